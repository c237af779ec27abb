"""On weights that somebody really pretrained, what tests on random weights promise: equal to
transformers and PEFT, exact at the start, whole after an export, close in few bits.

Set LANGUAGE_WEIGHTS to the folder of a small language model, such as `python -m weights.gguf`
writes. Each test prints its numbers under `pytest -s`.
"""

import os
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from lora import adapter
from model.common import read_text
from model.differential import KINDS, graft
from model.generate import generate
from model.systems.chat import load_text_tokenizer
from weights.export import companions, export_model
from weights.load import load_model, load_text

FOLDER = os.environ.get("LANGUAGE_WEIGHTS", "")
TEXT = Path(__file__).parents[2] / "LICENSE"
EXACT = "softmax twin dex v2".split()
PARTS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(not FOLDER, reason="needs LANGUAGE_WEIGHTS: a language model's folder"),
]


def opened():
    return load_text(FOLDER)


@pytest.fixture(scope="module")
def model():
    """Read-only."""
    return opened()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """The first 1,024 tokens of the licence (1, S)."""
    return torch.tensor([load_text_tokenizer(FOLDER).encode(read_text(TEXT))[:1024]])


@pytest.fixture(scope="module")
def hf():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids)[0]


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Nats a token."""
    return F.cross_entropy(logits[:-1], ids[0, 1:])


def agreement(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Share of the positions whose likeliest token is the same."""
    return float((logits.argmax(-1) == others.argmax(-1)).float().mean())


@torch.no_grad()
def test_logits_loss_and_answers_are_transformers(model, hf, ids, logits):
    """Breaks when a real model differs from transformers', which a random one hides: large norms,
    sinks, long texts."""
    theirs = hf(ids).logits[0]
    worst = (logits - theirs).abs().max().item()
    losses = [loss_of(each, ids).item() for each in (logits, theirs)]
    print(f"\nlogits within {worst:.1e} of {theirs.abs().max():.1f}; loss {losses[0]:.5f}")
    assert worst < 1e-3
    assert agreement(logits, theirs) == 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    prompt = ids[:, :100]
    types = torch.ones_like(prompt)
    said = generate(model, prompt, None, types, types, 60)[0]
    expected = hf.generate(prompt, attention_mask=types, max_new_tokens=60, do_sample=False)
    assert said.tolist() == expected[0, 100:].tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_how_far_a_graft_starts(kind, ids, logits):
    """Breaks when a variant that promises to start exact changes a real model at step 0."""
    model = opened()
    graft(model, kind)
    changed = model(ids)[0]
    worst = (changed - logits).abs().max().item()
    pair = changed.log_softmax(-1), logits.log_softmax(-1)
    kl = F.kl_div(*pair, reduction="batchmean", log_target=True).item()
    loss, same = loss_of(changed, ids).item(), agreement(changed, logits)
    print(f"\n{kind}: {worst:.1e}, KL {kl:.4f}, loss {loss:.4f}, top-1 {100 * same:.1f} %")
    if kind in EXACT:
        assert worst == 0


def test_lora_trains_as_in_peft_and_is_whole_after_export(hf, ids, tmp_path):
    """Breaks when ten steps of LoRA leave PEFT's way, or merging, exporting and reopening change
    what was learned."""
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(PARTS))
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32), config
    )
    start = {name.replace(".default", ""): p for name, p in theirs.named_parameters()}
    ours = opened()
    adapter.inject(ours, adapter.DECODER_TARGETS, 8, 16)
    parameters = adapter.adapter_parameters(ours)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    rows = ids[:, :960].reshape(10, 96)

    def trained(model, parameters, forward) -> list[float]:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0)
        losses = []
        for row in rows:
            loss = loss_of(forward(model, row[None]), row[None])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    mine = trained(ours, parameters.values(), lambda model, row: model(row)[0])
    weights = [p for p in theirs.parameters() if p.requires_grad]
    expected = trained(theirs, weights, lambda model, row: model(row).logits[0])
    worst = max(abs(a - b) for a, b in zip(mine, expected, strict=True))
    print(f"\nLoRA: losses {mine[0]:.4f} to {mine[-1]:.4f}, within {worst:.1e} of PEFT's")
    assert worst < 1e-3

    with torch.no_grad():
        ours.eval()
        learned = ours(rows)
        adapter.merge(ours)
        export_model(ours, tmp_path / "merged", companions=companions(FOLDER))
        again = load_text(tmp_path / "merged")(rows)
        reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        error = (again - learned).abs().max().item()
        print(f"merged, exported, reopened: within {error:.1e}")
        assert error < 2e-3
        assert torch.allclose(reopened(rows).logits, again, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.03), ("nf4", 0.4)])
def test_few_bits_cost_little(kind, most, ids, logits):
    """Breaks when a quantized model loses more than its bits explain."""
    model = load_model(FOLDER, quantize=kind)
    losses = [loss_of(each, ids).item() for each in (model(ids)[0], logits)]
    print(f"\n{kind}: loss {losses[0]:.4f}, fp32 {losses[1]:.4f}")
    assert 0 < abs(losses[0] - losses[1]) < most


@torch.no_grad()
def test_a_long_text_token_by_token(model, ids, logits):
    """Breaks when the cache changes what a real model computes over 1,024 tokens."""
    cache = model.new_cache(1024)
    steps = [model(ids[:, :512], cache=cache)[0]]
    steps += [model(ids[:, place, None], cache=cache)[0] for place in range(512, 1024)]
    worst = (torch.cat(steps) - logits[:1024]).abs().max().item()
    print(f"\ncached and uncached within {worst:.1e}")
    assert worst < 1e-3
