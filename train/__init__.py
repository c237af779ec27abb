"""Training: the loops, and the commands that train and compare."""
