"""Decoding: the prompts are read once into the cache, then one token a step for all rows until
every row has ended.

In: a batch of prompts of unequal length, padded on either side. Out: the new tokens of each row and
their log-probabilities, which `generate_texts` turns into text, and how sure the model is of it;
`ask` does all of it, from pictures to text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.common import UserError
from model.confidence import certainty
from model.paligemma import PaliGemma
from model.processor import Processor

# steps between checks whether all rows have ended on a GPU: each makes the CPU wait for it
CHECK_EVERY = 8


def ask(
    model: PaliGemma,
    processor: Processor,
    pictures: Sequence,
    prompts: Sequence[str],
    max_new_tokens: int = 32,
    **options,
) -> list[str]:
    """The answer to each prompt about its picture, as text. options: those of `generate_texts`.
    Raises UserError.

    Many questions are asked faster by `eval.answer.ask_all`, which encodes a picture once and sorts
    prompts by length.
    """
    batch = processor(pictures, prompts).to(model.device)
    return generate_texts(
        model,
        processor.decode,
        batch.input_ids,
        batch.pixel_values,
        batch.token_type_ids,
        batch.attention_mask,
        max_new_tokens,
        image_index=batch.image_index,
        **options,
    )


def generate_texts(
    model: Any,
    decode: Callable[[Any], str],
    *inputs,
    sure: list | None = None,
    also_end: Sequence[int] = (),
    **options,
) -> list[str]:
    """What `generate` says, as text. sure: gets a `Certainty` of each answer. decode: from ids to
    text. inputs, options: those of `generate`."""
    log_probs = []
    if sure is not None:
        options["log_probs"] = log_probs
    answers = generate(model, *inputs, also_end=also_end, **options)
    if sure is not None:
        ends = end_tokens(model, also_end).tolist()
        for ids, of_tokens in zip(answers, log_probs, strict=True):
            sure.append(certainty(ids.tolist(), of_tokens.tolist(), ends, decode))
    return [decode(answer) for answer in answers]


def generate(
    model: Any,
    input_ids: Tensor,
    pixel_values: Tensor | None,
    token_type_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    image_features: Tensor | None = None,
    image_index: Tensor | None = None,
    compiled: Any = None,
    also_end: Sequence[int] = (),
    on_token: Callable[[Tensor], object] = lambda token: None,
    log_probs: list | None = None,
) -> list[Tensor]:
    """New token ids of each row (a list of B vectors), up to and including an end token if one
    came.

    The prompt (B, S) and its pictures are as for `PaliGemma.forward`; each new token is causal.
    Decoding is greedy at temperature 0, else sampled from the smallest set of tokens that holds
    `top_p` of the probability there, after the model's own `adjusted` has seen the logits.
    `compiled` is a `model.compiled.CompiledStep` of this model. The tokens `also_end` end a row,
    too; `on_token` receives each new token (B,). Raises UserError, and NonFiniteError for logits
    before a row's end that are NaN or infinite.

    `log_probs`, an empty list, gets for each row the log p (T,) fp32 of its new tokens, the end
    token included, in nats. p is the softmax of the model's own logits. `adjusted`, temperature and
    top_p decide which token is chosen, but do not change its p.
    """
    check_options(max_new_tokens, temperature, top_p)
    rows, prompt = input_ids.shape
    length = prompt + max_new_tokens  # of a row that does not end before
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    # inference mode saves the bookkeeping of autograd; torch.compile does not allow it
    with torch.inference_mode() if compiled is None else torch.no_grad():
        # 1. a cache; new positions are valid and causal, a compiled step sees all at once
        cache = model.new_cache(length) if compiled is None else compiled.open(rows, length)
        new = 0 if compiled is None else cache[0].capacity - prompt
        valid = F.pad(attention_mask, (0, new), value=1)
        types = F.pad(token_type_ids, (0, new), value=1)

        # 2. the prompts, once
        logits = model(
            input_ids,
            pixel_values=pixel_values,
            image_features=image_features,
            image_index=image_index,
            token_type_ids=token_type_ids,
            attention_mask=attention_mask,
            positions_to_keep=last_valid(attention_mask),
            cache=cache,
        )[:, -1]
        if compiled is not None:
            compiled.seal()

        # 3. a token at a time, until every row has ended
        ends = end_tokens(model, also_end).to(logits.device)
        check_every = CHECK_EVERY if logits.is_cuda else 1
        ended = broken = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        tokens = []
        for filled in range(prompt + 1, length + 1):  # positions, that of the new token included
            # a row of NaN counts as ended, and is reported in the end: no step waits for a GPU
            finite = finite_rows(logits)
            broken = broken | ~(finite | ended)
            ended = ended | ~finite
            token = next_token(
                model,
                logits,
                (input_ids, tokens, valid),
                log_probs,
                temperature,
                top_p,
                generator,
            )
            token = torch.where(ended, ends[0] if len(ends) else 0, token)
            tokens.append(token)
            on_token(token)
            ended = ended | (token[:, None] == ends).any(1)
            if filled == length or len(tokens) % check_every == 0 and ended.all():
                break
            if compiled is None:
                valid = F.pad(valid, (0, 1), value=1)
                types = F.pad(types, (0, 1), value=1)
                logits = model(
                    token[:, None],
                    pixel_values=None,
                    token_type_ids=types,
                    attention_mask=valid,
                    cache=cache,
                )[:, -1]
            else:
                logits = compiled(token, types, valid)

        # 4. what went wrong, or each row up to its end
        if problems := broken.nonzero().flatten().tolist():
            raise NonFiniteError(problems)
    # stacked outside of inference mode: autograd may use them
    answers = [up_to_end(row, ends) for row in torch.stack(tokens, dim=1)]
    if log_probs is not None:
        pairs = zip(torch.stack(log_probs, dim=1), answers, strict=True)
        log_probs[:] = [row[: len(answer)] for row, answer in pairs]
    return answers


def end_tokens(model: Any, also_end: Sequence[int]) -> Tensor:
    """The tokens that end an answer: one of the configuration, several, or none; and others."""
    given = getattr(model.config, "eos_token_id", None)
    if given is None:
        given = ()
    elif isinstance(given, int):
        given = (given,)
    return torch.tensor([*given, *also_end], dtype=torch.int64)


def check_options(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise UserError for options that `generate` does not take."""
    if max_new_tokens < 1 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise UserError(
            f"max_new_tokens {max_new_tokens}, temperature {temperature}, top_p {top_p}: expected at "
            "least 1, at least 0 and finite, and in (0, 1]"
        )


def last_valid(attention_mask: Tensor) -> Tensor:
    """Index (B, 1) of each row's last valid position, whose logits choose the first new token."""
    width = attention_mask.shape[1]
    behind = attention_mask.flip(1).long().argmax(dim=1, keepdim=True)  # padding on the right
    return width - 1 - behind


def next_token(
    model: Any,
    logits: Tensor,
    read: tuple,
    log_probs: list[Tensor] | None,
    *options,
) -> Tensor:
    """One token (B,): what `pick` takes of the logits (B, V) after the model's own `adjusted`.

    read: what `adjusted` reads beside the logits: the prompt's ids (B, S), the new tokens so far, a
    list of (B,), and `valid`. log_probs: gets the token's log p (B,) before `adjusted`. options: of
    `pick`.
    """
    if log_probs is None:
        return pick(model.adjusted(logits, *read), *options)
    own = logits.log_softmax(-1, torch.float32)  # before `adjusted`, which may write into them
    token = pick(model.adjusted(logits, *read), *options)
    log_probs.append(own.gather(-1, token[:, None])[:, 0])
    return token


def pick(
    logits: Tensor,
    temperature: float,
    top_p: float,
    generator: torch.Generator | None,
) -> Tensor:
    """One token (B,) from logits (B, V), which are finite or −∞: the largest, or a sample of the
    nucleus (Holtzman et al. 2020). Of a row that has NaN it is any."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # the largest logit becomes 0, and the temperature a number of fp32, so that no quotient is NaN
    limits = torch.finfo(logits.dtype)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    temperature = min(max(temperature, limits.tiny), limits.max)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    # torch.multinomial fails on NaN, on CUDA for all later calls too
    probabilities = probabilities.nan_to_num(1.0)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # a token stays while the mass before it has not reached top_p: the first always does
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def up_to_end(row: Tensor, ends: Tensor) -> Tensor:
    """A row of tokens (T,) up to its first token of `ends`, included."""
    places = torch.isin(row, ends).nonzero()
    return row[: int(places[0]) + 1] if len(places) else row


class NonFiniteError(UserError):
    """Logits that are NaN or infinite; `rows` are the rows of the batch that have them, `name` is
    what was asked."""

    def __init__(self, rows: list[int], name: str = ""):
        self.rows = rows
        where = f"{name}: " if name else ""
        super().__init__(
            f"{where}the logits are not finite: the weights or the adapter are damaged, or too "
            "large for the dtype: try --dtype fp32, or another model"
        )


def finite_rows(logits: Tensor) -> Tensor:
    """Whether all logits (B, …, V) of a row are finite, (B,) bool, without waiting for the
    device."""
    low, high = torch.aminmax(logits.flatten(1), dim=1)  # NaN is both
    return low.isfinite() & high.isfinite()


def check_finite(logits: Tensor, name: str) -> None:
    """Raise NonFiniteError for logits (B, …, V) that are NaN or infinite, its message with `name`
    in front."""
    rows = (~finite_rows(logits)).nonzero().flatten().tolist()
    if rows:
        raise NonFiniteError(rows, name)
