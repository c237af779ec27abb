"""Make the tokenizer of the embedded models: `train/embedded/tokenizer.py`."""

from model.common import run_command
from train.embedded.tokenizer import main

if __name__ == "__main__":
    run_command(main)
