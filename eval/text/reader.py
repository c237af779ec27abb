"""Language models in `eval/answer.py`: texts that a model continues, in the place of prompts about
pictures.

In: a model folder. Out: what a `Processor` is for other models. Tokens are as in
lm-evaluation-harness: trailing spaces move to the answer; answer tokens = encode(prompt + answer)
minus encode(prompt).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from eval.question import Question
from eval.text.corpus import BOS, PAD
from model.common import UserError
from model.processor import Batch, TokenRow
from model.registry import read_config
from model.source import resolve
from model.systems.chat import load_text_tokenizer, pad_left
from model.systems.configs import LanguageConfig
from model.tokenizer import Texts, find_tokenizer, load_tokenizer


class TextReader:
    """Rows of texts, and what may follow each."""

    def __init__(
        self, encode: Callable[[str], list[int]], begin: list[int], pad: int | None, max_length: int
    ):
        self.encode = lru_cache(maxsize=4096)(
            encode
        )  # a prompt is encoded with each of its choices
        self.begin, self.padding, self.max_length = begin, pad, max_length

    def pixels(self, picture) -> torch.Tensor:
        raise UserError(
            "the model reads text alone, no pictures: take other questions, or another model"
        )

    def row(self, question: Question) -> TokenRow:
        """The tokens of a prompt."""
        ids = self.begin + self.encode(question.prefix.rstrip())
        return ids, [1] * len(ids), [0] * len(ids)

    def continuation(self, prefix: str, answer: str) -> list[int]:
        """The tokens of an answer after its prompt."""
        return self.encode(f"{prefix} {answer}")[len(self.encode(prefix.rstrip())) :]

    def pad(self, rows: Sequence[TokenRow]) -> Batch:
        ids, valid = pad_left([row for row, *_ in rows], self.padding)
        types, labels = torch.ones_like(ids), torch.full_like(ids, -100)
        return Batch(
            ids, torch.empty(0, 3, 1, 1), types, valid, labels, torch.empty(0, dtype=torch.int64)
        )


def open_reader(source: str, max_length: int) -> TextReader:
    """The reader of a language model. Raises UserError."""
    config = read_config(resolve(source, ["config.json"]) / "config.json")
    if isinstance(config, LanguageConfig):
        tokenizer = load_text_tokenizer(source)
        begin = tokenizer.prompt("a")[: -len(tokenizer.encode("a"))]
        return TextReader(
            tokenizer.encode,
            begin,
            config.pad_token_id,
            min(max_length, config.max_position_embeddings),
        )
    texts = Texts(load_tokenizer(find_tokenizer(source)), config.text.vocab_size, (), ())
    return TextReader(texts.encode, [BOS], PAD, max_length)
