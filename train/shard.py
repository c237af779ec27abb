"""Pack training data into tar shards: `train/data/pack.py`."""

from model.common import run_command
from train.data.pack import main

if __name__ == "__main__":
    run_command(main)
