"""Checkpoints: the published names, loading, export, inspection; the bundled models in `tiny/` and `tiny-mamba/`.

`train/embedded` made them from nothing, at commit b24ffcd: tokenizer.py, base.py and mamba.py.
"""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
