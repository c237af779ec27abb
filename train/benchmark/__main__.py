"""Time and memory beside transformers and PEFT."""

from model.common import run_command
from train.benchmark.command import main

if __name__ == "__main__":
    run_command(main)
