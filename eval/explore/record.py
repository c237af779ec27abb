"""What the explorer shows: every map that decides a token of an answer, by layer and head.

In: a model, a picture and a prompt. Out: a `Said`, the answer, and `Maps`, the rows of attention of the positions that
decide its tokens, recorded in one forward pass over prompt and answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image

from model.attention import Attention, attention_modules, tapped
from model.common import UserError, quoted
from model.cpu import blend
from model.generate import NonFiniteError, check_finite, generate
from model.paligemma import PaliGemma
from model.processor import Batch, Processor
from model.tokenizer import SPACE
from model.variants import Differential


@dataclass(frozen=True)
class Said:
    """An answer: the prompt's batch of one row, its new ids (T,), the texts of all tokens that are not pictures, by
    position, and which keys are the picture's, (S,) bool."""

    batch: Batch
    new: torch.Tensor
    text: str
    words: dict[int, str]
    slots: np.ndarray

    def inputs(self, token: int) -> dict[str, torch.Tensor]:
        """The model's arguments up to the position that decides token number `token`: the one before it."""
        before = self.new[:token].to(self.batch.input_ids.device)
        types = self.batch.token_type_ids[0]
        return {
            "input_ids": torch.cat((self.batch.input_ids[0], before))[None],
            "pixel_values": self.batch.pixel_values,
            "token_type_ids": torch.cat((types, torch.ones_like(before)))[None],
        }


@dataclass(frozen=True)
class Maps:
    """Of T answer tokens, L layers, N heads and S keys. kinds: by name (T, L, N, S) float32; `plain` or `A`, or A1 and
    A2 with `mix`, what is left of both. factor: (T, L, N), the weight of the second map. laws: by name (L,), the share
    of the picture in the attention of all queries, mean over heads. probabilities: (T,) of the tokens."""

    kinds: dict[str, np.ndarray]
    laws: dict[str, np.ndarray]
    probabilities: np.ndarray
    factor: np.ndarray | None = None
    formula: str = ""


def answer(model: PaliGemma, processor: Processor, image: Image.Image, prompt: str, limit: int) -> Said:
    """The greedy answer of up to `limit` tokens. Raises UserError."""
    batch = processor([image], [prompt]).to(next(model.parameters()).device)
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    try:
        new = generate(model, *inputs, limit)[0].cpu()
    except NonFiniteError as error:
        raise NonFiniteError(error.rows, quoted(prompt)) from None
    ids = torch.cat((batch.input_ids[0].cpu(), new)).tolist()
    slots = np.array(ids) == processor.config.image_token_id
    words = {int(number): spell_token(processor, ids[number]) for number in np.flatnonzero(~slots)}
    return Said(batch, new, processor.decode(new), words, slots[:-1])


def spell_token(processor: Processor, id_: int) -> str:
    """The text of a token, its spaces included; names for those without one."""
    names = {processor.config.bos_token_id: "start", processor.config.eos_token_id: "end"}
    if id_ in names:
        return f"‹{names[id_]}›"
    is_piece = id_ < processor.tokenizer.vocab_size()  # the embedding has a few rows more
    return processor.tokenizer.id_to_piece(id_).replace(SPACE, " ") if is_piece else f"‹{id_}›"


@torch.no_grad()
def maps_of(model: PaliGemma, said: Said, name: str) -> Maps:
    """The maps of all tokens of `said`. The weights of a layer are reduced at once: whole maps of a long prompt would
    fill the memory. Raises UserError; NonFiniteError names `name`."""
    layers = [m for path, m in attention_modules(model).items() if path.startswith("language_model.")]
    if not layers:
        raise UserError(f"{name}: the model has no attention in its decoder, and nothing to explore")
    count, keys = len(said.new), torch.from_numpy(said.slots)
    rows: dict[Attention, list[np.ndarray]] = {layer: [] for layer in layers}
    shares: dict[Attention, list[float]] = {layer: [] for layer in layers}
    factors: list[np.ndarray] = []

    def tap(layer: Attention, weights: torch.Tensor) -> None:
        weights = weights[0].float()  # (N, S, S)
        rows[layer].append(weights[:, -count:].transpose(0, 1).cpu().numpy())
        shares[layer].append(float(weights[..., keys.to(weights.device)].sum(-1).mean()))

    def watch(layer: Differential, args) -> None:
        factor = layer.factor(args[0]).expand(1, layer.num_heads, args[0].shape[1], 1)
        factors.append(factor[0, :, -count:, 0].T.cpu().numpy())

    double = [layer for layer in layers if isinstance(layer, Differential) and layer.maps == 2]
    hooks = [layer.register_forward_pre_hook(watch) for layer in double]
    try:
        with tapped({layer: partial(tap, layer) for layer in layers}):
            logits = model(**said.inputs(count - 1), positions_to_keep=count)
    finally:
        for hook in hooks:
            hook.remove()
    check_finite(logits, name)
    chosen = logits[0].float().softmax(-1).gather(-1, said.new[:, None].to(logits.device))[:, 0].cpu().numpy()

    def stacked(values: Sequence, number: int) -> np.ndarray:
        return np.stack([of_layer[min(number, len(of_layer) - 1)] for of_layer in values], axis=1)

    found, laws = list(rows.values()), list(shares.values())
    if not double:
        return Maps({"A": stacked(found, 0)}, {"A": np.array([share[0] for share in laws])}, chosen)
    first, second = stacked(found, 0), stacked(found, 1)  # a layer without a second map has the first twice
    weight, extrapolates = np.zeros(first.shape[:3], np.float32), double[0].extrapolates
    for layer, factor in zip(double, factors, strict=True):
        weight[:, layers.index(layer)] = factor
    mixed = blend(*map(torch.from_numpy, (first, second, weight[..., None])), extrapolates).numpy()
    shares_of = {
        name: np.array([share[min(n, len(share) - 1)] for share in laws]) for n, name in enumerate(("A1", "A2"))
    }
    formula = "A₁ + μ(A₁ − A₂)" if extrapolates else "A₁ − λA₂"
    return Maps({"A1": first, "A2": second, "mix": mixed}, shares_of, chosen, weight, formula)
