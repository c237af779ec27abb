"""Attention, the plain one: rotary positions, the one mask builder, softmax attention, and its key/value cache.

In: hidden states (B, S, H), a `Rope`, a boolean mask (B, 1, S, Sk). Out: hidden states (B, S, H).
Both towers use this class; `model/differential.py` holds its siblings. Next: `model/gemma.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from model import cpu
from model.common import UserError
from model.linear import Linear


class Rope:
    """Rotary position embedding (Su et al. 2021) of one batch, in rotate-half form: pairs are (i, i + D/2).

    Angles are computed in fp32 from integer positions (B, S), whatever dtype the model has, and cast to the dtype of
    what they turn: inverse frequencies in bf16 would cost a relative 3e-5 in the logits.
    """

    def __init__(self, positions: torch.Tensor, theta: float):
        self.positions, self.theta = positions, theta
        self._tables: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, N, S, D) turned by its positions; D may be any even width."""
        cos, sin = self._table(x.shape[-1], x.dtype)
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin

    def _table(self, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if (width, dtype) in self._tables:
            return self._tables[width, dtype]
        even = torch.arange(0, width, 2, dtype=torch.float32, device=self.positions.device)
        angles = self.positions[:, None, :, None].float() * (1.0 / self.theta ** (even / width))
        cos, sin = angles.cos(), angles.sin()  # (B, 1, S, D/2)
        # (x₁, x₂) becomes (x₁·cos − x₂·sin, x₂·cos + x₁·sin): the sign is in the table
        table = torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
        if not torch.compiler.is_compiling():  # a compiled, checkpointed layer may leave nothing behind
            self._tables[width, dtype] = table
        return table


def attention_mask(
    valid: torch.Tensor,
    types: torch.Tensor,
    queries: int | torch.Tensor | None = None,
    window: int | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Who may see whom: a boolean mask (B, 1, Sq, Sk), True where query i may attend to key j.

    valid (B, Sk) is False at padding; types (B, Sk) is 0 for image and prefix, 1 for the causal suffix; `queries` is
    how many of the last positions ask (None: all of them), or which ones (Sq,). Types 0 see each other, all else looks
    back:

        types 0 0 0 1 1         0: x x x . .        types all 1: causal
                                0: x x x . .        types all 0: bidirectional
                                0: x x x . .
                                1: x x x x .
                                1: x x x x x

    With a sliding `window` W (Gemma 2), looking back reaches i − j < W; the prefix block stays whole.
    `documents` (B, Sk) numbers the documents that are packed into a row: none sees another.
    Every position sees itself, so that no row is empty, padding included: what padding computes, nobody reads.
    """
    if isinstance(queries, int) and queries == 1 and window is None and documents is None:  # a step of decoding
        return F.pad(valid[:, None, None, :-1].bool(), (0, 1), value=True)
    query = key = torch.arange(valid.shape[1], device=valid.device)
    if queries is not None:
        query = queries if isinstance(queries, torch.Tensor) else key[-queries:]
    back = key[None, :] <= query[:, None]
    if window is not None:
        back &= query[:, None] - key[None, :] < window
    prefix = types == 0
    block = prefix[:, query, None] & prefix[:, None, :]
    seen = (back | block) & valid[:, None, :].bool()
    if documents is not None:
        seen &= documents[:, query, None] == documents[:, None, :]
    return (seen | (key[None, :] == query[:, None]))[:, None]


def keep_positions(x: torch.Tensor, positions: int | torch.Tensor | None, dim: int = 1) -> torch.Tensor:
    """What `positions_to_keep` of `PaliGemma.forward` names along `dim` of x (B, …, S, …), a boolean mask along 1."""
    if positions is None:
        return x
    if isinstance(positions, int):
        return x.narrow(dim, x.shape[dim] - positions, positions)
    if positions.dtype == torch.bool:
        return x[positions]
    if positions.dim() == 1:
        return x.index_select(dim, positions)
    shape = [*x.shape[:dim], positions.shape[1], *x.shape[dim + 1 :]]
    index = positions.view(len(x), *[1] * (dim - 1), -1, *[1] * (x.dim() - dim - 1))
    return x.gather(dim, index.expand(shape))


class LayerCache:
    """Keys and values of one layer, allocated once for `capacity` positions on first use.

    A compiled step must find nothing changed, neither sizes nor numbers: when `position` (S,) is set, a tensor, k and v
    are written there, the whole capacity is returned, and the mask hides what is not written.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.position: torch.Tensor | None = None
        self.keys = self.values = None

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v (B, heads, S, width) and return all that is held. UserError when it is full."""
        if self.position is not None:
            self.keys.index_copy_(2, self.position, k)
            self.values.index_copy_(2, self.position, v)
            return self.keys, self.values
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise UserError(
                f"{end} positions do not fit into a cache of {self.capacity}: shorten the prompt, ask for fewer new "
                "tokens, or allocate a larger cache"
            )
        if self.keys is None:
            self.keys = k.new_zeros(*k.shape[:2], self.capacity, k.shape[3])  # hidden is not harmless: 0 · NaN is NaN
            self.values = v.new_zeros(*v.shape[:2], self.capacity, v.shape[3])
        self.keys.narrow(2, self.length, k.shape[2]).copy_(k)
        self.values.narrow(2, self.length, k.shape[2]).copy_(v)
        self.length = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class Attention(nn.Module):
    """Softmax attention with N query heads sharing K key heads: softmax(QKᵀ·scale)·V, then the output projection.

    `softcap` c bounds the logits to c·tanh(x/c) before the mask (Gemma 2). `backend` is "sdpa" or "eager"; soft-capped
    logits and a `tap`, a function that is handed the weights (B, N, Sq, Sk), always take the eager path.
    A differential sibling overrides `project` (what q, k and v are) and `mix` (how they meet), and nothing else.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        scale: float,
        softcap: float | None = None,
        bias: bool = False,
        output_name: str = "o_proj",
    ):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.scale, self.softcap, self.output_name = scale, softcap, output_name
        self.backend = "sdpa"
        self.tap: Callable[[torch.Tensor], None] | None = None
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        # o_proj in Gemma, out_proj in SigLIP: published names stay
        self.add_module(output_name, Linear(num_heads * head_dim, hidden_size, bias=bias))

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope | None = None,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
        positions: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, S, H) to (B, S, H), or to the `positions` to keep; `mask` (B, 1, S, Sk) is None where all see all."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        # a tap is handed the weights of all queries, and as many of each row must be left
        early = self.tap is None and not (isinstance(positions, torch.Tensor) and positions.dtype == torch.bool)
        if early and positions is not None:
            x, q = keep_positions(x, positions), keep_positions(q, positions, dim=2)
            mask = None if mask is None else keep_positions(mask.expand(len(x), -1, -1, -1), positions, dim=2)
        heads = self.mix(x, q, k, v, mask)  # (B, N, S, D)
        out = getattr(self, self.output_name)(heads.transpose(1, 2).flatten(2))
        return out if early else keep_positions(out, positions)

    def project(self, x: torch.Tensor, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (B, N, S, D), k and v (B, K, S, D), rotated: k and v are what the cache keeps."""
        q, k, v = (self.split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def mix(self, x, q, k, v, mask) -> torch.Tensor:
        """Heads (B, N, S, D) from queries and all keys and values, cached ones included."""
        return self.softmax_attention(q, k, v, mask)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, n·D) to (B, n, S, D)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    @property
    def fused(self) -> bool:
        """Whether the weights may stay inside a kernel, since nobody looks at them."""
        return self.backend == "sdpa" and self.softcap is None and self.tap is None

    def softmax_attention(self, q, k, v, mask, scale: float | None = None) -> torch.Tensor:
        """softmax(qkᵀ·scale)·v for any number of query heads that is a multiple of the key heads."""
        scale, groups = self.scale if scale is None else scale, q.shape[1] // k.shape[1]
        if self.fused:
            if cpu.rows_are_faster(q, k):
                return cpu.row_attention([(q, k)], v, mask, scale)
            if q.shape[2] == 1:  # the heads of a lone query become the queries of their key head
                by_key_head = q.reshape(*k.shape[:2], groups, -1)
                heads = F.scaled_dot_product_attention(by_key_head, k, v, mask, scale=scale)
                return heads.view(*q.shape[:3], -1)
            if groups > 1 and mask is not None and q.is_cuda:  # CUDA's kernels take a mask or shared heads, not both
                k, v, groups = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), 1
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=groups > 1)
        k, v = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v))
        logits = torch.matmul(q, k.transpose(2, 3)) * scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if mask is not None:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
        if self.tap is not None:
            self.tap(weights)
        return torch.matmul(weights, v)


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its path, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}


@contextlib.contextmanager
def tapped(taps: Mapping[Attention, Callable[[torch.Tensor], None]]) -> Iterator[None]:
    """While the block runs, hand the weights (B, N, Sq, Sk) of each attention to its function, one call for each map.

    What was tapping before is put back afterwards, also after an error. Attention takes the eager path meanwhile.
    """
    before = {module: module.tap for module in taps}
    try:
        for module, tap in taps.items():
            module.tap = tap
        yield
    finally:
        for module, tap in before.items():
            module.tap = tap


def set_attention_backend(model: nn.Module, backend: str) -> None:
    """Make every attention of `model` use "sdpa" (the fused kernels) or "eager" (the equations, written out)."""
    if backend not in ("sdpa", "eager"):
        raise UserError(f"attention backend is {backend!r}, expected 'sdpa' or 'eager'")
    for module in attention_modules(model).values():
        module.backend = backend
