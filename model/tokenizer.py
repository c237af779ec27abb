"""Tokenizers: a sentencepiece model, or any tokenizer.json, with the methods of sentencepiece.

Where a model has both files, tokenizer.model is read: it holds the pieces that PaliGemma was
trained with, and needs no further package, so that ids are the same in every environment. But
where tokenizer.json names a token that tokenizer.model lacks, tokenizer.json is read.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import sentencepiece

from model.common import UserError, check_text, quoted, read_json, read_json_if
from model.config import config_errors
from model.source import EMBEDDED, preset_of, resolve
from model.turns import SLOT

BESIDE = ["added_tokens.json", "tokenizer_config.json"]  # files that name tokens, too
SPACE = "\u2581"  # stands for a space in sentencepiece's pieces
# Where a file lacks <pad>, <eos>, <bos> or <unk>, the first of these that it has stands for all
# four: it is that of GPT-NeoX, Qwen and SmolLM; of Llama 3; of Llama 1 and 2
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
# tokens that transformers' GemmaTokenizer and PaliGemmaProcessor find in text, whatever a file says
# of them
SPECIAL = "<pad> <eos> <bos> <unk> <mask>".split()
LOCATIONS = [f"<loc{number:04}>" for number in range(1024)] + [
    f"<seg{number:03}>" for number in range(128)
]
# what a tokenizer.model may lack: <image> comes after its pieces, the tab is the piece <0x09>, and
# <seg…> of the embedded base are names of a spare row, so that transformers adds none
UNNAMED = {SLOT, "\t", *LOCATIONS[1024:]}
MAX_GROWTH = 100  # how much longer a tokenizer.json may make a text; published files: 2
# in a tokenizer.json: the token that its template puts before a text
BEFORE = re.compile(r'"single": \[\{"SpecialToken": \{"id": ("[^"]*")')
# and the texts that its steps put in place of others, or before them
INSERTED = re.compile(r'"(?:content|prepend)": "((?:\\.|[^"\\])+)"')


class JsonTokenizer:
    """A tokenizer.json, read by the package `tokenizers`, with the methods of sentencepiece. Raises
    UserError."""

    def __init__(self, path: Path):
        # 1. the file
        try:
            from tokenizers import Tokenizer

            raw = read_json(path)
            parts = [raw.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
            steps = json.dumps(parts, ensure_ascii=False)
            # at most: ByteLevel may double a text, an inserted text may replace each character
            growth = 2 ** steps.count('"ByteLevel"') * prod(map(len, INSERTED.findall(steps)))
            if growth > MAX_GROWTH:
                raise ValueError(f"it may make a text {MAX_GROWTH} times longer")
            self.tokenizer = Tokenizer.from_file(str(path))
            # control tokens are placed by us, and a template may leave out the text
            self.tokenizer.post_processor = None
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
            # this raises, too, where nothing stands for what is unknown
            if not self.encode("a\U0010ffff"):
                raise ValueError("it leaves nothing of a text")
        except ImportError:
            raise UserError(
                f"{path}: is read by a package that is not installed: pip install tokenizers"
            ) from None
        # the package raises Exception itself, and panics in Rust at damaged files
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"{path}: not a tokenizer ({quoted(str(error))}): download the file again"
            ) from None
        # 2. its control tokens
        find = self.tokenizer.token_to_id
        control = [find(token) for token in SPECIAL[:4]]
        known = self.tokenizer.get_vocab()
        ends = [token for token in ENDS if token in known]
        if None not in control:
            self.tokenizer.add_special_tokens([token for token in SPECIAL if token in known])
            self.tokenizer.add_tokens([token for token in LOCATIONS if token in known])
        elif ends:
            control = [known[ends[0]]] * 4
        else:
            raise UserError(
                f"{path}: has neither <pad>, <eos>, <bos> and <unk> nor one of "
                f"{', '.join(ENDS)}: take the model's own file"
            )
        # 3. what it puts before a text: bos, or nothing
        first = BEFORE.search(json.dumps(raw.get("post_processor")))
        bos = find(json.loads(first[1])) if first else None
        self.before = [] if bos is None else [bos]
        size = max(known.values()) + 1  # ids may have gaps
        # 4. methods, as sentencepiece's
        numbers = (partial(int, number) for number in (*control, size))
        self.pad_id, self.eos_id, self.bos_id, self.unk_id, self.vocab_size = numbers

    def id_to_piece(self, id_: int) -> str:
        return self.tokenizer.id_to_token(id_) or ""  # where the vocabulary has a gap

    def piece_to_id(self, piece: str) -> int:
        id_ = self.tokenizer.token_to_id(piece)
        return self.unk_id() if id_ is None else id_

    def encode(self, text: str | Sequence[str]) -> list:
        """The ids of a text, or of each of a list of texts, without control tokens."""
        if not isinstance(text, str):
            return [self.encode(part) for part in text]
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


Tokenizer = sentencepiece.SentencePieceProcessor | JsonTokenizer


def find_tokenizer(source: str | Path, revision: str | None = None) -> Path:
    """The tokenizer.model of a model, or else its tokenizer.json, which need not exist; the
    embedded one for a preset. Downloads from the hub the small files beside it, too."""
    source = EMBEDDED if preset_of(source) else source
    # its own, and those of the callers
    names = (
        "tokenizer.model tokenizer.json config.json processor_config.json preprocessor_config.json"
    ).split()
    file = resolve(source, [*names, *BESIDE], revision) / "tokenizer.model"
    return file if file.exists() else file.with_suffix(".json")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The sentencepiece model or tokenizer.json at `path`. The tokenizer.json beside the former is
    read in its place if it names other tokens. Raises UserError if it is absent or another kind of
    file, or lacks a token that a file beside it names."""
    if not (path := Path(path)).is_file():
        raise UserError(
            f"{path}: not found, nor a tokenizer.model: copy either from the model that this one was "
            "made from, such as google/paligemma-3b-pt-224"
        )
    whole = path.with_suffix(".json")
    if path == whole:
        tokenizer = JsonTokenizer(path)
    else:
        tokenizer = sentencepiece.SentencePieceProcessor()
        try:
            tokenizer.load_from_serialized_proto(path.read_bytes())
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{path}: not a sentencepiece model ({error}): download the file again"
            ) from None
        if lacking(tokenizer, whole):
            tokenizer = JsonTokenizer(whole)
    for name in BESIDE:
        if tokens := lacking(tokenizer, path.with_name(name)):
            raise UserError(
                f"{path.with_name(name)}: names {quoted(tokens[0])}, which the tokenizer lacks or has "
                "elsewhere: save all with transformers"
            )
    return tokenizer


def lacking(tokenizer: Tokenizer, file: Path) -> list[str]:
    """The tokens that a file of transformers names, if it is there, and `tokenizer` has not, or by
    another id."""
    raw = read_json_if(file)
    with config_errors(file):
        named = dict(raw if file.name == BESIDE[0] else raw.get("model", {}).get("vocab", {}))
        for token in raw.get("added_tokens", []):
            named[token["content"]] = token["id"]
        for number, token in raw.get("added_tokens_decoder", {}).items():
            named[token["content"]] = int(number)
        for token in UNNAMED:
            named.pop(token, None)
        return [token for token, number in named.items() if tokenizer.piece_to_id(token) != number]


def another_model(problem: str) -> UserError:
    return UserError(
        f"the tokenizer is of another model: {problem}: take both files from one model"
    )


class Texts:
    """Text to ids and back. Texts spell no `control` token; an answer stops at the first of
    `ends`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rows: int,
        control: Iterable[int | None],
        ends: Collection[int],
    ):
        """rows: of the embedding. Raises UserError if the tokenizer has more pieces."""
        self.tokenizer, self.ends, self.pieces = tokenizer, ends, tokenizer.vocab_size()
        if self.pieces > rows:
            raise another_model(f"it has {self.pieces} pieces, but the embedding only {rows} rows")
        self.control = {id_ for id_ in control if id_ is not None and id_ < self.pieces}
        self._reserved = list(filter(None, map(tokenizer.id_to_piece, sorted(self.control))))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing before and nothing behind. Raises UserError if it spells a
        control token or is not UTF-8."""
        for piece in self._reserved:
            if piece in text:
                raise UserError(
                    f"the text spells the control token {piece}, which is placed for you: remove it"
                )
        return self.tokenizer.encode(check_text(text))

    def decode(self, ids: Any) -> str:
        """The text of answer ids (T,) up to the first that ends it, without control tokens and ids
        of no piece."""
        said = []
        for id_ in map(int, ids):
            if id_ in self.ends:
                break
            if 0 <= id_ < self.pieces and id_ not in self.control:
                said.append(id_)
        return self.tokenizer.decode(said)
