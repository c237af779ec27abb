"""Benchmarks: their data, their scorers, their pictures, and the commands that run them."""
