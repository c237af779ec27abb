"""Checkpoints in and out. Commit b24ffcd made the bundled ones, `tiny/` and `tiny-mamba/`, with
`train/systems/text_base.py`."""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
