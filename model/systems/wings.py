"""WINGS: a low-rank learner for pictures and one for text, beside the main attention of every decoder layer.

In: a batch of `model/processor.py`, as for PaliGemma, with `<image>` anywhere in the text or not at all. Out: float32
logits (B, S, V). Everything is causal: token_type_ids only mark what is trained, they do not change the mask.
Source: "Wings: Learning Multimodal LLMs without Text-only Forgetting" (Zhang et al., NeurIPS 2024).

    h ──┬── main attention ────────────── + ── …          w = Router(the main attention's weights), w₁ + w₂ = 1
        ├── visual learner  (picture) ─ w₁·┤              keys and values of the learners are projections of the
        └── textual learner (text)   ── w₂·┘              decoder's input embeddings, the same ones in every layer

Stage 1 of training has no routers and no textual learners (`routed` False): the visual output is added unweighted.
`route` makes the model of stage 2 from it. Differences from the authors' code:
- h is the input of the main attention, as in the paper's formula; the code uses the sum after it.
- A key is visible if it does not come after the query. The code compares indices that leave out the system's tokens
  with positions that include them, so that its textual learner sees later tokens.
- Padding is hidden as a key, not as a query. Routed learners are added once, not twice. Both learners are cached.
- The router reads sums of attention weights by distance. In code and paper it reads weights at absolute positions, and
  learns nothing of a position that no training text has reached. As in the code, learners have RoPE.
The router needs the attention weights, so a routed model computes its main attention without a fused kernel.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attention, LayerCache, Rope, keep_positions, tapped
from model.config import require
from model.gemma import Gemma
from model.linear import Linear
from model.paligemma import PaliGemma, Projector
from model.registry import System
from model.siglip import Siglip
from model.systems.configs import LanguageWingsConfig, WingsConfig
from model.systems.language import LanguageModel
from model.systems.processors import LanguageProcessor, SlotProcessor

OCTAVES = 16  # buckets of distance in a router: 0, 1–2, 3–6, 7–14, …, from 32767 on
NEVER = 1 << 40  # as a column: after every query, so that no query sees it


class LearnerInput(NamedTuple):
    """The keys of one kind of learner, the same in every layer."""

    # (B, n, H), embeddings as they enter the decoder; the layer projects keys and values from them
    x: Tensor
    rope: Rope  # of their positions
    mask: Tensor  # (B, 1, S, Sn), cached keys included


class WingsRope(Rope):
    """The rope of a batch, which every layer receives, and with it the inputs of its learners and
    router."""

    visual: LearnerInput
    textual: LearnerInput
    # (B, S, Sk): where a router counts each key; None without routers
    buckets: Tensor | None = None


class LearnerCache(LayerCache):
    """A learner's keys and values in one layer, and their columns (B, n) in the sequence."""

    columns: Tensor


class WingsCache:
    """Keys and values of one layer: those of the main attention, and those of each learner from the
    first call on."""

    position = None  # single steps are not compiled
    visual: LearnerCache | None = None
    textual: LearnerCache | None = None

    def __init__(self, capacity: int | None = None):
        self.main: Any = None if capacity is None else LayerCache(capacity)


NO_CACHE = WingsCache()


class Learner(nn.Module):
    """LoRRA, low-rank residual attention, from the hidden states h to embeddings x of one kind.

        q = h·(1 + W_q)    k = x·(1 + W_k)    v = x·(1 + W_v)        out = softmax(RoPE(q)·RoPE(k)ᵀ/√d + mask)·v·W_o

    Each W is a product A·B of low rank; A starts from a truncated normal distribution, B at zero, and so does the
    output, since W_o has no 1 beside it. Heads are H/N wide, and there are as many key heads as query heads, because
    the residual path needs all H channels.
    """

    def __init__(self, width: int, num_heads: int, rank: int):
        super().__init__()
        problem = f"{width} channels cannot be cut into {num_heads} heads of an even width"
        assert width % (2 * num_heads) == 0, problem
        self.num_heads = num_heads
        for name in "qkvo":
            down, up = Linear(width, rank, bias=False), Linear(rank, width, bias=False)
            self.add_module(name, nn.Sequential(OrderedDict(A=down, B=up)))

    def forward(
        self, h, rope: Rope, given: LearnerInput, cache: LearnerCache | None = None
    ) -> Tensor:
        """h (B, S, H) to (B, S, H); exactly zero where a query sees no key."""
        q = rope(self.heads(h, "q"))
        k = given.rope(self.heads(given.x, "k"))
        v = self.heads(given.x, "v")
        if cache is not None:
            k, v = cache.extend(k, v)
        # a query with no visible key attends to all keys and its output is zeroed: an empty softmax
        # row is NaN
        visible = given.mask.any(-1, keepdim=True)
        heads = F.scaled_dot_product_attention(q, k, v, given.mask | ~visible) * visible
        return self.o(heads.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor, name: str) -> Tensor:
        """x·(1 + W) by head (B, N, ·, H/N)."""
        update = self.get_submodule(name)
        return (x + update(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Router(nn.Module):
    """The weight of each learner for each query: softmax(SiLU(W·a + b)), a the attention weights of
    the query.

    They are summed over heads, and over the keys in each octave of the distance, apart for pictures
    and text: 2·OCTAVES numbers, which mean the same at any place of a text of any length. W and b
    start at zero, both learners at ½.
    """

    def __init__(self):
        super().__init__()
        self.linear = Linear(2 * OCTAVES, 2)

    def forward(self, weights: Tensor, buckets: Tensor) -> Tensor:
        """Attention weights (B, N, S, Sk) and buckets (B, S, Sk) to (B, S, 2): visual, textual."""
        row = weights.float().sum(1)
        sums = row.new_zeros(*row.shape[:2], 2 * OCTAVES).scatter_add(-1, buckets, row)
        return F.silu(self.linear(sums.to(self.linear.weight.dtype))).float().softmax(-1)


class WingsAttention(Attention):
    """Att = Att_main + Σ Router·Learner, on the projections of a plain attention."""

    def __init__(self, plain: Attention, config: WingsConfig):
        self.adopt(plain)
        sizes = config.text.hidden_size, config.text.num_attention_heads, config.rank
        self.visual = Learner(*sizes)
        if config.routed:
            self.textual = Learner(*sizes)
            self.router = Router()

    def forward(
        self,
        x,
        rope: WingsRope,
        mask,
        cache: WingsCache | None,
        positions,
    ) -> Tensor:
        cache = cache or NO_CACHE
        visual = self.visual(x, rope, rope.visual, cache.visual)
        if rope.buckets is None:
            attended = super().forward(x, rope, mask, cache.main)
            return keep_positions(attended + visual, positions)
        textual = self.textual(x, rope, rope.textual, cache.textual)
        outer, shares = self.tap, []

        def tap(weights: Tensor) -> None:
            shares.append(self.router(weights, rope.buckets).to(x.dtype))
            if outer is not None:
                outer(weights)

        with tapped({self: tap}):
            attended = super().forward(x, rope, mask, cache.main)
        of_visual, of_textual = shares[0].split(1, dim=-1)
        return keep_positions(attended + of_visual * visual + of_textual * textual, positions)


class WingsGemma(Gemma):
    """Gemma with learners: `types` are 0 for tokens of pictures and 1 for text, and everything is
    causal."""

    def __init__(self, config: WingsConfig):
        super().__init__(config.text, 0 if isinstance(config, LanguageWingsConfig) else 1)
        for layer in self.layers:
            plain: Any = layer.self_attn
            layer.self_attn = WingsAttention(plain, config)
        self.routed = config.routed

    def new_cache(self, capacity: int) -> list:
        return [WingsCache(capacity) for _ in self.layers]

    def geometry(self, x, valid, types, cache: list | None = None, documents=None):
        """As `Gemma.geometry`; the rope is a `WingsRope` with the inputs of the learners and routers.

        The columns of a row are tokens (v_c = 1) and padding (v_c = 0), column c at position p_c = Σ_{c' ≤ c} v_{c'}.
        This call reads the columns F … F + S − 1; F columns are in the cache. For each kind κ, visual or textual,

            J_κ    = the columns c ≥ F with v_c = 1 and type κ, in order, padded with ∞ to the same number n per row
            x_κ    = (x_c for c in J_κ), (B, n, H), from which every layer projects the learner's keys and values
            rope_κ = rotation by (p_c for c in J_κ)
            C_κ    = the columns of the cached keys, then J_κ; each layer's cache keeps them for the next call
            mask_κ[i, j] = C_κ[j] ≤ F + i: query i sees the keys of its own and of earlier columns, and never ∞

        In the first call (F = 0) n is the most that a row has, but at least 1, because processes that train together
        must have the same gradients. Counting would make the CPU wait for a GPU: there n is S. All pictures come with
        that call, so that in later ones n is 0 for visual and S for textual keys.

        The bucket of query i and key column c is min(⌊log₂(p_i − p_c + 1)⌋, OCTAVES − 1), plus OCTAVES if c ∈ C_visual.
        """
        assert documents is None, "learners do not separate the documents of a row"
        plain, full, sliding = super().geometry(x, valid, torch.ones_like(types), cache)
        rope = WingsRope(plain.positions, plain.theta, plain.stretch)
        steps, first = x.shape[1], valid.shape[1] - x.shape[1]
        query = pictures = torch.arange(first, first + steps, device=x.device)
        for kind, name in enumerate(("visual", "textual")):
            # 1. J_κ
            chosen = ((types == kind) & valid)[:, first:]
            if first:
                n = kind * steps
            else:
                n = steps if x.is_cuda else max(1, int(chosen.sum(1).max()))
            index = (~chosen).long().argsort(dim=1, stable=True)[:, :n]
            columns = first + index.masked_fill(~chosen.gather(1, index), NEVER)
            # 2. C_κ
            if cache and first:
                columns = torch.cat((getattr(cache[0], name).columns, columns), dim=1)
            for layer in cache or ():
                if first == 0:  # there is room for new text, and pictures are complete
                    setattr(layer, name, LearnerCache(n + kind * (layer.main.capacity - steps)))
                getattr(layer, name).columns = columns
            # 3. what the layers read
            if kind == 0:
                pictures = columns
            turned = Rope(rope.positions.gather(1, index), rope.theta, rope.stretch)
            mask = columns[:, None, None] <= query[:, None]
            setattr(rope, name, LearnerInput(keep_positions(x, index), turned, mask))
        if self.routed:
            place = valid.long().cumsum(-1) + (self.first_position - 1)  # of the keys
            rope.buckets = self.bucket(rope.positions, place, pictures)
        return rope, full, sliding

    @staticmethod
    def bucket(query: Tensor, key: Tensor, pictures: Tensor) -> Tensor:
        """`WingsRope.buckets` from positions of queries (B, S) and keys (B, Sk), and columns (B, n)
        of pictures."""
        distance = (query[:, :, None] - key[:, None]).clamp(min=0)
        octave = torch.frexp(distance + 1.0).exponent.long() - 1  # octave n starts at 2ⁿ − 1
        # with one more column, which takes the padding of `pictures`
        kind = F.pad(torch.zeros_like(key), (0, 1))
        kind = kind.scatter(1, pictures.clamp(max=key.shape[1]), 1)[:, :-1]
        return octave.clamp(max=OCTAVES - 1) + OCTAVES * kind[:, None]


class Wings(PaliGemma):
    """PaliGemma, or with a `LanguageWingsConfig` a published language model, with learners in every
    decoder layer."""

    @staticmethod
    def build(config: WingsConfig) -> tuple[nn.Module, WingsGemma]:
        """Beside a language model the projector is two layers with GELU between them (LLaVA's
        mlp2x_gelu)."""
        if not isinstance(config, LanguageWingsConfig):
            return Projector(config), WingsGemma(config)
        width = config.text.hidden_size
        first, second = Linear(config.vision.hidden_size, width), Linear(width, width)
        projector = nn.Sequential(OrderedDict(linear_1=first, gelu=nn.GELU(), linear_2=second))
        return projector, WingsGemma(config)

    def forward(
        self, input_ids, pixel_values, token_type_ids, attention_mask=None, **options
    ) -> Tensor:
        """As `PaliGemma.forward`; of token_type_ids only the number of columns is used. All
        pictures are in the first call with a cache."""
        first = token_type_ids.shape[1] - input_ids.shape[1]
        is_text = (input_ids != self.config.image_token_id).to(token_type_ids.dtype)
        may_read = first and not input_ids.is_cuda
        assert not may_read or is_text.all(), "all pictures come with the first call"
        types = F.pad(is_text, (first, 0))
        return super().forward(input_ids, pixel_values, types, attention_mask, **options)


def attach(
    base: PaliGemma,
    rank: int = 64,
    *,
    routed: bool = False,
    seed: int = 0,
) -> Wings:
    """A plain PaliGemma with learners, sharing its weights; until they learn, it is `base` with all
    tokens causal."""
    is_plain = type(base) is PaliGemma and not base.grafts
    problem = (
        "learners go beside the plain attention of a PaliGemma: take a base without other parts"
    )
    require(is_plain, problem)
    config = WingsConfig(**vars(base.config), rank=rank, routed=routed)
    return _assemble(config, base.state_dict(), seed).train(base.training)


def join(
    config: LanguageWingsConfig,
    tower: Siglip,
    text: LanguageModel,
    seed: int = 0,
) -> Wings:
    """A language model with fresh learners and a vision tower, sharing their weights; on text alone
    it is `text`."""
    state = {f"vision_tower.{name}": tensor for name, tensor in tower.state_dict().items()}
    return _assemble(config, state | text.state_dict(), seed).eval()


def route(model: Wings, seed: int = 0) -> Wings:
    """The model of stage 2 from one of stage 1: with textual learners, and routers whose weights
    start at ½.

    The output weights of the visual learners are doubled, which the weight ½ makes up for. Doubling
    is exact in floating point, so the logits stay the same. Raises UserError for another model.
    """
    is_first = type(model) is Wings and not model.config.routed
    problem = (
        "stage 2 of WINGS goes on from a model of stage 1, which has visual learners and no router"
    )
    require(is_first, problem)
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("visual.o.B.weight"):
            state[name] = 2 * tensor
    return _assemble(replace(model.config, routed=True), state, seed).train(model.training)


def _assemble(config: WingsConfig, state: Mapping[str, Tensor], seed: int) -> Wings:
    """A model of `config` with the tensors of `state`; parameters that are not in it are
    initialised."""
    with torch.device("meta"):
        model = Wings(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    problem = f"{unexpected[:1]} is no part of a plain PaliGemma: merge or leave out its adapter"
    require(not unexpected, problem)
    generator, fresh = torch.Generator().manual_seed(seed), {}
    for name in missing:
        # on the CPU, so that every device gets the same numbers
        tensor = torch.zeros(model.get_parameter(name).shape)
        if name.endswith(".A.weight"):
            nn.init.trunc_normal_(tensor, std=0.02, generator=generator)
        elif name.startswith("multi_modal_projector."):  # as in nn.Linear
            end = getattr(model.multi_modal_projector, name.split(".")[1]).in_features ** -0.5
            tensor.uniform_(-end, end, generator=generator)
        fresh[name] = tensor.to(model.language_model.embed_tokens.weight)
    model.load_state_dict(fresh, strict=False, assign=True)
    return model


SYSTEMS = {
    WingsConfig.kind: System(WingsConfig, Wings, SlotProcessor, asked_as="llava"),
    LanguageWingsConfig.kind: System(
        LanguageWingsConfig, Wings, LanguageProcessor, asked_as="llava"
    ),
}
