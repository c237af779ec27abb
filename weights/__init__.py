"""Checkpoints: the published names, loading, export, inspection; the bundled models in `tiny/` and `tiny-mamba/`."""
