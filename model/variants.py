"""The variants of attention: siblings of plain attention, with its signature, its cache and its masks.

In: a plain `Attention`, whose projections a variant takes over, and the number of its layer. Out: hidden states, as
from `Attention`. `model/differential.py` has the table of variants; `model/graft.py` puts one into a model.
"""

import inspect
import math
import typing
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from model import cpu
from model.attention import Attention, Rope
from model.common import UserError, quoted
from model.lowrank import LowRank, check_low_rank

NORM_EPS = 1e-5


def lambda_schedule(layer: int) -> float:
    """λ_init of a layer counted from 1: 0.2 in the first, near 0.8 in deep ones (Ye et al. 2024; the paper, Eq. 4)."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


class Differential(Attention):
    """What all variants share: they take over the projections of a plain attention as they are.

    The projections may be trained, carry LoRA, or be on the meta device. `layer` counts from 1. The keyword arguments
    of a subclass are the options that `graft` accepts for it.
    """

    kind: str
    read_twice: tuple[str, ...] = ()  # projections whose weights a second branch reads too: no LoRA is merged there
    foldable = False  # `fold` can turn it into plain attention,
    rewrites_output = False  # with other weights of the output projection
    maps = 1  # attention maps of a head, and calls of `tap`, A₁ first
    divides_adapter = False  # LoRA on `read_twice` makes the second branch too, so one of them needs it
    extrapolates = False  # two maps are blended as A₁ + f·(A₁ − A₂), not as A₁ − f·A₂, f being `factor`

    def __init__(self, plain: Attention, layer: int):
        with torch.device("meta"):
            super().__init__(**plain.sizes())
        self.adopt(plain)

    def blended(self, x, maps, v, mask, scale: float | None = None) -> torch.Tensor:
        """blend(A₁·V, A₂·V, factor(x)) (B, N, S, D) in fp32 from two maps (q, k).

        `blend` is linear, so the fast path blends the maps instead and multiplies by V once.
        """
        factor, extrapolate = self.factor(x), self.extrapolates
        if self.fused and cpu.rows_are_faster(*maps[0]):
            factor = factor.expand(*maps[0][0].shape[:2], -1, 1)
            return cpu.row_attention(maps, v, mask, self.scale if scale is None else scale, factor, extrapolate)
        first, second = (self.softmax_attention(q, k, v, mask, scale).float() for q, k in maps)
        return cpu.blend(first, second, factor, extrapolate)

    def coefficient(self) -> torch.Tensor | None:
        """The weight of the second map in fp32: λ (1,), or λ or μ of each head (N,); None for a variant without."""

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        """The weight of the second map where the hidden states are x (B, S, H), in fp32; broadcasts to (B, N, S, 1)."""
        weight = self.coefficient()
        assert weight is not None
        return weight[:, None, None]

    def folded(self, weight: torch.Tensor) -> torch.Tensor:
        """W' (…, N·D) so that W' of plain heads is `weight` W of this variant's heads, if it `rewrites_output`."""
        raise NotImplementedError


class Softmax(Differential):
    """Plain attention under the name of a variant: the control of every comparison."""

    kind = "softmax"
    foldable = True


class Reparametrised(Differential):
    """λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init (Ye et al. 2024; the paper, Eq. 3) and the norm by head (Eq. 6).

    One λ a layer, shared by its heads. The vectors start as N(0, 0.1): at zero their gradient would be zero too, and
    with λ_init = 0 the second map would never contribute. The norm's gain starts at 1. Without the `norm` its factor
    (1 − λ_init) is left out too. `lambda_init` is a number in [0, 1) or "layer", the schedule of Eq. 4.
    """

    def __init__(self, plain: Attention, layer: int, width: int, lambda_init: float | str, norm: bool):
        super().__init__(plain, layer)
        value = lambda_schedule(layer) if lambda_init == "layer" else lambda_init
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise UserError(f"lambda_init is {value!r}, expected 'layer' or a number from 0 up to, not including, 1")
        self.lambda_init = value
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(width)) for _ in range(4)
        )
        self.subln = nn.RMSNorm(self.head_dim, eps=NORM_EPS) if norm else None

    def coefficient(self) -> torch.Tensor:
        first = (self.lambda_q1.float() * self.lambda_k1.float()).sum(-1, keepdim=True).exp()
        second = (self.lambda_q2.float() * self.lambda_k2.float()).sum(-1, keepdim=True).exp()
        return first - second + self.lambda_init

    def normalise(self, heads: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """norm(scale·heads)·(1 − λ_init) in fp32 for heads (B, N, S, D) and scale (1,); None is a scale of 1.

        Uses s·x / √(s²·m + ε) = sign(s)·x / √(m + ε/s²): one pass fewer over the heads, and the gradient of s is
        computed without cancellation.
        """
        if self.subln is None:
            return heads if scale is None else scale * heads
        scale = torch.ones((), device=heads.device) if scale is None else scale
        epsilon, gain = NORM_EPS / scale**2, self.subln.weight * (1 - self.lambda_init) * scale.sign()
        with torch.autocast(heads.device.type, enabled=False):  # it would round the sums to bf16
            mean_square = torch.linalg.vecdot(heads, heads)[..., None] / self.head_dim
        return heads * torch.rsqrt(mean_square + epsilon) * gain


class Shared(Reparametrised):
    """The paper's adaptation (Eq. 5–6): both maps come from the same Q and K.

    A − λ·A = (1 − λ)·A, so it is one attention, and is computed as one. What follows from the equations:
    - The norm removes the factor, norm(s·x) = sign(s)·norm(x) up to eps. λ's gradient is smaller by orders of
      magnitude than in the same model without the norm, and Adam moves λ by rounding errors. λ is not learned.
    - Where λ > 1 the attention changes its sign. With vectors of 256, this happens by chance in about 2 of 18 layers.
    - What is left, the norm with its gain and the factor (1 − λ_init), shifts the pretrained model at step 0.
    """

    kind = "shared"

    def __init__(self, plain: Attention, layer: int, *, lambda_init: float | str = "layer", norm: bool = True):
        super().__init__(plain, layer, plain.head_dim, lambda_init, norm)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        heads = self.softmax_attention(q, k, v, mask)
        return self.normalise(heads.float(), 1 - self.coefficient()).to(heads.dtype)


class Split(Reparametrised):
    """The original (Ye et al. 2024; the paper, Eq. 2): the two halves of a head's width are two heads; V is shared.

    RoPE turns the pairs (i, i + D/2). `rope_pairs` "kept" rotates first and gives each half whole pairs, so that the
    pretrained rotation stays and the logits of both halves add up to the pretrained ones. "fresh", the paper's code,
    cuts at D/2 and rotates each half by a RoPE of its own: its logits are unrelated to the pretrained ones. Cutting at
    D/2 after the rotation would separate the pairs, and the logits would depend on absolute positions.
    Each head is cut by itself, so a half of a query always meets the same half of its own key head, also when several
    query heads share a key head.
    """

    kind = "split"
    maps = 2

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        rope_pairs: str = "kept",
        lambda_init: float | str = "layer",
        norm: bool = True,
    ):
        super().__init__(plain, layer, plain.head_dim // 2, lambda_init, norm)
        if rope_pairs not in ("kept", "fresh"):
            raise UserError(f"rope_pairs is {rope_pairs!r}, expected 'kept' or 'fresh'")
        if self.head_dim % 4:
            raise UserError(f"split cannot halve heads of {self.head_dim}: it needs a multiple of 4")
        self.rope_pairs = rope_pairs

    def project(self, x: torch.Tensor, rope: Rope | None):
        if self.rope_pairs == "kept" or rope is None:
            return super().project(x, rope)
        q, k, v = super().project(x, None)
        q, k = (torch.cat([rope(half) for half in t.chunk(2, dim=-1)], dim=-1) for t in (q, k))
        return q, k, v

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        scale = self.scale * 2**0.5  # 1/√(D/2) where plain attention has 1/√D
        maps = list(zip(self.halves(q), self.halves(k), strict=True))
        heads = self.blended(x, maps, v, mask, scale)
        return self.normalise(heads).to(v.dtype)

    def halves(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x (…, D) as two of (…, D/2), padded with zeros to a multiple of 8, which CUDA's fused kernels require."""
        if self.rope_pairs == "kept":  # channels [0:D/4] and [D/2:3D/4], and the rest
            parts = [half.flatten(-2) for half in x.unflatten(-1, (2, 2, -1)).unbind(-2)]
        else:
            parts = list(x.chunk(2, dim=-1))
        short = -parts[0].shape[-1] % 8
        return [F.pad(half, (0, short)) for half in parts] if short else parts


class Twin(Differential):
    """Identity-preserving differential attention: two branches on one frozen projection, o = o₁ + μ·(o₁ − o₂).

    Q_b = base(x) + LoRA_b(x) and K_b likewise. Branch 1's LoRA is the adapter on q_proj and k_proj. Branch 2 has its
    own, `q2` and `k2`, on the same base product, which is computed once. With λ = μ/(1 + μ) this is
    (A₁ − λ·A₂)·V/(1 − λ). Its rows sum to 1, so neither a norm nor (1 − λ_init) is needed, and while the branches are
    equal it is the pretrained attention to the bit, for any μ. The first gradients of the branches point in opposite
    directions, so they separate without noise. μ, one a head, has no gradient until they differ. At μ = 0 branch 2
    would have none.

    by_token: μ·2σ(w·x + b) in place of μ, from w = b = 0. half: no parameters but μ; the first half of the adapter's
    rank belongs to branch 1, the rest to branch 2, so that there are as many as without a graft.
    """

    kind = "twin"
    read_twice = ("q_proj", "k_proj")
    maps = 2
    extrapolates = True

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        r: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        mu: float = 1.0,
        by_token: bool = False,
        half: bool = False,
    ):
        super().__init__(plain, layer)
        if not mu > 0:
            raise UserError(f"mu is {mu!r}, expected a number above 0: at 0 the second branch gets no gradient")
        self.divides_adapter = half
        self.q2 = None if half else low_rank_beside(self.q_proj, r, alpha, dropout)
        self.k2 = None if half else low_rank_beside(self.k_proj, r, alpha, dropout)
        self.mu = nn.Parameter(torch.full((self.num_heads,), float(mu)))
        self.lambda_proj = gate(self) if by_token else None

    def project(self, x: torch.Tensor, rope: Rope | None):
        """q (B, 2N, S, D) and k (B, 2K, S, D), branch 1 before branch 2, and v (B, K, S, D)."""
        q, k = (
            torch.cat([self.split_heads(branch) for branch in branches(proj, second, x)], dim=1)
            for proj, second in ((self.q_proj, self.q2), (self.k_proj, self.k2))
        )
        v = self.split_heads(self.v_proj(x))
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        # two calls of the plain kernel are as fast as one of 2N heads, and compute each branch as the base does
        maps = list(zip(q.chunk(2, dim=1), k.chunk(2, dim=1), strict=True))
        return self.blended(x, maps, v, mask).to(v.dtype)

    def coefficient(self) -> torch.Tensor:
        """μ (N,); λ is μ/(1 + μ)."""
        return self.mu.float()

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        if self.lambda_proj is None:
            return super().factor(x)
        return super().factor(x) * 2 * gated(self.lambda_proj, x)


class V2(Differential):
    """Differential attention V2 (microsoft/unilm, 2026) as a graft: o₁ − σ(w·x + b)·o₂, λ by token and head, no norm.

    K and V, and so the cache, are the plain ones. There are twice as many queries: the second ones are
    base(x) + `q2`(x). The original is trained from scratch with doubled query heads; here w = 0 and b = −4 start the
    subtraction at 0.018.

    shared_by: so many heads share one second query, made of their first one's (Grouped Differential Attention, Lim
    et al. 2025, arXiv 2510.06949, with ratios of 3 and 4 to 1).
    """

    kind = "v2"
    read_twice = ("q_proj",)
    maps = 2

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        r: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        shared_by: int = 1,
    ):
        super().__init__(plain, layer)
        if shared_by < 1 or self.num_heads % shared_by:
            raise UserError(f"shared_by is {shared_by}, expected a divisor of {self.num_heads}, the number of heads")
        self.shared_by = shared_by
        self.q2 = low_rank_beside(self.q_proj, r, alpha, dropout, shared_by)
        self.lambda_proj = gate(self, -4.0)

    def project(self, x: torch.Tensor, rope: Rope | None):
        """q (B, 2N, S, D), branch 1 before branch 2; k and v (B, K, S, D)."""
        first, second = branches(self.q_proj, self.q2, x, self.leaders)
        second = self.split_heads(second).repeat_interleave(self.shared_by, dim=1)
        q = torch.cat([self.split_heads(first), second], dim=1)
        k, v = (self.split_heads(proj(x)) for proj in (self.k_proj, self.v_proj))
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def leaders(self, q: torch.Tensor) -> torch.Tensor:
        """Of all queries (B, S, N·D), those of the first head of each group that shares one."""
        return q.unflatten(-1, (-1, self.shared_by, self.head_dim))[..., 0, :].flatten(-2)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        return self.blended(x, [(branch, k) for branch in q.chunk(2, dim=1)], v, mask).to(v.dtype)

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        """λ = σ(w·x + b) of each token and head (B, N, S, 1)."""
        return gated(self.lambda_proj, x)

    def coefficient(self) -> torch.Tensor:
        """σ(b) (N,): λ where w·x is 0, as everywhere at step 0."""
        return torch.sigmoid(self.lambda_proj.bias.float())


class Dex(Differential):
    """DEX (Kong et al. 2025, arXiv 2505.16333): o − λ·o·W_D on the outputs of chosen heads; the map is unchanged.

    One W_D (D, D) for a layer's chosen `heads` (None: all; a list for each layer, or one list for all), starting at 0,
    and one λ, starting at `lambda_init`: exact at step 0 without annealing λ, and with a gradient as long as λ is not 0
    too. It is linear in o, so `fold` merges it into the output projection.
    """

    kind = "dex"
    foldable = rewrites_output = True

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        heads: list[int] | list[list[int]] | None = None,
        lambda_init: float = 1.0,
    ):
        super().__init__(plain, layer)
        own, by_layer = [h for h in heads or () if isinstance(h, int)], [h for h in heads or () if isinstance(h, list)]
        if by_layer:
            own = by_layer[layer - 1] if layer <= len(by_layer) else []
        self.heads = list(range(self.num_heads)) if heads is None else sorted(set(own))
        if not self.heads or not 0 <= self.heads[0] <= self.heads[-1] < self.num_heads:
            raise UserError(f"heads are {own!r} in layer {layer}, expected at least one of 0 to {self.num_heads - 1}")
        if lambda_init == 0:
            raise UserError("lambda_init is 0: with W_D = 0 neither would ever get a gradient; give another number")
        # a buffer: a copy from the CPU in each call would make it wait, and cannot be a part of a CUDA graph
        self.register_buffer("chosen", torch.tensor(self.heads), persistent=False)
        self.w_d = nn.Parameter(torch.zeros(self.head_dim, self.head_dim))
        self.lambda_d = nn.Parameter(torch.full((1,), float(lambda_init)))

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        heads = self.softmax_attention(q, k, v, mask)
        if len(self.heads) == self.num_heads:
            return self.change(heads)
        if self.chosen.device != heads.device:  # grafted on the meta device, where a buffer loses its numbers
            self.chosen = torch.tensor(self.heads, device=heads.device)
        return heads.index_copy(1, self.chosen, self.change(heads[:, self.chosen]))

    def change(self, heads: torch.Tensor) -> torch.Tensor:
        """o − λ·o·W_D for heads o (B, n, S, D), in fp32, cast back to their dtype."""
        wide = heads.float()
        return (wide - self.lambda_d.float() * torch.matmul(wide, self.w_d.float())).to(heads.dtype)

    def coefficient(self) -> torch.Tensor:
        return self.lambda_d.float()

    def folded(self, weight: torch.Tensor) -> torch.Tensor:
        """W·(I − λ·W_D)ᵀ at the columns of each chosen head, in fp32."""
        by_head = weight.float().unflatten(1, (self.num_heads, self.head_dim)).clone()  # (H, N, D)
        by_head[:, self.heads] -= self.lambda_d.float() * (by_head[:, self.heads] @ self.w_d.float().T)
        return by_head.flatten(1)


# Every variant by name. A new one is a class above and a line here.
KINDS: dict[str, type[Differential]] = {c.kind: c for c in (Softmax, Shared, Split, Twin, V2, Dex)}


def options_of(kind: str) -> dict:
    """The options of a variant, as `graft` takes them, with their defaults."""
    parameters = inspect.signature(KINDS[kind]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_option(kind: str, name: str, value: object) -> None:
    """Raise UserError unless `value` has the type of this option; an integer may stand for a number."""
    expected = inspect.signature(KINDS[kind]).parameters[name].annotation
    allowed = typing.get_args(expected) or (expected,)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    is_list = list[int] in allowed and all(isinstance(r, list) and all(type(i) is int for i in r) for r in rows)
    if not (is_list or type(value) in allowed and is_finite or type(value) is int and float in allowed):
        shown = getattr(expected, "__name__", str(expected))
        raise UserError(f"{kind!r}: {name} is {quoted(value)}, expected {shown}, finite if it is a number")


def default_options(kind: str, r: int, alpha: float, dropout: float = 0.0) -> dict:
    """Options that give a second branch the rank, scale and dropout of the adapter beside it; {} without one."""
    adapter = {"r": r, "alpha": alpha, "dropout": dropout}
    return {name: value for name, value in adapter.items() if name in options_of(kind)}


def base_layer(projection: nn.Module) -> nn.Linear:
    """The linear layer under LoRA, or the projection itself."""
    layer = getattr(projection, "base_layer", projection)
    assert isinstance(layer, nn.Linear)
    return layer


def branches(
    projection: nn.Module,
    second: LowRank | None,
    x: torch.Tensor,
    chosen: Callable[[torch.Tensor], torch.Tensor] = lambda base: base,
) -> tuple[torch.Tensor, torch.Tensor]:
    """base(x) + LoRA(x) of `projection`, and base(x) + second(x), with the costly base product computed once.

    chosen: the columns of base(x) that `second` is added to. Without `second`, LoRA's rank is divided: the first half
    of it belongs to the first, the rest to the second.
    """
    base, lora = base_layer(projection)(x), getattr(projection, "lora", None)
    if second is not None:
        return base if lora is None else lora.add_to(base, x), second.add_to(chosen(base), x)
    if lora is None:
        return base, base
    return lora.add_to(base, x, slice(0, lora.r // 2)), lora.add_to(base, x, slice(lora.r // 2, None))


def low_rank_beside(projection: nn.Module, r: int, alpha: float, dropout: float, shared_by: int = 1) -> LowRank:
    """The second branch's update of `projection`, or of every so many heads of it, zero at the start.

    Raises UserError for values out of range.
    """
    check_low_rank(r, alpha, dropout)
    linear = base_layer(projection)
    return LowRank(linear.in_features, linear.out_features // shared_by, r, alpha, dropout)


def gate(attention: Attention, bias: float = 0.0) -> nn.Linear:
    """The w and b of `gated`: hidden states to heads."""
    linear = nn.Linear(attention.hidden_size, attention.num_heads)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, bias)
    return linear


def gated(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """σ(w·x + b) of each token and head (B, N, S, 1), in fp32 up to the multiplication."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.sigmoid(F.linear(x.float(), linear.weight.float(), linear.bias.float())).transpose(1, 2)[..., None]
