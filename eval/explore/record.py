"""What the explorer shows: every map that decides a token of an answer, by layer and head.

In: a model, a prompt and a picture, or a text alone and words of it. Out: a `Case`, with the answer
of each model and its `Maps`: the rows of attention of the positions that decide its tokens,
recorded in one forward pass over prompt and answer.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from eval.vqa_scoring import exact_match
from model.attention import Attention, attention_modules, tapped
from model.boxes import parse_objects
from model.common import UserError, quoted
from model.differential import Variant
from model.generate import check_finite, generate
from model.paligemma import PaliGemma
from model.processor import Batch, Processor
from model.tokenizer import SPACE, Texts

ONE_MAP = {
    "dex": "A, one map: dex changes outputs, o − λ·o·W_D",
    "shared": "A, one map: shared scales it by 1 − λ",
    "gate": "A, one map: gate scales outputs, o·2σ(w·x)",
    "temperature": "A, one map: temperature scales its logits, t·q·k",
    "sink": "A, one map: sink scales outputs, o·σ(logsumexp(s) − b)",
}


class TokenizedAnswer(NamedTuple):
    """An answer of T tokens."""

    batch: Batch  # of the prompt, one row
    new: Tensor  # the answer's ids (T,)
    text: str
    words: dict[int, str]  # the text of each token that is no picture, by position
    slots: np.ndarray  # (S,) bool, which keys are the picture's


class Maps(NamedTuple):
    """Of T answer tokens, L layers, N heads, P patches and S keys.

    Heads with nothing to look for put most on an empty patch, a sink: there `apart` is small, and
    the answer hardly changes."""

    # by name (T, L, N, S) float32: `plain` or `A`; or A1, A2 and `mix`, what is left of both
    kinds: dict[str, np.ndarray]
    # by name (L,), the share of the picture in the attention of all queries, mean over heads
    laws: dict[str, np.ndarray]
    probabilities: np.ndarray  # (T,) of the tokens
    # (L, P), how far a patch's value is from the mean of all, beside the farthest one
    apart: np.ndarray
    factor: np.ndarray | None = None  # (T, L, N), the weight of the second map
    formula: str = ""


@dataclass
class Case:
    """One question about one picture, or a text alone, and what each model says."""

    image: Image.Image | None
    prompt: str
    truths: tuple[str, ...] = ()  # the right answers, none where nobody knows
    answers: dict[str, tuple[TokenizedAnswer, Maps]] = field(
        default_factory=dict
    )  # by the model's name
    hit: bool | None = None  # whether the first model is right
    # (left, top, right, bottom) in pixels, of the first model
    boxes: list[list[float]] = field(default_factory=list)
    mark: str = ""  # of a text alone: the words that are looked at, in place of a picture

    def ask(
        self,
        title: str,
        model: PaliGemma,
        processor: Processor,
        limit: int,
    ) -> None:
        """Let a model answer in up to `limit` tokens, and keep its maps. Raises UserError."""
        said = answer(model, processor, self.image, self.prompt, limit, self.mark)
        if not self.answers:
            if self.truths:
                self.hit = exact_match(said.text, self.truths)
            if self.image is not None:
                found = parse_objects(said.text, *self.image.size)
                self.boxes = [list(one.box) for one in found]
        self.answers[title] = said, maps_of(model, said, quoted(self.prompt))

    def add_plain(self, title: str, plain: PaliGemma) -> None:
        """The maps of the base model at the tokens that the model of this title said."""
        said, maps = self.answers[title]
        beside = maps_of(plain, said, quoted(self.prompt))
        maps.kinds["plain"] = beside.kinds["A"]
        maps.laws["plain"] = beside.laws["A"]


def answer(
    model: Any,
    processor: Any,
    image: Image.Image | None,
    prompt: str,
    limit: int,
    mark: str = "",
) -> TokenizedAnswer:
    """The greedy answer of up to `limit` tokens. Without an image `processor` is the reader of a
    language model, and `mark` are words of the prompt. Raises UserError."""
    # 1. the prompt
    device = model.device
    is_text = image is None
    if is_text:
        texts = processor.tokenizer
        row = processor.row_of(0, [(prompt, None)])
        batch = replace(processor.pad([row]), pixel_values=None).to(device)
    else:
        texts = processor.texts
        batch = processor([image], [prompt]).to(device)
    # 2. the answer
    new = generate(
        model,
        batch.input_ids,
        batch.pixel_values,
        batch.token_type_ids,
        batch.attention_mask,
        limit,
    )[0]
    ids = torch.cat((batch.input_ids[0], new)).tolist()
    # 3. what is looked at, and the words
    slots = np.array(ids) == getattr(model.config, "image_token_id", None)
    if is_text:
        slots = marked(processor, prompt, mark, ids)
    words = {}
    for position, id_ in enumerate(ids):
        if is_text or not slots[position]:
            words[position] = spell_token(texts, model.config.bos_token_id, id_)
    return TokenizedAnswer(batch, new, texts.decode(new.tolist()), words, slots[:-1])


def marked(reader: Any, prompt: str, mark: str, ids: list[int]) -> np.ndarray:
    """Which of the ids, (S,) bool, are the words `mark`, by default all but the first token."""
    start = prompt.find(mark)
    if start < 0:
        raise UserError(f"--mark {quoted(mark)} is not in the prompt: give words of it")
    end = start + len(mark) if mark else len(prompt)
    first, last = (len(reader.encode(prompt[:place].rstrip())) for place in (start, end))
    slots = np.zeros(len(ids), dtype=bool)
    begin = len(reader.begin)
    slots[max(1, begin + first) : begin + last] = True
    if not slots.any():
        raise UserError(f"--mark {quoted(mark)} marks no token behind the first: give more words")
    return slots


def spell_token(texts: Texts, bos: int | None, id_: int) -> str:
    """The text of a token, its spaces included; names for those without one."""
    if id_ == bos:
        return "‹start›"
    if id_ in texts.ends:
        return "‹end›"
    if id_ >= texts.pieces:  # the embedding has a few rows more
        return f"‹{id_}›"
    piece = texts.tokenizer.id_to_piece(id_)
    if SPACE in piece or piece.isascii():
        return piece.replace(SPACE, " ")
    return texts.tokenizer.decode([id_])


def decoder_layers(model: Any) -> list[Attention]:
    modules = attention_modules(model)
    return [modules[path] for path in modules if path.startswith("language_model.")]


@torch.no_grad()
def decoder_maps(
    model: Any,
    reduce: Callable[[Tensor], Any],
    name: str,
    *,
    keep: int = 1,
    **batch,
) -> tuple[dict[Attention, list], dict[Attention, Tensor], Tensor]:
    """What `reduce` makes of the one or two maps (B, N, Sq, Sk) of each decoder layer, A₁ first, in
    a forward pass; of layers with two the weights (Sq, N) of the second one in the first row; and
    the logits of the last `keep` positions.

    batch: the model's arguments. Each map is reduced at once: whole maps of a long prompt would
    fill the memory. Raises UserError for a decoder without attention, and NonFiniteError, which
    `name`s the question.
    """
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            f"{name}: the model has no attention in its decoder, and no maps: take a PaliGemma"
        )
    maps = {layer: [] for layer in layers}
    factors = {}

    def keep_map(layer: Attention, weights: Tensor) -> None:
        maps[layer].append(reduce(weights))

    def keep_factor(layer: Variant, args) -> None:
        x = args[0]
        factor = layer.factor(x).expand(len(x), layer.num_heads, x.shape[1], 1)
        factors[layer] = factor[0, :, :, 0].T.detach()

    with tapped({layer: partial(keep_map, layer) for layer in layers}), ExitStack() as hooks:
        for layer in layers:
            if isinstance(layer, Variant) and layer.maps == 2:
                hooks.enter_context(layer.register_forward_pre_hook(keep_factor))
        logits = model(**batch, positions_to_keep=keep)
    check_finite(logits, name)
    return maps, factors, logits


def deciding_maps(
    model: Any,
    place: int,
    name: str,
    **batch,
) -> tuple[list[Tensor], Tensor]:
    """The weights (N, S) in fp32 of the query at `place`, by layer: of two maps what is left; and
    the logits, as of `decoder_maps`."""

    def row_at(weights: Tensor) -> Tensor:
        return weights[0, :, place].float()

    layers, factors, logits = decoder_maps(model, row_at, name, **batch)
    rows = []
    for layer, (row, *second) in layers.items():
        if layer in factors:
            row = layer.difference(factors[layer][place, :, None], row, *second)
        rows.append(row)
    return rows, logits


def maps_of(model: PaliGemma, said: TokenizedAnswer, name: str) -> Maps:
    """The maps of all tokens of `said`. Raises UserError; NonFiniteError names `name`."""
    count = len(said.new)
    slots = torch.from_numpy(said.slots)
    layers = decoder_layers(model)
    apart = []

    def reduce(weights: Tensor) -> tuple[np.ndarray, float]:
        weights = weights[0].float()  # (N, S, S)
        share = weights[..., slots.to(weights.device)].sum(-1).mean()
        return weights[:, -count:].transpose(0, 1).cpu().numpy(), float(share)

    def compare(projection, args, values: Tensor) -> None:
        patches = values[0, slots].float()
        lengths = (patches - patches.mean(0)).norm(dim=-1)
        apart.append((lengths / lengths.max().clamp_min(1e-12)).cpu().numpy())

    # 1. one pass, up to the position that decides the last token
    batch = said.batch
    before = said.new[None, :-1]
    ids = torch.cat((batch.input_ids, before), dim=1)
    types = torch.cat((batch.token_type_ids, torch.ones_like(before)), dim=1)
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.v_proj.register_forward_hook(compare))
        maps, factors, logits = decoder_maps(
            model,
            reduce,
            name,
            keep=count,
            input_ids=ids,
            pixel_values=batch.pixel_values,
            token_type_ids=types,
        )
    chances = logits[0].float().softmax(-1)
    chances = chances.gather(-1, said.new[:, None])[:, 0].cpu().numpy()
    known = chances, np.stack(apart)

    # 2. one map a layer
    first, share = stacked(kept[0] for kept in maps.values())
    if not factors:
        formula = ONE_MAP.get(getattr(layers[-1], "kind", ""), "")
        return Maps({"A": first}, {"A": share}, *known, formula=formula)

    # 3. two maps; a layer without a second one has the first twice
    second, second_share = stacked(kept[-1] for kept in maps.values())
    none = torch.zeros(ids.shape[1], first.shape[2])
    by_layer = [factors.get(layer, none)[-count:].cpu() for layer in layers]
    factor = torch.stack(by_layer, dim=1).numpy()
    *_, last = factors
    mix = last.difference(*map(torch.from_numpy, (factor[..., None], first, second)))
    kinds = {"A1": first, "A2": second, "mix": mix.numpy()}
    return Maps(
        kinds,
        {"A1": share, "A2": second_share},
        *known,
        factor,
        last.formula,
    )


def stacked(maps: Iterable[tuple[np.ndarray, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The rows (T, L, N, S) and the shares (L,) of the layers' maps."""
    rows, shares = zip(*maps, strict=True)
    return np.stack(rows, axis=1), np.array(shares)
