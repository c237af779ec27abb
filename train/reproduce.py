"""Run a paper's experiments as published, in one command, and print its tables beside the published figures.

python -m train.reproduce paligemma      differential PaliGemma (Li et al. 2025), see train/studies/paper.py
python -m train.reproduce text           the Differential Transformer (Ye et al. 2024), see train/studies/text.py
python -m train.reproduce wings          WINGS (Zhang et al. 2024), see train/studies/wings.py
python -m train.reproduce qmamba         Q-Mamba, see train/studies/qmamba.py

Without more flags each is a miniature, on the embedded models. All but the first are studies of `train.compare`, too.
"""

import sys
from collections.abc import Sequence

from eval.command import command_parser
from model.common import run_command
from train.compare import STUDIES
from train.studies import paper


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study of the paper that is named first, with all other flags."""
    argv, papers = sys.argv[1:] if argv is None else argv, {"paligemma": paper.main, **STUDIES}
    parser = command_parser("train.reproduce", __doc__)
    parser.add_argument("paper", choices=list(papers), help="its own flags: PAPER --help")
    papers[parser.parse_args(argv[:1]).paper](argv[1:])


if __name__ == "__main__":
    run_command(main)
