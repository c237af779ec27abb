"""Benchmarks: their data, their scorers, their pictures, and the commands that run them."""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
