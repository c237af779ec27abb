"""LAWS and the attention shift: the identities that define them, and what the command tells."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from eval.systems import shift
from eval.systems.shift import GROUPS, Shift, measure, put_slot
from model.attention import attention_modules, tapped
from model.differential import graft
from model.systems.processors import SlotProcessor
from model.systems.wings import attach
from tests.files import read_json, write_lines
from tests.model.test_wings import randomized
from weights.export import companions, export_model
from weights.load import load_model

pytestmark = pytest.mark.long
PICTURE = Image.new("RGB", (112, 112), (10, 200, 90))
EXAMPLES = [
    (PICTURE, "answer en Where<image> is the dog?"),
    (PICTURE, "How<image> many cats are there in the image?"),
]


@pytest.mark.parametrize("kind", ["paligemma", "wings", "twin"])
def test_laws_are_sums_of_the_attention_weights(processor, kind):
    """Breaks when a group takes another's keys, queries or heads are weighed, or the groups do not
    add up to them."""
    model = load_model("embedded")
    if kind == "wings":
        model = randomized(attach(model, 4, routed=True)).eval()
    elif kind == "twin":
        graft(model, "twin")
    found = measure(model, processor, EXAMPLES)
    assert found.laws.shape == (2, 4, 3)
    assert found.shares.sum(-1) == pytest.approx([100] * 4)
    inside = SlotProcessor(processor.config, processor.tokenizer)
    batch = inside.pad([inside.row_of(1, [(EXAMPLES[0][1], None)])], [PICTURE])
    start = batch.input_ids[0].tolist().index(processor.config.image_token_id)
    assert start > 3  # the words before the picture
    spans = (slice(0, start), slice(start, start + 16), slice(start + 16, None))
    maps = []
    layers = attention_modules(model.language_model).values()
    with torch.no_grad(), tapped(dict.fromkeys(layers, maps.append)):
        model(batch.input_ids, batch.pixel_values, batch.token_type_ids)
    for layer, weights in enumerate(maps[:: len(maps) // 4]):  # of two maps in a layer the first
        by_hand = [float(weights[0].double().mean(0)[:, span].sum()) for span in spans]
        assert found.laws[0, layer] == pytest.approx(by_hand, rel=1e-4)


def test_the_shift_is_one_minus_the_correlation_over_layers():
    """Breaks when curves are correlated over anything but layers, or an undefined one is counted as
    a number."""
    laws = np.random.default_rng(0).random((5, 6, 3))
    laws[1, :, 2] = 3 * laws[1, :, 0] + 1  # the same course: no shift
    laws[2, :, 2] = 2 - laws[2, :, 0]  # the opposite one: all of it
    laws[3, :, 0] = 0  # nothing before the picture
    found = Shift(laws, laws.sum(-1).mean(-1))
    expected = [1 - np.corrcoef(example[:, 0], example[:, 2])[0, 1] for example in laws[:3]]
    assert found.each[:3] == pytest.approx(expected)
    assert found.each[1:3] == pytest.approx([0, 2])
    assert math.isnan(found.each[3])


def test_the_command(workplace, printed):
    """Breaks when the command does not measure, write or tell what it says, for PaliGemma, WINGS
    and a user's file."""
    for text in ("Where is<image> the dog?", "dog<image>", "locate<image> dog", "a<image> b c"):
        assert put_slot(text) == text
        assert text[0] == "a" or put_slot(text.replace("<image>", "")) == text
    shift.main("--model embedded --limit 3 --out plain".split())
    assert "attention shift: not defined" in printed()
    result = read_json(workplace / "plain/shift.json")
    assert (result["attention_shift"], result["slot"], result["undefined"]) == (None, "first", 3)
    PICTURE.save("a.png")
    line = {"image": "a.png", "prefix": "Where is<image> the dog?", "suffix": "left"}
    write_lines(
        workplace / "own.jsonl",
        [line | {"image": "lost.png"}, line, line],
    )
    wings = attach(load_model("embedded"), 4, routed=True)
    export_model(wings, workplace / "wings", companions=companions("embedded"))
    shift.main("--model wings --data own.jsonl --out w".split())
    result = read_json(workplace / "w/shift.json")
    assert (result["slot"], result["undefined"], result["prompts"]) == ("inside", 0, 2)
    assert list(result["laws_percent"][0]) == [*GROUPS]
    shift.main("--model embedded --data own.jsonl --slot first --out f".split())
    assert read_json(workplace / "f/shift.json")["undefined"] == 2  # as the model is asked
    assert 0 <= result["attention_shift"]["low"] <= result["attention_shift"]["high"] <= 2
