"""Bad input of a command is one line; the readers of files are in tests/test_hostile_files.py."""

from pathlib import Path

import pytest

from eval import needle, pope, shift, vqa
from tests.runs import refused


@pytest.mark.parametrize("command", [vqa, pope, needle, shift])
def test_an_output_that_cannot_be_written_is_refused_at_once(command, workplace, monkeypatch):
    """Breaks when a path costs an hour of asking before it is refused, or ends in a traceback."""
    Path("file").touch()
    Path("dangling").symlink_to("nowhere/at/all")
    monkeypatch.setattr("eval.open.load_model", None)
    for path in ("file/a", "x" * 300, "dangling"):
        refused(lambda path=path: command.main(["--model", "embedded", "--limit", "2", "--out", path]))
