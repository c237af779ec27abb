"""The scan equals a loop in fp64, the language model equals transformers, and its state is all that it remembers."""

import functools
import importlib.util
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from eval import vqa
from model import scan
from model.generate import generate
from model.mamba import Mamba, MambaLM, choose_kernel, initialize_mamba
from model.scan import BLOCK, _kernel_scan, selective_scan, use_kernel
from model.system_configs import MAMBA_PRESETS, MambaConfig
from tests.reference import relative_error
from train import finetune

# ---------------------------------------------------------------------------------------------------------------------
# The scan
# ---------------------------------------------------------------------------------------------------------------------


def loop(x, delta, A, B, C, state):
    """The recurrence as the paper writes it, one step after the other, in the dtype of its inputs."""
    state, outputs = state.mT, []  # (B, E, N)
    for t in range(x.shape[1]):
        state = torch.exp(delta[:, t, :, None] * A) * state + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1))
    return torch.stack(outputs, dim=1), state.mT


def scan_inputs(length: int, batch: int = 2, channels: int = 6, size: int = 5, scale: float = 1.0, seed: int = 0):
    """x, Δ > 0, A < 0, B, C and a first state, in fp64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    delta = F.softplus(normal(batch, length, channels)) * scale
    A = -normal(channels, size).exp()
    sequences = normal(batch, length, channels), delta, A, normal(batch, length, size), normal(batch, length, size)
    return *sequences, normal(batch, size, channels)


def run_with_gradients(function, inputs, dtype):
    """Outputs, and the gradients of a loss that weighs every one of them differently."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    outputs = function(*inputs)
    weights = [torch.linspace(-1, 2, out.numel(), dtype=torch.float64).cos().view(out.shape) for out in outputs]
    sum((out * weight.to(out.dtype)).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    return [*outputs, *(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs)]


@pytest.mark.long
@pytest.mark.parametrize("chunk", [None, 1, 5, BLOCK, BLOCK + 3, 1000])
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_scan_equals_a_loop_in_fp64(length, chunk):
    """Breaks when outputs, last state or any gradient depart at any length, on a block's or a chunk's border too."""
    inputs = scan_inputs(length)
    mine = run_with_gradients(lambda *args: selective_scan(*args, chunk=chunk), inputs, torch.float32)
    exact = run_with_gradients(loop, inputs, torch.float64)
    names = ("y", "last state", "x", "delta", "A", "B", "C", "first state")
    for name, a, b in zip(names, mine, exact, strict=True):
        assert relative_error(a, b) <= 2e-6, name


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e4])
def test_large_and_small_steps_are_exact(scale, chunk):
    """Breaks when decay is divided by or taken apart in logarithms: exp(Δ A) underflows here, and 1/exp(Δ A) is ∞."""
    inputs = scan_inputs(50, scale=scale)
    inputs[1][:, ::3] = 0.0  # steps that keep the state whole among others that wipe it out
    mine = run_with_gradients(lambda *args: selective_scan(*args, chunk=chunk), inputs, torch.float32)
    exact = run_with_gradients(loop, inputs, torch.float64)
    for a, b in zip(mine, exact, strict=True):
        assert torch.isfinite(a).all()
        assert relative_error(a, b) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("chunk", [None, 3])
def test_gradcheck(chunk):
    """Breaks when the backward pass written by hand is not the derivative of the forward pass."""
    inputs = [tensor.requires_grad_() for tensor in scan_inputs(8, batch=1, channels=3, size=2)]
    inputs[1].data[:, :4] *= 1e-3  # the series of the slope near 0
    assert torch.autograd.gradcheck(functools.partial(selective_scan, chunk=chunk), inputs)


@pytest.mark.parametrize("output", [0, 1])
def test_either_output_alone_has_a_gradient(output):
    """Breaks when a loss of the state alone, or of y alone, cannot be differentiated."""
    inputs = scan_inputs(20)
    mine = run_with_gradients(lambda *args: selective_scan(*args)[output : output + 1], inputs, torch.float64)
    exact = run_with_gradients(lambda *args: loop(*args)[output : output + 1], inputs, torch.float64)
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a, b)


def test_a_large_batch_is_read_by_rows(monkeypatch):
    """Breaks when the rows that share a cache are put together in another order, or lose a part of A's gradient."""
    inputs = scan_inputs(20, batch=5)
    exact = run_with_gradients(loop, inputs, torch.float64)
    monkeypatch.setattr("model.scan.CACHE_SIZE", 2 * BLOCK * 6 * 5)  # two rows at a time
    for a, b in zip(run_with_gradients(selective_scan, inputs, torch.float64), exact, strict=True):
        assert relative_error(a, b) <= 1e-12


def test_the_kernel_is_called_as_it_wants(monkeypatch):
    """Breaks when sequences or states are handed to mamba_ssm's scan in another layout than it takes and returns."""
    interface = types.ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_fn = mamba_selective_scan  # transformers' stand-in for it, of the same signature
    monkeypatch.setitem(sys.modules, "mamba_ssm", types.ModuleType("mamba_ssm"))
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops", types.ModuleType("mamba_ssm.ops"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    inputs = [tensor.float() for tensor in scan_inputs(20)[:5]]
    for a, b in zip(_kernel_scan(*inputs), selective_scan(*inputs), strict=True):
        assert relative_error(a, b) <= 1e-5


def test_an_absent_kernel_is_told(monkeypatch):
    """Breaks when a machine without the package or without CUDA, or a model without Mamba, learns of it in the middle
    of a run, or never."""
    if importlib.util.find_spec("mamba_ssm"):
        pytest.skip("mamba_ssm is installed")
    with pytest.raises(ValueError, match="pip install mamba-ssm"):
        use_kernel()
    with pytest.raises(ValueError, match="mamba_ssm is not installed"):
        finetune.main(["--arch", "qmamba", "--stage", "1", "--kernel", "mamba_ssm", "--device", "cpu"])
    with pytest.raises(ValueError, match="no Mamba layers"):
        vqa.main(["--model", "embedded", "--limit", "1", "--kernel", "mamba_ssm", "--device", "cpu"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="on CUDA alone, not on cpu"):
        choose_kernel(Mamba(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)), "mamba_ssm", "cpu")


@pytest.mark.gpu
def test_the_kernel_equals_the_scan():
    """Breaks when mamba_ssm computes another recurrence, or its gradients differ."""
    pytest.importorskip("mamba_ssm")
    inputs = [tensor.float().cuda() for tensor in scan_inputs(100)[:5]]
    mine = run_with_gradients(lambda *args: selective_scan(*args)[:1], inputs, torch.float32)
    use_kernel()
    try:
        theirs = run_with_gradients(lambda *args: selective_scan(*args)[:1], inputs, torch.float32)
    finally:
        use_kernel(False)
    for a, b in zip(theirs, mine, strict=True):
        assert relative_error(a, b) <= 1e-4


def test_scan_goes_on_from_its_state():
    """Breaks when a sequence read in two parts, or token by token, gives another result than in one."""
    *sequences, state = scan_inputs(40)
    whole, last = selective_scan(*sequences, state)
    parts, A = [], sequences[2]
    for part in (slice(0, 13), slice(13, 30), *(slice(t, t + 1) for t in range(30, 40))):
        with torch.set_grad_enabled(part.start < 30):  # a decoding step has a shorter way
            y, state = selective_scan(*(t if t is A else t[:, part] for t in sequences), state)
        parts.append(y)
    assert relative_error(torch.cat(parts, dim=1), whole) <= 1e-12
    assert relative_error(state, last) <= 1e-12


@pytest.mark.parametrize("autocast", [False, True])
def test_the_recurrence_is_computed_in_fp32(autocast):
    """Breaks when bf16 inputs or autocast round the state at every step, forward or backward."""
    inputs = [tensor.bfloat16() for tensor in scan_inputs(60)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine = run_with_gradients(selective_scan, inputs, torch.float32 if autocast else torch.bfloat16)
    assert mine[0].dtype == mine[1].dtype == torch.float32
    for index, (a, b) in enumerate(zip(mine, run_with_gradients(loop, inputs, torch.float64), strict=True)):
        # the gradient of a bf16 input is rounded once, at the end
        assert relative_error(a, b) <= 2e-6 + (0.0 if autocast or index < 2 else 2**-8)


def test_a_gpu_s_scan_holds_few_blocks(monkeypatch):
    """Breaks when, on a GPU, the states of a whole long sequence are in memory, or blocks are put together wrongly."""
    inputs = scan_inputs(100)
    monkeypatch.setattr(scan, "GPU_SIZE", 2 * 6 * 5 * 30)  # 30 steps of these two rows
    steps, spied = [], scan._states
    monkeypatch.setattr(scan, "_states", lambda *args, **more: steps.append(args[1].shape[1]) or spied(*args, **more))
    chunk = 30
    mine = run_with_gradients(functools.partial(selective_scan, chunk=chunk), inputs, torch.float32)
    for a, b in zip(mine, run_with_gradients(loop, inputs, torch.float64), strict=True):
        assert relative_error(a, b) <= 2e-6
    assert steps == [25] * 8  # four blocks of nearly equal length, in both passes


@pytest.mark.parametrize("chunk", [None, 32])
def test_few_states_are_kept_for_the_backward_pass(chunk):
    """Breaks when all states are kept: at the width of mamba-2.8b, 335 MB a layer for 1024 tokens."""
    length, channels, size = 256, 8, 16
    inputs = [tensor.float().requires_grad_() for tensor in scan_inputs(length, 1, channels, size)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        selective_scan(*inputs, chunk=chunk)
    sequences = sum(tensor.numel() for tensor in inputs)
    assert sum(kept) <= sequences + length / BLOCK * channels * size < length * channels * size


# ---------------------------------------------------------------------------------------------------------------------
# The language model
# ---------------------------------------------------------------------------------------------------------------------


def hf_mamba(seed: int = 0, **sizes) -> transformers.MambaForCausalLM:
    """A random transformers model whose every parameter matters: three layers, state size and kernel not the usual."""
    sizes = {"hidden_size": 36, "state_size": 5, "conv_kernel": 3, "num_hidden_layers": 3, "vocab_size": 60} | sizes
    config = transformers.MambaConfig(**sizes, layer_norm_epsilon=1e-3, pad_token_id=0, bos_token_id=2, eos_token_id=1)
    torch.manual_seed(seed)
    model = transformers.MambaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".D"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith(("A_log", "conv1d.bias")):
                parameter.add_(0.5 * torch.randn_like(parameter))
            elif name.endswith("dt_proj.bias") or "embeddings" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
    return model


def ours(hf, dtype: torch.dtype = torch.float32) -> MambaLM:
    """The same model: every name but the tied head's, and no other."""
    model = MambaLM(MambaConfig.from_dict(hf.config.to_dict())).to(dtype)
    model.load_state_dict({name: tensor for name, tensor in hf.state_dict().items() if name != "lm_head.weight"})
    return model


def prompts(lengths=(9, 4, 1), seed: int = 1) -> dict[str, torch.Tensor]:
    """A left-padded batch, with token 0 as padding and as text."""
    ids = torch.randint(0, 60, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * valid, "attention_mask": valid.long()}


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(20, 20), (9, 4, 1), (37,)], ids=["unpadded", "padded", "single"])
def test_logits_and_gradients_equal_transformers(lengths):
    """Breaks when convolution, scan, gate, norm, residual, padding or head depart from the published computation."""
    hf = hf_mamba()
    model, inputs = ours(hf), prompts(lengths)
    valid = inputs["attention_mask"].bool()
    mine, theirs = model(**inputs), hf(**inputs, use_cache=False).logits
    assert mine.dtype == torch.float32
    assert relative_error(mine[valid], theirs[valid]) <= 1e-6
    labels = torch.randint(0, 60, valid.shape, generator=torch.Generator().manual_seed(2))[valid]
    F.cross_entropy(mine[valid], labels).backward()
    F.cross_entropy(theirs[valid], labels).backward()
    theirs = dict(hf.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, theirs[name].grad) <= 3e-6, name


def test_every_layer_equals_transformers():
    """Breaks when two mistakes in a block cancel out in the logits."""
    hf = hf_mamba()
    model, inputs = ours(hf), prompts((9, 9))
    layers = hf(**inputs, output_hidden_states=True, use_cache=False).hidden_states  # the last one is the norm's
    seen = []
    for layer in [*model.backbone.layers, model.backbone.norm_f]:
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**inputs)
    for mine, theirs in zip(seen, layers, strict=True):
        assert relative_error(mine, theirs) <= 1e-6


def test_bf16_is_at_least_as_exact_as_transformers():
    """Breaks when something that must be computed in fp32 is not."""
    hf, inputs = hf_mamba(hidden_size=64), prompts((24, 24))
    with torch.no_grad():
        exact = hf(**inputs).logits
        mine = ours(hf, torch.bfloat16)(**inputs)
        theirs = hf.to(torch.bfloat16)(**inputs).logits
    assert relative_error(mine, exact) <= 1.1 * relative_error(theirs, exact)


def test_a_bf16_layer_rounds_only_what_it_must(monkeypatch):
    """Breaks when residual, step size, or the convolution's sum are rounded to bf16, or the norm rounds elsewhere."""
    hf = hf_mamba(conv_kernel=4)
    layer = ours(hf, torch.bfloat16).backbone.layers[0]
    mixer, h = layer.mixer, torch.randn(2, 30, 36, generator=torch.Generator().manual_seed(0))
    mixer.dt_proj.bias.data -= 6.0
    seen = {}

    def spy(x, delta, *rest, **options):
        seen.update(x=x, delta=delta)
        return selective_scan(x, delta, *rest, **options)

    monkeypatch.setattr("model.mamba.selective_scan", spy)
    with torch.no_grad():
        mixer(h.bfloat16())
        delta = F.linear(mixer.x_proj(seen["x"])[..., :3], mixer.dt_proj.weight)
        assert relative_error(seen["delta"], F.softplus(delta.double() + mixer.dt_proj.bias)) <= 1e-6
        inputs = mixer.in_proj(h.bfloat16())[..., :72].double().mT
        exact = F.conv1d(F.pad(inputs, (3, 0)), *(p.double() for p in mixer.conv1d.parameters()), groups=72).mT
        assert relative_error(seen["x"], F.silu(exact)) <= 0.6 * 2**-8  # one rounding has an error of 0.4 · 2⁻⁸
        mixer.out_proj.weight.zero_()
        assert torch.equal(layer(h), h)
        assert torch.equal(layer.norm(h.bfloat16()), hf.bfloat16().backbone.layers[0].norm(h.bfloat16()))


@pytest.mark.parametrize("parts", [(1,) * 12, (12,), (5, 7), (1, 4, 1, 6), (2, 1, 9)])
def test_prefill_equals_single_steps(parts):
    """Breaks when the state after a part is not what the rest needs: the scan's, or the convolution's last inputs."""
    model = ours(hf_mamba())
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = model(ids)
    for model.backbone.checkpointing in (False, True):
        with torch.set_grad_enabled(model.backbone.checkpointing):
            cache = model.new_cache()
            read = torch.cat([model(part, cache=cache) for part in ids.split(parts, dim=1)], dim=1)
        assert relative_error(read, whole) <= 1e-6


@pytest.mark.parametrize("parts", [(4, 8), (6, 5, 1), (11, 1)])
def test_a_padded_prompt_is_read_in_parts(parts):
    """Breaks when the mask of all that was read is laid over the part at hand from its wrong end."""
    model, inputs = ours(hf_mamba()), prompts((12, 9))
    valid, cache, read, seen = inputs["attention_mask"].bool(), model.new_cache(), [], 0
    with torch.no_grad():
        for part in inputs["input_ids"].split(parts, dim=1):
            seen += part.shape[1]
            read.append(model(part, inputs["attention_mask"][:, :seen], cache=cache))
        assert relative_error(torch.cat(read, dim=1)[valid], model(**inputs)[valid]) <= 1e-6


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_within_what_follows_changes_nothing(side):
    """Breaks when a state fades over the padding of a later part, or the last inputs before it are lost."""
    model, lengths = ours(hf_mamba()), (5, 2, 1, 4)
    generator = torch.Generator().manual_seed(5)
    first, last = (torch.randint(0, 60, (4, width), generator=generator) for width in (6, 3))
    second = [torch.randint(0, 60, (length,), generator=generator) for length in lengths]
    place = {"left": lambda n: range(6 - n, 6), "right": range, "middle": lambda n: [*range(n - 1), 5]}[side]
    ids, mask, cache = torch.full((4, 6), 9), torch.zeros(4, 6, dtype=torch.long), model.new_cache()
    for row, text in enumerate(second):
        ids[row, list(place(len(text)))], mask[row, list(place(len(text)))] = text, 1
    with torch.no_grad():
        model(first, cache=cache)
        read = model(ids, torch.cat((torch.ones_like(first), mask), dim=1), cache=cache)
        after = model(last, cache=cache)
        for row, text in enumerate(second):
            whole = model(torch.cat((first[row], text, last[row]))[None])[0, 6:]
            assert relative_error(read[row, mask[row].bool()], whole[: len(text)]) <= 1e-6
            assert relative_error(after[row], whole[len(text) :]) <= 1e-6


def test_padding_changes_nothing_on_either_side():
    """Breaks when a row's logits depend on its neighbours, or on where its padding is: left, right or in between."""
    model, inputs = ours(hf_mamba()), prompts()
    together = model(**inputs)
    for row, valid in enumerate(inputs["attention_mask"].bool()):
        alone = inputs["input_ids"][row : row + 1, valid]
        expected = model(alone)[0]
        assert relative_error(together[row, valid], expected) <= 1e-6
        for place in (slice(0, len(expected)), slice(5, 5 + len(expected))):
            ids, mask = torch.full((1, 16), 7), torch.zeros(1, 16, dtype=torch.long)
            ids[:, place], mask[:, place] = alone, 1
            assert relative_error(model(ids, mask)[0, place], expected) <= 1e-6


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(9, 4, 1), (6,)], ids=["batched", "single"])
def test_greedy_equals_transformers(lengths):
    """Breaks when the state after a padded prompt is not that of the tokens alone, or the stop differs."""
    hf = hf_mamba()
    inputs = prompts(lengths)
    theirs = hf.generate(**inputs, max_new_tokens=15, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    types = torch.zeros_like(inputs["input_ids"])
    mine = generate(ours(hf), inputs["input_ids"], None, types, inputs["attention_mask"], 15)
    for a, b in zip(mine, theirs, strict=True):
        ends = (b == 1).nonzero()
        assert a.tolist() == b[: int(ends[0]) + 1 if len(ends) else None].tolist()
    assert len({tuple(row.tolist()) for row in mine}) == len(lengths)


def test_right_padded_prompts_are_answered_alike():
    """Breaks when the state of a right-padded row goes on fading over its padding."""
    model, inputs = ours(hf_mamba()), prompts()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    left = generate(model, ids, None, torch.zeros_like(ids), mask, 12)
    rolled = [torch.stack([row.roll(int(m.sum())) for row, m in zip(t, mask, strict=True)]) for t in (ids, mask)]
    assert rolled[1][1].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    right = generate(model, rolled[0], None, torch.zeros_like(ids), rolled[1], 12)
    assert [row.tolist() for row in left] == [row.tolist() for row in right]


def test_memory_and_work_of_a_step_are_constant():
    """Breaks when what is remembered, or what a new token costs, grows with what has been read."""
    model = ours(hf_mamba())

    def read(tokens):
        cache = model.new_cache(tokens + 1)
        with torch.no_grad():
            model(torch.ones(1, tokens, dtype=torch.long), cache=cache)
            with FlopCounterMode(display=False) as counter:
                model(torch.ones(1, 1, dtype=torch.long), cache=cache)
        held = [tensor.untyped_storage().nbytes() for layer in cache for tensor in (layer.conv, layer.ssm)]
        return sum(held), counter.get_total_flops()

    assert read(1) == read(10) == read(300) == (3 * 4 * (2 * 72 + 5 * 72), read(1)[1])


def test_checkpointed_gradients_are_the_same():
    """Breaks when recomputing activations changes what is learned."""
    model, inputs = ours(hf_mamba()), prompts()
    model(**inputs).square().mean().backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.backbone.checkpointing = True
    model(**inputs).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


def test_positions_to_keep_are_rows_of_all_logits():
    """Breaks when the head runs on other positions than those asked for, after rows were reordered for padding too."""
    model, inputs = ours(hf_mamba()), prompts()
    inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}  # padding on the right
    logits, mask = model(**inputs), inputs["attention_mask"].bool()
    for positions, expected in ((mask, logits[mask]), (2, logits[:, -2:]), (torch.tensor([[3], [1], [0]]), None)):
        expected = logits[torch.arange(3), [3, 1, 0]][:, None] if expected is None else expected
        assert relative_error(model(**inputs, positions_to_keep=positions), expected) <= 1e-6


def test_initialization_is_the_published_one():
    """Breaks when a fresh model starts elsewhere: A = −1 … −N, steps from 0.001 to 0.1, out_proj scaled by depth."""
    config = MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=4)
    model = Mamba(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    initialize_mamba(model, seed=3)
    assert abs(model.embeddings.weight.std().item() - 0.02) < 1e-3
    steps = F.softplus(torch.cat([layer.mixer.dt_proj.bias for layer in model.layers]))
    assert 0.99e-3 < steps.min() < 1.1e-3 and 0.097 < steps.max() < 0.101
    assert abs(steps.log().mean().item() - math.log(0.01)) < 0.2  # log-uniform
    for layer in model.layers:
        mixer = layer.mixer
        assert torch.allclose(-mixer.A_log.exp(), -torch.arange(1.0, 17).expand(128, 16))
        assert (mixer.D == 1).all() and (mixer.conv1d.bias == 0).all() and (layer.norm.weight == 1).all()
        for weight, bound in (
            (mixer.in_proj.weight, 64**-0.5),
            (mixer.x_proj.weight, 128**-0.5),
            (mixer.dt_proj.weight, 4**-0.5),
            (mixer.conv1d.weight, 4**-0.5),
            (mixer.out_proj.weight, 128**-0.5 / 4**0.5),
        ):
            assert 0.97 * bound < weight.abs().max() <= bound
    again = Mamba(config)
    initialize_mamba(again, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and mistakes
# ---------------------------------------------------------------------------------------------------------------------

# config.json of state-spaces/mamba-130m, the original repository's; its tensors have 50280 rows
ORIGINAL = {
    "d_model": 768,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}


def test_configs_are_read_and_written():
    """Breaks when published sizes, of either repository, are misread, or transformers cannot read what is written."""
    assert MambaConfig.from_dict(ORIGINAL) == MAMBA_PRESETS["mamba-130m"] == MambaConfig()
    assert MambaConfig().layer_norm_epsilon == transformers.MambaConfig().layer_norm_epsilon == 1e-5
    sized = MambaConfig.from_dict(ORIGINAL | {"ssm_cfg": {"d_state": 8, "d_conv": 3, "expand": 3, "dt_rank": 7}})
    assert (sized.state_size, sized.conv_kernel, sized.intermediate_size, sized.rank) == (8, 3, 2304, 7)
    config = MambaConfig(vocab_size=60, hidden_size=40, num_hidden_layers=3, state_size=5, eos_token_id=1)
    theirs = transformers.MambaConfig.from_dict(config.to_dict())
    assert MambaConfig.from_dict(config.to_dict()) == config
    assert MambaConfig.from_dict(theirs.to_dict()).rank == config.rank == theirs.time_step_rank == 3
    shapes = {name: tensor.shape for name, tensor in transformers.MambaForCausalLM(theirs).state_dict().items()}
    del shapes["lm_head.weight"]
    assert {name: tensor.shape for name, tensor in MambaLM(config).state_dict().items()} == shapes
