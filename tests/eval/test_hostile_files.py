"""Bad input of a command is one line; the readers of files are in tests/test_hostile_files.py."""

import json

import pytest
from PIL import Image

from eval import datasets, pope, shift, vqa
from eval.needle_scoring import read_responses
from model.common import UserError


def question(id_, **more) -> dict:
    return {"question_id": id_, "image": "p.png", "question": "What?"} | more


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "b", "a")])
def test_ids_that_a_result_cannot_tell_apart_are_refused(ids, workplace):
    """Breaks when the answer to question 1 is that to question "1"."""
    (workplace / "Q").write_text(json.dumps({"questions": [question(id_) for id_ in ids]}))
    lines = [json.dumps({"question_id": i, "image": "p.png", "text": "?", "label": "no"}) for i in ids]
    (workplace / "P").write_text("\n".join(lines))
    for read, name in ((datasets.read_questions, "Q"), (datasets.read_pope, "P")):
        with pytest.raises(UserError, match=f"{name}: "):
            read(name)


@pytest.mark.parametrize("truth", ["1, 0, 0", "0, 0, 1", "-1", "1, 1, 1;2, 2, 2", "1, 1, 99999999", ""])
def test_truths_are_places(truth, tmp_path):
    """Breaks when half a negative counts as a place, or a heatmap of 10⁸ rows is drawn."""
    path = tmp_path / "F.json"
    record = {"id": 0, "response": "1, 1, 1", "ground_truth": truth, "target_path": "x", "caption": "x"}
    path.write_text(json.dumps([record]))
    with pytest.raises(UserError, match=r"F\.json"):
        read_responses(path)


def test_pictures_of_vizwiz_are_found(workplace):
    """Breaks when VizWiz_val_00000000.jpg is looked for as VizWiz_val_00000000.jpg.jpg."""
    for image, name in (("VizWiz_val_00000000.jpg", "VizWiz_val_00000000.jpg"), ("0f3a.b", "0f3a.b.jpg")):
        asked = [{"image_id": image, "question": "?", "question_id": 0}]
        (workplace / "V").write_text(json.dumps({"data": asked}))
        assert datasets.read_questions("V")[0].image == name


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
