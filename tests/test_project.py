"""pyproject.toml says what the requirement files say, and lists every package of the project."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("model", "lora", "weights", "eval", "train")


@pytest.fixture(scope="module")
def project() -> dict:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(file: str) -> list[str]:
    return [line for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if not line.startswith("-r ")]


def test_the_requirement_files_agree(project):
    """Breaks when `pip install -e .` and `pip install -r requirements.txt` give different environments."""
    extras = project["project"]["optional-dependencies"]
    assert requirements("requirements.txt") == project["project"]["dependencies"]
    assert requirements("tests/requirements.txt") == extras["test"]
    assert set(extras["bench"]) <= set(extras["test"])


def test_every_package_is_installed(project):
    """Breaks when a new package runs in the repository's folder only."""
    folders = {file.parent for floor in FLOORS for file in (ROOT / floor).rglob("*.py")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(
        project["tool"]["setuptools"]["packages"]
    )
