"""PaliGemma stands alone: without its sister systems the main story is whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = "model lora weights eval train tests".split()
TABLES = ("model/registry.py", "train/compare.py")
RUN = "--base tiny --samples 48 --steps 2 --batch-size 8 --eval-limit 4 --device cpu --out run"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A copy of the tree without any folder `systems/`, and without the lines that name them."""
    copy = tmp_path_factory.mktemp("alone")
    ignored = shutil.ignore_patterns("systems", "__pycache__", ".*")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for table in TABLES:
        lines = (copy / table).read_text().splitlines(keepends=True)
        kept = [line for line in lines if ".systems." not in line and '": "qmamba"' not in line]
        assert len(kept) < len(lines)
        (copy / table).write_text("".join(kept))
    return copy


# one process for the commands that import the same
STORY = f"""
from eval import needle, vqa
from train import finetune
finetune.main("{RUN}".split())
for command in (needle, vqa):
    command.main("--adapter run --limit 4 --device cpu".split())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["-c", STORY],
        "-m pytest -q -m fast -p no:cacheprovider tests/model/test_equivalence.py".split(),
        "-m ruff check model lora weights eval train".split(),
    ],
    ids=["main story", "equivalence", "ruff"],
)
def test_the_main_story_runs_without_its_sisters(command, alone):
    """Breaks when PaliGemma's code needs a file of WINGS, Q-Mamba or a language model."""
    environment = os.environ | {"PYTHONPATH": str(alone)}
    line = [sys.executable, *command]
    done = subprocess.run(line, cwd=alone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_nothing_else_names_a_sister():
    """Breaks when a file outside of `systems/` and the tables names WINGS or Q-Mamba."""
    named = []
    for room in ROOMS[:-1]:
        for file in (ROOT / room).rglob("*.py"):
            place = file.relative_to(ROOT)
            if "systems" in place.parts or str(place) in TABLES:
                continue
            text = file.read_text(encoding="utf-8").lower()
            named += [f"{place}: {name}" for name in ("wings", "mamba") if name in text]
    assert not named
