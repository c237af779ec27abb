"""Texts as token ids and back, and the turns of a conversation with a published language model.

In: a text, or prompts with their answers. Out: token ids, and answer ids back to text. A text
cannot spell control tokens: they are placed here.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from model.common import UserError, read_json_if, read_text
from model.generate import generate
from model.source import resolve
from model.systems.configs import LanguageConfig
from model.tokenizer import Texts, Tokenizer, find_tokenizer, load_tokenizer
from model.turns import SLOT, Turn

GEMMA = "<start_of_turn>", "<end_of_turn>", "model"  # begin and end of a turn, and the model's role
CHATML = "<|im_start|>", "<|im_end|>", "assistant"
# the system turn that a template of Qwen's writes where a conversation has none
SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'<]+)<\|im_end\|>")


def spell(texts: Texts, text: str, slot: Sequence[int]) -> list[int]:
    """The ids of a text, those of `slot` in place of each `<image>`; without a slot it is text."""
    ids = []
    for place, part in enumerate(text.split(SLOT) if slot else [text]):
        ids += [*(slot if place else ()), *texts.encode(part)]
    return ids


class TextTokenizer(Texts):
    """Texts and conversations of the language model of `config`."""

    def __init__(
        self,
        config: LanguageConfig,
        tokenizer: Tokenizer,
        max_length: int | None = None,
        template: str = "",
    ):
        """max_length: tokens that a prompt may have, at most those that the model was trained to
        read; a longer one is an error, it is never cut. template: the model's own chat template,
        which has its system text."""
        self.config, self.is_gemma = config, config.text.model_type != "qwen2"
        self.max_length = min(
            max_length or config.max_position_embeddings, config.max_position_embeddings
        )
        *marks, self.role = GEMMA if self.is_gemma else CHATML
        known = [id_ for id_ in map(tokenizer.piece_to_id, marks) if id_ != tokenizer.unk_id()]
        self.marks = known if len(known) == 2 else []  # a base model may have none
        self.end_of_turn = self.marks[
            1:
        ]  # ends the model's turn, besides the ends of its configuration
        control = (
            *config.eos_token_id,
            config.pad_token_id,
            config.bos_token_id,
            tokenizer.unk_id(),
            *self.marks,
        )
        super().__init__(
            tokenizer, config.text.vocab_size, control, {*config.eos_token_id, *self.end_of_turn}
        )
        self.begin = (
            [config.bos_token_id] if self.is_gemma and config.bos_token_id is not None else []
        )
        self.system = None if self.is_gemma or template else "You are a helpful assistant."
        if not self.is_gemma and (written := SYSTEM.search(template)):
            self.system = written[1]

    def prompt(self, text: str, chat: bool = False) -> list[int]:
        """The ids of a text that the model is to continue, or with `chat` to answer. Raises
        UserError."""
        ids = self.conversation([(text, None)])[0] if chat else self.begin + self.encode(text)
        if not 0 < len(ids) <= self.max_length:
            raise UserError(
                f"the text has {len(ids)} tokens, expected 1 to {self.max_length}: write another"
            )
        return ids

    def conversation(
        self, turns: Sequence[Turn], slot: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        """The ids of prompts with their answers, and 1 for those that are learned: answers, their
        end marks, and newlines between turns. Where the last answer is None, the model's turn
        opens. See `spell` for `slot`.

        Ids are those of the published template, unless an answer begins with a line break: a header
        is encoded by itself, since generation begins after it. Raises UserError for a tokenizer or
        template without these turns.
        """
        if not self.marks:
            raise UserError(
                "the tokenizer has no tokens of turns: ask this model without a chat's turns"
            )
        if not self.is_gemma and self.system is None:
            raise UserError(
                "the model's chat template spells no system turn, as Qwen's: ask without turns"
            )
        (start, end), newline = self.marks, self.encode("\n")
        ids = list(self.begin)
        ids += (
            []
            if self.system is None
            else [start, *self.encode(f"system\n{self.system}"), end, *newline]
        )
        learned = [0] * len(ids)
        for number, (prompt, answer) in enumerate(turns):
            text = spell(self, f"user\n{prompt.strip() if self.is_gemma else prompt}", slot)
            given = [start, *text, end, *newline, start, *self.encode(f"{self.role}\n")]
            reply = []
            if answer is not None:
                reply = [*self.encode(answer.strip() if self.is_gemma else answer), end]
                reply += newline if number + 1 < len(turns) else []
            ids += given + reply
            learned += [0] * len(given) + [1] * len(reply)
        return ids, learned


def load_text_tokenizer(source: str | Path, max_length: int | None = None) -> TextTokenizer:
    """The tokenizer of a language model, a folder or hub id; Qwen's needs the package `tokenizers`.
    UserError."""
    beside = ["generation_config.json", "chat_template.jinja", "tokenizer_config.json"]
    folder = resolve(source, ["config.json", *beside])
    # where transformers 4 and 5 save a template
    template = read_json_if(folder / "tokenizer_config.json").get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = read_text(file)
    config = LanguageConfig.from_file(folder / "config.json")
    tokenizer = load_tokenizer(find_tokenizer(source))
    return TextTokenizer(
        config, tokenizer, max_length, template if isinstance(template, str) else ""
    )


def ask_text(
    model: Any,
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
    answers = generate(model, ids, None, torch.ones_like(ids), valid, max_new_tokens, **options)
    return [tokenizer.decode(answer) for answer in answers]


def pad_left(rows: Sequence[Sequence[int]], pad: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, S) of rows of unequal length, and the attention mask (B, S). pad: None where a
    model has none."""
    width = max(map(len, rows))
    size = len(rows), width
    ids = torch.full(size, pad or 0, dtype=torch.int64)
    valid = torch.zeros(size, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = torch.tensor(row)
        valid[number, width - len(row) :] = 1
    return ids, valid
