"""Language models in the place of models that read pictures: texts that a model continues.

In: a model folder. Out: what a `Processor` is for other models. Tokens are as in
lm-evaluation-harness: trailing spaces move to the answer; answer tokens = encode(prompt + answer)
minus encode(prompt).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from model.common import UserError
from model.processor import Batch, TokenRow
from model.registry import read_config
from model.source import resolve
from model.systems.chat import TextTokenizer, ask_text, load_text_tokenizer, pad_left
from model.systems.configs import LanguageConfig
from model.tokenizer import Texts, find_tokenizer, load_tokenizer
from model.turns import Turn


class TextReader:
    """Rows of texts for a language model, and what may follow each."""

    def __init__(self, tokenizer: Texts, begin: list[int], pad: int | None, max_length: int):
        self.tokenizer = tokenizer
        # a prompt is encoded with each of its choices
        self.encode = lru_cache(4096)(tokenizer.encode)
        self.begin, self.padding, self.max_length = begin, pad, max_length

    def pixels(self, picture) -> Tensor:
        raise UserError(
            "the model reads text alone, no pictures: take other questions, or another model"
        )

    def row_of(self, n_images: int, turns: Sequence[Turn]) -> TokenRow:
        """The tokens of the last prompt."""
        ids = self.begin + self.encode(turns[-1][0].rstrip())
        return ids, [1] * len(ids), [0] * len(ids)

    def continuation(self, prefix: str, answer: str) -> list[int]:
        """The tokens of an answer after its prompt."""
        return self.encode(f"{prefix} {answer}")[len(self.encode(prefix.rstrip())) :]

    def ask(self, model: Any, prompts: Sequence[str], *options, **more) -> list[str]:
        """As `ask_text`. Raises UserError for one of our own text models."""
        if not isinstance(self.tokenizer, TextTokenizer):
            raise UserError("a model that was trained from nothing is measured, not asked")
        return ask_text(model, self.tokenizer, prompts, *options, **more)

    def pad(self, rows: Sequence[TokenRow]) -> Batch:
        ids, valid = pad_left([row for row, *_ in rows], self.padding)
        return Batch(
            ids,
            pixel_values=torch.empty(0, 3, 1, 1),
            token_type_ids=torch.ones_like(ids),
            attention_mask=valid,
            labels=torch.full_like(ids, -100),
            image_index=torch.empty(0, dtype=torch.int64),
        )


def open_reader(source: str, max_length: int) -> TextReader:
    """The reader of a language model. Raises UserError."""
    config = read_config(resolve(source, ["config.json"]) / "config.json")
    if isinstance(config, LanguageConfig):
        known = load_text_tokenizer(source, max_length)
        return TextReader(known, known.begin, config.pad_token_id, known.max_length)
    texts = Texts(load_tokenizer(find_tokenizer(source)), config.text.vocab_size, (), ())
    return TextReader(texts, [config.bos_token_id], config.pad_token_id, max_length)
