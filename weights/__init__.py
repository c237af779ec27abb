"""Checkpoints: the published names, loading, export, inspection; the bundled models in `tiny/` and `tiny-mamba/`.

`train/embedded` made them from nothing; its tokenizer.py and mamba.py are at commit b24ffcd.
"""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
