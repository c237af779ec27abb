"""Run a paper's experiments as published, in one command, and print its tables beside the published
figures.

python -m train.reproduce paligemma      differential PaliGemma (Li et al. 2025): train/studies/paper.py
python -m train.reproduce NAME           another study, with its own flags: see train/compare.py

Without more flags each is a miniature, on the embedded models; real needs --base FOLDER.
"""

import sys
from collections.abc import Sequence

from eval.command import command_parser
from model.common import run_command
from train.compare import STUDIES, run_study


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study of the paper that is named first, with all other flags."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser("train.reproduce", __doc__)
    parser.add_argument("paper", choices=[*STUDIES], help="its own flags: PAPER --help")
    run_study(parser.parse_args(argv[:1]).paper, argv[1:])


if __name__ == "__main__":
    run_command(main)
