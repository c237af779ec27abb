"""The explorer's maps and its file: what is recorded is what the model computes, and the page holds it safely."""

import base64
import gzip
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from eval import needle, scenes, vqa
from eval.attention import look
from eval.explore import command, gallery, page
from eval.explore.page import Case
from eval.explore.record import Maps, Said, answer, maps_of
from model.attention import attention_modules
from model.common import UserError
from model.differential import graft
from model.processor import Processor
from tests.eval.conftest import random_model
from weights.load import load_model

PROMPT = "answer en Where is the dog?"


def picture(index: int = 192) -> Image.Image:
    return scenes.sample("vqa", "test", index).image


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), [("twin", {}), ("v2", {}), ("split", {"norm": False}), ("softmax", {})])
def test_maps_are_what_the_model_computes(processor, kind, options, seeded):
    """A map is of another query, head or layer; or the result of the subtraction is not what multiplies the values."""
    model = random_model()
    graft(model, kind, **options)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q2", "k2", "lambda", ".mu")):
                parameter += 0.3 * torch.randn_like(parameter)
    said = answer(model, processor, picture(), PROMPT, 5)
    layers = [m for path, m in attention_modules(model).items() if path.startswith("language_model.")]
    values, heads = [], []
    for layer in layers:
        layer.v_proj.register_forward_hook(lambda _, args, out: values.append(out[0]))
        layer.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0][0]))
    maps = maps_of(model, said, "it")
    count, result = (
        len(said.new),
        torch.from_numpy(maps.kinds.get("mix", maps.kinds["A1" if "A1" in maps.kinds else "A"])),
    )
    for number, layer in enumerate(layers):
        v = (
            values[number]
            .view(len(values[number]), -1, layer.head_dim)
            .repeat_interleave(layer.num_heads // layer.num_key_value_heads, dim=1)
        )
        expected = heads[number][-count:].view(count, layer.num_heads, layer.head_dim)
        found = torch.einsum("tns,snd->tnd", result[:, number], v)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert set(maps.kinds) == ({"A"} if kind == "softmax" else {"A1", "A2", "mix"})
    first = look(model, "it", **said.inputs(len(said.new) - 1))  # the last query decides the last token
    for number, of_layer in enumerate(first):
        name = "A" if kind == "softmax" else "A1"
        np.testing.assert_allclose(maps.kinds[name][-1, number].mean(0), of_layer[0].last, rtol=1e-4, atol=1e-6)
        share = of_layer[0].received[torch.from_numpy(said.slots)].sum() / len(said.slots)
        assert maps.laws[name][number] == pytest.approx(float(share), rel=1e-4)


def random_case(tokens: int, models: int = 1, prompt: str = "x", layers=18, heads=8, slots=256) -> Case:
    """A case of the geometry of PaliGemma 3B at 224 pixels, with random attention, which compresses worst."""
    dice, length = np.random.default_rng(0), slots + 24
    keys, case = length + tokens - 1, Case(Image.new("RGB", (300, 200)), prompt)
    for number in range(models):
        logits = 2 * dice.standard_normal((4, tokens, layers, heads, keys), dtype=np.float32)
        logits = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        kinds = dict(zip(("A1", "A2", "plain", "mix"), logits, strict=True))
        kinds["mix"] = 2 * kinds["A1"] - kinds["A2"]
        words = {place: "word" for place in range(slots, keys + 1)}
        batch = SimpleNamespace(input_ids=torch.zeros(1, length))
        said = Said(batch, torch.zeros(tokens), prompt, words, np.arange(keys) < slots)
        laws = {name: np.full(layers, 0.5) for name in ("A1", "A2", "plain")}
        case.answers[f"m{number}"] = (
            said,
            Maps(kinds, laws, np.ones(tokens), np.ones((tokens, layers, heads)), "A₁ − λA₂"),
        )
    return case


def data_of(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_quantized_maps_come_back():
    """A sink among the words rounds the picture to nothing, a sum is that of rounded weights, or a sign is lost."""
    case = random_case(1, layers=2, heads=3, slots=16)
    said, maps = case.answers["m0"]
    for kind in ("A1", "mix"):
        maps.kinds[kind][..., 20] = 30  # one word takes far more than all patches
        rows = maps.kinds[kind][0].reshape(6, -1)
        header, levels = page.quantized(rows, said.slots, 40, signed=kind == "mix")
        header = np.frombuffer(header, "<f4").reshape(6, 6)
        levels = np.frombuffer(levels, np.int8 if kind == "mix" else np.uint8).reshape(rows.shape)
        top = 127 if kind == "mix" else 255
        found = levels / top * np.where(said.slots, header[:, :1], header[:, 1:2])
        assert np.abs(found - rows)[:, said.slots].max() <= np.abs(rows[:, said.slots]).max() / top * 0.51
        np.testing.assert_allclose(header[:, 2], rows[:, :16].sum(1), rtol=1e-5)
        np.testing.assert_allclose(header[:, 3:5].sum(1), rows[:, 16:].sum(1), rtol=1e-5)
        np.testing.assert_array_equal(header[:, 5], rows[:, 0].astype(np.float32))


def test_a_page_of_3b_is_small():
    """The file of two models of the published size cannot be sent by mail, or its maps are dropped without need."""
    text = page.page([random_case(2, models=2)], "3B")
    assert len(text.encode()) < 1_500_000 < page.MOST_BYTES < 5e6
    (entry,) = data_of(text)["cases"]
    assert all(token["mean"] and token["heads"] for model in entry["models"] for token in model["tokens"])
    raw = gzip.decompress(base64.b64decode(entry["models"][0]["tokens"][0]["heads"]))
    assert len(raw) == 4 * 18 * 8 * (6 * 4 + 281)


def test_what_does_not_fit_is_left_out_from_the_end():
    """A long answer makes a page that no browser opens; or the maps of its first tokens are those that are missing."""
    case = random_case(6, layers=4, heads=4, slots=64)
    whole = len(page.page([case], "x").encode())
    for bound in (whole - 100, whole - 15_000, whole - 30_000):
        text = page.page([case], "x", bound)
        assert len(text.encode()) <= bound
        tokens = data_of(text)["cases"][0]["models"][0]["tokens"]
        kept = [bool(token["heads"]) for token in tokens]
        assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True)
        assert all(token["mean"] for token in tokens)


def test_a_prompt_cannot_leave_its_place():
    """A prompt ends the script that holds it, or becomes HTML in the title or a replacement mark of the template."""
    prompt = "</script><script>alert(1)</script><!-- %%css%% & \u2028 \" '"
    text = page.page([random_case(1, prompt=prompt, layers=1, heads=1, slots=4)], prompt)
    assert data_of(text)["cases"][0]["prompt"] == data_of(text)["title"] == prompt
    assert text.count("<script") == 2 and "alert(1)</" not in text and text.count("<!--") == 0
    assert "http" not in re.sub(r'http-equiv|"http://www.w3.org/2000/svg"', "", text.replace(prompt, ""))


@pytest.mark.long
def test_explore_command(source, twin, workplace, capsys):
    """A page is of another model than asked, lacks the base beside an adapter, or hits and misses are mixed up."""
    picture().save("p.png")
    few = ["--max-new-tokens", "3"]
    command.main(["--adapter", twin, "--image", "p.png", "--prompt", PROMPT, *few])
    assert "runs/eval/twin/explore.html" in capsys.readouterr().out
    (entry,) = data_of((workplace / "runs/eval/twin/explore.html").read_text())["cases"]
    assert [model["kinds"] for model in entry["models"]] == [["A1", "A2", "mix", "plain"]]
    assert set(entry["models"][0]["laws"]) == {"A1", "A2", "plain"}

    asked = vqa.embedded(8)
    said = vqa.answer(load_model(source), Processor.from_source(source), asked, max_new_tokens=3)
    vqa.write_results(workplace / "v/results.json", said)
    trials = needle.embedded_trials("n2o1", 4)
    needle.write_responses(workplace / "n/responses-n2o1.json", needle.responses_of(trials, [["", ""]] * 4, "paper"))
    capsys.readouterr()
    for folder in ("v", "n"):
        command.main(["--model", source, "--gallery", folder, "--limit", "4", "--out", f"{folder}.html", *few])
        cases = data_of((workplace / f"{folder}.html").read_text())["cases"]
        assert len(cases) == 4 and all(case["hit"] is False and case["truth"] for case in cases)
    assert "differ" not in capsys.readouterr().err
    vqa.write_results(workplace / "v/results.json", dict.fromkeys(said, "yes"))
    command.main(["--model", source, "--gallery", "v", "--limit", "4", "--out", "v.html", *few])
    assert "4 of 4 answers differ from those in v" in capsys.readouterr().err


def test_a_gallery_of_own_data(workplace):
    """Results about a user's own file are a traceback, or where questions were left out the last ones are lost."""
    picture().save("p.png")
    rows = [{"image": "p.png", "prefix": f"is {n}?", "suffix": "yes"} for n in range(3)]
    (workplace / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vqa.write_results(workplace / "v/results.json", {"own.jsonl:2": "yes", "own.jsonl:3": "no"})
    args = {"gallery": workplace / "v", "data": "jsonl:own.jsonl", "images": None, "allow_outside": False, "limit": 4}
    found = gallery.questions_of(SimpleNamespace(**args), "{question}")
    assert [(q.prompt, q.truth, q.said) for q in found] == [("is 1?", "yes", "yes"), ("is 2?", "yes", "no")]
    (workplace / "v/results.json").write_text('[{"prediction": "yes"}]')
    with pytest.raises(UserError, match=r"results.json\[0\]: question_id is missing"):
        gallery.questions_of(SimpleNamespace(**args), "{question}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image", "p.png"], "give --image and --prompt, or --gallery"),
        (["--gallery", "."], "no results.json of eval.vqa"),
        (["--image", "gone.png", "--prompt", "x"], "gone.png: not found"),
    ],
)
def test_what_cannot_be_explored_is_one_line(flags, message, source, workplace):
    """A mistake ends in a traceback, or after a large model was read."""
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        command.main(["--model", source, *flags])
    assert "\n" not in str(caught.value)
