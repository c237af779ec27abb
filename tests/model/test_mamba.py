"""The scan equals a loop in fp64, the language model equals transformers, and its state is all that
it remembers."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode

from model.generate import generate
from model.systems import scan
from model.systems.configs import MambaConfig
from model.systems.mamba import Mamba, MambaLM, initialize_mamba
from model.systems.scan import BLOCK, selective_scan
from tests.reference import dice, hf_mamba, is_valid, our_mamba, padded_texts, relative_error


def loop(x, delta, A, B, C, state):
    """The recurrence as the paper writes it, one step after the other, in the dtype of its
    inputs."""
    state = state.mT
    outputs = []  # (B, E, N)
    for t in range(x.shape[1]):
        decay = torch.exp(delta[:, t, :, None] * A)
        state = decay * state + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1))
    return torch.stack(outputs, dim=1), state.mT


def scan_inputs(length, batch=2, channels=6, size=5, scale=1.0, seed=0):
    """x, Δ > 0, A < 0, B, C and a first state, in fp64."""
    normal = partial(torch.randn, generator=dice(seed), dtype=torch.float64)
    delta = F.softplus(normal(batch, length, channels)) * scale
    A = -normal(channels, size).exp()
    x = normal(batch, length, channels)
    B, C = (normal(batch, length, size) for _ in range(2))
    return x, delta, A, B, C, normal(batch, size, channels)


def run_with_gradients(function, inputs, dtype):
    """Outputs, and the gradients of a loss that weighs every one of them differently."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    outputs = function(*inputs)
    loss = 0.0
    for out in outputs:
        weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).cos().view(out.shape)
        loss += (out * weight.to(out.dtype)).sum()
    return [*outputs, *torch.autograd.grad(loss, inputs, materialize_grads=True)]


def errors(function, inputs, dtype=torch.float32):
    """Of y, the last state, and the gradients of x, Δ, A, B, C and the first state, against the
    loop in fp64."""
    mine = run_with_gradients(function, inputs, dtype)
    exact = run_with_gradients(loop, inputs, torch.float64)
    return [relative_error(a, b) for a, b in zip(mine, exact, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("chunk", [None, 1, 5, BLOCK, BLOCK + 3, 1000])
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_scan_equals_a_loop_in_fp64(length, chunk):
    """Breaks when outputs, last state or any gradient depart at any length, on a block's or a
    chunk's border too."""
    assert max(errors(partial(selective_scan, chunk=chunk), scan_inputs(length))) <= 2e-6


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e4])
def test_large_and_small_steps_are_exact(scale, chunk):
    """Breaks when decay is divided by or taken apart in logarithms: exp(Δ A) underflows here, and
    1/exp(Δ A) is ∞."""
    inputs = scan_inputs(50, scale=scale)
    inputs[1][:, ::3] = 0.0  # steps that keep the state whole among others that wipe it out
    assert max(errors(partial(selective_scan, chunk=chunk), inputs)) <= 1e-5


def test_a_large_batch_is_read_by_rows(monkeypatch):
    """Breaks when the rows that share a cache are put together in another order, or lose a part of
    A's gradient."""
    monkeypatch.setattr(scan, "CACHE_SIZE", 2 * BLOCK * 6 * 5)  # two rows at a time
    assert max(errors(selective_scan, scan_inputs(20, batch=5), torch.float64)) <= 1e-12


@pytest.mark.parametrize("autocast", [False, True])
def test_the_recurrence_is_computed_in_fp32(autocast):
    """Breaks when bf16 inputs or autocast round the state at every step, forward or backward."""
    inputs = [tensor.bfloat16() for tensor in scan_inputs(60)]
    dtype = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, last, *gradients = errors(selective_scan, inputs, dtype)
    # the gradient of a bf16 input is rounded once, at the end
    assert max(y, last) <= 2e-6
    assert max(gradients) <= 2e-6 + (0.0 if autocast else 2**-8)


def prompts(lengths=(9, 4, 1)):
    """A left-padded batch, with token 0 as padding and as text."""
    return padded_texts(lengths, 0, 60)


@pytest.mark.long
@pytest.mark.parametrize(
    "lengths", [(20, 20), (9, 4, 1), (37,)], ids=["unpadded", "padded", "single"]
)
def test_logits_and_gradients_equal_transformers(lengths):
    """Breaks when convolution, scan, gate, norm, residual, padding or head depart from the
    published computation."""
    hf = hf_mamba()
    model = our_mamba(hf)
    inputs = prompts(lengths)
    valid = is_valid(inputs)
    mine = model(**inputs)
    theirs = hf(**inputs, use_cache=False).logits
    assert mine.dtype == torch.float32
    assert relative_error(mine[valid], theirs[valid]) <= 1e-6
    labels = torch.randint(0, 60, valid.shape, generator=dice(2))[valid]
    F.cross_entropy(mine[valid], labels).backward()
    F.cross_entropy(theirs[valid], labels).backward()
    theirs = dict(hf.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, theirs[name].grad) <= 3e-6, name


@torch.no_grad()
def test_a_bf16_layer_rounds_only_what_it_must(monkeypatch):
    """Breaks when residual, step size, or the convolution's sum are rounded to bf16, or the norm
    rounds elsewhere."""
    hf = hf_mamba(conv_kernel=4)
    inputs = prompts((24, 24))
    seen = []
    model = our_mamba(hf, torch.bfloat16)
    h = torch.randn(2, 30, 36, generator=dice(0))
    exact = hf(**inputs).logits
    mine = model(**inputs)
    theirs = hf.to(torch.bfloat16)(**inputs).logits
    assert relative_error(mine, exact) <= 1.1 * relative_error(theirs, exact)
    layer = model.backbone.layers[0]
    mixer = model.backbone.layers[0].mixer
    mixer.dt_proj.bias -= 6.0
    monkeypatch.setattr(
        "model.systems.mamba.selective_scan",
        lambda *args: seen.append(args) or selective_scan(*args),
    )
    mixer(h.bfloat16())
    x, delta, *_ = seen[0]
    step = F.linear(mixer.x_proj(x)[..., :3], mixer.dt_proj.weight)
    assert relative_error(delta, F.softplus(step.double() + mixer.dt_proj.bias)) <= 1e-6
    inputs = F.pad(mixer.in_proj(h.bfloat16())[..., :72].double().mT, (3, 0))
    exact = F.silu(F.conv1d(inputs, *(p.double() for p in mixer.conv1d.parameters()), groups=72).mT)
    assert relative_error(x, exact) <= 0.6 * 2**-8  # one rounding has an error of 0.4 · 2⁻⁸
    mixer.out_proj.weight.zero_()
    assert torch.equal(layer(h), h)
    assert torch.equal(layer.norm(h.bfloat16()), hf.backbone.layers[0].norm(h.bfloat16()))


@pytest.mark.parametrize("places", [[4, 5], [0, 1], [0, 5]], ids=["left", "right", "middle"])
def test_padding_within_what_follows_changes_nothing(places):
    """Breaks when a state fades over the padding of a later part, or the last inputs before it are
    lost."""
    model = our_mamba(hf_mamba())
    tokens = torch.randint(0, 60, (1, 11), generator=dice(5))
    first, second, last = tokens.split((6, 2, 3), dim=1)
    ids = torch.full((1, 6), 9)
    mask = torch.ones(1, 12, dtype=torch.long)
    cache = model.new_cache()
    ids[:, places] = second
    mask[:, 6:] = (ids != 9).long()
    with torch.no_grad():
        whole = model(tokens)
        model(first, cache=cache)
        read = model(ids, mask, cache=cache)
        assert relative_error(read[:, places], whole[:, 6:8]) <= 1e-6
        assert relative_error(model(last, cache=cache), whole[:, 8:]) <= 1e-6


@pytest.mark.long
def test_greedy_equals_transformers():
    """Breaks when the state after a padded prompt is not that of the tokens alone, or the stop
    differs."""
    hf = hf_mamba()
    inputs = prompts()
    ids, valid = inputs.values()
    theirs = hf.generate(**inputs, max_new_tokens=15, do_sample=False)
    mine = generate(our_mamba(hf), ids, None, valid, valid, 15)
    for a, b in zip(mine, theirs[:, ids.shape[1] :], strict=True):
        ends = (b == 1).nonzero()
        assert a.tolist() == b[: int(ends[0]) + 1 if len(ends) else None].tolist()
    assert len({tuple(row.tolist()) for row in mine}) == 3


@torch.no_grad()
def test_memory_and_work_of_a_step_are_constant():
    """Breaks when what is remembered, or what a new token costs, grows with what has been read."""
    model = our_mamba(hf_mamba())
    work = set()
    for tokens in (1, 10, 300):
        cache = model.new_cache(tokens + 1)
        model(torch.ones(1, tokens, dtype=torch.long), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, 1, dtype=torch.long), cache=cache)
        for layer in cache:
            assert layer.conv.untyped_storage().nbytes() == 4 * 2 * 72
            assert layer.ssm.untyped_storage().nbytes() == 4 * 5 * 72
        work.add(counter.get_total_flops())
    assert len(work) == 1


def test_initialization_is_the_published_one():
    """Breaks when a fresh model starts elsewhere: A = −1 … −N, steps from 0.001 to 0.1, out_proj
    scaled by depth."""
    model = Mamba(MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=4))
    initialize_mamba(model, seed=3)
    assert abs(model.embeddings.weight.std().item() - 0.02) < 1e-3
    for mixer in (layer.mixer for layer in model.layers):
        steps = F.softplus(mixer.dt_proj.bias)
        assert 0.99e-3 < steps.min() < 1.3e-3
        assert 0.08 < steps.max() < 0.101
        assert abs(steps.log().mean().item() - math.log(0.01)) < 0.4  # log-uniform
        assert torch.allclose(-mixer.A_log.exp(), -torch.arange(1.0, 17).expand(128, 16))
        assert (mixer.D == 1).all()
        assert (mixer.conv1d.bias == 0).all()
        bounds = {mixer.in_proj: 64**-0.5, mixer.x_proj: 128**-0.5, mixer.dt_proj: 0.5}
        bounds |= {mixer.conv1d: 0.5, mixer.out_proj: 128**-0.5 / 4**0.5}
        for part, bound in bounds.items():
            assert 0.97 * bound < part.weight.abs().max() <= bound


def test_transformers_reads_what_is_written():
    """Breaks when transformers builds another model from what is written."""
    config = MambaConfig(
        vocab_size=60, hidden_size=40, num_hidden_layers=3, state_size=5, eos_token_id=1
    )
    theirs = transformers.MambaConfig.from_dict(config.to_dict())
    shapes = []
    for model in (MambaLM(config), transformers.MambaForCausalLM(theirs)):
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    del shapes[1]["lm_head.weight"]
    assert shapes[0] == shapes[1]
