"""Bad input of a command is one line; the readers of files are in tests/test_hostile_files.py."""

import json

import pytest
from PIL import Image

from eval import pope, shift, vqa
from eval.needle_scoring import read_responses
from model.common import UserError


@pytest.mark.parametrize("truth", ["1, 0, 0", "0, 0, 1", "-1", "1, 1, 1;2, 2, 2", "1, 1, 99999999", ""])
def test_truths_are_places(truth, tmp_path):
    """Breaks when half a negative counts as a place, or a heatmap of 10⁸ rows is drawn."""
    path = tmp_path / "F.json"
    record = {"id": 0, "response": "1, 1, 1", "ground_truth": truth, "target_path": "x", "caption": "x"}
    path.write_text(json.dumps([record]))
    with pytest.raises(UserError, match=r"F\.json"):
        read_responses(path)


@pytest.mark.parametrize("path", ["p.png/a", "a\0b", "x" * 300, "dangling"])
@pytest.mark.parametrize("command", [vqa, pope, shift])
def test_an_output_that_cannot_be_written_is_refused_at_once(command, path, workplace, monkeypatch):
    """Breaks when a path costs an hour of asking before it is refused, or ends in a traceback."""
    Image.new("RGB", (9, 9)).save("p.png")
    (workplace / "dangling").symlink_to("nowhere/at/all")
    monkeypatch.setattr("eval.open.load_model", None)
    with pytest.raises(UserError) as caught:
        command.main(["--model", "embedded", "--limit", "2", "--out", path])
    assert "\n" not in str(caught.value)
