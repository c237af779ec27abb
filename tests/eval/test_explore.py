"""The explorer's maps and its file: what is recorded is what the model computes, and the page holds
it safely."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from eval.data import scenes
from eval.explore import page
from eval.explore.__main__ import main
from eval.explore.record import Case, Maps, TokenizedAnswer, answer, maps_of
from model.attention import attention_modules
from model.differential import graft
from tests.eval.conftest import random_model
from tests.files import json_lines, write_lines
from tests.runs import refused, words

PROMPT = "answer en Where is the dog?"
HOSTILE = "</script><script>alert(1)</script><!-- %%css%% & \u2028 \" '"
PICTURE = scenes.sample("vqa", "test", 192).image


KINDS = """["twin", {}]
["v2", {}]
["split", {"norm": false}]
["softmax", {}]"""


@pytest.mark.long
@pytest.mark.parametrize("kind, options", json_lines(KINDS))
def test_maps_are_what_the_model_computes(processor, kind, options, seeded):
    """Breaks when a map is of another query, head or layer, what multiplies the values is not the
    difference, or the values of patches are compared wrongly."""
    model = random_model()
    graft(model, kind, **options)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            if any(part in name for part in "q2 k2 lambda .mu".split()):
                parameter += 0.3 * torch.randn_like(parameter)
    said = answer(model, processor, PICTURE, PROMPT, 5)
    count = len(said.new)
    values, heads, taps = [], [], []
    modules = attention_modules(model)
    layers = [modules[path] for path in modules if path.startswith("language_model.")]
    for layer in layers:
        layer.v_proj.register_forward_hook(lambda _, args, out: values.append(out[0]))
        layer.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0][0]))
    calls = []
    model.register_forward_pre_hook(lambda _, args, named: calls.append(named), with_kwargs=True)
    maps = maps_of(model, said, "it")
    assert set(maps.kinds) == ({"A"} if kind == "softmax" else {"A1", "A2", "mix"})
    first = "A" if kind == "softmax" else "A1"
    result = torch.from_numpy(maps.kinds.get("mix", maps.kinds[first]))
    for number, layer in enumerate(layers):
        v = values[number].unflatten(1, (-1, layer.head_dim))
        patches = v[said.slots].flatten(1)  # without the last token, whose keys nobody reads
        lengths = torch.stack([(one - patches.mean(0)).norm() for one in patches])
        np.testing.assert_allclose(maps.apart[number], lengths / lengths.max(), rtol=1e-3)
        v = v.repeat_interleave(layer.num_heads // layer.num_key_value_heads, dim=1)
        expected = heads[number][-count:].view(count, layer.num_heads, layer.head_dim)
        mixed = torch.einsum("tns,snd->tnd", result[:, number], v)
        torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-4)
        layer.tap = taps.append
    with torch.no_grad():
        model(**calls[0])
    firsts = taps[:: len(taps) // len(layers)]  # of two maps in a layer
    for number, weights in enumerate(firsts):
        rows = weights[0, :, -count:].transpose(0, 1)
        np.testing.assert_allclose(maps.kinds[first][:, number], rows, atol=1e-6)
        share = weights[0][..., torch.from_numpy(said.slots)].sum() / weights[0].sum()
        assert maps.laws[first][number] == pytest.approx(float(share), rel=1e-4)


@pytest.mark.parametrize("kind", "dex shared gate temperature sink".split())
def test_a_kind_with_one_map_says_so(kind, processor):
    """Breaks when a reader looks for the second map of a model that changes outputs or logits."""
    model = random_model()
    graft(model, kind)
    maps = maps_of(model, answer(model, processor, PICTURE, PROMPT, 1), "it")
    assert set(maps.kinds) == {"A"}
    assert "one map" in maps.formula


def random_case(tokens, models=1, layers=18, heads=8, slots=256):
    """A case of the geometry of PaliGemma 3B at 224 pixels, with random attention, which compresses
    worst."""
    dice = np.random.default_rng(0)
    length = slots + 24
    keys = length + tokens - 1
    case = Case(Image.new("RGB", (300, 200)), HOSTILE)
    for number in range(models):
        maps = np.exp(2 * dice.standard_normal((3, tokens, layers, heads, keys), dtype=np.float32))
        kinds = dict(zip(("A1", "A2", "plain"), maps / maps.sum(-1, keepdims=True), strict=True))
        kinds["mix"] = 2 * kinds["A1"] - kinds["A2"]
        words = {place: "word" for place in range(slots, keys + 1)}
        batch = SimpleNamespace(input_ids=torch.zeros(1, length))
        said = TokenizedAnswer(batch, None, "x", words, np.arange(keys) < slots)
        laws = {"A1": np.ones(layers)}
        apart = np.ones((layers, slots))
        case.answers[f"m{number}"] = said, Maps(kinds, laws, np.ones(tokens), apart)
    return case


def data_of(text):
    _, data = text.split('<script type="application/json" id="data">')
    return json.loads(data.partition("</script>")[0])


@pytest.mark.parametrize("kind, dtype, top", [("A1", "u1", 255), ("mix", "i1", 127)])
def test_quantized_maps_come_back(kind, dtype, top):
    """Breaks when a sink among the words rounds the picture to nothing, sums are rounded, or signs
    are lost."""
    said, maps = random_case(1, layers=2, heads=3, slots=16).answers["m0"]
    rows = maps.kinds[kind][0].reshape(6, -1)
    rows[:, 20] = 30  # one word takes far more than all patches
    numbers, levels = page.quantized(rows, said.slots, 40, signed=kind == "mix")
    numbers = np.frombuffer(numbers, "<f4").reshape(6, 6)
    found = np.frombuffer(levels, dtype).reshape(6, -1) / top * numbers[:, :1]
    assert np.abs(found - rows)[:, :16].max() <= np.abs(rows[:, :16]).max() / top * 0.51
    sums = [numbers[:, 2], numbers[:, 3:5].sum(1), numbers[:, 5]]
    exact = [rows[:, :16].sum(1), rows[:, 16:].sum(1), rows[:, 0]]
    np.testing.assert_allclose(sums, exact, rtol=1e-5)


def test_a_page_of_3b_is_small_and_safe_and_longer_answers_lose_their_end():
    """Breaks when a file cannot be sent by mail, its maps are dropped without need, or those of the
    first tokens; or a prompt ends the script that holds it, or becomes HTML in the title or a mark
    of the template."""
    text = page.page([random_case(2, models=2)], HOSTILE)
    assert data_of(text)["cases"][0]["prompt"] == data_of(text)["title"] == HOSTILE
    assert text.count("<script") == 2
    assert "alert(1)</" not in text
    assert text.count("<!--") == 0
    assert "http" not in re.sub(r'http-equiv|"http://www.w3.org/2000/svg"', "", text)
    assert len(text.encode()) < 1_500_000 < page.PAGE_BYTES < 5e6
    models = data_of(text)["cases"][0]["models"]
    assert all(token["mean"] and token["heads"] for model in models for token in model["tokens"])
    case = random_case(6, layers=4, heads=4, slots=64)
    whole = len(page.page([case], "x").encode())
    for bound in (whole - 100, whole - 30_000):
        text = page.page([case], "x", bound)
        tokens = data_of(text)["cases"][0]["models"][0]["tokens"]
        kept = [bool(token["heads"]) for token in tokens]
        assert len(text.encode()) <= bound
        assert all(token["mean"] for token in tokens)
        assert kept[0]
        assert not kept[-1]
        assert kept == sorted(kept, reverse=True)


@pytest.mark.long
def test_explore_command(twin, workplace, printed):
    """Breaks when a page is of another model than asked, lacks the base beside an adapter, or mixes
    hits and misses."""
    PICTURE.save("p.png")
    main(["--adapter", twin, "--image", "p.png", "--prompt", PROMPT, "--max-new-tokens", "3"])
    assert "runs/eval/twin/explore.html" in printed()
    (entry,) = data_of((workplace / "runs/eval/twin/explore.html").read_text())["cases"]
    assert [model["kinds"] for model in entry["models"]] == ["A1 A2 mix plain".split()]
    assert set(entry["models"][0]["laws"]) == {"A1", "A2", "plain"}
    assert entry["hit"] is None
    row = {"image": "p.png", "prefix": PROMPT}
    rows = [row | {"suffix": answer} for answer in ("Bottom right", "top left")]
    write_lines(workplace / "own.jsonl", rows)
    for source, hits in (("jsonl:own.jsonl", [True, False]), ("embedded", [True, True, True])):
        main(words("--model embedded --limit 3 --out hits.html --data", source))
        cases = data_of((workplace / "hits.html").read_text())["cases"]
        assert [case["hit"] for case in cases] == hits
    refused(lambda: main(["--model", twin, "--image", "p.png"]), "give --image")
    refused(lambda: main(words("--model", twin, "--data embedded --prompt x")), "or --data")
