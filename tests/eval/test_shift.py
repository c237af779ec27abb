"""LAWS and the attention shift: the identities that define them, and what the command tells."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from eval import shift
from eval.shift import GROUPS, Shift, measure, put_slot
from eval.statistics import bootstrap
from model.attention import attention_modules
from model.common import UserError
from model.differential import graft
from model.turns import SLOT
from model.wings import attach
from tests.model.test_wings import randomized
from weights.export import companions, export_model
from weights.load import load_model

pytestmark = pytest.mark.long


def picture() -> Image.Image:
    return Image.new("RGB", (112, 112), (10, 200, 90))


EXAMPLES = [(picture, "answer en Where<image> is the dog?"), (picture, "How<image> many cats are there in the image?")]


@pytest.mark.parametrize("kind", ["paligemma", "wings", "twin"])
def test_laws_are_sums_of_the_attention_weights(processor, kind):
    """Breaks when a group takes another's keys, queries or heads are weighed, or the groups do not add up to them."""
    model = load_model("embedded")
    if kind == "wings":
        model = randomized(attach(model, 4, routed=True)).eval()
    elif kind == "twin":
        graft(model, "twin")
    found = measure(model, processor, EXAMPLES)
    assert found.laws.shape == (2, 4, 3)
    np.testing.assert_allclose(found.laws.sum(-1), np.broadcast_to(found.queries[:, None], (2, 4)), rtol=1e-5)
    assert found.shares.sum(-1) == pytest.approx([100] * 4)

    batch = processor.pad([processor.layout(1, EXAMPLES[0][1])], [picture()])
    start = batch.input_ids[0].tolist().index(processor.config.image_token_id)
    assert start > 3 and found.laws[..., 0].all()  # the words before the picture
    spans = (slice(0, start), slice(start, start + 16), slice(start + 16, None))
    maps = []
    layers = [m for path, m in attention_modules(model).items() if path.startswith("language_model.")]
    for layer in layers:
        layer.tap = maps.append
    with torch.no_grad():
        model(batch.input_ids, batch.pixel_values, batch.token_type_ids)
    for layer, weights in enumerate(maps[:: len(maps) // 4]):  # of two maps in a layer the first
        weights = weights[0].double()
        for group, span in enumerate(spans):
            by_hand = sum(weights[head, :, span].sum() for head in range(len(weights))) / len(weights)
            assert found.laws[0, layer, group] == pytest.approx(float(by_hand), rel=1e-4)


def test_the_shift_is_one_minus_the_correlation_over_layers():
    """Breaks when curves are correlated over anything but layers, or an undefined one is counted as a number."""
    generator = np.random.default_rng(0)
    laws = generator.random((5, 6, 3))
    laws[1, :, 2] = 3 * laws[1, :, 0] + 1  # the same course: no shift
    laws[2, :, 2] = 2 - laws[2, :, 0]  # the opposite one: all of it
    laws[3, :, 0] = 0  # nothing before the picture
    found = Shift(laws, laws.sum(-1).mean(-1))
    expected = [1 - np.corrcoef(example[:, 0], example[:, 2])[0, 1] for example in laws[:3]]
    assert found.each[:3] == pytest.approx(expected) and found.each[1:3] == pytest.approx([0, 2])
    assert math.isnan(found.each[3])
    assert found.interval == bootstrap(found.each[[0, 1, 2, 4]])
    assert Shift(laws[3:4], np.ones(1)).interval is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Where is the dog?", "Where is<image> the dog?"),
        ("dog", "dog<image>"),
        ("locate dog", "locate<image> dog"),
        ("a<image> b c", "a<image> b c"),
    ],
)
def test_a_slot_goes_between_the_words(prompt, expected):
    """Breaks when the slot cuts a word, changes the text around it, or a second one is put into a prompt."""
    assert put_slot(prompt) == expected and put_slot(prompt).replace(SLOT, "") == prompt.replace(SLOT, "")
    assert put_slot("a b c d", 0.0) == "a<image> b c d" and put_slot("a b c d", 1.0) == "a b c<image> d"


@pytest.mark.long
def test_the_command(tmp_path, capsys):
    """Breaks when the command does not measure, write or tell what it says, for PaliGemma and for WINGS."""
    shift.main(["--model", "embedded", "--limit", "3", "--out", str(tmp_path / "plain")])
    told = capsys.readouterr().out
    assert "attention shift: not defined" in told and "--slot inside" in told
    result = json.loads((tmp_path / "plain" / "shift.json").read_text())
    assert result["attention_shift"] is None and result["slot"] == "first" and result["undefined"] == 3
    assert len(result["laws_percent"]) == 4 and result["laws_percent"][0]["text before"] == 0

    export_model(attach(load_model("embedded"), 4, routed=True), tmp_path / "wings", companions=companions("embedded"))
    shift.main(["--model", str(tmp_path / "wings"), "--limit", "3", "--out", str(tmp_path / "w"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["slot"] == "inside" and result["undefined"] == 0
    assert 0 <= result["attention_shift"]["low"] <= result["attention_shift"]["high"] <= 2
    assert list(result["laws_percent"][0]) == [*GROUPS]
    assert sum(result["laws_percent"][2].values()) == pytest.approx(100)
    assert Image.open(tmp_path / "w" / "shift.png").width > 100


def test_a_users_own_prompts(tmp_path, capsys):
    """Breaks when --data does not read the user's file, or what it lacks is no clear line."""
    picture().save(tmp_path / "a.png")
    line = {"image": "a.png", "prefix": "Where is<image> the dog?", "suffix": "left"}
    (tmp_path / "own.jsonl").write_text(json.dumps(line) + "\n")
    shift.main(["--model", "embedded", "--data", str(tmp_path / "own.jsonl"), "--out", str(tmp_path)])
    assert "attention shift" in capsys.readouterr().out
    with pytest.raises(UserError, match="none.jsonl: not found"):
        shift.main(["--model", "embedded", "--data", str(tmp_path / "none.jsonl")])
    line["prefix"] = "a<image> b<image> c"
    (tmp_path / "own.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="2 <image> in the prefix, but 1 picture"):
        shift.main(["--model", "embedded", "--data", str(tmp_path / "own.jsonl"), "--out", str(tmp_path)])
