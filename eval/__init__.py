"""Benchmarks: their data, their scorers, their pictures, and the commands that run them."""

import model  # noqa: F401  (before PyTorch: how its threads wait)
