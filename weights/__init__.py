"""Checkpoints in and out, and the bundled toy models."""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
