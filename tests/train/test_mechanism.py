"""The mechanism tables: measures checked on maps and updates whose numbers can be worked out by hand."""

import math

import pytest
import torch
from torch import nn

from eval import scenes
from lora import adapter
from model.attention import Attention, tapped
from model.differential import graft
from model.variants import KINDS
from train.studies import attention_maps, attention_mechanism
from train.studies.attention_maps import Asked, ask, effective, forms, groups_of_patches, looks, second_map_left
from train.studies.attention_mechanism import LEFT, Measured
from weights.load import load_model

CPU = torch.device("cpu")
ALL = torch.ones(1, 4, dtype=torch.bool)


def test_forms_of_maps_worked_out_by_hand():
    """Breaks when an entropy, a rank, a likeness of heads or the share of negative weights is another number."""
    even, own = torch.full((4, 4), 0.25), torch.eye(4)
    assert forms(even[None, None], ALL) == pytest.approx(
        {"negative": 0, "sum": 1, "entropy": math.log(4), "rank": 1, "cosine": 0}, abs=1e-5
    )
    found = forms(torch.stack((own, own))[None], ALL)
    assert found == pytest.approx({"negative": 0, "sum": 1, "entropy": 0, "rank": 4, "cosine": 1}, abs=1e-5)
    found = forms(torch.stack((own, own.flip(0)))[None], ALL)
    assert found["cosine"] == pytest.approx(0, abs=1e-6)
    signed = torch.tensor([1.5, -0.5, 0, 0]).expand(4, 4)
    found = forms(signed[None, None], ALL)
    assert (found["negative"], found["sum"], found["rank"]) == pytest.approx((0.25, 2, 1), abs=1e-5)
    # a token that is no part of the prompt, such as padding, changes nothing
    short = torch.tensor([[True, True, True, False]])
    thirds = torch.full((4, 4), 1 / 3)
    assert forms(thirds[None, None], short)["entropy"] == pytest.approx(math.log(3), abs=1e-5)


def test_cka_knows_rotations_from_other_outputs():
    """Breaks when heads that differ by a rotation, a factor or a shift are not the same, or unrelated ones are."""
    x, turn = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([[0.0, 1, 0], [-1, 0, 0]])
    turn = torch.cat((turn, torch.tensor([[0.0, 0, 1]])))
    assert attention_maps.linear_cka(torch.stack((x, 3 * x @ turn + 1))) == pytest.approx(1, abs=1e-5)
    rows = torch.tensor([[1.0, -1, 1, -1], [1, 1, -1, -1]])
    assert attention_maps.linear_cka(rows[..., None]) == pytest.approx(0, abs=1e-6)


def test_looks_are_shares_of_absolute_weights():
    """Breaks when a share is of another query, of signed weights, or of another group of keys."""
    groups = torch.eye(4, 5)[None]
    asked = Asked(None, groups, ALL, {"answer": torch.tensor([[2]]), "name": torch.tensor([[0]])}, 1)
    maps = torch.zeros(1, 1, 4, 4)
    maps[0, 0, 2], maps[0, 0, 0] = torch.tensor([1.0, -0.5, 0.5, 0]), torch.tensor([0.0, 0, 0, 1])
    found = looks(maps, asked)
    assert [found[f"answer on {key}"] for key in attention_maps.KEYS] == pytest.approx([0.5, 0.25, 0.25, 0, 0])
    assert found["name on first"] == 1


def test_questions_know_where_the_needle_is(processor):
    """Breaks when the needle's patch, the caption's last word or the deciding positions are others."""
    asked, tests = ask("n4o1", processor, CPU), [scenes.needle("n4o1", "test", number) for number in range(32)]
    ids, labels = asked.micro.batch.input_ids, asked.micro.batch.labels
    for row, test in enumerate(tests):
        (needle,) = asked.groups[row, :, 0].nonzero()[:, 0].tolist()
        assert test.scene.squares[needle] == test.captions[0].split()[-1] and asked.groups[row, :, 1].sum() == 15
        name, *answer = (int(place) for query in ("name", "answer") for place in asked.queries[query][row])
        assert asked.groups[row, name, 2] == 1
        assert processor.decode(ids[row, [name]]).strip() == test.captions[0].split()[-1]
        place = [processor.decode(labels[row, [position + 1]]).strip() for position in answer]
        assert place == [str(number + 1) for number in test.targets[0]]
    assert asked.groups.sum(-1).unique().tolist() == [1] and asked.groups[:, 16, 3].all()
    two = scenes.needle("n2o2", "test", 1)  # the upper right quarter, two of whose squares are filled
    filled = [patch for patch, group in enumerate(groups_of_patches(two, 16).tolist()) if group == 0]
    assert len(filled) == 2 and all(patch // 4 < 2 <= patch % 4 for patch in filled)


@pytest.mark.parametrize("kind", KINDS)
def test_the_effective_map_is_what_values_are_multiplied_with(kind, seeded):
    """Breaks when a variant's heads are not its effective map times V, up to a positive factor for each query."""
    layer, x = KINDS[kind](Attention(16, 2, 1, 8, scale=0.5), 3), torch.randn(2, 5, 16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if kind in ("shared", "split"):
        layer.subln = None  # a gain by channel has no map
    maps, heads = [], []
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
    if kind == "dex":
        nn.init.zeros_(layer.w_d)
    with tapped({layer: maps.append}):
        layer(x)
    values = layer.split_heads(layer.v_proj(x))
    found = (effective(layer, maps, x) @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, heads[0], rtol=1e-4, atol=1e-5)


def adapted(kind: str = "softmax", **options):
    model = load_model("embedded")
    if kind != "softmax":
        graft(model, kind, **options)
    adapter.inject(model, r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj", 4, 8.0)
    return model.eval()


def test_two_equal_maps_have_no_distance(processor, monkeypatch):
    """Breaks when a fresh `twin` differs from the base, or a changed one does not; when a share of its second map is
    not left, or stays after the block."""
    monkeypatch.setattr(attention_maps, "TESTS", 4)
    asked, model = ask.__wrapped__("n4o1", processor, CPU), adapted("twin")
    base = attention_maps.measure_layers(load_model("embedded"), asked)
    for before, fresh in zip(base, attention_maps.measure_layers(model, asked), strict=True):
        assert (fresh["distance"], fresh["weight"]) == (0, 1) and fresh["A2 name on needle"] == fresh["name on needle"]
        assert {name: fresh[name] for name in before} == pytest.approx(before, abs=1e-4)
    for layer in model.language_model.layers:
        nn.init.normal_(layer.self_attn.q2.lora_B.weight, std=0.3)
    changed = attention_maps.measure_layers(model, asked)
    assert all(one["distance"] > 0.05 and one["negative"] > 0.01 and one["sum"] > 1.02 for one in changed)
    assert changed[0]["A1 name on needle"] == pytest.approx(base[0]["name on needle"], abs=1e-6)

    with torch.no_grad():
        logits = attention_maps.forward(model, asked.micro)
        with second_map_left(model, 0.0):
            without = attention_maps.forward(model, asked.micro)
        assert torch.equal(attention_maps.forward(model, asked.micro), logits)
        torch.testing.assert_close(without, attention_maps.forward(load_model("embedded"), asked.micro))
        dex = adapted("dex")
        nn.init.normal_(dex.language_model.layers[0].self_attn.w_d)
        with second_map_left(dex, 0.0):
            torch.testing.assert_close(attention_maps.forward(dex, asked.micro), without)
        with second_map_left(dex, 1.0):
            torch.testing.assert_close(
                attention_maps.forward(dex, asked.micro), attention_maps.forward(dex, asked.micro)
            )


def test_updates_worked_out_by_hand():
    """Breaks when the size of an update, of a branch or of the whole, or the cosine of two branches is another one."""
    for kind, options in (("twin", {"r": 4, "alpha": 8.0}), ("twin", {"half": True}), ("v2", {"r": 4, "alpha": 8.0})):
        layer = adapted(kind, **options).language_model.layers[1]
        attention = layer.self_attn
        for name in ("q", "k", "v"):
            part = getattr(attention, f"{name}_proj")
            part.base_layer.weight.data = torch.eye(*part.base_layer.weight.shape)
            for lora, factor in ((part.lora, 1.0), (getattr(attention, f"{name}2", None), -2.0)):
                if lora:
                    lora.lora_A.weight.data = torch.eye(4, 128)
                    lora.lora_B.weight.data = torch.eye(lora.lora_B.out_features, 4) * factor / lora.scaling
            if options.get("half") and name != "v":  # the second half of the rank undoes the first, twice
                part.lora.lora_A.weight.data[2:] = -2 * part.lora.lora_A.weight[:2]
                part.lora.lora_B.weight.data[:, 2:] = part.lora.lora_B.weight[:, :2]
        attention.o_proj.base_layer.weight.data.zero_()
        found, rank = attention_maps.updates(attention, layer), 2 if options.get("half") else 4
        parts = (1, 1) if kind == "twin" else (1, 0)  # of q (128 ones in its base) and of k (64)
        size = math.sqrt(2 * rank / (128 + 64))
        assert found["update"] == pytest.approx(size)
        assert found["second update"] == pytest.approx(2 * math.sqrt(sum(parts) * rank / (128 + 64)))
        assert found["update cosine"] == pytest.approx(-1)
        assert found["whole update"] == pytest.approx(size * (4 if kind == "twin" else 1))  # 2·1 − 1·(−2)
        assert found["other update"] == pytest.approx(math.sqrt(4 / 64))


def cell(seed: int, by_left=(1, 1, 1, 1), loss=1.0, **measures) -> dict:
    named = {"name on needle": 0.2, "name on distractors": 0.2, "update": 0.1, "whole update": 0.1, "other update": 0.1}
    found = {left: {"n4o1": [float(hit), 0.0]} for left, hit in zip(LEFT, by_left, strict=True)}
    return {"seed": seed, "layers": [named | measures] * 2, "found": found, "loss": loss, "cpu_seconds": 1, "file": ""}


def test_hypotheses_are_computed():
    """Breaks when a hypothesis gets another sign, another number, or a verdict from a single seed."""
    control = Measured(cell(0), [cell(seed, loss=1.0) for seed in range(3)])
    one_map = {"A1 name on needle": 0.1, "A1 name on distractors": 0.3, "update cosine": -0.5, "weight": 1.0}
    one_map |= {"whole update": 0.3, "other update": 0.05}
    own = [
        cell(seed, (0, 1, 1, 1), 1.2 + seed / 1e3, **{name: value + seed / 1e7 for name, value in one_map.items()})
        for seed in range(3)
    ]
    rows = attention_mechanism.summarize({"LoRA": control, "twin": Measured(own[0], own)}, {"twin": "LoRA"})
    found = rows["twin"]["hypotheses"]
    means = {name: round(one["mean"], 3) for name, one in found.items()}
    expected = {"noise": -50, "cancels": 25, "copies": -0.5, "amplifies": 5, "moves less": 50, "learns less": 0.201}
    assert means == expected
    verdicts = {name: one["verdict"] for name, one in found.items()}
    assert verdicts == dict.fromkeys(expected, "yes") | {"noise": "open", "copies": "no"}  # two examples decide nothing
    assert rows["twin"]["found"]["0"]["mean"] == 0 and rows["twin"]["found"]["1"]["mean"] == 50
    single = attention_mechanism.summarize({"LoRA": control, "twin": Measured(own[0], own[:1])}, {"twin": "LoRA"})
    assert {one["verdict"] for one in single["twin"]["hypotheses"].values()} == {"open"}
    alone = attention_mechanism.summarize(
        {"LoRA": Measured(own[0], control.after[:1]), "twin": Measured(own[0], own)}, {"twin": "LoRA"}
    )
    assert alone["twin"]["hypotheses"]["amplifies"]["verdict"] == "open"  # a single pair


def test_a_needle_is_found_if_all_of_its_answers_are_right(processor, monkeypatch):
    """Breaks when one wrong word, or one of two questions, does not count."""
    monkeypatch.setattr(attention_maps, "TESTS", 4)
    asked = ask.__wrapped__("n2o1", processor, CPU)
    logits = torch.nn.functional.one_hot(asked.micro.targets.clamp(min=0), 1728).float()
    logits[3, 0] = logits[3, 0].roll(1)  # the second question of the second test
    monkeypatch.setattr(attention_maps, "forward", lambda *_: logits)
    assert attention_maps.find_needles(load_model("embedded"), asked) == [1, 0, 1, 1]
