"""Differential attention on pretrained weights: the siblings of plain attention, and `graft`, which puts them in place.

In: a plain `PaliGemma` and the name of a variant. Out: the same model, its weights untouched, with the variant's own
parameters beside them. Every sibling has the signature, the cache and the masks of `model/attention.py`; nothing else
in the model knows of it. Next: LoRA adapters in `lora/`, which train around what is grafted here.

    name       heads                                          new parameters of a layer       at step 0    maps
    softmax    A·V                                            –                               exact        1
    shared     norm((1 − λ)·A·V)·(1 − λ_init)                 4·D, D                          shifted      1
    split      norm((A₁ − λ·A₂)·V)·(1 − λ_init)               4·D/2, D                        shifted      2
    twin       o₁ + μ·(o₁ − o₂)                               LoRA on q and k, N              exact        2
    v2         o₁ − σ(w·x + b)·o₂, one K                      LoRA on q, (H + 1)·N            nearly exact 2
    dex        o − λ·o·W_D, merges into W_O                   D·D, 1                          exact        1

"The paper" is Differential MultiModal Transformers (Li et al. 2024), which this project rebuilds; the original is
Differential Transformer (Ye et al. 2024). A attention map, o = A·V, norm an RMSNorm by head, W_O the output projection.
New parameters are fp32 whatever the model's dtype, because λ, μ and small updates drown in bf16's 8 bits: set the
model's dtype before grafting, for `model.to(dtype)` afterwards casts them with the rest. Maps are subtracted in fp32.
"""

import dataclasses
import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn

from model import cpu
from model.attention import Attention, Rope, attention_modules
from model.common import UserError
from model.linear import Linear
from model.lowrank import LowRank


def lambda_schedule(layer: int) -> float:
    """λ_init of a layer counted from 1: 0.2 in the first, near 0.8 in deep ones (Ye et al. 2024; the paper, Eq. 4)."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


class Differential(Attention):
    """What all siblings do: take over the projections of a plain attention, trained, adapted or on meta as they are.

    `layer` counts from 1. Keyword arguments of a subclass are the options that `graft` accepts for it.
    """

    kind: str
    mergeable = True  # LoRA on q_proj and k_proj may be merged into their weights: nothing else reads those
    foldable = False  # `fold` turns it into plain attention
    maps = 1  # how many attention maps a head has, and how many times `tap` is called, A₁ first

    def __init__(self, plain: Attention, layer: int):
        with torch.device("meta"):
            super().__init__(**sizes(plain))
        hand_over(plain, self)

    def blended(
        self, maps, v, mask, factor: torch.Tensor, extrapolate=False, scale: float | None = None
    ) -> torch.Tensor:
        """blend(A₁·V, A₂·V, factor, extrapolate) (B, N, S, D) in fp32, of two maps (q, k); factor fits (B, N, S, 1).

        `blend` is linear in the maps, so it may as well blend these, and V is multiplied once.
        """
        if self.fused and cpu.rows_are_faster(*maps[0]):
            factor = factor.expand(*maps[0][0].shape[:2], -1, 1)
            return cpu.row_attention(maps, v, mask, self.scale if scale is None else scale, factor, extrapolate)
        first, second = (self.softmax_attention(q, k, v, mask, scale).float() for q, k in maps)
        return cpu.blend(first, second, factor, extrapolate)

    def coefficient(self) -> torch.Tensor | None:
        """What weighs the second map, λ (1,) or λ or μ by head (N,), in fp32; None where nothing does."""

    def fold_output(self) -> None:
        """Write into the output projection what this sibling adds to plain attention, if it is `foldable`."""


class Softmax(Differential):
    """Plain attention under the name of a variant: the control of every comparison."""

    kind = "softmax"
    foldable = True


class Reparametrised(Differential):
    """λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init (Ye et al. 2024; the paper, Eq. 3) and the norm by head (Eq. 6).

    One λ a layer, shared by its heads. The vectors start as N(0, 0.1): at zero their gradient would be zero too, and
    with λ_init = 0 the second map would never appear. The norm's gain starts at 1; without the `norm` its factor
    (1 − λ_init) goes too. `lambda_init` is a number in [0, 1) or "layer", the schedule of Eq. 4.
    """

    def __init__(self, plain: Attention, layer: int, width: int, lambda_init: float | str, norm: bool):
        super().__init__(plain, layer)
        self.lambda_init = lambda_schedule(layer) if lambda_init == "layer" else lambda_init
        if not isinstance(self.lambda_init, int | float) or not 0 <= self.lambda_init < 1:
            raise UserError(f"lambda_init is {lambda_init!r}, expected 'layer' or a number from 0 up to, not with, 1")
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.1 * torch.randn(width)))
        self.subln = nn.RMSNorm(self.head_dim, eps=1e-5) if norm else None

    def coefficient(self) -> torch.Tensor:
        first = (self.lambda_q1.float() * self.lambda_k1.float()).sum(-1, keepdim=True).exp()
        second = (self.lambda_q2.float() * self.lambda_k2.float()).sum(-1, keepdim=True).exp()
        return first - second + self.lambda_init

    def normalise(self, heads: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """scale·heads (B, N, S, D) in fp32, each normalised over its D; scale (1,), None for 1.

        s·x / √(s²·m + ε) = sign(s)·x / √(m + ε/s²): one pass less, and in the gradient of s nothing is left to cancel.
        """
        if self.subln is None:
            return heads if scale is None else scale * heads
        epsilon, gain = self.subln.eps, self.subln.weight * (1 - self.lambda_init)
        if scale is not None:
            epsilon, gain = epsilon / scale**2, gain * scale.sign()
        mean_square = torch.linalg.vecdot(heads, heads)[..., None] / self.head_dim
        return heads * torch.rsqrt(mean_square + epsilon) * gain


class Shared(Reparametrised):
    """The paper's adaptation (Eq. 5–6): both maps come from the same Q and K.

    A − λ·A = (1 − λ)·A, so it is one attention, and it is computed as one. What the equations amount to:
    - The norm removes the factor, norm(s·x) = sign(s)·norm(x) up to eps: λ's gradient is suppressed by orders of
      magnitude against the same model without the norm, and Adam moves λ by round-off. λ is not learned.
    - Where λ > 1 the attention flips its sign. With vectors of 256, that happens by chance in about 2 of 18 layers.
    - What is left, the norm with its gain and the factor (1 − λ_init), shifts the pretrained model at step 0.
    """

    kind = "shared"

    def __init__(self, plain: Attention, layer: int, *, lambda_init: float | str = "layer", norm: bool = True):
        super().__init__(plain, layer, plain.head_dim, lambda_init, norm)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        heads = self.softmax_attention(q, k, v, mask)
        return self.normalise(heads.float(), 1 - self.coefficient()).to(heads.dtype)


class Split(Reparametrised):
    """The original (Ye et al. 2024; the paper, Eq. 2): the two halves of a head's width are two heads, V stays whole.

    RoPE turns the pairs (i, i + D/2). `rope_pairs` "kept" rotates first and deals whole pairs to the halves, so that
    each keeps the pretrained rotation and the logits of both add up to the pretrained ones; "fresh", the paper's code,
    cuts at D/2 and gives each half a RoPE of its own, whose logits have nothing to do with the pretrained ones. A cut
    at D/2 after the rotation would tear the pairs apart: then the logits depend on absolute positions.
    The cut is inside each head, so a query half always meets the same half of its own key head, however few those are.
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
        heads = self.blended(maps, v, mask, self.coefficient()[:, None, None], scale=scale)
        return self.normalise(heads).to(v.dtype)

    def halves(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Two (…, D/2) of x (…, D). CUDA's fused kernels want widths in 8s: SigLIP's 36 is filled up with zeros."""
        if self.rope_pairs == "kept":  # channels [0:D/4] and [D/2:3D/4], and the rest
            parts = [half.flatten(-2) for half in x.unflatten(-1, (2, 2, -1)).unbind(-2)]
        else:
            parts = list(x.chunk(2, dim=-1))
        short = -parts[0].shape[-1] % 8
        return [F.pad(half, (0, short)) for half in parts] if short else parts


class Twin(Differential):
    """Identity-preserving differential attention: two branches on one frozen projection, o = o₁ + μ·(o₁ − o₂).

    Q_b = base(x) + LoRA_b(x) and K_b likewise. Branch 1's LoRA is the adapter on q_proj and k_proj; branch 2 has its
    own, `q2` and `k2`, on the same base product, which is computed once. With λ = μ/(1 + μ) this is
    (A₁ − λ·A₂)·V/(1 − λ): rows sum to 1, so neither norm nor (1 − λ_init) is needed, and while the branches are equal
    it is the pretrained attention to the bit, for any μ. The subtraction breaks their symmetry: their first gradients
    point in opposite directions. μ, one a head, has no gradient until they differ. At μ = 0 branch 2 would have none.
    """

    kind = "twin"
    mergeable = False
    maps = 2

    def __init__(
        self, plain: Attention, layer: int, *, r: int = 16, alpha: float = 32.0, dropout: float = 0.0, mu: float = 1.0
    ):
        super().__init__(plain, layer)
        if not mu > 0:
            raise UserError(f"mu is {mu!r}, expected a number above 0: at 0 the second branch gets no gradient")
        self.q2 = low_rank_beside(self.q_proj, r, alpha, dropout)
        self.k2 = low_rank_beside(self.k_proj, r, alpha, dropout)
        self.mu = nn.Parameter(torch.full((self.num_heads,), float(mu)))

    def project(self, x: torch.Tensor, rope: Rope | None):
        """q (B, 2N, S, D) and k (B, 2K, S, D), branch 1 before branch 2, and v (B, K, S, D)."""
        q, k = (
            torch.cat([self.split_heads(branch) for branch in branches(proj, second, x)], dim=1)
            for proj, second in ((self.q_proj, self.q2), (self.k_proj, self.k2))
        )
        v = self.split_heads(self.v_proj(x))
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        # two calls, each the plain one: as fast as one of 2N heads, and no kernel can tell the first from the base
        maps = list(zip(q.chunk(2, dim=1), k.chunk(2, dim=1), strict=True))
        return self.blended(maps, v, mask, self.mu.float()[:, None, None], extrapolate=True).to(v.dtype)

    def coefficient(self) -> torch.Tensor:
        """μ (N,); λ is μ/(1 + μ)."""
        return self.mu.float()


class V2(Differential):
    """Differential attention V2 (microsoft/unilm, 2026) as a graft: o₁ − σ(w·x + b)·o₂, λ by token and head, no norm.

    K and V, and so the cache, are the plain ones; there are twice the queries, the second ones base(x) + `q2`(x). The
    original is trained from scratch with doubled query heads; here w = 0 and b = −4 start the subtraction at 0.018.
    """

    kind = "v2"
    mergeable = False
    maps = 2

    def __init__(self, plain: Attention, layer: int, *, r: int = 16, alpha: float = 32.0, dropout: float = 0.0):
        super().__init__(plain, layer)
        self.q2 = low_rank_beside(self.q_proj, r, alpha, dropout)
        self.lambda_proj = nn.Linear(base_layer(self.q_proj).in_features, self.num_heads)
        nn.init.zeros_(self.lambda_proj.weight)
        nn.init.constant_(self.lambda_proj.bias, -4.0)

    def project(self, x: torch.Tensor, rope: Rope | None):
        """q (B, 2N, S, D), branch 1 before branch 2; k and v (B, K, S, D)."""
        q = torch.cat([self.split_heads(branch) for branch in branches(self.q_proj, self.q2, x)], dim=1)
        k, v = (self.split_heads(proj(x)) for proj in (self.k_proj, self.v_proj))
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):  # λ stays fp32 up to the multiplication
            weight, bias = self.lambda_proj.weight.float(), self.lambda_proj.bias.float()
            by_head = torch.sigmoid(F.linear(x.float(), weight, bias)).transpose(1, 2)[..., None]  # (B, N, S, 1)
        return self.blended([(branch, k) for branch in q.chunk(2, dim=1)], v, mask, by_head).to(v.dtype)

    def coefficient(self) -> torch.Tensor:
        """σ(b) (N,): λ where w·x is 0, as everywhere at step 0."""
        return torch.sigmoid(self.lambda_proj.bias.float())


class Dex(Differential):
    """DEX (Kong et al. 2025, arXiv 2505.16333): o − λ·o·W_D on the outputs of chosen heads; the map stays as it was.

    One W_D (D, D) for a layer's chosen `heads` (None: all), starting at 0, and one λ, starting at `lambda_init`: exact
    at step 0 without annealing λ, and alive as long as λ is not 0 too. It is linear in o, so `fold` merges it into the
    output projection.
    """

    kind = "dex"
    foldable = True

    def __init__(self, plain: Attention, layer: int, *, heads: list[int] | None = None, lambda_init: float = 1.0):
        super().__init__(plain, layer)
        self.heads = list(range(self.num_heads)) if heads is None else sorted(set(heads))
        if not self.heads or not 0 <= self.heads[0] <= self.heads[-1] < self.num_heads:
            raise UserError(f"heads are {heads!r}, expected at least one of 0 to {self.num_heads - 1}")
        if lambda_init == 0:
            raise UserError("lambda_init is 0: with W_D = 0 neither would ever get a gradient; give another number")
        self.w_d = nn.Parameter(torch.zeros(self.head_dim, self.head_dim))
        self.lambda_d = nn.Parameter(torch.full((1,), float(lambda_init)))

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        heads = self.softmax_attention(q, k, v, mask)
        if len(self.heads) == self.num_heads:
            return self.change(heads)
        chosen = torch.tensor(self.heads, device=heads.device)
        return heads.index_copy(1, chosen, self.change(heads[:, chosen]))

    def change(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.float()
        return (wide - self.lambda_d.float() * torch.matmul(wide, self.w_d.float())).to(heads.dtype)

    def coefficient(self) -> torch.Tensor:
        return self.lambda_d.float()

    def fold_output(self) -> None:
        """W_O ← W_O·(I − λ·W_D)ᵀ at the columns of each chosen head, in fp32, then rounded to W_O's dtype."""
        weight = base_layer(self.get_submodule(self.output_name)).weight
        by_head = weight.data.float().unflatten(1, (self.num_heads, self.head_dim))  # (H, N, D)
        by_head[:, self.heads] -= self.lambda_d.data.float() * (by_head[:, self.heads] @ self.w_d.data.float().T)
        weight.data.copy_(by_head.flatten(1))


# Every variant by name. A new one is a class above and a line here.
KINDS: dict[str, type[Differential]] = {
    "softmax": Softmax,
    "shared": Shared,
    "split": Split,
    "twin": Twin,
    "v2": V2,
    "dex": Dex,
}

# The stacks of layers that `where` chooses from.
TOWERS = {"decoder": ("language_model.layers",), "vision": ("vision_tower.encoder.layers",)}
TOWERS["both"] = TOWERS["decoder"] + TOWERS["vision"]

FEED_FORWARDS = ("mlp", "swiglu", "swiglu-new")


class SwiGLU(nn.Module):
    """(swish(x·W_G) ⊙ x·W_1)·W_2 with a hidden width of int(8/3·H), fresh (the paper, Eq. 7).

    It replaces a pretrained MLP by random weights: nothing of the pretrained answers survives step 0. The names are
    not the published ones, so that LoRA's targets pass it by: it is trained whole.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        width = int(8 / 3 * hidden_size)
        self.w_g = Linear(hidden_size, width, bias=False)
        self.w_1 = Linear(hidden_size, width, bias=False)
        self.w_2 = Linear(width, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if torch.is_autocast_enabled(x.device.type) else x.to(self.w_g.weight.dtype)
        return self.w_2(F.silu(self.w_g(h)) * self.w_1(h)).to(x.dtype)


def graft(
    model: nn.Module, kind: str, *, where: str = "decoder", feed_forward: str = "mlp", seed: int = 0, **options
) -> list[str]:
    """Turn a plain PaliGemma into a variant, in place, and return the names of its new parameters.

    kind: a key of KINDS; `options` are the keyword arguments of its class. where: "decoder", "vision" or "both".
    feed_forward of the decoder (the paper, Table 1): "mlp" as published, "swiglu" with the published weights and a silu
    gate, or "swiglu-new", fresh. New parameters are fp32, trainable, on the model's device (meta included) and the same
    for the same seed. A tower is grafted once; the other may follow in a second call.

    `model.grafts` records the calls, each a dictionary for `graft(model, **record)`; `model.grafted` all new names.
    Raises UserError for an unknown kind, place, feed-forward or option, for an option's value from which nothing would
    be learned, and for a tower that is grafted already. Nothing is changed then.
    """
    for what, value, known in (
        ("variant", kind, KINDS),
        ("place", where, TOWERS),
        ("feed_forward", feed_forward, FEED_FORWARDS),
    ):
        if value not in known:
            raise UserError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
    if feed_forward != "mlp" and where == "vision":
        raise UserError(f"feed_forward {feed_forward!r} concerns the decoder: graft it with where 'decoder' or 'both'")
    defaults = options_of(kind)
    if unknown := sorted(set(options) - set(defaults)):
        raise UserError(f"{kind!r} has no option {', '.join(unknown)}: it takes {', '.join(defaults) or 'none'}")
    options = defaults | options
    layers = {
        f"{tower}.{index}": layer for tower in TOWERS[where] for index, layer in enumerate(model.get_submodule(tower))
    }
    for path, layer in layers.items():
        if isinstance(layer.self_attn, Differential):
            raise UserError(f"{path} has {layer.self_attn.kind!r} attention already: graft a freshly loaded model")
        if type(layer.self_attn) is not Attention:
            raise UserError(f"{path} is {type(layer.self_attn).__name__}: a graft replaces plain attention alone")

    before = {name for name, _ in model.named_parameters()}
    device = model.language_model.embed_tokens.weight.device
    new: list[tuple[nn.Module, str, nn.Module]] = []
    # drawn on the CPU, so that a seed means the same on every device
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        for path, layer in layers.items():
            number = int(path.rpartition(".")[2]) + 1
            new.append((layer, "self_attn", KINDS[kind](layer.self_attn, number, **options).to(device)))
        if feed_forward == "swiglu-new":
            width = model.config.text.hidden_size
            new += [(layer, "mlp", SwiGLU(width).to(device)) for layer in model.language_model.layers]
    for layer, name, module in new:
        setattr(layer, name, module.train(layer.training))
    if feed_forward == "swiglu":
        for layer in model.language_model.layers:
            layer.mlp.activation = "silu"

    names = [name for name, _ in model.named_parameters() if name not in before]
    call = {"kind": kind, "where": where, "feed_forward": feed_forward, "seed": seed, **options}
    model.grafts = [*getattr(model, "grafts", []), call]
    model.grafted = [*getattr(model, "grafted", []), *names]
    return names


def options_of(kind: str) -> dict:
    """The options of a variant, as `graft` takes them, with their defaults."""
    parameters = inspect.signature(KINDS[kind]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Make a grafted model plain again, in place, where a plain one can compute the same: softmax, dex, swiglu.

    In fp32 it is exact up to rounding; a dex folded into a bf16 weight is rounded to it.
    Raises UserError, and folds nothing, for the other variants and while LoRA is unmerged.
    """
    siblings = {path: m for path, m in attention_modules(model).items() if isinstance(m, Differential)}
    for path, module in siblings.items():
        if not module.foldable:
            raise UserError(f"{path}: plain attention cannot compute {module.kind!r}: keep it as base and adapter")
        if not getattr(module.get_submodule(module.output_name), "merged", True):
            raise UserError(f"{path}.{module.output_name} carries LoRA: merge the adapter before folding the graft")
    feed_forwards = {call["feed_forward"] for call in getattr(model, "grafts", [])}
    if "swiglu-new" in feed_forwards:
        raise UserError("feed_forward 'swiglu-new' is no part of the published format: keep it as base and adapter")
    for path, module in siblings.items():
        module.fold_output()
        with torch.device("meta"):
            plain = Attention(**sizes(module))
        hand_over(module, plain)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, plain.train(module.training))
    if "swiglu" in feed_forwards:
        text = dataclasses.replace(model.config.text, hidden_activation="silu")
        model.config = dataclasses.replace(model.config, text=text)
        model.language_model.config = text
    model.grafts, model.grafted = [], []


def lambdas(model: nn.Module) -> dict[str, torch.Tensor]:
    """What weighs the second map in each layer, by the attention's path: λ (1,) or (N,), for twin μ (N,), detached."""
    found = {path: m.coefficient() for path, m in attention_modules(model).items() if isinstance(m, Differential)}
    return {path: value.detach() for path, value in found.items() if value is not None}


@torch.no_grad()
def map_distance(model: nn.Module, **batch) -> dict[str, torch.Tensor]:
    """How far the two maps of each layer are apart: total variation ½·Σ|A₁ − A₂|, from 0 to 1, by the attention's path.

    A scalar for each attention with two maps, the mean over heads and valid queries of one forward pass of `batch`,
    the arguments of the model. Dropout is as the model's mode has it.
    """
    distances: dict[str, torch.Tensor] = {}

    def watch(path: str):
        maps: list[torch.Tensor] = []

        def tap(weights: torch.Tensor) -> None:
            maps.append(weights.float())
            if len(maps) == 2:
                by_query = (maps[0] - maps[1]).abs().sum(-1).mean(1) / 2  # (B, S)
                valid = batch.get("attention_mask")
                is_padded = valid is not None and path.startswith("language_model.")
                distances[path] = by_query[valid.bool()].mean() if is_padded else by_query.mean()

        return tap

    siblings = {path: m for path, m in attention_modules(model).items() if isinstance(m, Differential) and m.maps == 2}
    before = {path: module.tap for path, module in siblings.items()}
    try:
        for path, module in siblings.items():
            module.tap = watch(path)
        model(**(batch | {"positions_to_keep": 1}))  # the head, the widest product, has nothing to say here
    finally:
        for path, module in siblings.items():
            module.tap = before[path]
    return distances


def sizes(attention: Attention) -> dict:
    """The arguments of `Attention` that make one like `attention`."""
    value = base_layer(attention.v_proj)
    names = ("num_heads", "num_key_value_heads", "head_dim", "scale", "softcap", "output_name")
    same = {name: getattr(attention, name) for name in names}
    return {"hidden_size": value.in_features, "bias": value.bias is not None, **same}


def hand_over(old: Attention, new: Attention) -> None:
    """Give `new` the projections, the backend and the tap of `old`."""
    for name in ("q_proj", "k_proj", "v_proj", old.output_name):
        setattr(new, name, getattr(old, name))
    new.backend, new.tap = old.backend, old.tap


def base_layer(projection: nn.Module) -> nn.Linear:
    """The linear layer under LoRA, or the projection itself."""
    return getattr(projection, "base_layer", projection)


def branches(projection: nn.Module, second: LowRank, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """base(x) + LoRA(x) of `projection`, and base(x) + second(x): the base product, the costly one, is done once."""
    base = base_layer(projection)(x)
    lora = getattr(projection, "lora", None)
    return base if lora is None else lora.add_to(base, x), second.add_to(base, x)


def low_rank_beside(projection: nn.Module, r: int, alpha: float, dropout: float) -> LowRank:
    """The second branch's update of `projection`, zero at the start."""
    if r < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise UserError(f"r {r}, alpha {alpha}, dropout {dropout}: expected r ≥ 1, alpha > 0 and 0 ≤ dropout < 1")
    linear = base_layer(projection)
    return LowRank(linear.in_features, linear.out_features, r, alpha, dropout)
