"""Mamba (Gu and Dao 2023): a language model whose memory is a state of constant size, in place of a key/value cache.

In: token ids (B, S), or embeddings that text and pictures share. Out: float32 logits (B, S, V). `selective_scan` is the
recurrence, `MambaMixer` the block around it, `MambaLM` the stack with its tied head. Next: `model/qmamba.py`, where a
picture's features become queries that this model reads.

Letters beyond those of `model/config.py`: E = 2H channels of the mixer, N state size (not heads), R rank of the step,
T chunk length of the scan.
"""

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from model.attention import keep_positions
from model.common import UserError
from model.linear import Linear, linear
from model.system_configs import MambaConfig

# ---------------------------------------------------------------------------------------------------------------------
# The selective scan
# ---------------------------------------------------------------------------------------------------------------------

# Steps whose states are held at once. Only the state before each block is kept for the backward pass, which runs the
# block again: a sixteenth of the memory, and on a CPU faster than reading all states back, for a block stays in cache.
BLOCK = 16
# Numbers in a block's states that a CPU's cache has room for: of a larger batch, as many rows at a time. 1.8 times as
# fast for 64 rows of 32 steps with E = 256, N = 16 on one core.
CACHED = 1 << 19
# Whether a GPU scans a sequence that begins from nothing by the kernel of the package mamba_ssm: see `use_kernel`.
KERNEL = False


def selective_scan(
    x: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, L, E) and the last state (B, N, E) of s_t = exp(Δ_t A) ⊙ s_{t−1} + (Δ_t x_t) ⊗ B_t, y_t = s_t C_t.

    x and delta (B, L, E), A (E, N) negative, B and C (B, L, N), state (B, N, E) or None for zeros (Gu and Dao 2023,
    Algorithm 2; B is discretised as Δ·B, as in all published code, not by the paper's Eq. 4). Computed in fp32, or in
    fp64 if any input is. Every factor is the exponential of something that is not positive, and none is divided by, so
    nothing overflows however large Δ is.

    `chunk` T: the sequence is cut into chunks of T steps that run side by side, which takes 2T + L/T steps instead of
    L. At T ≥ L it is one plain loop, the faster way on a CPU. None: the plain loop on a CPU, else the T that makes the
    fewest steps. Raises UserError for L = 0 or shapes that do not fit each other.
    """
    (batch, length, channels), size = x.shape, A.shape[-1]
    expected = {
        "delta": (delta, x.shape),
        "A": (A, (channels, size)),
        "B": (B, (batch, length, size)),
        "C": (C, (batch, length, size)),
    }
    if state is not None:
        expected["state"] = (state, (batch, size, channels))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape):
            raise UserError(
                f"selective_scan: {name} is {tuple(tensor.shape)}, expected {tuple(shape)} for x {tuple(x.shape)} and "
                f"state size {size}: take weights and state from the same model"
            )
    if length == 0:
        raise UserError("selective_scan: the sequence is empty (L = 0): give at least one token")
    if KERNEL and state is None and x.is_cuda:
        return _kernel_scan(x.float(), delta.float(), A.float(), B.float(), C.float())
    if chunk is None:
        chunk = length if x.device.type == "cpu" else math.isqrt(length // 2) + 1
    dtype = torch.float32
    for tensor in (x, delta, A, B, C):
        dtype = torch.promote_types(dtype, tensor.dtype)
    state = x.new_zeros(batch, size, channels, dtype=dtype) if state is None else state.to(dtype)
    x, delta, A, B, C = (tensor.to(dtype).contiguous() for tensor in (x, delta, A.T, B, C))
    if length == 1 and not torch.is_grad_enabled():  # a decoding step, for which what follows is three times the work
        _, states = _states(state, x, delta, A, B)
        return _sum_states(C, states[:, 1:]), states[:, 1].clone()  # a view would keep both states
    rows = batch if x.device.type != "cpu" else max(1, CACHED // (min(BLOCK, length) * size * channels))
    parts = [
        SelectiveScan.apply(x, delta, A, B, C, state, min(chunk, length))
        for x, delta, B, C, state in zip(*(tensor.split(rows) for tensor in (x, delta, B, C, state)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def use_kernel(on: bool = True) -> None:
    """Scan on GPUs with mamba_ssm's kernel, or again without. Raises UserError where that package is not installed."""
    global KERNEL
    if on and importlib.util.find_spec("mamba_ssm") is None:
        raise UserError("mamba_ssm is not installed: pip install mamba-ssm, on a machine with CUDA, or do without")
    KERNEL = on


def _kernel_scan(x, delta, A, B, C) -> tuple[torch.Tensor, torch.Tensor]:
    """`selective_scan` from nothing, by the kernel, which wants the sequence last; the last state has no gradient."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    x, delta, B, C = (tensor.mT.contiguous() for tensor in (x, delta, B, C))
    y, last = selective_scan_fn(x, delta, A, B, C, return_last_state=True)
    return y.mT, last.mT


class SelectiveScan(torch.autograd.Function):
    """The scan and its gradient. Channels come last, so that each step is a few passes over contiguous memory.

    Chunks become lanes: (B, L, …) is folded into (M, T, …), M = B · L/T. A first pass, which one lane can do without,
    runs every lane from zero to learn what it adds; what enters each lane follows by a loop over the lanes; the second
    pass runs them again from there. The backward pass does the same with time reversed:

        g_t = ∂loss/∂s_t = C_t ⊗ ∂loss/∂y_t + exp(Δ_{t+1} A) ⊙ g_{t+1}
    """

    @staticmethod
    def forward(ctx, x, delta, A, B, C, state, chunk):
        batch, length = x.shape[:2]
        lanes = math.ceil(length / chunk)
        x, delta, B, C = (_fold(tensor, chunk) for tensor in (x, delta, B, C))
        if lanes > 1:
            added = x.new_zeros(len(x), *A.shape)
            for block in _blocks(chunk):
                added = _states(added, x[:, block], delta[:, block], A, B[:, block])[1][:, -1]
            state = _entering(_lane_decay(delta, A).unflatten(0, (batch, -1)), added.unflatten(0, (batch, -1)), state)
            state = state.flatten(0, 1)
        y, before = torch.empty_like(x), []
        for block in _blocks(chunk):
            before.append(state)
            _, states = _states(state, x[:, block], delta[:, block], A, B[:, block])
            y[:, block] = _sum_states(C[:, block], states[:, 1:])
            state = states[:, -1].clone()  # a view would keep the whole block alive
        ctx.save_for_backward(x, delta, A, B, C, torch.stack(before))
        ctx.batch, ctx.length = batch, length
        return _unfold(y, batch, length), state.unflatten(0, (batch, -1))[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_state):
        x, delta, A, B, C, before = ctx.saved_tensors
        batch, chunk = ctx.batch, x.shape[1]
        grad_y = _fold(grad_y.to(x.dtype), chunk)
        blocks = list(enumerate(_blocks(chunk)))[::-1]
        g = grad_state.to(x.dtype)  # what reaches the state after the steps at hand from all that follows
        if len(x) > batch:
            added = torch.zeros_like(before[0])
            for _, block in blocks:
                added = _adjoints(_decay(delta[:, block], A), C[:, block], grad_y[:, block], added)[1]
            decay, added = (t.unflatten(0, (batch, -1)).flip(1) for t in (_lane_decay(delta, A), added))
            g = _entering(decay, added, g).flip(1).flatten(0, 1)
        grad_x, grad_delta, grad_A, grad_B, grad_C = (torch.empty_like(tensor) for tensor in (x, delta, A, B, C))
        grad_A.zero_()
        for index, block in blocks:
            x_t, delta_t, B_t, grad_y_t = x[:, block], delta[:, block], B[:, block], grad_y[:, block]
            decay, states = _states(before[index], x_t, delta_t, A, B_t)
            adjoints, g = _adjoints(decay, C[:, block], grad_y_t, g)
            grad_C[:, block] = _sum_channels(states[:, 1:], grad_y_t)
            grad_B[:, block] = _sum_channels(adjoints, delta_t * x_t)
            grad_input = _sum_states(B_t, adjoints)  # of Δ_t x_t
            # s_t = exp(Δ_t A) ⊙ s_{t−1} + …: the gradient of the exponent Δ_t A
            exponent = adjoints.mul_(decay).mul_(states[:, :-1])
            grad_A += (exponent * delta_t[:, :, None]).sum((0, 1))
            grad_delta[:, block] = exponent.mul_(A).sum(2).addcmul_(grad_input, x_t)
            grad_x[:, block] = grad_input.mul_(delta_t)
        grads = (_unfold(t, batch, ctx.length) for t in (grad_x, grad_delta, grad_B, grad_C))
        grad_x, grad_delta, grad_B, grad_C = grads
        return grad_x, grad_delta, grad_A, grad_B, grad_C, g.unflatten(0, (batch, -1))[:, 0], None


def _blocks(steps: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, steps)) for start in range(0, steps, BLOCK)]


def _fold(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """(B, L, W) to lanes (B · K, T, W), filled up with zeros: a step of Δ = 0 leaves the state as it is."""
    missing = -tensor.shape[1] % chunk
    if missing:  # padding by nothing would copy
        tensor = F.pad(tensor, (0, 0, 0, missing))
    return tensor.unflatten(1, (-1, chunk)).flatten(0, 1)


def _unfold(tensor: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Lanes (B · K, T, W) back to (B, L, W)."""
    return tensor.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


def _decay(delta: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """exp(Δ_t A) (M, T, N, E) of each step."""
    return (delta[:, :, None] * A).exp_()


def _lane_decay(delta: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """The product of a lane's decays (M, N, E)."""
    return (delta.sum(1)[:, None] * A).exp_()


def _states(state, x, delta, A, B) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays (M, T, N, E), and states (M, T + 1, N, E), `state` itself first."""
    decay = _decay(delta, A)
    states = decay.new_empty(len(x), x.shape[1] + 1, *A.shape)
    states[:, 0] = state
    torch.mul(B[..., None], (delta * x)[:, :, None], out=states[:, 1:])
    for t in range(x.shape[1]):
        states[:, t + 1].addcmul_(decay[:, t], states[:, t])
    return decay, states


def _adjoints(decay, C, grad_y, after) -> tuple[torch.Tensor, torch.Tensor]:
    """g (M, T, N, E) of each step's state, given what reaches the last one from `after` it, and what goes on before."""
    g = C[..., None] * grad_y[:, :, None]
    g[:, -1] += after
    for t in range(g.shape[1] - 1, 0, -1):
        g[:, t - 1].addcmul_(decay[:, t], g[:, t])
    return g, decay[:, 0] * g[:, 0]


def _entering(decay: torch.Tensor, added: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """What enters each of K lanes (B, K, N, E): `first` the first one, decay ⊙ entered + added the next."""
    entering = torch.empty_like(added)
    for k in range(added.shape[1]):
        entering[:, k] = first
        first = decay[:, k] * first + added[:, k]
    return entering


def _sum_states(weights: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Σ_n weights (M, T, N) · states (M, T, N, E), to (M, T, E)."""
    with torch.autocast(states.device.type, enabled=False):  # which would make this, a product, bf16
        return (weights[:, :, None] @ states)[:, :, 0]


def _sum_channels(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ_e states (M, T, N, E) · weights (M, T, E), to (M, T, N); as a batched product it is several times slower."""
    return (states * weights[:, :, None]).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# The block and the language model
# ---------------------------------------------------------------------------------------------------------------------


class MambaState:
    """What a layer remembers of all it has read: of the same size after ten tokens and after a million."""

    def __init__(self):
        self.conv: torch.Tensor | None = None  # (B, conv_kernel − 1, E), the convolution's last inputs
        self.ssm: torch.Tensor | None = None  # (B, N, E) in fp32


class MambaMixer(nn.Module):
    """Gated projection, short causal convolution, selective scan. Parameter names are those of transformers.

    [x, z] = W_in h;  x = SiLU(conv(x));  [δ, B, C] = W_x x;  Δ = softplus(W_Δ δ + b_Δ);  A = −exp(A_log)
    y = scan(x, Δ, A, B, C) + D ⊙ x;  out = W_out (y ⊙ SiLU(z))
    """

    def __init__(self, config: MambaConfig):
        super().__init__()
        channels, size = config.intermediate_size, config.state_size
        self.splits = [config.rank, size, size]
        self.in_proj = Linear(config.hidden_size, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels)
        self.x_proj = Linear(channels, sum(self.splits), bias=False)
        self.dt_proj = Linear(config.rank, channels)
        self.A_log = nn.Parameter(torch.arange(1.0, size + 1).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        self.out_proj = Linear(channels, config.hidden_size, bias=False)

    def forward(
        self, h: torch.Tensor, valid: torch.Tensor | None = None, state: MambaState | None = None
    ) -> torch.Tensor:
        """h (B, S, H) to (B, S, H). valid (B, S) is False at padding, which comes last; `state` is read, and left as it
        is after h."""
        x, z = self.in_proj(h).chunk(2, dim=-1)
        x = self.convolve(x, valid, state)
        delta, B, C = self.x_proj(x).split(self.splits, dim=-1)
        # the bias, −7 to −2, is added in fp32: rounded to bf16 it would shift Δ by up to 2 %
        delta = F.softplus(linear(delta, self.dt_proj.weight).float() + self.dt_proj.bias.float())
        if valid is not None:
            delta = delta.masked_fill(~valid[..., None], 0.0)  # such a step leaves the state as it is
        y, last = selective_scan(x, delta, -self.A_log.float().exp(), B, C, None if state is None else state.ssm)
        if state is not None:
            state.ssm = last
        y = (y + self.D.float() * x) * F.silu(z)
        return self.out_proj(y.to(h.dtype))

    def convolve(self, x: torch.Tensor, valid: torch.Tensor | None, state: MambaState | None) -> torch.Tensor:
        """SiLU of the causal depthwise convolution of x (B, S, E), which the inputs in `state` precede.

        A sum of shifted products in fp32: without the transposes of nn.Conv1d, and on a CPU three times as fast.
        """
        steps, past = x.shape[1], self.conv1d.kernel_size[0] - 1
        if state is None or state.conv is None:
            inputs = F.pad(x, (0, 0, past, 0))
        else:
            inputs = torch.cat((state.conv, x), dim=1)
        if state is not None and valid is None:
            state.conv = inputs[:, steps:].clone()
        elif state is not None:  # the last inputs before the padding
            last = valid.sum(1)[:, None] + torch.arange(past, device=x.device)
            state.conv = _take(inputs, last)
        out = self.conv1d.bias.float()
        for shift, weight in enumerate(self.conv1d.weight[:, 0].unbind(1)):
            out = torch.addcmul(out, inputs[:, shift : shift + steps], weight)
        return F.silu(out).to(x.dtype)


class MambaRMSNorm(nn.Module):
    """weight · x / rms(x): unlike Gemma's, the weight is not 1 + w, and multiplies after the cast back."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MambaBlock(nn.Module):
    """h + Mixer(RMSNorm(h)), the sum in fp32 whatever the model's dtype."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        self.norm = MambaRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MambaMixer(config)

    def forward(
        self, h: torch.Tensor, valid: torch.Tensor | None = None, state: MambaState | None = None
    ) -> torch.Tensor:
        return h.float() + self.mixer(self.norm(h.to(self.norm.weight.dtype)), valid, state)


class Mamba(nn.Module):
    """The decoder with its embedding, which is the head too: what `model/gemma.py` is to PaliGemma."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False  # recompute each layer in the backward pass instead of keeping its activations
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm_f = MambaRMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids (B, S) to embeddings (B, S, H), unscaled."""
        return self.embeddings(input_ids)

    def forward(
        self,
        x: torch.Tensor,
        valid: torch.Tensor | None = None,
        types: torch.Tensor | None = None,
        cache: list[MambaState] | None = None,
        positions_to_keep: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, S, H) to hidden states (B, S, H) after the final norm, or those of the positions asked for.

        With a `cache`, x continues what it has read. valid (B, Sk) is False at padding, on either side; the last S of
        its columns count, and a single step is never padding. `types` change nothing: image and prefix are read from
        left to right, too. Raises UserError for S = 0, or a cache of another model.
        """
        steps = x.shape[1]
        if cache is not None and len(cache) != len(self.layers):
            raise UserError(f"the cache has {len(cache)} layers, but the model {len(self.layers)}: use its new_cache")
        order = None
        if valid is not None and steps > 1:
            valid = valid[:, -steps:].bool()
            # padding goes to a row's end, wherever it was: the tokens must follow each other, and what is remembered
            order = (~valid).long().argsort(dim=1, stable=True)
            x, valid = _take(x, order), valid.gather(1, order)
        else:
            valid = None
        for index, layer in enumerate(self.layers):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, valid, use_reentrant=False)
            else:
                x = layer(x, valid, None if cache is None else cache[index])
        x = self.norm_f(x)
        return keep_positions(x if order is None else _take(x, order.argsort(dim=1)), positions_to_keep)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (…, H) to float32 logits (…, V)."""
        weight = self.embeddings.weight
        return linear(hidden.to(weight.dtype), weight).float()

    def new_cache(self) -> list[MambaState]:
        """An empty state for each layer."""
        return [MambaState() for _ in self.layers]


class MambaLM(nn.Module):
    """The language model for text alone. Its parameter names are those of transformers, the tied head left out."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        self.config = config
        self.backbone = Mamba(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        token_type_ids: torch.Tensor | None = None,
        positions_to_keep: int | torch.Tensor | None = None,
        cache: list[MambaState] | None = None,
        **pictures: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32 logits (B, S, V), or those of the positions asked for, as in `PaliGemma.forward`.

        attention_mask (B, S): 0 at padding, on either side; None means no padding. token_type_ids change nothing.
        Raises UserError for pictures, of which `generate` passes None.
        """
        if any(value is not None for value in pictures.values()):
            raise UserError(f"a language model takes no {', '.join(pictures)}: use a model of model/qmamba.py")
        x = self.backbone.embed(input_ids)
        return self.backbone.head(self.backbone(x, attention_mask, None, cache, positions_to_keep))

    def new_cache(self, capacity: int | None = None) -> list[MambaState]:
        """An empty state for each layer, of the same size whatever the `capacity` in tokens."""
        return self.backbone.new_cache()


def _take(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows of x (B, S, H) at the places (B, T): (B, T, H)."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


@torch.no_grad()
def initialize_mixer(mixer: MambaMixer, depth: int, generator: torch.Generator) -> None:
    """Fill a mixer of a stack of `depth` as the original code does (Gu and Dao 2023, §3.6).

    A = −1 … −N in every channel, D = 1, and a bias b_Δ such that steps start log-uniform between 0.001 and 0.1.
    """

    def uniform(tensor: torch.Tensor, bound: float) -> None:
        tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2 - 1) * bound)

    for matrix in (mixer.in_proj, mixer.x_proj, mixer.out_proj):
        uniform(matrix.weight, matrix.in_features**-0.5)
    mixer.out_proj.weight /= depth**0.5
    uniform(mixer.conv1d.weight, mixer.conv1d.kernel_size[0] ** -0.5)
    mixer.conv1d.bias.zero_()
    uniform(mixer.dt_proj.weight, mixer.dt_proj.in_features**-0.5)
    low, high = math.log(1e-3), math.log(0.1)
    step = (torch.rand(mixer.dt_proj.out_features, generator=generator) * (high - low) + low).exp().clamp(min=1e-4)
    mixer.dt_proj.bias.copy_(step + (-torch.expm1(-step)).log())  # softplus⁻¹
    mixer.A_log.copy_(torch.arange(1.0, mixer.A_log.shape[1] + 1).log().expand_as(mixer.A_log))
    mixer.D.fill_(1.0)


@torch.no_grad()
def initialize_mamba(model: Mamba, seed: int = 0) -> None:
    """Fill a decoder with random weights as the original code does, embeddings with a std of 0.02."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = model.embeddings.weight
    embeddings.copy_(torch.randn(embeddings.shape, generator=generator) * 0.02)
    for layer in model.layers:
        initialize_mixer(layer.mixer, len(model.layers), generator)
        layer.norm.weight.fill_(1.0)
    model.norm_f.weight.fill_(1.0)
