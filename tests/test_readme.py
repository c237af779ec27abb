"""The documents: their Python runs, their commands parse, their links lead somewhere, and none
grows too long."""

import argparse
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from eval.data.scenes import sample
from model.common import UserError
from tests.house import ROOT

LINES = json.loads("""{
    "README.md": 180, "BENCHMARKS.md": 60, "CONTRIBUTING.md": 50, "CHANGELOG.md": 45,
    "docs/differential.md": 100, "docs/own-data.md": 125, "docs/evaluation.md": 62,
    "docs/scaling.md": 70, "docs/systems.md": 60, "docs/real-weights.md": 60,
    "docs/asked-for.md": 30
}""")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in LINES}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"(?:python|torchrun\b.*) -m ((?:train|eval|weights)\b\S*)(.*)")


def blocks(text, language):
    return [block for kind, block in FENCED.findall(text) if kind == language]


def test_documents_are_short():
    """Breaks when a document outgrows its budget, README needs a wide window, or files are longer
    than it says."""
    assert {
        name: len(text.splitlines())
        for name, text in TEXTS.items()
        if len(text.splitlines()) > LINES[name]
    } == {}
    assert [line for line in TEXTS["README.md"].splitlines() if len(line) > 100] == []
    files = re.findall(r"\]\((\S+\.py)\) (\d+)", TEXTS["README.md"])
    lengths = [
        (int(number), (ROOT / name).read_text(encoding="utf-8").count("\n"))
        for name, number in files
    ]
    assert len(files) == 9
    assert all(abs(number - length) <= 0.15 * length for number, length in lengths)


@pytest.mark.long
def test_every_command_parses(monkeypatch):
    """Breaks when a document prints a command, or promises a flag, that is not there."""
    flags = set()
    kind = argparse.ArgumentParser
    parse = kind.parse_args
    parse_known = kind.parse_known_args

    class Parsed(Exception):
        """The command line was read; the command would begin."""

    def parse_known_args(parser, args=None, namespace=None):
        flags.update(parser._option_string_actions)
        return parse_known(parser, args, namespace)

    def parse_args(parser, args=None, namespace=None):
        parsed = parse(parser, args, namespace)
        if (
            parser.prog != "python -m train.reproduce"
        ):  # which parses its other words in the paper's study
            raise Parsed
        return parsed

    monkeypatch.setattr(kind, "parse_known_args", parse_known_args)
    monkeypatch.setattr(kind, "parse_args", parse_args)
    lines = [
        line
        for text in TEXTS.values()
        for block in blocks(text, "bash")
        for line in re.split(r"(?<!\\)\n", block)
    ]
    found = [COMMAND.search(line.replace("\\\n", " ")) for line in lines]
    found = [match.groups() for match in found if match]
    assert len(found) > 40
    for module, words in found:
        main = importlib.import_module(
            f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
        )
        with pytest.raises((Parsed, UserError)):  # eval.suite looks for its files first
            main.main(shlex.split(words, comments=True))
    prose = "".join(
        FENCED.sub("", text) for name, text in TEXTS.items() if name != "CHANGELOG.md"
    )  # of old flags
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose)) <= flags | {"--help"}


def test_links_lead_somewhere():
    """Breaks when a link or a picture of a document leads nowhere, or a file of the project is
    named without a link."""
    for name, text in TEXTS.items():
        folder = (ROOT / name).parent
        prose = FENCED.sub("", text)
        for path, _, place in re.findall(r"(?:\]\(|src=\")(?!http)([^)\"#]*)(#([^)\"]+))?", prose):
            target = folder / path if path else ROOT / name
            assert target.exists(), f"{name}: {path}"
            heads = (
                re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M) if place else []
            )
            assert not place or place in [
                re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads
            ]
        words = re.findall(r"[\w./-]+\.(?:py|md|cff)\b", re.sub(r"\[[^]]*\]\([^)]*\)", "", prose))
        assert [word for word in words if (ROOT / word).exists()] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_git_does_not_see_what_the_documents_write():
    """Breaks when a reader who follows the documents finds files in `git status`."""
    written = (
        "runs/x/a.png exported/README.md scene.png batch.png shapes/train.jsonl .venv/x".split()
    )
    asked = ["git", "check-ignore", *written]
    assert subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.split() == written


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "```python" in text])
def test_python_of_the_documents(name, workplace, printed):
    """Breaks when a name in a document's Python is gone, or its lines do not work one after the
    other."""
    sample("vqa", "test", 192).image.save("scene.png")
    record = {"image": "scene.png", "prefix": "answer en Where is the dog?", "suffix": "top left"}
    Path("train.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    for block in blocks(TEXTS[name], "python"):
        exec(compile(block, name, "exec"), {"__name__": "readme"})
        assert printed().strip(), block
