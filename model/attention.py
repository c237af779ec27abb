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
from torch import Tensor, nn

from model.linear import Linear

# which positions of a sequence to keep: the last n, indices (T,) or (B, T), or all
Positions = int | Tensor | None


class Rope:
    """Rotary position embedding (Su et al. 2021) of one batch, in rotate-half form: pairs are (i, i
    + D/2).

    Sines and cosines are computed in fp32 from integer positions (B, S), whatever the model's
    dtype, and then cast to the dtype of x: inverse frequencies in bf16 would change the logits by a
    relative 3e-5.
    """

    def __init__(
        self,
        positions: Tensor,
        theta: float,
        stretch: Callable[[Tensor], Tensor] | None = None,
    ):
        """stretch: of the frequencies (D/2,)."""
        self.positions, self.theta, self.stretch = positions, theta, stretch
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, N, S, D) rotated by its positions; D may be any even width."""
        cos, sin = self._table(x.shape[-1], x.dtype)
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin

    def _table(self, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if (width, dtype) in self._tables:
            return self._tables[width, dtype]
        even = torch.arange(0, width, 2, dtype=torch.float32, device=self.positions.device)
        frequencies = 1.0 / self.theta ** (even / width)
        if self.stretch is not None:
            frequencies = self.stretch(frequencies)
        angles = self.positions[:, None, :, None].float() * frequencies  # (B, 1, S, D/2)
        cos = angles.cos()
        sin = angles.sin()
        # (x₁, x₂) becomes (x₁·cos − x₂·sin, x₂·cos + x₁·sin): the sign is in the table
        cosines = torch.cat((cos, cos), dim=-1)
        sines = torch.cat((-sin, sin), dim=-1)
        table = cosines.to(dtype), sines.to(dtype)
        # a compiled layer with checkpointing must not have side effects
        if not torch.compiler.is_compiling():
            self._tables[width, dtype] = table
        return table


def attention_mask(
    valid: Tensor,
    types: Tensor,
    queries: Positions = None,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """A boolean mask (B, 1, Sq, Sk), True where query i may attend to key j.

    valid (B, Sk) is False at padding. types (B, Sk) is 0 for image and prefix, 1 for the causal
    suffix. `queries`: how many of the last positions are queries, or which positions (Sq,); None
    means all. Positions of type 0 attend to each other; every other pair is causal, j ≤ i:

        types 0 0 0 1 1         0: x x x . .        types all 1: causal
                                0: x x x . .        types all 0: bidirectional
                                0: x x x . .
                                1: x x x x .
                                1: x x x x x

    With a sliding `window` W (Gemma 2), the key of a causal pair is token i itself or one of the
    W − 1 valid tokens before it; pairs of type 0 are not limited.
    `documents` (B, Sk) numbers the documents packed into a row: positions attend within their own
    document only.
    Every position attends to itself, padding included, so that no row is empty; outputs at padding
    are never used.
    """
    keys = torch.arange(valid.shape[1], device=valid.device)
    # 1. decoding, one token
    is_step = isinstance(queries, int) and queries == 1
    if is_step and window is None and documents is None:
        return F.pad(valid[:, None, None, :-1].bool(), (0, 1), value=True)
    if queries is None:
        queries = keys
    elif isinstance(queries, int):
        queries = keys[-queries:]

    # 2. causal pairs; a window counts valid tokens: padding between them takes no place in it
    causal = keys <= queries[:, None]
    if window is not None:
        place = valid.long().cumsum(-1)
        distance = place[:, queries, None] - place[:, None]
        causal = causal & (distance < window)

    # 3. pairs of the prefix, and what limits both
    prefix = types == 0
    both_prefix = prefix[:, queries, None] & prefix[:, None]
    visible = (causal | both_prefix) & valid[:, None].bool()
    if documents is not None:
        visible &= documents[:, queries, None] == documents[:, None]
    is_itself = keys == queries[:, None]
    return (visible | is_itself)[:, None]


def keep_positions(x: Tensor, positions: Positions, dim: int = 1) -> Tensor:
    """x (B, …, S, …) at the last n positions of `dim`, at indices (T,) or (B, T), or all of x."""
    if positions is None:
        return x
    if isinstance(positions, int):
        return x.narrow(dim, x.shape[dim] - positions, positions)
    index = torch.atleast_2d(positions)  # (1 or B, T)
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    return torch.take_along_dim(x, index.reshape(shape), dim)


class LayerCache:
    """Keys and values of one layer, for at most `capacity` positions.

    When memory is full, it is taken for twice as many positions as needed, at least for `least`.

    A compiled step must see constant sizes and constants. When `position` (S,), a tensor, is set, k
    and v are written there and the whole capacity is returned; the mask hides what is not written
    yet.
    """

    least = 1024

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0  # positions that are filled
        self.room = 0  # positions for which memory is taken
        self.position: Tensor | None = None
        self.keys = self.values = torch.empty(0)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, heads, S, width) and return all keys and values so far."""
        if self.position is not None:
            self.keys.index_copy_(2, self.position, k)
            self.values.index_copy_(2, self.position, v)
            return self.keys, self.values
        end = self.length + k.shape[2]
        assert end <= self.capacity, f"{end} positions do not fit into a cache of {self.capacity}"
        if end > self.room:
            if self.room == 0:
                self.keys, self.values = k[:, :, :0], v[:, :, :0]
            room = min(self.capacity, max(2 * end, self.least))
            more = (0, 0, 0, room - self.room)  # behind the last position
            # zeros, not empty: a masked weight of 0 times a NaN left in memory would be NaN
            self.keys = F.pad(self.keys, more)
            self.values = F.pad(self.values, more)
            self.room = room
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


# called with the weights (B, N, Sq, Sk) of an attention
Tap = Callable[[Tensor], None]
# what `adopt` takes over beside the projections
ADOPTED = "hidden_size num_heads num_key_value_heads head_dim scale softcap output_name tap".split()


class Attention(nn.Module):
    """Softmax attention with N query heads sharing K key heads: softmax(QKᵀ·scale)·V, then the
    output projection.

    `scale` is 1/√D unless given. `softcap` c bounds the logits to c·tanh(x/c) before the mask
    (Gemma 2). With a `tap` or a softcap the eager path is always taken.
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
        self.hidden_size, self.output_name = hidden_size, output_name
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.head_dim = head_dim
        self.scale: float = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.tap: Tap | None = None
        width, key_width = num_heads * head_dim, num_key_value_heads * head_dim
        self.q_proj = Linear(hidden_size, width, bias)
        self.k_proj = Linear(hidden_size, key_width, bias)
        self.v_proj = Linear(hidden_size, key_width, bias)
        # the published name: o_proj in Gemma, out_proj in SigLIP
        output_bias = bias if output_bias is None else output_bias
        self.add_module(output_name, Linear(width, hidden_size, output_bias))

    def projections(self) -> list[str]:
        return ["q_proj", "k_proj", "v_proj", self.output_name]

    def adopt(self, other: "Attention") -> None:
        """Take over the sizes, the projections and the tap of `other`; in place of `__init__`."""
        nn.Module.__init__(self)
        for name in ADOPTED:
            setattr(self, name, getattr(other, name))
        for name in self.projections():
            self.add_module(name, other.get_submodule(name))

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        positions: Positions = None,
    ) -> Tensor:
        """x (B, S, H) to (B, S, H), or to the `positions` to keep; mask (B, 1, S, Sk), None if all
        keys are visible."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        # queries that nobody needs are dropped before the products, unless a tap looks at all
        if self.tap is None:
            x = keep_positions(x, positions)
            q = keep_positions(q, positions, dim=2)
            if mask is not None:
                mask = keep_positions(mask, positions, dim=2)
            positions = None
        return keep_positions(self.join_heads(self.mix(x, q, k, v, mask)), positions)

    def project(
        self,
        x: Tensor,
        rope: Rope | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, N, S, D), k and v (B, K, S, D), rotated; the cache keeps k and v."""
        q = self.heads_of("q_proj", x)
        k = self.heads_of("k_proj", x)
        v = self.heads_of("v_proj", x)
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def heads_of(self, name: str, x: Tensor) -> Tensor:
        """(B, S, H) to (B, n, S, D) by the projection `name`."""
        return self.split_heads(getattr(self, name)(x))

    def mix(self, x, q, k, v, mask) -> Tensor:
        """Heads (B, N, S, D) from queries and all keys and values, cached ones included."""
        return self.softmax_attention(q, k, v, mask)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, S, n·D) to (B, n, S, D)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def join_heads(self, heads: Tensor) -> Tensor:
        """Heads (B, N, S, D) to the output (B, S, H)."""
        return self.get_submodule(self.output_name)(heads.transpose(1, 2).flatten(2))

    def softmax_attention(
        self,
        q,
        k,
        v,
        mask,
        scale: float | None = None,
    ) -> Tensor:
        """softmax(qkᵀ·scale)·v for any number of query heads that is a multiple of the key
        heads."""
        scale = scale or self.scale
        # nothing needs the logits or the weights themselves
        if self.softcap is None and self.tap is None:
            return fused_attention(q, k, v, mask, scale)
        logits = self.logits(q, k, mask, scale)
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
        if self.tap is not None:
            self.tap(weights)
        return torch.matmul(weights, repeated(v, q))

    def logits(self, q, k, mask, scale: float) -> Tensor:
        """qkᵀ·scale (B, N, Sq, Sk), bounded, and very low where the mask hides a key."""
        k = repeated(k, q)
        logits = torch.matmul(q, k.transpose(2, 3)) * scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if mask is not None:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        return logits


def repeated(heads: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, K, S, D), each head repeated for the query heads that share it."""
    groups = q.shape[1] // heads.shape[1]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def fused_attention(q, k, v, mask, scale: float) -> Tensor:
    """softmax(qkᵀ·scale)·v (B, N, S, D) without tap or softcap, by the fastest function for the
    device."""
    # one query: the query heads of a key head are treated as its queries, which is faster
    if q.shape[2] == 1:
        by_key_head = q.reshape(*k.shape[:2], -1, q.shape[3])
        heads = F.scaled_dot_product_attention(by_key_head, k, v, mask, scale=scale)
        return heads.view(*q.shape[:3], -1)
    # CUDA's kernels take a mask or shared heads, not both
    if mask is not None and q.is_cuda:
        if k.shape[1] > 1:
            k, v = repeated(k, q), repeated(v, q)
        else:  # shared without a copy, which would be kept for the backward pass
            k = k.expand(-1, q.shape[1], -1, -1)
            v = v.expand(-1, q.shape[1], -1, -1)
    is_shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=is_shared)


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its path, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}


@contextlib.contextmanager
def tapped(taps: Mapping[Any, Tap]) -> Iterator[None]:
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
