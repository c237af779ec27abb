"""What the explorer shows: every map that decides a token of an answer, by layer and head.

In: a model, a picture and a prompt. Out: a `Case`, with the answer of each model and its `Maps`:
the rows of attention of the positions that decide its tokens, recorded in one forward pass over
prompt and answer.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from eval.vqa_scoring import exact_match
from model.attention import Attention, attention_modules, tapped
from model.common import UserError, quoted
from model.differential import Differential
from model.generate import check_finite, generate
from model.paligemma import PaliGemma
from model.processor import Batch, Processor, parse_boxes
from model.tokenizer import SPACE

ONE_MAP = {
    "dex": "A, one map: dex changes outputs, o − λ·o·W_D",
    "shared": "A, one map: shared scales it by 1 − λ",
}


@dataclass(frozen=True)
class Said:
    """An answer: the prompt's batch of one row, its new ids (T,), the texts of all tokens that are
    not pictures, by position, and which keys are the picture's, (S,) bool."""

    batch: Batch
    new: torch.Tensor
    text: str
    words: dict[int, str]
    slots: np.ndarray


@dataclass(frozen=True)
class Maps:
    """Of T answer tokens, L layers, N heads, P patches and S keys. kinds: by name (T, L, N, S)
    float32; `plain` or `A`, or A1 and A2 with `mix`, what is left of both. factor: (T, L, N), the
    weight of the second map. laws: by name (L,), the share of the picture in the attention of all
    queries, mean over heads. probabilities: (T,) of the tokens.

    apart: (L, P), how far the value of a patch is from the mean of all patches, beside the farthest
    one. Heads with nothing to look for put most on an empty patch, a sink: there this is small, and
    the answer hardly changes."""

    kinds: dict[str, np.ndarray]
    laws: dict[str, np.ndarray]
    probabilities: np.ndarray
    apart: np.ndarray
    factor: np.ndarray | None = None
    formula: str = ""


@dataclass
class Case:
    """One question about one picture: the answer and the maps of each model by its name. truths:
    the right answers, none where nobody knows. Of the first model: hit, whether its answer is
    right, and the boxes (left, top, right, bottom) in it, in pixels."""

    image: Image.Image
    prompt: str
    truths: tuple[str, ...] = ()
    answers: dict[str, tuple[Said, Maps]] = field(default_factory=dict)
    hit: bool | None = None
    boxes: list[list[float]] = field(default_factory=list)

    def ask(self, title: str, model: PaliGemma, processor: Processor, limit: int) -> None:
        """Let a model answer in up to `limit` tokens, and keep its maps. Raises UserError."""
        said = answer(model, processor, self.image, self.prompt, limit)
        if not self.answers:
            self.hit = exact_match(said.text, self.truths) if self.truths else None
            self.boxes = [list(box) for _, box in parse_boxes(said.text, *self.image.size)]
        self.answers[title] = said, maps_of(model, said, quoted(self.prompt))

    def add_plain(self, title: str, plain: PaliGemma) -> None:
        """The maps of the base model at the tokens that the model of this title said."""
        said, maps = self.answers[title]
        beside = maps_of(plain, said, quoted(self.prompt))
        maps.kinds["plain"], maps.laws["plain"] = beside.kinds["A"], beside.laws["A"]


def answer(
    model: PaliGemma, processor: Processor, image: Image.Image, prompt: str, limit: int
) -> Said:
    """The greedy answer of up to `limit` tokens. Raises UserError."""
    batch = processor([image], [prompt]).to(next(model.parameters()).device)
    new = generate(
        model,
        batch.input_ids,
        batch.pixel_values,
        batch.token_type_ids,
        batch.attention_mask,
        limit,
    )[0]
    ids = torch.cat((batch.input_ids[0], new)).tolist()
    slots = np.array(ids) == processor.config.image_token_id
    words = {int(number): spell_token(processor, ids[number]) for number in np.flatnonzero(~slots)}
    return Said(batch, new, processor.decode(new.tolist()), words, slots[:-1])


def spell_token(processor: Processor, id_: int) -> str:
    """The text of a token, its spaces included; names for those without one."""
    names = {processor.config.bos_token_id: "start", processor.config.eos_token_id: "end"}
    if id_ in names or id_ >= processor.tokenizer.vocab_size():  # the embedding has a few rows more
        return f"‹{names.get(id_, id_)}›"
    return processor.tokenizer.id_to_piece(id_).replace(SPACE, " ")


def decoder_layers(model: Any) -> list[Attention]:
    return [m for path, m in attention_modules(model).items() if path.startswith("language_model.")]


@torch.no_grad()
def decoder_maps(
    model: Any,
    reduce: Callable[[torch.Tensor], Any],
    name: str,
    *,
    keep: int = 1,
    **batch,
) -> tuple[dict[Attention, list], torch.Tensor]:
    """What `reduce` makes of the one or two maps (B, N, Sq, Sk) of each decoder layer, A₁ first, in
    a forward pass; and the logits of the last `keep` positions. batch: the model's arguments. Each
    map is reduced at once: whole maps of a long prompt would fill the memory. Raises UserError for
    a decoder without attention, and NonFiniteError, which `name`s the question."""
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            f"{name}: the model has no attention in its decoder, and no maps: take a PaliGemma"
        )
    maps: dict[Attention, list] = {layer: [] for layer in layers}
    taps = {
        layer: lambda weights, kept=kept: kept.append(reduce(weights))
        for layer, kept in maps.items()
    }
    with tapped(taps):
        logits = model(**batch, positions_to_keep=keep)
    check_finite(logits, name)
    return maps, logits


def maps_of(model: PaliGemma, said: Said, name: str) -> Maps:
    """The maps of all tokens of `said`. Raises UserError; NonFiniteError names `name`."""
    count, slots, factors = len(said.new), torch.from_numpy(said.slots), {}
    apart = []

    def reduce(weights: torch.Tensor) -> tuple[np.ndarray, float]:
        weights = weights[0].float()  # (N, S, S)
        share = weights[..., slots.to(weights.device)].sum(-1).mean()
        return weights[:, -count:].transpose(0, 1).cpu().numpy(), float(share)

    def watch(layer: Differential, args) -> None:
        factor = layer.factor(args[0]).expand(1, layer.num_heads, args[0].shape[1], 1)
        factors[layer] = factor[0, :, -count:, 0].T.cpu().numpy()

    def compare(projection, args, values: torch.Tensor) -> None:
        patches = values[0, slots].float()
        lengths = (patches - patches.mean(0)).norm(dim=-1)
        apart.append((lengths / lengths.max()).cpu().numpy())

    before, batch = (
        said.new[None, :-1],
        said.batch,
    )  # up to the position that decides the last token
    ids = torch.cat((batch.input_ids, before), dim=1)
    types = torch.cat((batch.token_type_ids, torch.ones_like(before)), dim=1)
    inputs = {"input_ids": ids, "pixel_values": batch.pixel_values, "token_type_ids": types}
    double = [m for m in decoder_layers(model) if isinstance(m, Differential) and m.maps == 2]
    with ExitStack() as hooks:
        for layer in double:
            hooks.enter_context(layer.register_forward_pre_hook(watch))
        for layer in decoder_layers(model):
            hooks.enter_context(layer.v_proj.register_forward_hook(compare))
        maps, logits = decoder_maps(model, reduce, name, keep=count, **inputs)
    chosen = logits[0].float().softmax(-1).gather(-1, said.new[:, None])[:, 0].cpu().numpy()
    # rows and shares of the first and of the last map; a layer without a second one has the first
    # twice
    (first, share), (second, other) = (
        zip(*(kept[at] for kept in maps.values()), strict=True) for at in (0, -1)
    )
    first, second = (np.stack(rows, axis=1) for rows in (first, second))
    known = chosen, np.stack(apart)
    if not factors:
        formula = ONE_MAP.get(getattr(decoder_layers(model)[-1], "kind", ""), "")
        return Maps({"A": first}, {"A": np.array(share)}, *known, formula=formula)
    none = np.zeros((count, first.shape[2]), np.float32)
    factor = np.stack([factors.get(layer, none) for layer in maps], axis=1)
    weight, kinds = factor[..., None], {"A1": first, "A2": second}
    extrapolates = double[-1].extrapolates
    kinds["mix"] = first + weight * (first - second) if extrapolates else first - weight * second
    formula = "A₁ + μ(A₁ − A₂)" if extrapolates else "A₁ − λA₂"
    return Maps(kinds, {"A1": np.array(share), "A2": np.array(other)}, *known, factor, formula)
