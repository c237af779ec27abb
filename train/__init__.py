"""Training: the loops, and the commands that train and compare."""

import sys

if "train.benchmark.peer" not in sys.orig_argv:  # which imports nothing of ours
    import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
