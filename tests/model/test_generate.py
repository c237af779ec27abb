"""Decoding equals transformers' generate and our own uncached forward, batched or alone, on either
padding side."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import RepetitionPenaltyLogitsProcessor

from model.attention import LayerCache
from model.compiled import CompiledStep
from model.generate import generate, next_token, pick
from model.systems.language import new_model
from tests.reference import (
    batch,
    dice,
    generations,
    hf_forward,
    hf_model,
    ours,
    relative_error,
    right_padded,
    twins,
)

PROMPTS = ((6, 0), (2, 0), (4, 0))


def asked(generation=1, rows=PROMPTS):
    return twins(generation, rows, seed=3)


def answered(inputs, row, ids):
    """A row of `inputs` with an answer behind it."""
    one = {name: value[row : row + 1] for name, value in inputs.items()}
    one["input_ids"] = torch.cat((one["input_ids"], ids[None]), dim=1)
    for name in ("token_type_ids", "attention_mask"):
        one[name] = F.pad(one[name], (0, len(ids)), value=1)
    return one


@torch.no_grad()
@pytest.mark.long
@generations
@pytest.mark.parametrize(
    "rows", [PROMPTS[:1], PROMPTS, ((2, 0), (30, 0))], ids=["single", "short", "long"]
)
def test_greedy_equals_transformers(generation, rows):
    """Breaks when cache, masks, positions or the stop differ from HF generate; 20 tokens pass Gemma
    2's window, which counts tokens, not padding behind a prompt. transformers pads on the left
    alone."""
    hf, model, inputs = asked(generation, rows)
    theirs = hf.generate(**inputs, max_new_tokens=20, do_sample=False)
    theirs = theirs[:, inputs["input_ids"].shape[1] :]
    for given in (inputs, right_padded(inputs)):
        mine = generate(model, **given, max_new_tokens=20)
        for row, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b[: len(a)])
            assert len(a) == 20 or a[-1] == hf.config.eos_token_id
            # the logits of the whole answer: equal tokens may be luck
            whole = model(**answered(given, row, a), positions_to_keep=len(a))
            expected = hf_forward(hf, answered(inputs, row, a))[:, -len(a) :]
            assert relative_error(whole, expected) <= 1e-6
        # the pictures and prompts matter
        assert len({tuple(row.tolist()) for row in mine}) == len(rows)


@torch.no_grad()
@generations
def test_log_probabilities_are_those_of_transformers(generation):
    """Breaks when a token gets another's log p, the end token none, or a row that has ended counts
    on."""
    hf = hf_model(generation)
    inputs = batch(hf, PROMPTS, seed=3)
    free = hf.generate(**inputs, max_new_tokens=20, do_sample=False)[
        :, inputs["input_ids"].shape[1] :
    ]
    # the first row ends in its middle
    end = int(free[0, 7])
    hf.config.eos_token_id = hf.generation_config.eos_token_id = end
    hf.config.text_config.eos_token_id = end
    model = ours(hf)
    theirs = hf.generate(
        **inputs,
        max_new_tokens=20,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    expected = hf.compute_transition_scores(theirs.sequences, theirs.scores, normalize_logits=True)
    for given in (inputs, right_padded(inputs)):
        log_probs = []
        rows = generate(model, **given, max_new_tokens=20, log_probs=log_probs)
        assert all(map(torch.equal, rows, generate(model, **given, max_new_tokens=20)))
        assert rows[0][-1] == end and len(rows[0]) <= 8
        assert max(map(len, rows)) == 20
        for number, (row, found) in enumerate(zip(rows, log_probs, strict=True)):
            assert len(found) == len(row)
            torch.testing.assert_close(found, expected[number, : len(row)], rtol=0, atol=2e-5)
    compiled = CompiledStep(model, backend="eager")
    fast = []
    generate(model, **inputs, max_new_tokens=20, compiled=compiled, log_probs=fast)
    torch.testing.assert_close(fast, log_probs, rtol=0, atol=2e-5)


@torch.no_grad()
def test_log_probabilities_of_a_sample_are_the_model_s_own():
    """Breaks when temperature, nucleus or the image token change what the model is said to
    believe, or bf16 rounds it."""
    _, model, inputs = asked()
    raw = []
    model.register_forward_hook(lambda module, args, logits: raw.append(logits[:, -1].double()))
    log_probs = []
    options = {"temperature": 5.0, "top_p": 0.9, "generator": dice(0)}
    rows = generate(model, **inputs, max_new_tokens=12, log_probs=log_probs, **options)
    own = torch.stack(raw, dim=1).log_softmax(-1)
    assert len({tuple(row.tolist()) for row in rows}) == 3
    for number, (row, found) in enumerate(zip(rows, log_probs, strict=True)):
        assert found.dtype == torch.float32
        assert not found.is_inference() and not row.is_inference()  # autograd refuses what is
        expected = own[number, range(len(row)), row].float()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    rounded = torch.randn(3, 50).bfloat16()
    exact = rounded.double().log_softmax(-1).amax(-1).float()
    known = []
    next_token(model, rounded, (), known, 0.0, 1.0, None)
    torch.testing.assert_close(known[0], exact, rtol=0, atol=1e-6)


def test_memory_grows_with_what_is_generated(monkeypatch):
    """Breaks when a limit that is never reached takes its memory, or a token is lost as the cache
    grows."""
    _, model, inputs = asked()
    expected = generate(model, **inputs, max_new_tokens=20)
    caches = []
    new_cache = model.new_cache
    monkeypatch.setattr(model, "new_cache", lambda n: caches.append(new_cache(n)) or caches[-1])
    monkeypatch.setattr(LayerCache, "least", 1)
    assert all(map(torch.equal, generate(model, **inputs, max_new_tokens=20), expected))
    script = iter([5, 6, model.config.eos_token_id])
    monkeypatch.setattr("model.generate.pick", lambda *_: torch.tensor([next(script)] * 3))
    assert len(generate(model, **inputs, max_new_tokens=10**9)[0]) == 3
    width = inputs["input_ids"].shape[1]
    assert all(width < layer.keys.shape[2] <= 2 * width + 4 for layer in caches[-1])


def test_sampling_follows_the_distribution():
    """Breaks when temperature or the nucleus change the probabilities that tokens are drawn
    with."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(40000, -1)
    generator = dice(0)

    expected = {
        (1.0, 1.0): [0.5, 0.3, 0.15, 0.05],
        (1.0, 0.75): [0.625, 0.375, 0, 0],  # 0.5 has not reached 0.75, 0.8 has: two tokens stay
        (1.0, 0.5): [1, 0, 0, 0],  # the first token alone is exactly enough
        (0.5, 1.0): [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365],
    }
    for options, probabilities in expected.items():
        share = pick(logits, *options, generator).bincount(minlength=4) / len(logits)
        assert torch.allclose(share, torch.tensor(probabilities, dtype=share.dtype), atol=0.01)
    assert pick(logits[:2], 0.0, 1.0, None).tolist() == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-39, 1e-38, 1e-20, 1e38, 1e300])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_extreme_temperatures_are_their_limits(temperature, top_p):
    """Breaks when a quotient overflows: near 0 only the largest logit is drawn, far above 1 all
    alike."""
    logits = torch.tensor([[3.0, -80.0, 50.0, 49.0], [-1e30, 1e30, -1e30, 0.0]]).repeat(500, 1)
    drawn = pick(logits, temperature, top_p, dice(0)).view(-1, 2)
    if temperature < 1:
        assert (drawn == torch.tensor([2, 1])).all()
    elif top_p == 1 and temperature > 1e38:
        assert all(torch.bincount(column, minlength=4).min() > 80 for column in drawn.T)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e300])
def test_an_image_token_is_never_an_answer(temperature, monkeypatch):
    """Breaks when a row that draws <image>, which needs a picture, aborts the whole batch."""
    _, model, inputs = asked()
    image = model.config.image_token_id
    head = model.language_model.head

    def towards_image(hidden):
        return head(hidden).index_fill(-1, torch.tensor(image), 1e4)

    monkeypatch.setattr(model.language_model, "head", towards_image)
    options = {"top_p": 0.9, "generator": dice(0)}
    options["temperature"] = temperature
    assert image not in torch.cat(generate(model, **inputs, max_new_tokens=12, **options))


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_senseless_options_are_refused(options):
    """Breaks when a wrong option decodes something instead of saying so."""
    _, model, inputs = asked()
    with pytest.raises(ValueError, match="expected"):
        generate(model, **inputs, max_new_tokens=4, **options)
    # positions past it would overwrite others
    with pytest.raises(AssertionError, match="cache of 10"):
        model(**inputs, cache=model.new_cache(10))


@torch.no_grad()
def test_the_repetition_penalty_is_that_of_transformers(monkeypatch):
    """Breaks when logits of either sign are changed otherwise than by transformers' processor, or a
    model that is trained from nothing, and has no stop token, cannot be asked."""
    model = new_model("nano", differential=True)
    ids = torch.arange(40).view(2, 20)
    object.__setattr__(model.config, "repetition_penalty", 1.7)
    valid = torch.ones_like(ids)
    raw = []
    chosen = []
    valid[1, 0] = 0
    model.register_forward_hook(lambda module, args, logits: raw.append(logits[:, -1].clone()))

    def kept(logits, *args):
        chosen.append(logits)
        return pick(logits, *args)

    monkeypatch.setattr("model.generate.pick", kept)
    log_probs = []
    types = torch.ones_like(ids)
    rows = torch.stack(generate(model, ids, None, types, valid, 30, log_probs=log_probs))
    penalise = RepetitionPenaltyLogitsProcessor(1.7)
    for step, (logits, mine) in enumerate(zip(raw, chosen, strict=True)):
        for row, start in enumerate((0, 1)):  # without padding
            assert (mine[row] < logits[row])[logits[row] < 0].any()
            read = torch.cat((ids[row, start:], rows[row, :step]))[None]
            assert torch.equal(penalise(read, logits[row : row + 1])[0], mine[row])
    assert rows.shape == (2, 30)
    # how sure the model is does not hang on the penalty
    own = torch.stack(raw, dim=1).log_softmax(-1).gather(-1, rows[..., None])[..., 0]
    torch.testing.assert_close(torch.stack(log_probs), own)
