"""Run a paper's experiment as published, in one command, and print its tables beside the published figures.

python -m train.reproduce paligemma      see train/studies/paper.py; without more flags in miniature, in minutes
"""

import sys
from collections.abc import Sequence

from model.common import run_command
from train.flags import FlagParser
from train.studies import paper

STUDIES = {"paligemma": paper.main}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study of the paper that is named first, with all other flags."""
    argv = sys.argv[1:] if argv is None else argv
    parser = FlagParser(prog="python -m train.reproduce", description=__doc__)
    parser.add_argument("paper", choices=list(STUDIES), help="its own flags: PAPER --help")
    STUDIES[parser.parse_args(argv[:1]).paper](argv[1:])


if __name__ == "__main__":
    run_command(main)
