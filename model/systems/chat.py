"""Texts as token ids and back, and the turns of a conversation with a published language model.

In: a text, or prompts with their answers. Out: token ids, and answer ids back to text. A text
cannot spell control tokens: they are placed here.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.common import UserError, read_json_if, read_text
from model.generate import generate_texts
from model.processor import left_padded
from model.source import resolve
from model.systems.configs import DEFAULT_SYSTEM, LanguageConfig, LlamaConfig
from model.templates import render
from model.tokenizer import JsonTokenizer, Texts, Tokenizer, find_tokenizer, load_tokenizer
from model.turns import SLOT, Turn

GEMMA = "<start_of_turn>", "<end_of_turn>", "model"  # begin and end of a turn, and the model's role
CHATML = "<|im_start|>", "<|im_end|>", "assistant"


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
        system: str | None = DEFAULT_SYSTEM,
        adds_bos: bool = True,
    ):
        """max_length: tokens that a prompt may have, at most those that the model was trained to
        read; a longer one is an error, it is never cut. system: the text of the system turn, of
        ChatML. adds_bos: before a text, where the tokenizer's own file does not say."""
        self.config, self.is_gemma = config, not isinstance(config.text, LlamaConfig)
        longest = config.max_position_embeddings
        self.max_length = min(max_length or longest, longest)
        self.system = None if self.is_gemma else system
        # 1. marks of turns, which a base model may lack
        self.spelled = GEMMA if self.is_gemma else CHATML
        unknown = tokenizer.unk_id()
        known = [id_ for id_ in map(tokenizer.piece_to_id, self.spelled[:2]) if id_ != unknown]
        self.marks = known if len(known) == 2 else []
        # ends the model's turn, besides the ends of its configuration
        self.end_of_turn = self.marks[1:]
        # 2. what stands before a text, as in the tokenizer's file, and before a conversation
        self.bos = [] if config.bos_token_id is None else [config.bos_token_id]
        before = self.bos if adds_bos else []
        self.begin = before if self.is_gemma else getattr(tokenizer, "before", before)
        self.opening = self.bos if self.is_gemma else []
        # 3. what a text cannot spell, and what ends an answer
        ends = {*config.eos_token_id, *self.end_of_turn}
        control = [*ends, *self.marks, config.pad_token_id, config.bos_token_id, unknown]
        super().__init__(tokenizer, config.text.vocab_size, control, ends)

    def follow(self, template: Any, named: Mapping[str, Any]) -> None:
        """Open a conversation as a chat template does, which is given tokens by name. One that
        writes other turns than those here leaves the model without turns."""
        # 1. what it makes of a question, an answer and a question; Gemma's have no blanks around
        said = "A" if self.is_gemma else " A "
        messages = [{"role": role, "content": said} for role in ("user", "assistant", "user")]
        bos = "".join(map(self.tokenizer.id_to_piece, self.bos))
        text = render(template, {"bos_token": bos, **named, "messages": messages})
        # 2. what it writes before them: bos, or a system turn
        start, end, role = self.spelled
        question = f"{start}user\n{said}{end}\n{start}{role}\n"
        turns = f"{question}{said}{end}\n{question}"
        bos, start, end, turns = map(re.escape, (bos, start, end, turns))
        system = f"{start}system\n((?:(?!{start}|{end}).)*){end}\n"
        found = re.fullmatch(f"({bos})?(?:{system})?{turns}", text, re.DOTALL)
        if found:
            self.opening = self.bos if found[1] else []
            self.system = found[2]
        # 3. whether its parts have the same ids by themselves
        ids, _ = self.conversation([(said, said), (said, None)])
        if isinstance(self.tokenizer, JsonTokenizer) and self.tokenizer.encode(text) != ids:
            found = None
        if not found:
            self.marks = []

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
                "the tokenizer or the chat template has other turns than Gemma's or ChatML, which "
                "alone are written here: ask this model without a chat's turns"
            )
        (start, end), newline = self.marks, self.encode("\n")
        ids = list(self.opening)
        if self.system is not None:
            ids += [start, *self.encode(f"system\n{self.system}"), end, *newline]
        learned = [0] * len(ids)
        for number, (prompt, answer) in enumerate(turns):
            if self.is_gemma:
                prompt, answer = prompt.strip(), answer and answer.strip()
            text = spell(self, f"user\n{prompt}", slot)
            given = [start, *text, end, *newline, start, *self.encode(f"{self.spelled[2]}\n")]
            reply = []
            if answer is not None:
                reply = [*self.encode(answer), end]
                if number + 1 < len(turns):
                    reply += newline
            ids += given + reply
            learned += [0] * len(given) + [1] * len(reply)
        return ids, learned


def load_text_tokenizer(source: str | Path, max_length: int | None = None) -> TextTokenizer:
    """The tokenizer of a language model, a folder or hub id; Qwen's needs the package `tokenizers`.
    UserError."""
    names = "config.json generation_config.json chat_template.jinja tokenizer_config.json"
    folder = resolve(source, names.split())
    # where transformers 4 and 5 save a template
    told = read_json_if(folder / "tokenizer_config.json")
    template = told.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = read_text(file)
    config = LanguageConfig.from_file(folder / "config.json")
    adds_bos = told.get("add_bos_token") is not False
    texts = TextTokenizer(
        config, load_tokenizer(find_tokenizer(source)), max_length, adds_bos=adds_bos
    )
    if template and texts.marks:
        texts.follow(template, told)
    return texts


def ask_text(
    model: Any,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    max_new_tokens: int = 32,
    chat: bool = False,
    **options,
) -> list[str]:
    """How the model goes on from each prompt or, with `chat`, answers it. options: those of
    `generate_texts`. UserError."""
    rows = [tokenizer.prompt(prompt, chat) for prompt in prompts]
    device = model.device
    ids, valid = (tensor.to(device) for tensor in pad_left(rows, model.config.pad_token_id))
    options["also_end"] = tokenizer.end_of_turn  # where `decode` stops, too
    inputs = ids, None, torch.ones_like(ids), valid, max_new_tokens
    return generate_texts(model, tokenizer.decode, *inputs, **options)


def pad_left(rows: Sequence[Sequence[int]], pad: int | None) -> tuple[Tensor, Tensor]:
    """Token ids (B, S) of rows of unequal length, and the attention mask (B, S). pad: None where a
    model has none."""
    ids, valid = left_padded([[row] for row in rows])
    return ids.where(valid > 0, pad or 0), valid
