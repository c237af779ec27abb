"""What a language model does with its context."""

from eval.systems.text.measures import main
from model.common import run_command

if __name__ == "__main__":
    run_command(main)
