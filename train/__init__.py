"""Training: the loops, and the commands that train and compare."""

import model.common  # noqa: F401  before torch: Ctrl-C while modules are imported is one of its subjects
