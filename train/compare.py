"""Compare rows under equal conditions, in a study: its rows, measures and controls are in one file.

python -m train.compare                  attention variants against plain LoRA; see train/studies/attention.py
python -m train.compare --rows NAME      another study, with its own flags: see STUDIES
"""

import argparse
import importlib
from collections.abc import Sequence

from model.common import run_command
from train.studies import attention

STUDIES = {
    "paligemma": "train.studies.paper",
    "dose": "train.studies.dose",
    "wings": "train.systems.studies.wings",
    "qmamba": "train.systems.studies.qmamba",
    "text": "train.systems.studies.text",
    "real": "train.systems.studies.real",
}


def run_study(name: str, argv: Sequence[str] | None) -> None:
    """Run the study of a name, with its flags."""
    importlib.import_module(STUDIES[name]).main(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study that --rows names; any other value names rows of the attention study."""
    parser = argparse.ArgumentParser(
        prog="python -m train.compare", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--rows", nargs="+", default=[])
    known, rest = parser.parse_known_args(argv)
    if len(known.rows) == 1 and known.rows[0] in STUDIES:
        run_study(known.rows[0], rest)
        return
    if {"-h", "--help"} & set(rest):
        print(f"other studies, each with its own --help: --rows {' | '.join(STUDIES)}\n")
    attention.main(argv)


if __name__ == "__main__":
    run_command(main)
