"""Make the embedded Mamba again, from nothing: `train/embedded/mamba.py`."""

from model.common import run_command
from train.embedded.mamba import main

if __name__ == "__main__":
    run_command(main)
