"""Decoding: the prompts are read once into the cache, then one token a step for all rows until
every row has ended.

In: a batch of prompts of unequal length, padded on either side. Out: the new tokens of each row,
which `Processor.decode` turns into text; `ask` does all of it, from pictures to text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from model.attention import LayerCache
from model.common import UserError
from model.paligemma import PaliGemma
from model.processor import Processor
from model.systems.chat import TextTokenizer
from model.systems.language import LanguageModel

CHECK_EVERY = (
    8  # steps between checks whether all rows have ended on a GPU: each makes the CPU wait for it
)


class NonFiniteError(UserError):
    """Logits that are NaN or infinite; `rows` are the rows of the batch that have them, `name` is
    what was asked."""

    def __init__(self, rows: list[int], name: str = ""):
        self.rows = rows
        super().__init__(
            f"{name}{': ' * bool(name)}the logits are not finite: the weights or the adapter are "
            "damaged, or too large "
            "for the dtype: try --dtype fp32, or another model"
        )


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Whether all logits (B, …, V) of a row are finite, (B,) bool, without waiting for the
    device."""
    low, high = torch.aminmax(logits.flatten(1), dim=1)  # NaN is both
    return low.isfinite() & high.isfinite()


def check_finite(logits: torch.Tensor, name: str = "") -> None:
    """Raise NonFiniteError for logits (B, …, V) that are NaN or infinite, its message with `name`
    in front."""
    rows = (~finite_rows(logits)).nonzero().flatten().tolist()
    if rows:
        raise NonFiniteError(rows, name)


class CompiledStep:
    """One step of decoding through torch.compile, for many calls of `generate`; on CUDA as a CUDA
    graph.

    It keeps its caches, because a CUDA graph reads fixed addresses. Each number of rows and
    capacity, a multiple of `bucket`, is compiled by itself, which takes long. `options` are
    torch.compile's.
    """

    def __init__(self, model: PaliGemma, bucket: int = 128, **options: Any):
        if options == {} and next(model.parameters()).is_cuda:
            options = {"mode": "reduce-overhead"}
        # one compilation for each (rows, capacity); beyond its limit the compiler would raise
        # pyright: ignore
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.model, self.bucket = model, bucket
        self.caches: dict[tuple[int, int], list[LayerCache]] = {}
        self.cache: list[LayerCache] = []  # that of the present batch
        self.position = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        self.step = torch.compile(self._step, fullgraph=True, dynamic=False, **options)

    def open(self, rows: int, capacity: int) -> list[LayerCache]:
        """A cache for `rows` prompts, ready to read them. Raises UserError for a model without keys
        and values."""
        capacity += -capacity % self.bucket
        if (rows, capacity) not in self.caches:
            self.caches[rows, capacity] = self.model.new_cache(capacity)
        self.cache = self.caches[rows, capacity]
        for layer in self.cache:
            if not isinstance(layer, LayerCache):
                raise UserError(
                    "a model with no key/value cache cannot be compiled: decode without --compile"
                )
            layer.length, layer.position = 0, None
            for kept in (layer.keys, layer.values):
                kept.zero_()  # of the batch before: a masked weight of 0 times a NaN would be NaN
        return self.cache

    def seal(self) -> None:
        """Call this once the prompts are read: from here on, steps of one token follow."""
        self.position.fill_(self.cache[0].length - 1)
        for layer in self.cache:
            torch._dynamo.mark_static_address(layer.keys)
            torch._dynamo.mark_static_address(layer.values)
            layer.position = self.position

    def __call__(
        self, token: torch.Tensor, types: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Logits (B, V) after `token` (B,); types and valid (B, capacity) describe all positions.
        Raises UserError."""
        self.position += 1
        torch.compiler.cudagraph_mark_step_begin()
        try:
            return self.step(token[:, None], types, valid, self.cache)
        # pyright: ignore[reportAttributeAccessIssue]
        except torch._dynamo.exc.BackendCompilerFailed as error:
            message = " ".join(str(error).partition("\n\n")[0].split())
            raise UserError(
                f"torch.compile: {message}: install a C++ compiler, or decode without --compile"
            ) from error

    def _step(self, token, types, valid, cache) -> torch.Tensor:
        written = torch.arange(valid.shape[1], device=valid.device) <= cache[0].position
        valid = valid * written
        return self.model(
            token, pixel_values=None, token_type_ids=types, attention_mask=valid, cache=cache
        )[:, -1]


def generate(
    model: PaliGemma | LanguageModel,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor | None,
    token_type_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    image_features: torch.Tensor | None = None,
    image_index: torch.Tensor | None = None,
    compiled: CompiledStep | None = None,
    also_end: Sequence[int] = (),
    on_token: Callable[[torch.Tensor], object] = lambda token: None,
) -> list[torch.Tensor]:
    """New token ids of each row (a list of B vectors), up to and including an end token if one
    came.

    The prompt (B, S) and its pictures are as for `PaliGemma.forward`; each new token is causal.
    Decoding is greedy at temperature 0, else sampled from the smallest set of tokens that holds
    `top_p` of the probability there; the image token is never chosen. `compiled` is a compiled step
    of this model. The tokens `also_end` end a row, too; `on_token` receives each new token (B,).
    Raises UserError, and NonFiniteError for logits before a row's end that are not.
    """
    check_options(max_new_tokens, temperature, top_p)
    # inference mode saves the bookkeeping of autograd in every step; torch.compile does not allow
    # it
    with torch.inference_mode() if compiled is None else torch.no_grad():
        rows, prompt = input_ids.shape
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        end = prompt + max_new_tokens
        cache = model.new_cache(end) if compiled is None else compiled.open(rows, end)
        # valid and types of all positions, the new tokens' included, which are valid and causal
        new = attention_mask.new_ones(
            rows, (end if compiled is None else cache[0].capacity) - prompt
        )
        valid, types = (
            torch.cat((attention_mask, new), dim=1),
            torch.cat((token_type_ids, new), dim=1),
        )
        given = {
            "pixel_values": pixel_values,
            "image_features": image_features,
            "image_index": image_index,
        }
        given |= {"token_type_ids": token_type_ids, "attention_mask": attention_mask}
        logits = model(
            input_ids, positions_to_keep=last_valid(attention_mask), cache=cache, **given
        )[:, -1]
        if compiled is not None:
            compiled.seal()
        eos = torch.tensor(model.config.eos_token_id, dtype=torch.int64).view(
            -1
        )  # one, or a tuple of any number
        ends = torch.cat((eos, torch.tensor(also_end, dtype=eos.dtype))).to(logits.device)
        penalty = getattr(model.config, "repetition_penalty", 1.0)
        sampling = (
            temperature,
            top_p,
            generator,
            model.config.image_token_id if isinstance(model, PaliGemma) else None,
        )
        tokens, check_every = [], CHECK_EVERY if logits.is_cuda else 1
        ended = broken = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        for seen in range(prompt + 1, end + 1):
            # a row of NaN counts as ended, and is reported in the end, so that no step waits for a
            # GPU
            finite = finite_rows(logits)
            broken, ended = broken | ~(finite | ended), ended | ~finite
            if temperature > 0:  # torch.multinomial fails on NaN, on CUDA for all later calls too
                logits = torch.where(finite[:, None], logits, 0.0)
            if (
                penalty != 1
            ):  # Keskar et al. 2019, section 4.1, for what was read or said; padding was not
                ids = torch.cat((input_ids, *(token[:, None] for token in tokens)), dim=1)
                said = (
                    torch.zeros_like(logits).scatter_add(
                        1, ids, valid[:, : ids.shape[1]].to(logits)
                    )
                    > 0
                )
                logits = logits.where(
                    ~said, torch.where(logits < 0, logits * penalty, logits / penalty)
                )
            token = torch.where(ended, ends[0] if len(ends) else 0, pick(logits, *sampling))
            tokens.append(token)
            on_token(token)
            ended = ended | (token[:, None] == ends).any(1)
            if seen == end or len(tokens) % check_every == 0 and bool(ended.all()):
                break
            if compiled is None:
                given = {"token_type_ids": types[:, :seen], "attention_mask": valid[:, :seen]}
                logits = model(token[:, None], pixel_values=None, cache=cache, **given)[:, -1]
            else:
                logits = compiled(token, types, valid)
        if problems := broken.nonzero().flatten().tolist():
            raise NonFiniteError(problems)
    # copies made outside of inference mode, which autograd may use
    return [up_to_end(row, ends).clone() for row in torch.stack(tokens, dim=1)]


def up_to_end(row: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A row of tokens (T,) up to its first token of `ends`, included."""
    places = torch.isin(row, ends).nonzero()
    return row[: int(places[0]) + 1] if len(places) else row


def ask(
    model: PaliGemma,
    processor: Processor,
    pictures: Sequence,
    prompts: Sequence[str],
    max_new_tokens: int = 32,
    **options,
) -> list[str]:
    """The answer to each prompt about its picture, as text. options: those of `generate`. Raises
    UserError.

    Many questions are asked faster by `eval.answer.ask_all`, which encodes a picture once and sorts
    prompts by length.
    """
    batch = processor(pictures, prompts).to(next(model.parameters()).device)
    options["image_index"] = batch.image_index
    prompt = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    return [processor.decode(new) for new in generate(model, *prompt, max_new_tokens, **options)]


def ask_text(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    max_new_tokens: int = 32,
    chat: bool = False,
    **options,
) -> list[str]:
    """How the model goes on from each prompt or, with `chat`, answers it. options: those of
    `generate`. UserError."""
    rows = [tokenizer.prompt(prompt, chat) for prompt in prompts]
    ids, valid = pad_left(rows, model.config.pad_token_id)
    device = next(model.parameters()).device
    ids, valid = ids.to(device), valid.to(device)
    options["also_end"] = tokenizer.end_of_turn if chat else ()
    new = generate(model, ids, None, torch.ones_like(ids), valid, max_new_tokens, **options)
    return [tokenizer.decode(row) for row in new]


def pad_left(rows: Sequence[Sequence[int]], pad: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, S) of rows of unequal length, and the attention mask (B, S). pad: None where a
    model has none."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad or 0] * (width - len(row)) + list(row) for row in rows])
    valid = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, valid


def check_options(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise UserError for options that `generate` does not take."""
    if max_new_tokens < 1 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        given = f"max_new_tokens {max_new_tokens}, temperature {temperature}, top_p {top_p}"
        raise UserError(f"{given}: expected at least 1, at least 0 and finite, and in (0, 1]")


def last_valid(attention_mask: torch.Tensor) -> torch.Tensor:
    """Index (B, 1) of each row's last valid position, whose logits choose the first new token."""
    width = attention_mask.shape[1]
    return width - 1 - attention_mask.flip(1).long().argmax(dim=1, keepdim=True)


def pick(
    logits: torch.Tensor,
    temperature: float,
    top_p: float,
    generator: torch.Generator | None,
    excluded: int | None = None,
) -> torch.Tensor:
    """One token (B,) from finite logits (B, V): the largest, or a sample of the nucleus (Holtzman
    et al. 2020).

    The token `excluded` is never chosen; its logits are overwritten.
    """
    if excluded is not None and excluded < logits.shape[-1]:
        logits[:, excluded] = -math.inf
    if temperature == 0:
        return logits.argmax(dim=-1)
    # the largest logit becomes 0, and the temperature a number of fp32, so that no quotient is NaN
    limits = torch.finfo(logits.dtype)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = torch.softmax(logits / min(max(temperature, limits.tiny), limits.max), dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # a token stays while the mass before it has not reached top_p: the first always does
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
