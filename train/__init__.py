"""Training: the loops, and the commands that train and compare."""

import model  # noqa: F401  (before PyTorch: how its threads wait)
