"""Checkpoints: the published names, loading, export, inspection; the bundled models in `tiny/` and `tiny-mamba/`."""

import model  # noqa: F401  (before PyTorch: how its threads wait)
