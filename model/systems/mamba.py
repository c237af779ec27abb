"""Mamba (Gu and Dao 2023): a language model whose memory is a state of constant size instead of a
key/value cache.

In: token ids (B, S), or embeddings that text and pictures share. Out: float32 logits (B, S, V).
`MambaMixer` is the layer around `model/systems/scan.py`, `Mamba` the decoder that `model/systems/qmamba.py` uses,
`MambaLM` the model for text alone. Letters beyond those of `model/config.py`: E = 2H channels of
the mixer, N state size (not heads), R rank of the step.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import keep_positions
from model.gemma import RMSNorm
from model.linear import Linear, linear
from model.registry import System
from model.systems.configs import MambaConfig
from model.systems.scan import selective_scan


class MambaState:
    """A layer's memory of the tokens so far, of the same size for any number of them."""

    conv: Tensor | None = None  # (B, conv_kernel − 1, E), the convolution's last inputs
    ssm: Tensor | None = None  # (B, N, E) in fp32


class MambaMixer(nn.Module):
    """Gated projection, short causal convolution, selective scan. Parameter names are those of
    transformers.

        [x, z] = W_in h;  x = SiLU(conv(x));  [δ, B, C] = W_x x
        Δ = softplus(W_Δ δ + b_Δ);  A = −exp(A_log)
        y = scan(x, Δ, A, B, C) + D ⊙ x;  out = W_out (y ⊙ SiLU(z))
    """

    def __init__(self, config: MambaConfig):
        super().__init__()
        channels, size = config.expand * config.hidden_size, config.state_size
        self.splits = [config.rank, size, size]
        self.in_proj = Linear(config.hidden_size, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels)
        self.x_proj = Linear(channels, sum(self.splits), bias=False)
        self.dt_proj = Linear(config.rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, size))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = Linear(channels, config.hidden_size, bias=False)

    def forward(self, h, valid=None, state=None) -> Tensor:
        """h (B, S, H) to (B, S, H), from `state` on, which is updated. valid (B, S): False at
        padding, a row's end."""
        x, z = self.in_proj(h).chunk(2, dim=-1)
        state = state or MambaState()
        x = self.convolve(x, valid, state)
        delta, B, C = self.x_proj(x).split(self.splits, dim=-1)
        # the bias, −7 to −2, is added in fp32: rounded to bf16 it would shift Δ by up to 2 %
        delta = F.softplus(linear(delta, self.dt_proj.weight).float() + self.dt_proj.bias.float())
        if valid is not None:  # a step with Δ = 0 leaves the state as it is
            delta = delta.masked_fill(~valid[..., None], 0.0)
        y, state.ssm = selective_scan(x, delta, -self.A_log.float().exp(), B, C, state.ssm)
        y = (y + self.D.float() * x) * F.silu(z)
        return self.out_proj(y.to(h.dtype))

    def convolve(self, x: Tensor, valid: Tensor | None, state: MambaState) -> Tensor:
        """SiLU of the causal depthwise convolution of x (B, S, E), with the inputs in `state`
        before it.

        A sum of shifted products in fp32: without the transposes of nn.Conv1d it is three times as
        fast on a CPU.
        """
        steps, past = x.shape[1], self.conv1d.kernel_size[0] - 1
        if state.conv is None:
            state.conv = x.new_zeros(len(x), past, x.shape[2])
        inputs = torch.cat((state.conv, x), dim=1)
        if valid is None:
            state.conv = inputs[:, steps:].clone()
        else:  # the last inputs before the padding
            last = valid.sum(1)[:, None] + torch.arange(past, device=x.device)
            state.conv = keep_positions(inputs, last)
        out = self.conv1d.get_parameter("bias").float()
        for shift, weight in enumerate(self.conv1d.weight[:, 0].unbind(1)):
            out = torch.addcmul(out, inputs[:, shift : shift + steps], weight)
        return F.silu(out).to(x.dtype)


class MambaBlock(nn.Module):
    """h + Mixer(RMSNorm(h)), with the sum in fp32 for any dtype of the model."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, offset=0)
        self.mixer = MambaMixer(config)

    def forward(self, h, valid=None, state=None) -> Tensor:
        return h.float() + self.mixer(self.norm(h.to(self.norm.weight.dtype)), valid, state)


class Mamba(nn.Module):
    """The decoder with its embedding, which is also the head; it has the interface of
    `model.gemma.Gemma`."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        self.config = config
        # recompute each layer in the backward pass instead of keeping its activations
        self.checkpointing = False
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon, offset=0)

    def embed(self, input_ids: Tensor) -> Tensor:
        """ids (B, S) to embeddings (B, S, H), unscaled."""
        return self.embeddings(input_ids)

    def forward(
        self,
        x,
        valid,
        types=None,
        cache=None,
        positions_to_keep=None,
    ) -> Tensor:
        """x (B, S, H) to hidden states (B, S, H) after the final norm, or those of
        `positions_to_keep`.

        With a `cache` of `new_cache`, x continues the sequence that it has read. valid (B, Sk) is
        False at padding, on either side; its last S columns are those of x. A single step is never
        padding. `types` are ignored: image and prefix are causal, too.
        """
        order, steps = None, x.shape[1]
        if steps == 1:
            valid = None
        if valid is not None:
            valid = valid[:, -steps:].bool()
            # padding is moved to the end of its row: in the recurrence and the convolution, tokens
            # must be neighbours
            order = (~valid).long().argsort(dim=1, stable=True)
            x, valid = keep_positions(x, order), valid.gather(1, order)
        caches = cache or [None] * len(self.layers)
        is_checkpointed = self.checkpointing and torch.is_grad_enabled() and cache is None
        for layer, state in zip(self.layers, caches, strict=True):
            if is_checkpointed:
                x = checkpoint(layer, x, valid, use_reentrant=False)
            else:
                x = layer(x, valid, state)
        x = self.norm_f(x)
        if order is not None:
            x = keep_positions(x, order.argsort(dim=1))
        return keep_positions(x, positions_to_keep)

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states (…, H) to float32 logits (…, V)."""
        weight = self.embeddings.weight
        return linear(hidden.to(weight.dtype), weight).float()

    def new_cache(self, capacity=None) -> list[MambaState]:
        """An empty state for each layer; its size does not depend on `capacity`."""
        return [MambaState() for _ in self.layers]


class MambaLM(nn.Module):
    """The language model for text alone. Parameter names are those of transformers."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        self.config = config
        self.backbone = Mamba(config)

    def forward(
        self, input_ids, attention_mask=None, *, positions_to_keep=None, cache=None, **unused
    ) -> Tensor:
        """float32 logits (B, S, V), or those to keep, as `PaliGemma.forward`; None as
        attention_mask: no padding.

        unused: token_type_ids, and what `generate` passes as None to a model without pictures.
        """
        assert unused.get("pixel_values") is None, "a language model takes no pictures"
        x = self.backbone.embed(input_ids)
        return self.backbone.head(self.backbone(x, attention_mask, None, cache, positions_to_keep))

    def adjusted(self, logits: Tensor, *read) -> Tensor:
        return logits

    def new_cache(self, capacity=None) -> list[MambaState]:
        return self.backbone.new_cache()


@torch.no_grad()
def initialize_mixer(mixer: MambaMixer, depth: int, generator: torch.Generator) -> None:
    """Fill a mixer in a stack of `depth` layers as the original code does (Gu and Dao 2023, §3.6).

    A = −1 … −N in every channel and D = 1; with b_Δ the first Δ are log-uniform from 0.001 to 0.1.
    """
    for layer in (mixer.in_proj, mixer.x_proj, mixer.out_proj, mixer.conv1d, mixer.dt_proj):
        uniform = torch.rand(layer.weight.shape, generator=generator) * 2 - 1
        layer.weight.copy_(uniform * layer.weight[0].numel() ** -0.5)
    mixer.out_proj.weight /= depth**0.5
    mixer.conv1d.get_parameter("bias").zero_()
    low, high = math.log(1e-3), math.log(0.1)
    drawn = torch.rand(mixer.dt_proj.out_features, generator=generator)
    step = (drawn * (high - low) + low).exp().clamp(min=1e-4)
    mixer.dt_proj.bias.copy_(step + (-torch.expm1(-step)).log())  # softplus⁻¹
    mixer.A_log.copy_(torch.arange(1.0, mixer.A_log.shape[1] + 1).log())
    mixer.D.fill_(1.0)


@torch.no_grad()
def initialize_mamba(model: Mamba, seed: int) -> None:
    """Fill a decoder with random weights as the original code does; embeddings have a std of
    0.02."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = model.embeddings.weight
    embeddings.copy_(torch.randn(embeddings.shape, generator=generator) * 0.02)
    for module in model.modules():
        if isinstance(module, MambaMixer):
            initialize_mixer(module, len(model.layers), generator)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)


# the original repository's name of the embedding, and the tied head
_NAMES = ("backbone.embedding.weight", "lm_head.weight")
_OURS = "backbone.embeddings.weight"
SYSTEMS = {
    MambaConfig.kind: System(MambaConfig, MambaLM, aliases=dict.fromkeys(_NAMES, _OURS)),
}
