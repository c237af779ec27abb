"""A page that shows where a model looks."""

from eval.explore.command import main
from model.common import run_command

if __name__ == "__main__":
    run_command(main)
