"""Bad input of a command is one line; the readers of files are in tests/test_hostile_files.py."""

import pytest
from PIL import Image

from eval import needle, pope, shift, vqa
from model.common import UserError


@pytest.mark.parametrize("path", ["p.png/a", "x" * 300, "dangling"])
@pytest.mark.parametrize("command", [vqa, pope, needle, shift])
def test_an_output_that_cannot_be_written_is_refused_at_once(command, path, workplace, monkeypatch):
    """Breaks when a path costs an hour of asking before it is refused, or ends in a traceback."""
    Image.new("RGB", (9, 9)).save("p.png")
    (workplace / "dangling").symlink_to("nowhere/at/all")
    monkeypatch.setattr("eval.open.load_model", None)
    with pytest.raises(UserError) as caught:
        command.main(["--model", "embedded", "--limit", "2", "--out", path])
    assert "\n" not in str(caught.value)
