"""Checkpoints: the published names, loading, export, inspection; the bundled models in `tiny/` and `tiny-mamba/`."""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
