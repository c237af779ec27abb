"""Plain attention: rotary positions, the only function that makes masks, softmax attention, and its
key/value cache.

In: hidden states (B, S, H), a `Rope`, a boolean mask (B, 1, S, Sk). Out: hidden states (B, S, H).
Both towers use this class; its variants are in `model/differential.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from model.linear import Linear


class Rope:
    """Rotary position embedding (Su et al. 2021) of one batch, in rotate-half form: pairs are (i, i
    + D/2).

    Sines and cosines are computed in fp32 from integer positions (B, S), whatever the model's
    dtype, and then cast to the dtype of x: inverse frequencies in bf16 would change the logits by a
    relative 3e-5.
    """

    def __init__(self, positions: torch.Tensor, theta: float):
        self.positions, self.theta = positions, theta
        self._tables: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, N, S, D) rotated by its positions; D may be any even width."""
        cos, sin = self._table(x.shape[-1], x.dtype)
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin

    def _table(self, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if (width, dtype) in self._tables:
            return self._tables[width, dtype]
        even = torch.arange(0, width, 2, dtype=torch.float32, device=self.positions.device)
        frequencies = 1.0 / self.theta ** (even / width)
        angles = self.positions[:, None, :, None].float() * frequencies  # (B, 1, S, D/2)
        cos = angles.cos()
        sin = angles.sin()
        # (x₁, x₂) becomes (x₁·cos − x₂·sin, x₂·cos + x₁·sin): the sign is in the table
        cosines = torch.cat((cos, cos), dim=-1).to(dtype)
        sines = torch.cat((-sin, sin), dim=-1).to(dtype)
        table = cosines, sines
        # a compiled layer with checkpointing must not have side effects
        if not torch.compiler.is_compiling():
            self._tables[width, dtype] = table
        return table


def attention_mask(
    valid: torch.Tensor,
    types: torch.Tensor,
    queries: int | torch.Tensor | None = None,
    window: int | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """A boolean mask (B, 1, Sq, Sk), True where query i may attend to key j.

    valid (B, Sk) is False at padding. types (B, Sk) is 0 for image and prefix, 1 for the causal
    suffix. `queries`: how many of the last positions are queries, or which positions (Sq,); None
    means all. Positions of type 0 attend to each other; every other pair is causal, j ≤ i:

        types 0 0 0 1 1         0: x x x . .        types all 1: causal
                                0: x x x . .        types all 0: bidirectional
                                0: x x x . .
                                1: x x x x .
                                1: x x x x x

    A sliding `window` W (Gemma 2) limits causal pairs to fewer than W valid tokens from j to i, i
    not counted; pairs of type 0 are not limited.
    `documents` (B, Sk) numbers the documents packed into a row: positions attend within their own
    document only.
    Every position attends to itself, padding included, so that no row is empty; outputs at padding
    are never used.
    """
    # decoding, one token
    if isinstance(queries, int) and queries == 1 and window is None and documents is None:
        before = valid[:, None, None, :-1].bool()
        return F.pad(before, (0, 1), value=True)
    query = key = torch.arange(valid.shape[1], device=valid.device)
    if queries is not None:
        query = queries if isinstance(queries, torch.Tensor) else key[-queries:]
    causal = key[None, :] <= query[:, None]
    # counted in valid tokens: padding between them takes no place in the window
    if window is not None:
        place = valid.long().cumsum(-1)
        distance = place[:, query, None] - place[:, None, :]
        causal = causal & (distance < window)
    prefix = types == 0
    both_prefix = prefix[:, query, None] & prefix[:, None, :]
    visible = (causal | both_prefix) & valid[:, None, :].bool()
    if documents is not None:
        visible &= documents[:, query, None] == documents[:, None, :]
    is_itself = key[None, :] == query[:, None]
    return (visible | is_itself)[:, None]


def keep_positions(
    x: torch.Tensor, positions: int | torch.Tensor | None, dim: int = 1
) -> torch.Tensor:
    """The `positions_to_keep` of `PaliGemma.forward` along `dim` of x (B, …, S, …)."""
    if positions is None:
        return x
    if isinstance(positions, int):
        return x.narrow(dim, x.shape[dim] - positions, positions)
    positions = positions.expand(len(x), -1)  # (B, T)
    index = positions.view(len(x), *[1] * (dim - 1), -1, *[1] * (x.dim() - dim - 1))
    return x.gather(dim, index.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


class LayerCache:
    """Keys and values of one layer, for at most `capacity` positions; memory for `least` of them is
    taken on first use, and doubled when it is full.

    A compiled step must see constant sizes and constants. When `position` (S,), a tensor, is set, k
    and v are written there and the whole capacity is returned; the mask hides what is not written
    yet.
    """

    least = 1024

    def __init__(self, capacity: int):
        self.capacity, self.length, self.room = capacity, 0, 0
        self.position: torch.Tensor | None = None
        self.keys = self.values = torch.empty(0)

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v (B, heads, S, width) and return all keys and values so far."""
        if self.position is not None:
            self.keys.index_copy_(2, self.position, k)
            self.values.index_copy_(2, self.position, v)
            return self.keys, self.values
        end = self.length + k.shape[2]
        assert end <= self.capacity, f"{end} positions do not fit into a cache of {self.capacity}"
        # zeros, not empty: a masked weight of 0 times a NaN left in memory would be NaN
        if end > self.room:
            room = min(self.capacity, max(2 * end, self.least))
            more = (0, 0, 0, room - self.room)
            self.keys = F.pad(self.keys if self.room else k[:, :, :0], more)
            self.values = F.pad(self.values if self.room else v[:, :, :0], more)
            self.room = room
        self.keys.narrow(2, self.length, k.shape[2]).copy_(k)
        self.values.narrow(2, self.length, k.shape[2]).copy_(v)
        self.length = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class Attention(nn.Module):
    """Softmax attention with N query heads sharing K key heads: softmax(QKᵀ·scale)·V, then the
    output projection.

    `scale` is 1/√D unless given. `softcap` c bounds the logits to c·tanh(x/c) before the mask
    (Gemma 2). A `tap` is a function that receives the weights (B,
    N, Sq, Sk); with a tap or a softcap the eager path is always taken.
    A variant overrides `project` (how q, k and v are made) and `mix` (how they are combined), and
    nothing else.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        output_name: str = "o_proj",
    ):
        super().__init__()
        self.hidden_size, self.bias, self.output_name = hidden_size, bias, output_name
        self.output_bias = bias if output_bias is None else output_bias
        self.num_heads, self.num_key_value_heads, self.head_dim = (
            num_heads,
            num_key_value_heads,
            head_dim,
        )
        self.scale: float = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.tap: Callable[[torch.Tensor], None] | None = None
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        # the published name: o_proj in Gemma, out_proj in SigLIP
        self.add_module(
            output_name, Linear(num_heads * head_dim, hidden_size, bias=self.output_bias)
        )

    def sizes(self) -> dict[str, Any]:
        """The arguments that make an attention of the same sizes."""
        names = "hidden_size num_heads num_key_value_heads head_dim scale softcap bias output_bias output_name"
        return {name: getattr(self, name) for name in names.split()}

    def projections(self) -> list[str]:
        return ["q_proj", "k_proj", "v_proj", self.output_name]

    def adopt(self, other: "Attention") -> None:
        """Take over the projections and the tap of `other`."""
        for name in self.projections():
            self.add_module(name, other.get_submodule(name))
        self.tap = other.tap

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope | None = None,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
        positions: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, S, H) to (B, S, H), or to the `positions` to keep; mask (B, 1, S, Sk), None if all
        keys are visible."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        # queries that nobody needs are dropped before the products; a tap needs the weights of all
        is_early = self.tap is None
        if is_early and positions is not None:
            x = keep_positions(x, positions)
            q = keep_positions(q, positions, dim=2)
            if mask is not None:
                mask = keep_positions(mask.expand(len(x), -1, -1, -1), positions, dim=2)
        heads = self.mix(x, q, k, v, mask)  # (B, N, S, D)
        joined = heads.transpose(1, 2).flatten(2)  # (B, S, N·D)
        out = self.get_submodule(self.output_name)(joined)
        return out if is_early else keep_positions(out, positions)

    def project(
        self, x: torch.Tensor, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (B, N, S, D), k and v (B, K, S, D), rotated; the cache keeps k and v."""
        q = self.split_heads(self.q_proj(x))
        k = self.split_heads(self.k_proj(x))
        v = self.split_heads(self.v_proj(x))
        if rope is None:
            return q, k, v
        return rope(q), rope(k), v

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        """Heads (B, N, S, D) from queries and all keys and values, cached ones included."""
        return self.softmax_attention(q, k, v, mask)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, n·D) to (B, n, S, D)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def softmax_attention(self, q, k, v, mask, scale: float | None = None) -> torch.Tensor:
        """softmax(qkᵀ·scale)·v for any number of query heads that is a multiple of the key
        heads."""
        scale = self.scale if scale is None else scale
        # nothing needs the logits or the weights themselves
        if self.softcap is None and self.tap is None:
            return fused_attention(q, k, v, mask, scale)
        logits = self.logits(q, k, mask, scale)
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
        if self.tap is not None:
            self.tap(weights)
        return torch.matmul(weights, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))

    def logits(self, q, k, mask, scale: float) -> torch.Tensor:
        """qkᵀ·scale (B, N, Sq, Sk), bounded, and very low where the mask hides a key."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = torch.matmul(q, k.transpose(2, 3)) * scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if mask is not None:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        return logits


def fused_attention(q, k, v, mask, scale: float) -> torch.Tensor:
    """softmax(qkᵀ·scale)·v (B, N, S, D) without tap or softcap, by the fastest function for the
    device."""
    groups = q.shape[1] // k.shape[1]
    # one query: the query heads of a key head are treated as its queries, which is faster
    if q.shape[2] == 1:
        by_key_head = q.reshape(*k.shape[:2], groups, -1)
        heads = F.scaled_dot_product_attention(by_key_head, k, v, mask, scale=scale)
        return heads.view(*q.shape[:3], -1)
    # CUDA's kernels take a mask or shared heads, not both
    if groups > 1 and mask is not None and q.is_cuda:
        # a single key head is shared without a copy, which would be kept for the backward pass
        if k.shape[1] == 1:
            k = k.expand(-1, groups, -1, -1)
            v = v.expand(-1, groups, -1, -1)
        else:
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=groups > 1)


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its path, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}


@contextlib.contextmanager
def tapped(taps: Mapping[Any, Callable[[torch.Tensor], None]]) -> Iterator[None]:
    """Within the block, call each attention's function with its weights (B, N, Sq, Sk), once for
    each map.

    This is the one way to record maps. Attention takes the eager path within the block; taps set
    before are restored.
    """
    before = {module: module.tap for module in taps}
    for module, tap in taps.items():
        module.tap = tap
    try:
        yield
    finally:
        for module, tap in before.items():
            module.tap = tap
