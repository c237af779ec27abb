"""WINGS: a low-rank learner for the picture and one for the text, beside the main attention of every layer.

In: a batch of `model/processor.py`, as for PaliGemma, with `<image>` anywhere in the text or not at all. Out: float32
logits (B, S, V). Everything is causal: token_type_ids say what is learned, and change nothing here.
Next: `model/generate.py`; `eval/shift.py` measures what the learners are there to prevent.

Source: "Wings: Learning Multimodal LLMs without Text-only Forgetting" (Zhang et al., NeurIPS 2024).

    h ──┬── main attention ────────────── + ── …          w = Router(the main attention's weights), w₁ + w₂ = 1
        ├── visual learner  (picture) ─ w₁·┤              the learners' keys and values are those embeddings that
        └── textual learner (text)   ── w₂·┘              enter the decoder, in every layer the same ones

Training begins without routers and textual learners (`routed` False): the visual ones are added as they are. `route`
makes the second stage's model of it. Where this differs from the authors' code:
- h is what the main attention reads, as in the paper's formula; the code reads the sum after it.
- A key is visible if it does not come after the query. The code compares indices from which the system's tokens are
  missing with positions that count them, so that its textual learner sees tokens that are yet to come.
- Padding hides keys, not queries. The routed learners are added once, not twice. There is one cache for both learners.
- The router reads rows of attention by the distance of the key (`Router`), not by its absolute position.

The router needs the attention weights themselves, so the main attention of a routed model is never a fused kernel.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from model.attention import Attention, LayerCache, Rope, keep_positions, tapped
from model.common import UserError
from model.gemma import Gemma
from model.linear import Linear
from model.paligemma import PaliGemma, Projector, initialize
from model.siglip import Siglip
from model.system_configs import WingsConfig

OCTAVES = 16  # distances that a router tells apart: 0, 1–2, 3–6, 7–14, …, 32767 and more
NEVER = 1 << 40  # the column of a key that no query comes after


# ---------------------------------------------------------------------------------------------------------------------
# What the learners read
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What one learner reads in every layer: the new keys of its kind, and who sees which of all keys so far."""

    x: torch.Tensor  # (B, n, H), embeddings as they enter the decoder
    rope: Rope  # of their positions
    mask: torch.Tensor  # (B, 1, S, Sn), cached keys included


class Sides(Rope):
    """The rope of a batch, which goes to every layer, and with it what the learners read there.

    `groups` (B, S, Sk) is where a router counts a key of a query: its octave of distance, of a picture's key OCTAVES
    more. None for a model without routers.
    """

    def __init__(self, positions: torch.Tensor, theta: float, visual: Side, textual: Side, groups: torch.Tensor | None):
        super().__init__(positions, theta)
        self.visual, self.textual, self.groups = visual, textual, groups


class SideCache(LayerCache):
    """A learner's keys and values in one layer, and the columns (B, n) of the sequence that they are from."""

    columns: torch.Tensor


class WingsCache:
    """What a layer has read: the main attention's keys and values, and those of each learner.

    Pictures come with the first call; after it, the visual learner's part stays as it is.
    """

    position = None  # no step of it is compiled

    def __init__(self, capacity: int):
        self.main = LayerCache(capacity)
        self.visual: SideCache | None = None
        self.textual: SideCache | None = None


def pick(chosen: torch.Tensor, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """From chosen (B, S), boolean: where those chosen are, in order, and which of these only fill up; (B, width) each.

    width None is that of the row with the most, but at least 1, so that a learner without keys takes part all the same:
    processes that train together must have the same gradients.
    """
    if width is None:
        width = max(1, int(chosen.sum(1).max()))
    index = (~chosen).long().argsort(dim=1, stable=True)[:, :width]
    return index, ~chosen.gather(1, index)


# ---------------------------------------------------------------------------------------------------------------------
# The learners
# ---------------------------------------------------------------------------------------------------------------------


class Update(nn.Module):
    """x·A·B of low rank: A from a truncated normal distribution, B zero."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.A = Linear(width, rank, bias=False)
        self.B = Linear(rank, width, bias=False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        drawn = torch.empty(self.A.weight.shape)  # on the CPU, whatever the device: the same numbers everywhere
        with torch.no_grad():
            self.A.weight.copy_(nn.init.trunc_normal_(drawn, std=0.02, generator=generator))
            self.B.weight.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.B(self.A(x))


class Learner(nn.Module):
    """LoRRA, low-rank residual attention, from the hidden states h to embeddings x of one kind.

        q = h·(1 + W_q)    k = x·(1 + W_k)    v = x·(1 + W_v)    out = softmax(RoPE(q)·RoPE(k)ᵀ/√d + mask)·v·W_o

    Each W is a product A·B of low rank; W_o has no 1 beside it, so the output starts at zero. A head is H/N wide, and
    there are as many of keys as of queries, since the residual path needs all H channels.
    """

    def __init__(self, width: int, num_heads: int, rank: int):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (Update(width, rank) for _ in range(4))

    def forward(self, h: torch.Tensor, rope: Rope, side: Side, cache: SideCache | None = None) -> torch.Tensor:
        """h (B, S, H) to (B, S, H); exactly zero where a query sees no key of this kind."""
        q = rope(self.split_heads(h + self.q(h)))
        k, v = side.rope(self.split_heads(side.x + self.k(side.x))), self.split_heads(side.x + self.v(side.x))
        if cache is not None:
            k, v = cache.extend(k, v)
        sees = side.mask.any(-1, keepdim=True)
        # whoever sees nothing is let see all, and forgets it: an empty row of softmax would be NaN
        heads = F.scaled_dot_product_attention(q, k, v, side.mask | ~sees) * sees  # (B, N, S, H/N)
        return self.o(heads.transpose(1, 2).flatten(2))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) to (B, N, S, H/N)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Router(nn.Module):
    """How much each learner counts for a query: softmax(SiLU(W·a + b)), a the attention that the query pays.

    The authors' a is the row of weights itself, summed over heads: W then belongs to absolute positions, and ends with
    the longest text that was planned for. Here the row is summed within octaves of the distance, apart for the keys of
    pictures and of text: 2·OCTAVES numbers, whatever the length and the padding.

    W and b start at zero, where both learners count one half.
    """

    def __init__(self):
        super().__init__()
        self.linear = Linear(2 * OCTAVES, 2)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Attention weights (B, N, S, Sk) and groups (B, S, Sk) to (B, S, 2): visual, textual."""
        row = weights.float().sum(1)
        row = row.new_zeros(*row.shape[:2], 2 * OCTAVES).scatter_add(-1, groups, row)
        return F.silu(self.linear(row.to(self.linear.weight.dtype))).float().softmax(-1)


class WingsAttention(Attention):
    """Att = Att_main + Σ Router·Learner, on the projections of a plain attention."""

    def __init__(self, plain: Attention, config: WingsConfig):
        with torch.device("meta"):
            super().__init__(**plain.sizes())
        self.adopt(plain)
        learner = config.text.hidden_size, config.text.num_attention_heads, config.rank
        self.visual = Learner(*learner)
        self.textual = Learner(*learner) if config.routed else None
        self.router = Router() if config.routed else None

    def forward(
        self,
        x: torch.Tensor,
        rope: Sides,
        mask: torch.Tensor | None = None,
        cache: WingsCache | None = None,
        positions: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        main, of_visual, of_textual = (cache.main, cache.visual, cache.textual) if cache is not None else (None,) * 3
        visual = self.visual(x, rope, rope.visual, of_visual)
        router = self.router
        if self.textual is None or router is None:
            return keep_positions(super().forward(x, rope, mask, main) + visual, positions)
        textual, seen, outer = self.textual(x, rope, rope.textual, of_textual), [], self.tap

        def tap(weights: torch.Tensor) -> None:
            seen.append(router(weights, rope.groups).to(x.dtype))
            if outer is not None:
                outer(weights)

        with tapped({self: tap}):
            attended = super().forward(x, rope, mask, main)
        of_picture, of_text = seen[0].split(1, dim=-1)
        return keep_positions(attended + of_picture * visual + of_text * textual, positions)


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


class WingsGemma(Gemma):
    """Gemma with learners: `types` are 0 for the tokens of pictures and 1 for text, and everything is causal."""

    def __init__(self, config: WingsConfig):
        super().__init__(config.text)
        for layer in self.layers:
            layer.self_attn = WingsAttention(cast(Attention, layer.self_attn), config)
        self.routed = config.routed

    def geometry(self, x, valid, types, cache=None, documents=None):
        """As `Gemma.geometry`; the rope carries what the learners read."""
        assert documents is None, "the learners know of no documents in a row"
        rope, full, sliding = super().geometry(x, valid, torch.ones_like(types), cache)
        queries = x.shape[1]
        first = valid.shape[1] - queries  # columns that the cache holds
        query = torch.arange(first, first + queries, device=x.device)
        sides, columns = {}, {}
        # pictures come with the first call: how much there is of each kind must be counted there alone
        for name, kind, width in (("visual", 0, 0), ("textual", 1, queries)):
            index, fills = pick(((types == kind) & valid)[:, first:], width if first else None)
            columns[name] = first + index.masked_fill(fills, NEVER)
            if first and cache:
                columns[name] = torch.cat((getattr(cache[0], name).columns, columns[name]), dim=1)
            for layer in cache or ():
                if first == 0:
                    setattr(layer, name, SideCache(index.shape[1] + kind * (layer.main.capacity - queries)))
                getattr(layer, name).columns = columns[name]
            keys = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
            mask = columns[name][:, None, None] <= query[:, None]
            sides[name] = Side(keys, Rope(rope.positions.gather(1, index), rope.theta), mask)
        groups = self.group(rope.positions, valid.long().cumsum(-1), columns["visual"]) if self.routed else None
        return Sides(rope.positions, rope.theta, groups=groups, **sides), full, sliding

    @staticmethod
    def group(query: torch.Tensor, key: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        """`Sides.groups`, from the positions of queries (B, S) and keys (B, Sk), and the columns (B, n) of pictures."""
        distance = (query[:, :, None] - key[:, None]).clamp(min=0)
        octave = (torch.frexp(distance + 1.0).exponent.long() - 1).clamp(max=OCTAVES - 1)  # n from 2ⁿ − 1 on
        # one column more, for what only fills up
        is_picture = key.new_zeros(len(key), key.shape[1] + 1).scatter(1, pictures.clamp(max=key.shape[1]), 1)[:, :-1]
        return octave + OCTAVES * is_picture[:, None]


class Wings(PaliGemma):
    """PaliGemma with a learner or two in every layer of its decoder: same parts, same names, same `forward`."""

    def __init__(self, config: WingsConfig):
        nn.Module.__init__(self)  # PaliGemma's own would build its decoder
        config.check()
        self.config = config
        self.vision_tower = Siglip(config.vision)
        self.multi_modal_projector = Projector(config)
        self.language_model = WingsGemma(config)

    def forward(self, input_ids, pixel_values, token_type_ids, attention_mask=None, **options) -> torch.Tensor:
        """As `PaliGemma.forward`; token_type_ids give the number of columns and no more."""
        first = token_type_ids.shape[1] - input_ids.shape[1]
        is_text = (input_ids != self.config.image_token_id).to(token_type_ids.dtype)
        if first and not input_ids.is_cuda and not is_text.all():
            raise UserError("a picture comes after what the cache holds: give all pictures in the first call")
        return super().forward(input_ids, pixel_values, F.pad(is_text, (first, 0)), attention_mask, **options)

    def new_cache(self, capacity: int) -> list[WingsCache]:
        """An empty cache of `capacity` positions for each decoder layer."""
        return [WingsCache(capacity) for _ in self.language_model.layers]


def attach(base: PaliGemma, rank: int = 64, *, routed: bool = False, seed: int = 0) -> Wings:
    """`base` with learners, on its own weights: it computes what `base` does where every token is causal.

    Raises UserError for a base that is no plain PaliGemma.
    """
    if type(base) is not PaliGemma or base.grafts:
        raise UserError("learners go beside the plain attention of a PaliGemma: take a base without other parts")
    return _assemble(WingsConfig.beside(base.config, rank=rank, routed=routed), base, seed)


def route(model: Wings, seed: int = 0) -> Wings:
    """The model of stage 2 on the weights of one of stage 1: with textual learners, and routers that start at ½.

    What the visual learners give is doubled, so that half of it is what it was. Doubling is exact: so are the logits.
    """
    if type(model) is not Wings or model.config.routed:
        raise UserError("stage 2 of WINGS goes on from a model of stage 1, which has visual learners and no router")
    routed = _assemble(WingsConfig.beside(model.config, rank=model.config.rank), model, seed)
    for layer in routed.language_model.layers:
        up = layer.self_attn.visual.o.B
        up.weight = nn.Parameter(2 * up.weight.detach())
    return routed


def _assemble(config: WingsConfig, source: PaliGemma, seed: int) -> Wings:
    """A model of `config` that holds the tensors of `source`; the parts that `source` has not are fresh."""
    with torch.device("meta"):
        model = Wings(config)
    state = source.state_dict()
    lacks = model.load_state_dict(state, strict=False, assign=True)
    if lacks.unexpected_keys:
        raise UserError(f"{lacks.unexpected_keys[0]} is no part of a plain PaliGemma: merge or leave out its adapter")
    weight, generator = source.language_model.embed_tokens.weight, torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Update | Router) and next(module.parameters()).is_meta:
            module.to(weight.dtype).to_empty(device=weight.device)
            module.reset_parameters(generator)
    return model.train(source.training)


@torch.no_grad()
def initialize_wings(model: Wings, seed: int = 0) -> Wings:
    """Fill a model with random weights: as PaliGemma, and learners and routers that add nothing yet."""
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Update | Router):
            module.reset_parameters(generator)
    return model
