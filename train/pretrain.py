"""Make the embedded base again, from nothing: `train/embedded/base.py`."""

from model.common import run_command
from train.embedded.base import main

if __name__ == "__main__":
    run_command(main)
