"""Ours equals transformers: every layer, the logits and the gradients, in both generations and
geometries."""

import json

import pytest
import torch
import torch.nn.functional as F

import model.cpu as cpu
from tests.reference import (
    backends,
    batch,
    error,
    generations,
    hf_forward,
    hf_model,
    is_valid,
    ours,
    outputs_by_layer,
    relative_error,
    reload_hf,
    set_attention_backend,
    twins,
)

SAME_BACKEND, OTHER_BACKEND = 1e-6, 1e-5

ROWS = json.loads("""{
    "unpadded": [[5, 4], [5, 4]],
    "padded": [[5, 4], [3, 6], [1, 1]],
    "prefix only": [[6, 0], [6, 0]],
    "prefix only, padded": [[6, 0], [2, 0]],
    "long": [[4, 30], [20, 9]]
}""")


def layers_of(model) -> list[str]:
    """Every module whose output has a meaning of its own: each block, attention, MLP, norm, tower
    and the projector."""
    leaves = tuple("self_attn mlp multi_modal_projector norm post_layernorm embeddings".split())
    return [
        name
        for name, _ in model.named_modules()
        if name.endswith(leaves) or "norm" in name.split(".")[-1] or name.split(".")[-1].isdigit()
    ]


@pytest.mark.long
@pytest.mark.parametrize("rows", ROWS)
@generations
@pytest.mark.parametrize(("path", "bound"), [("torch", SAME_BACKEND), ("onednn", OTHER_BACKEND)])
def test_every_layer_and_the_logits(path, bound, generation, rows, monkeypatch):
    """Breaks when any block, norm, mask, position or scale departs from the published computation.
    -s prints errors."""
    monkeypatch.setattr(cpu, "ways", cpu.choose("", "", False, path))
    hf, model, inputs = twins(generation, ROWS[rows])
    names = layers_of(model)
    assert len(names) >= 29
    results = {}
    theirs = outputs_by_layer(hf.model, names, lambda: results.update(hf=hf_forward(hf, inputs)))
    mine = outputs_by_layer(model, names, lambda: results.update(ours=model(**inputs)))
    valid = is_valid(inputs)
    print(
        f"\nPaliGemma {generation}, rows {rows}, products by {path}: relative error of each "
        f"module, at most {bound}"
    )
    for name in names:
        a, b = mine[name], theirs[name]
        if a.shape[:2] == valid.shape:  # outputs at padding are never used
            a, b = a[valid], b[valid]
        print(f"{relative_error(a, b):9.1e}  {name}")
        assert relative_error(a, b) <= bound, name
    assert results["ours"].dtype == torch.float32
    assert relative_error(results["ours"][valid], results["hf"][valid]) <= bound


@pytest.mark.long
@cpu.using("torch")
@pytest.mark.parametrize(
    ("ours_backend", "hf_backend", "bound"),
    [
        ("sdpa", "sdpa", SAME_BACKEND),
        ("sdpa", "eager", OTHER_BACKEND),
        ("eager", "sdpa", OTHER_BACKEND),
    ],
)
def test_backends_agree(ours_backend, hf_backend, bound):
    """Breaks when the fused kernel gets another mask, scale or head grouping than the written-out
    equations."""
    hf = hf_model(1, backend=hf_backend)
    assert error(ours(hf, ours_backend), hf, batch(hf, ROWS["padded"])) <= bound


@generations
@pytest.mark.parametrize("path", ["onednn", "torch"])
def test_gradients(path, generation, monkeypatch):
    """Breaks when the loss would train the weights in another direction than transformers does."""
    monkeypatch.setattr(cpu, "ways", cpu.choose("", "", False, path))
    monkeypatch.setattr(cpu, "MIN_OPERATIONS", 0)
    hf, model, inputs = twins(generation, ROWS["padded"])
    target = inputs["token_type_ids"][:, 1:].bool()
    labels = inputs["input_ids"][:, 1:][target]
    F.cross_entropy(model(**inputs)[:, :-1][target], labels).backward()
    F.cross_entropy(hf_forward(hf, inputs)[:, :-1][target], labels).backward()
    theirs = dict(hf.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # softmax is blind to a shift, what is left is rounding
            assert parameter.grad.norm() < 1e-6, name
        else:
            assert relative_error(parameter.grad, theirs[name].grad) <= (
                1e-5 if path == "torch" else 3e-5
            ), name


@pytest.mark.long
@backends
@generations
def test_bf16_is_equal_to_the_bit(generation, backend, monkeypatch):
    """Breaks when an operation is reordered or a cast moves: fp32 islands, the √H factor, the RoPE
    tables."""
    monkeypatch.setattr(cpu, "ways", frozenset())
    if generation == 2 and backend == "sdpa":
        pytest.skip(
            "soft-capped logits have no fused kernel: transformers refuses sdpa for Gemma 2"
        )
    hf = reload_hf(hf_model(generation), backend, torch.bfloat16)
    model = ours(hf_model(generation), backend, dtype=torch.bfloat16)
    inputs = batch(hf, ROWS["padded"])
    valid = is_valid(inputs)
    with torch.no_grad():
        mine, theirs = model(**inputs)[valid], hf_forward(hf, inputs)[valid].float()
    assert torch.equal(mine, theirs), relative_error(mine, theirs)


@pytest.mark.long
@generations
@pytest.mark.parametrize("learns", [True, False])
def test_no_position_to_keep_is_no_error(generation, learns, monkeypatch):
    """Breaks when a batch without supervised tokens raises; its loss and its gradients are zero."""
    monkeypatch.setattr(cpu, "MIN_WEIGHT_ELEMENTS", 0)
    _, model, inputs = twins(generation)
    set_attention_backend(model, "sdpa")
    none = torch.zeros(2, 0, dtype=torch.long)
    for positions in (0, none):
        with torch.set_grad_enabled(learns):
            assert model(**inputs, positions_to_keep=positions).shape == (2, 0, 128)
            loss = model(**inputs, positions_to_keep=positions, targets=none)
        assert loss == 0
        if learns:
            loss.backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.long
def test_the_head_runs_only_at_positions_to_keep(monkeypatch):
    """Breaks when the widest product of the model is computed at positions that are not used."""
    _, model, inputs = twins(rows=ROWS["padded"])
    seen = []
    head = model.language_model.head
    monkeypatch.setattr(
        model.language_model, "head", lambda hidden: seen.append(hidden.shape) or head(hidden)
    )
    model(**inputs, positions_to_keep=3)
    assert seen == [(3, 3, 72)]


@pytest.mark.long
@pytest.mark.parametrize(("pixels", "generation"), [(224, 1), (448, 1), (896, 1), (896, 2)])
def test_published_geometries(pixels, generation):
    """Breaks when a sequence of 256, 1024 or 4096 image tokens is laid out, masked or windowed
    wrongly."""
    # 896 px and Gemma 2: the suffix reaches past the window of 4096, and must lose sight of the
    # first patches
    window = {"sliding_window": 4096} if generation == 2 else {}
    # a head more at 4096 tokens takes a second more, and no other place
    heads = (
        {"vision_heads": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        if pixels == 896
        else {}
    )
    sizes = window | heads | {"image_size": pixels, "num_hidden_layers": 2}
    hf, model, inputs = twins(generation, ((3, 5),), **sizes)
    with torch.no_grad():
        kept = inputs["token_type_ids"].shape[1] - torch.arange(8, 0, -1)
        theirs = hf_forward(hf, inputs)[:, kept]
        for path, bound in (("onednn", 1e-5), ("torch", 1e-6)):  # oneDNN brings a GELU of its own
            with cpu.using(path):
                assert relative_error(model(**inputs, positions_to_keep=kept), theirs) <= bound
