"""Compare."""

from model.common import run_command
from train.studies.attention import main

if __name__ == "__main__":
    run_command(main)
