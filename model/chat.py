"""The tokenizer of a published language model, and the turns of a conversation with it.

In: a text, or prompts with their answers. Out: token ids for `model/language.py`, and answer ids back to text. A text
cannot spell control tokens: they are placed here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.common import UserError, read_json, read_text
from model.source import resolve
from model.system_configs import LanguageConfig
from model.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from model.turns import SLOT, Turn, check_text


@dataclass(frozen=True)
class ChatFormat:
    """How a family writes a conversation: each turn is `start`, role, newline, text, `end`, newline."""

    begins: bool  # any text with bos
    start: str
    end: str
    model_role: str
    system: str | None  # where neither the caller nor the model's template has one; None: the family has no such turn
    strips: bool  # the blanks around a text


_GEMMA = ChatFormat(True, "<start_of_turn>", "<end_of_turn>", "model", None, True)
_CHATML = ChatFormat(False, "<|im_start|>", "<|im_end|>", "assistant", "You are a helpful assistant.", False)
CHAT_FORMATS = {"gemma": _GEMMA, "gemma2": _GEMMA, "qwen2": _CHATML}
# the system turn that a template of Qwen's writes where a conversation has none
_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'<]+)<\|im_end\|>")


class TextTokenizer:
    """Text to ids and back, for the model of `config`."""

    def __init__(self, config: LanguageConfig, tokenizer: Tokenizer, max_length: int | None = None, template: str = ""):
        """max_length: tokens that a prompt or chat may have, at most those that the model was trained to read; a longer
        one is an error, it is never cut. template: the model's own chat template, which has its system text.

        Raises UserError if the tokenizer has more pieces than the embedding rows.
        """
        if (pieces := tokenizer.vocab_size()) > config.text.vocab_size:
            raise UserError(
                f"the tokenizer is of another model: it has {pieces} pieces, but the embedding only "
                f"{config.text.vocab_size} rows: take both files from one model"
            )
        self.config, self.tokenizer, self.format = config, tokenizer, CHAT_FORMATS[config.text.model_type]
        self.max_length = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
        own = _SYSTEM.search(template) if self.format.system else None
        self.system = own[1] if own else self.format.system
        self._is_foreign = bool(template and self.format.system and own is None)  # it would begin with another text
        self.begin = [config.bos_token_id] if self.format.begins and config.bos_token_id is not None else []
        unknown = tokenizer.unk_id()
        # a base model may have no turns
        marks = {mark: tokenizer.piece_to_id(mark) for mark in (self.format.start, self.format.end)}
        self._marks = {mark: id_ for mark, id_ in marks.items() if id_ != unknown}
        control = {*config.eos_token_id, config.pad_token_id, config.bos_token_id, unknown, *self._marks.values()}
        self._control = control - {None}
        self._reserved = [piece for piece in map(tokenizer.id_to_piece, sorted(self._control)) if piece]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing before and nothing behind. Raises UserError if it spells a control token."""
        check_text(text, self._reserved)
        return self.tokenizer.encode(text)

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that the model is to continue: with bos in front, if its family has one."""
        return self._checked(self.begin + self.encode(text))

    def chat(self, turns: Sequence[Turn], system: str | None = None) -> list[int]:
        """The ids of a conversation, prompts with their answers; where the last answer is None, the model's turn opens.

        system: what stands before them, None for what the family puts there. Raises UserError for a system text where
        the family has no such turn, and for a tokenizer without the control tokens of turns.
        """
        return self._checked(self.conversation(turns, (), system)[0])

    def conversation(
        self, turns: Sequence[Turn], slot: Sequence[int], system: str | None = None
    ) -> tuple[list[int], list[int]]:
        """As `chat`, and 1 for the ids that are learned: answers, their end marks, and newlines between turns.

        `<image>` in a prompt stands for the ids `slot`, if there are any. An answer's header is encoded by itself,
        since generation begins after it. Ids are those of the published template, unless an answer begins with a line
        break, which that joins to the header's.
        """
        form, newline = self.format, self.encode("\n")
        if len(self._marks) < 2:
            raise UserError(f"the tokenizer has no {form.start} and {form.end}: ask this model without a chat's turns")
        if system is not None and form.system is None:
            raise UserError(f"a conversation of {self.config.text.model_type} has no system turn: put it in the prompt")
        if system is None and self._is_foreign:
            raise UserError("the model's chat template spells no system turn, as Qwen's: ask without turns")
        system = self.system if system is None else system
        start, end = self._marks[form.start], self._marks[form.end]
        ids = list(self.begin)
        ids += [] if system is None else [start, *self.encode(f"system\n{system}"), end, *newline]
        learned = [0] * len(ids)
        for number, (prompt, answer) in enumerate(turns):
            text, given = f"user\n{prompt.strip() if form.strips else prompt}", [start]
            for place, part in enumerate(text.split(SLOT) if slot else [text]):
                given += [*(slot if place else ()), *self.encode(part)]
            given += [end, *newline, start, *self.encode(f"{form.model_role}\n")]
            reply = []
            if answer is not None:
                reply = [*self.encode(answer.strip() if form.strips else answer), end]
                reply += newline if number + 1 < len(turns) else []
            ids += given + reply
            learned += [0] * len(given) + [1] * len(reply)
        return ids, learned

    @property
    def end_of_turn(self) -> list[int]:
        """The tokens that end the model's turn, besides the ends of its configuration."""
        return [self._marks[self.format.end]] if self.format.end in self._marks else []

    def decode(self, ids: Iterable[int] | torch.Tensor) -> str:
        """The text of answer ids (T,) up to the first that ends an answer or a turn; control tokens are left out."""
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        ends = {*self.config.eos_token_id, *self.end_of_turn}
        ids = ids[: next((place for place, id_ in enumerate(ids) if id_ in ends), None)]
        pieces = self.tokenizer.vocab_size()  # the embedding has a few rows more
        return self.tokenizer.decode([id_ for id_ in ids if 0 <= id_ < pieces and id_ not in self._control])

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise UserError("the text has no tokens: write one")
        if len(ids) > self.max_length:
            raise UserError(f"{len(ids)} tokens, but at most {self.max_length} are read: shorten the text")
        return ids


def load_text_tokenizer(
    source: str | Path, revision: str | None = None, max_length: int | None = None
) -> TextTokenizer:
    """The tokenizer of a language model, a folder or hub id: tokenizer.model, or tokenizer.json where there is none.

    Qwen's needs the package `tokenizers`. Raises UserError.
    """
    names = ["config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json"]
    folder = resolve(source, names, revision)
    file, older = folder / names[2], folder / names[3]  # where transformers 5 and 4 save a template
    template = read_text(file) if file.is_file() else read_json(older).get("chat_template") if older.is_file() else ""
    config = LanguageConfig.from_file(folder / names[0])
    tokenizer = load_tokenizer(find_tokenizer(source, revision))
    return TextTokenizer(config, tokenizer, max_length, template if isinstance(template, str) else "")
