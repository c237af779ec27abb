"""Differential attention on pretrained weights: siblings of plain attention, and how they are grafted and folded.

    name         heads                              new parameters of a layer  at step 0     maps
    softmax      A·V                                –                          exact         1
    shared       norm((1 − λ)·A·V)·(1 − λ_init)     4·D, D                     shifted       1
    split        norm((A₁ − λ·A₂)·V)·(1 − λ_init)   4·D/2, D                   shifted       2
    twin         o₁ + μ·(o₁ − o₂)                   LoRA on q and k, N         exact         2
    v2           (o₁ − σ(w·x + b)·o₂)/(1 − λ₀)      LoRA on q, (H + 1)·N       exact         2
    difflora     o₁ − λ·o₂                          LoRA on q and k, 1         shifted       2
    dex          o − λ·o·W_D, merges into W_O       D·D, 1                     exact         1
    mean         o − λ·Ū                            N                          exact         1, Ū's
    gate         o·2σ(w·x)                          H·N                        exact         1
    temperature  A of t·q, merges into W_Q          N                          exact         1
    sink         o·σ(logsumexp(s) − b)              N                          nearly exact  1

A is an attention map of the logits s, o = A·V, Ū the mean of the visible values, norm an RMSNorm by
head, W_O the output projection. The last four are controls: each has one part of what a second map
may do. "The paper" is Differential MultiModal Transformers (Li et al. 2025, arXiv 2507.15875),
which this project rebuilds; the original is Differential Transformer (Ye et al. 2024).

New parameters are fp32 whatever the model's dtype, because λ, μ and small updates are lost in
bf16's 8 bits; maps are subtracted in fp32. Set the model's dtype before grafting: `model.to(dtype)`
casts all of them.
"""

import inspect
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import Attention, Rope, attention_modules, tapped
from model.common import UserError, quoted
from model.config import fits
from model.gemma import Adaptable
from model.linear import Linear, filled
from model.lowrank import LowRank
from model.variant import Gate, Mean, Sink, Softmax, Temperature, Variant, scores_of


class Reparametrised(Variant):
    """λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init, one a layer, and the norm by head.

    The paper's Eq. 3 and 6. λ_init is a number in [0, 1), or "layer": 0.8 − 0.6·exp(−0.3·(layer −
    1)) (Eq. 4), 0.2 in the first layer and near 0.8 in deep ones. The vectors start as N(0, 0.1):
    at zero their gradient would be zero too.
    """

    def __init__(
        self, plain: Attention, layer: int, width: int, lambda_init: float | str, norm: bool
    ):
        super().__init__(plain, layer, norm)
        if lambda_init == "layer":
            lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        if isinstance(lambda_init, str) or not 0 <= lambda_init < 1:
            raise UserError(
                f"lambda_init is {lambda_init!r}, expected 'layer' or a number in [0, 1)"
            )
        self.lambda_init = lambda_init
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(width)) for _ in range(4)
        )

    def coefficient(self) -> Tensor:
        first = self.lambda_q1.float() * self.lambda_k1.float()
        second = self.lambda_q2.float() * self.lambda_k2.float()
        return (
            first.sum(-1, keepdim=True).exp()
            - second.sum(-1, keepdim=True).exp()
            + self.lambda_init
        )


class Shared(Reparametrised):
    """The paper's adaptation (Eq. 5–6): both maps come from the same Q and K.

    A − λ·A = (1 − λ)·A, so it is one attention, and is computed as one. What follows from the
    equations:
    - The norm removes the factor, norm(s·x) = sign(s)·norm(x) up to eps. λ's gradient is smaller
      by orders of magnitude than in the same model without the norm, and Adam moves λ by rounding
      errors. λ is not learned.
    - Where λ > 1 the attention changes its sign. With vectors of 256, this happens by chance in
      about 2 of 18 layers.
    - What is left, the norm with its gain and the factor (1 − λ_init), shifts the pretrained model
      at step 0.
    """

    kind = "shared"

    def __init__(
        self, plain: Attention, layer: int, *, lambda_init: float | str = "layer", norm: bool = True
    ):
        super().__init__(plain, layer, plain.head_dim, lambda_init, norm)

    def mix(self, x, q, k, v, mask) -> Tensor:
        heads = self.softmax_attention(q, k, v, mask)
        return self.normalise((1 - self.coefficient()) * heads.float()).to(heads.dtype)


class Split(Reparametrised):
    """The original (Ye et al. 2024; the paper, Eq. 2): the halves of a head are two heads.

    V is shared.

    RoPE turns the pairs (i, i + D/2). `rope_pairs` "kept" rotates first and gives each half whole
    pairs, so that the logits of both halves add up to the pretrained ones. "fresh", the paper's
    code, cuts at D/2 and rotates each half by a RoPE of its own: its logits are unrelated to the
    pretrained ones. Cutting at D/2 after the rotation would separate the pairs, and the logits
    would depend on absolute positions.
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
        if rope_pairs not in ("kept", "fresh") or self.head_dim % 4:
            raise UserError(
                f"split in {rope_pairs!r} pairs of heads of {self.head_dim}: 'kept' or 'fresh', of "
                "4·n"
            )
        self.rope_pairs = rope_pairs

    def project(self, x: Tensor, rope: Rope | None):
        if self.rope_pairs == "kept" or rope is None:
            return super().project(x, rope)
        q, k, v = super().project(x, None)
        halves = [rope(half) for half in (*q.chunk(2, dim=-1), *k.chunk(2, dim=-1))]
        return torch.cat(halves[:2], dim=-1), torch.cat(halves[2:], dim=-1), v

    def mix(self, x, q, k, v, mask) -> Tensor:
        pairs = zip(self.halves(q), self.halves(k), strict=True)
        scale = self.scale * 2**0.5  # 1/√(D/2)
        outputs = (self.softmax_attention(*pair, v, mask, scale) for pair in pairs)
        return self.blend(x, *outputs)

    def halves(self, x: Tensor) -> list[Tensor]:
        """x (…, D) as two of (…, D/2), padded with zeros to a multiple of 8.

        CUDA's fused kernels require it.
        """
        parts = list(x.chunk(2, dim=-1))
        if self.rope_pairs == "kept":  # channels [0:D/4] and [D/2:3D/4], and the rest
            parts = [half.flatten(-2) for half in x.unflatten(-1, (2, 2, -1)).unbind(-2)]
        short = -parts[0].shape[-1] % 8
        return [nn.functional.pad(half, (0, short)) for half in parts] if short else parts


SECOND = {"q_proj": "q2", "k_proj": "k2"}  # the variant's LoRA beside each projection


class Branched(Variant):
    """Two branches on one base product: base(x) + LoRA(x) of the adapter and of the variant.

    The variant's LoRA is beside each projection of `read_twice`: `q2`, `k2`, zero at the start.
    """

    maps = 2
    alone = False  # the second branch is the variant's LoRA without the base product

    def __init__(
        self,
        plain: Attention,
        layer: int,
        r: int,
        alpha: float,
        dropout: float,
        norm: bool = False,
    ):
        super().__init__(plain, layer, norm)
        for name in self.read_twice:
            projection = self.get_submodule(name)
            if getattr(projection, "merged", False):
                raise UserError(
                    f"LoRA is merged into {name}, which a second branch reads too: unmerge it first"
                )
            linear = base_layer(projection)
            second = LowRank(linear.in_features, linear.out_features, r, alpha, dropout)
            self.add_module(SECOND[name], second)

    def heads_of(self, name: str, x: Tensor) -> Tensor:
        """Where a projection is read twice, the heads of branch 1 before those of branch 2."""
        if name not in self.read_twice:
            return super().heads_of(name, x)
        projection = self.get_submodule(name)
        base = base_layer(projection)(x)
        lora = getattr(projection, "lora", None)
        first = base if lora is None else lora.add_to(base, x)
        shared = torch.zeros_like(base) if self.alone else base
        second = self.get_submodule(SECOND[name]).add_to(shared, x)
        return torch.cat([self.split_heads(first), self.split_heads(second)], dim=1)

    def mix(self, x, q, k, v, mask) -> Tensor:
        keys = k.chunk(2, dim=1) if "k_proj" in self.read_twice else (k, k)
        pairs = zip(q.chunk(2, dim=1), keys, strict=True)
        # as fast as one call of 2N heads
        outputs = (self.softmax_attention(*pair, v, mask) for pair in pairs)
        return self.blend(x, *outputs)


class Twin(Branched):
    """Identity-preserving differential attention: o = o₁ + μ·(o₁ − o₂), with one μ a head.

    With λ = μ/(1 + μ) this is (A₁ − λ·A₂)·V/(1 − λ). Its rows sum to 1, so neither a norm nor (1 −
    λ_init) is needed, and while the branches are equal it is the pretrained attention to the bit,
    for any μ. The first gradients of the branches point in opposite directions, so they separate
    without noise. μ has no gradient until they differ; at μ = 0 branch 2 would have none.
    """

    kind = "twin"
    read_twice = ("q_proj", "k_proj")
    formula = "A₁ + μ(A₁ − A₂)"
    weight_name = "mu"  # (N,); λ is μ/(1 + μ)

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        r: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        mu: float = 1.0,
    ):
        super().__init__(plain, layer, r, alpha, dropout)
        if not 0 < mu <= 1e6:
            raise UserError(
                f"mu is {mu!r}, expected a number above 0: at 0 the second branch gets no gradient"
            )
        self.mu = filled(self.num_heads, mu)

    def difference(self, factor: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Equal ones give `first` to the bit."""
        return torch.lerp(first, second, -factor)


class V2(Branched):
    """Differential attention V2 (microsoft/unilm, 2026) as a graft: o₁ − λ·o₂ with λ = σ(w·x + b).

    λ is by token and head, and there is no norm. K and V, and so the cache, are the plain ones;
    there are twice as many queries. The original is trained from scratch with doubled query heads;
    here w = 0 and b = −4 start the subtraction at λ₀ = 0.018. `exact` divides by 1 − λ₀, a
    constant: equal branches are the pretrained attention to the bit. The published form is without.
    """

    kind = "v2"
    read_twice = ("q_proj",)
    start = -4.0  # of b

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        r: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        exact: bool = True,
    ):
        super().__init__(plain, layer, r, alpha, dropout)
        self.exact = exact
        self.lambda_proj = nn.Linear(self.hidden_size, self.num_heads)
        nn.init.zeros_(self.lambda_proj.weight)
        nn.init.constant_(self.lambda_proj.bias, self.start)
        if exact:
            self.formula = "(A₁ − λA₂)/(1 − λ₀)"

    def factor(self, x: Tensor) -> Tensor:
        """λ = σ(w·x + b) of each token and head (B, N, S, 1)."""
        return torch.sigmoid(scores_of(self.lambda_proj, x))

    def difference(self, factor: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """(first − λ·second)/(1 − λ₀), or without the quotient."""
        if not self.exact:
            return first - factor * second
        before = torch.sigmoid(torch.full_like(factor, self.start))
        # so that equal ones give `first` to the bit
        return first + (before * first - factor * second) / (1 - before)

    def coefficient(self) -> Tensor:
        """σ(b) (N,): λ where w·x is 0, as everywhere at step 0."""
        return torch.sigmoid(self.lambda_proj.bias.float())


class DiffLora(Branched):
    """DiffLoRA (Misrahi et al. 2025, arXiv 2507.23588): o₁ − λ·o₂ of two branches with a LoRA each.

    λ is a learned number of the layer that starts at `lambda_init`: theirs is fixed, or learned as
    in `Reparametrised`. With `alone`, the second branch reads its LoRA alone, whose B is then drawn
    like A: with both B at zero no gradient would reach them. `norm`: by head, as of `split`.
    """

    kind = "difflora"
    read_twice = ("q_proj", "k_proj")
    weight_name = "lambda_d"

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        r: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        lambda_init: float = 0.1,
        alone: bool = False,
        norm: bool = False,
    ):
        super().__init__(plain, layer, r, alpha, dropout, norm)
        if not 0 <= lambda_init < 1:
            raise UserError(f"lambda_init is {lambda_init!r}, expected a number in [0, 1)")
        self.lambda_init = lambda_init
        self.lambda_d = filled(1, lambda_init)
        self.alone = alone
        if alone:
            for name in ("q2", "k2"):
                weight = self.get_parameter(f"{name}.lora_B.weight")
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


class Dex(Variant):
    """DEX (Kong et al. 2025, arXiv 2505.16333): o − λ·o·W_D on the outputs of chosen heads.

    The map is unchanged. One W_D (D, D) is for the chosen `heads` of a layer (None: all) and starts
    at 0; one λ starts at `lambda_init`. So it is exact at step 0 without annealing λ, and has a
    gradient as long as λ is not 0 too. It is linear in o, so `fold` merges it into the output
    projection.
    """

    kind = "dex"
    foldable = True
    weight_name = "lambda_d"
    lora_half = "lora_A"  # (W + B·A)·M = W·M + B·(A·M)

    def __init__(
        self,
        plain: Attention,
        layer: int,
        *,
        heads: list | None = None,
        lambda_init: float = 1.0,
    ):
        super().__init__(plain, layer)
        known = range(self.num_heads)
        chosen = known if heads is None else heads
        if not chosen or not all(type(head) is int and head in known for head in chosen):
            raise UserError(
                f"heads are {heads!r}, expected at least one of 0 to {self.num_heads - 1}"
            )
        self.heads = sorted(set(chosen))
        if not 0 < abs(lambda_init) <= 1e6:
            raise UserError(
                f"lambda_init is {lambda_init!r}, expected a number other than 0, since W_D starts "
                "at 0"
            )
        self.w_d = nn.Parameter(torch.zeros(self.head_dim, self.head_dim))
        self.lambda_d = filled(1, lambda_init)

    def mix(self, x, q, k, v, mask) -> Tensor:
        heads = self.softmax_attention(q, k, v, mask)
        if len(self.heads) == self.num_heads:
            return self.change(heads)
        by_head = list(heads.unbind(1))
        for head in self.heads:
            by_head[head] = self.change(by_head[head])
        return torch.stack(by_head, dim=1)

    def change(self, heads: Tensor) -> Tensor:
        """o − λ·o·W_D for heads o (…, S, D), in fp32, cast back to their dtype."""
        wide = heads.float()
        with torch.autocast(heads.device.type, enabled=False):
            noise = torch.matmul(wide, self.w_d.float())
        return (wide - self.lambda_d.float() * noise).to(heads.dtype)

    def fold_into(self, layer: nn.Linear) -> None:
        """W·(I − λ·W_D)ᵀ at the columns of each chosen head of W (…, N·D)."""
        by_head = layer.weight.float().unflatten(1, (self.num_heads, self.head_dim)).clone()
        noise = by_head[:, self.heads] @ self.w_d.float().T
        by_head[:, self.heads] -= self.lambda_d.float() * noise
        layer.weight.copy_(by_head.flatten(1))


# Every variant by name. A new one is a class above and its place here.
VARIANTS = (Softmax, Shared, Split, Twin, V2, DiffLora, Dex, Mean, Gate, Temperature, Sink)
KINDS: dict[str, type[Variant]] = {variant.kind: variant for variant in VARIANTS}


def options_of(attention: str) -> dict[str, Any]:
    """The options of a variant, as `graft` takes them, with their defaults."""
    parameters = inspect.signature(KINDS[attention]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def default_options(attention: str, r: int, alpha: float, dropout: float) -> dict[str, Any]:
    """Options that give a second branch rank, scale and dropout of the adapter; {} without one."""
    if not issubclass(KINDS[attention], Branched):
        return {}
    return {"r": r, "alpha": alpha, "dropout": dropout}


def base_layer(projection: Any) -> nn.Linear:
    """The linear layer under LoRA, or the projection itself."""
    return getattr(projection, "base_layer", projection)


# Surgery

TOWERS = {"decoder": ["language_model.layers"], "vision": ["vision_tower.encoder.layers"]}
TOWERS["both"] = TOWERS["decoder"] + TOWERS["vision"]
FEED_FORWARDS = ("mlp", "swiglu", "swiglu-new")


class SwiGLU(nn.Module):
    """(swish(x·W_G) ⊙ x·W_1)·W_2 with a hidden width of int(8/3·H), fresh (the paper, Eq. 7).

    LoRA leaves it alone.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        width = int(8 / 3 * hidden_size)
        self.w_g, self.w_1 = (Linear(hidden_size, width, bias=False) for _ in range(2))
        self.w_2 = Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x if torch.is_autocast_enabled(x.device.type) else x.to(self.w_g.weight.dtype)
        return self.w_2(nn.functional.silu(self.w_g(h)) * self.w_1(h)).to(x.dtype)


def graft(
    model: Adaptable,
    attention: str,
    *,
    diff_in: str = "decoder",
    feed_forward: str = "mlp",
    seed: int = 0,
    **options,
) -> list[str]:
    """Turn a plain model into a variant, in place, and return the names of its new parameters.

    attention: a key of KINDS; `options` are the keyword arguments of its class. diff_in: "decoder",
    "vision" or "both". feed_forward of the decoder (the paper, Table 1): "mlp" as published,
    "swiglu" with the published weights and a silu gate, or "swiglu-new", fresh. New parameters are
    fp32, on the model's device (meta included), the same for the same seed. Raises UserError for
    what is unknown, grafted already, or cannot learn; the model is then unchanged.
    """
    # 1. the arguments
    for value, known in ((attention, KINDS), (diff_in, TOWERS), (feed_forward, FEED_FORWARDS)):
        if value not in known:
            raise UserError(f"unknown {value!r}: choose one of {', '.join(known)}")
    if feed_forward != "mlp" and diff_in == "vision":
        raise UserError(
            f"feed_forward {feed_forward!r} concerns the decoder: graft it with diff_in 'decoder' "
            "or 'both'"
        )
    if not fits(seed, int) or abs(seed) >= 2**63:
        raise UserError(f"seed {quoted(seed)}: expected a number of less than 64 bits")
    variant = KINDS[attention]
    defaults = options_of(attention)
    annotations = inspect.signature(variant).parameters
    for name, value in options.items():
        if name not in defaults or not fits(value, annotations[name].annotation):
            raise UserError(
                f"{attention!r} has no option {name}={quoted(value)}: it takes "
                f"{quoted(defaults, 200)}"
            )
    options = defaults | options
    # 2. the new modules, drawn on the CPU: a seed gives the same numbers on every device
    before = new_parameters(model)
    device = model.device
    drawn_on = "meta" if device.type == "meta" else "cpu"
    new = []
    with torch.random.fork_rng(devices=[]), torch.device(drawn_on):
        torch.default_generator.manual_seed(seed)
        for tower in TOWERS[diff_in]:
            for number, layer in enumerate(model.get_submodule(tower).children(), 1):
                plain = layer.get_submodule("self_attn")
                if type(plain) is not Attention:
                    raise UserError(
                        f"{tower}.{number - 1} has no plain attention: graft a freshly loaded model"
                    )
                new.append((layer, "self_attn", variant(plain, number, **options)))
        if feed_forward == "swiglu-new":
            for layer in model.language_model.layers:
                new.append((layer, "mlp", SwiGLU(model.config.text.hidden_size)))
    # 3. in place of the old ones
    for layer, name, module in new:
        layer.add_module(name, module.to(device).train(layer.training))
    if feed_forward == "swiglu":
        for layer in model.language_model.layers:
            mlp: Any = layer.get_submodule("mlp")
            mlp.activation = "silu"
    call = {"kind": attention, "where": diff_in, "feed_forward": feed_forward, "seed": seed}
    model.grafts = (*model.grafts, call | options)
    return [name for name in new_parameters(model) if name not in before]


def variants_of(model: nn.Module) -> dict[str, Variant]:
    """Every grafted attention of a model by its path, in order."""
    return {path: m for path, m in attention_modules(model).items() if isinstance(m, Variant)}


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `graft` has added, by name, in the model's order.

    LoRA on a variant's projections is not among them.
    """
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, Variant | SwiGLU)
        for name, parameter in module.named_parameters()
        if isinstance(module, SwiGLU) or name.partition(".")[0] not in module.projections()
    }


@torch.no_grad()
def fold(model: Adaptable) -> None:
    """Make a grafted model plain again, in place, where plain parts can compute the same.

    That is after softmax, dex, temperature and swiglu. What is folded into a bf16 weight is rounded
    to it. Merged LoRA is folded too, so that it can still be unmerged. Raises UserError, and folds
    nothing, for other variants, unmerged LoRA, and weights of few bits that would change.
    """
    # 1. whether it can be done
    variants = variants_of(model)
    feed_forwards = {call["feed_forward"] for call in model.grafts}
    for path, module in variants.items():
        if not module.foldable or "swiglu-new" in feed_forwards:
            raise UserError(
                f"{path}: no plain model computes {module.kind!r} with {', '.join(feed_forwards)}: "
                "keep it as base and adapter"
            )
        name = module.folded_name
        projection = module.get_submodule(name)
        if not getattr(projection, "merged", True):  # a plain layer has no LoRA
            raise UserError(
                f"{path}.{name} carries LoRA: merge the adapter before folding the graft"
            )
        if module.lora_half and not base_layer(projection).weight.is_floating_point():
            raise UserError(f"{path}.{name} is quantized: fold before, or open the base anew")
    # 2. what the variant changes goes into the weights
    for path, module in variants.items():
        if module.lora_half:  # other variants change no weight
            projection: Any = module.get_submodule(module.folded_name)
            lora = getattr(projection, "lora", None)
            if lora:
                projection.unmerge()
                module.fold_into(lora.get_submodule(module.lora_half))
            module.fold_into(base_layer(projection))
            if lora:
                projection.merge()
        plain = Attention.__new__(Attention)
        plain.adopt(module)
        model.set_submodule(path, plain.train(module.training))
    # 3. the feed-forward is named in the configuration
    if "swiglu" in feed_forwards:
        text = replace(model.config.text, hidden_activation="silu")
        model.config = replace(model.config, text=text)
        model.language_model.config = text
    model.grafts = ()


# What is logged


def lambdas(model: nn.Module) -> dict[str, Tensor]:
    """The weight of the second map, by the path of the attention, detached.

    λ (1,) or (N,), for twin μ (N,).
    """
    values = {path: module.coefficient() for path, module in variants_of(model).items()}
    return {path: value.detach() for path, value in values.items() if value is not None}


@torch.no_grad()
def map_distance(model: nn.Module, **batch) -> dict[str, Tensor]:
    """Total variation ½·Σ|A₁ − A₂| between the two maps of each layer, from 0 to 1, by its path.

    The mean over heads and valid queries of one forward pass of `batch`, the arguments of the
    model.
    """
    first, distances = {}, {}

    def tap(path: str, weights: Tensor) -> None:
        if path not in first:
            first[path] = weights
            return
        gap = (first.pop(path).float() - weights.float()).abs()
        by_query = gap.sum(-1).mean(1) / 2  # (B, S)
        valid = batch.get("attention_mask")
        if valid is not None and path.startswith("language_model."):
            by_query = by_query[valid.bool()]
        distances[path] = by_query.mean()

    taps = {}
    for path, module in variants_of(model).items():
        if module.maps == 2:
            taps[module] = partial(tap, path)
    if taps:
        with tapped(taps):
            # the head, the widest product, is not needed here
            model(**(batch | {"positions_to_keep": 1}))
    return distances
