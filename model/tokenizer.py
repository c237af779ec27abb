"""Tokenizers: a sentencepiece model, or any tokenizer.json.

In: a file. Out: an object with the methods of `sentencepiece.SentencePieceProcessor` that `model/processor.py` and
`model/chat.py` call. Where a model has both files, tokenizer.model is read: it holds the pieces that PaliGemma was
trained with, and needs no further package, so that ids are the same in every environment.
"""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from model.common import UserError, quoted, read_json
from model.source import EMBEDDED, preset_of, resolve
from model.turns import SLOT

ADDED = "added_tokens.json"
BESIDE = ("config.json", "processor_config.json", "preprocessor_config.json")  # what the callers read besides
SPACE = "\u2581"  # stands for a space in sentencepiece's pieces
END = "<|endoftext|>"  # of GPT-NeoX (the published Mambas) and Qwen, in place of all four control tokens
# tokens that transformers' GemmaTokenizer and PaliGemmaProcessor find in text, whatever a file says of them
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
LOCATIONS = [f"<loc{number:04}>" for number in range(1024)] + [f"<seg{number:03}>" for number in range(128)]


class JsonTokenizer:
    """A tokenizer.json, read by the package `tokenizers`, with the methods of sentencepiece."""

    def __init__(self, path: Path):
        """Raises UserError where the package is absent, and for a file that it cannot read."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(f"{path}: is read by a package that is not installed: pip install tokenizers") from None
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except BaseException as error:  # the package raises Exception itself, and panics in Rust at damaged files
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{path}: not a tokenizer ({quoted(str(error))}): download the file again") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        find = self.tokenizer.token_to_id
        end = find(END)
        # in a text the spelling of this token is text; Gemma's are refused by the callers
        self.tokenizer.encode_special_tokens = end is not None
        if end is None:
            self.tokenizer.add_special_tokens([token for token in SPECIAL if find(token) is not None])
            self.tokenizer.add_tokens([token for token in LOCATIONS if find(token) is not None])
        control = [find(f"<{name}>") if end is None else end for name in ("pad", "eos", "bos", "unk")]
        self._control = [id_ for id_ in control if id_ is not None]
        if len(self._control) < len(control):
            raise UserError(f"{path}: has neither <pad>, <eos>, <bos> and <unk> nor {END}: take the model's own file")
        self._size = max(self.tokenizer.get_vocab().values()) + 1  # ids may have gaps

    def vocab_size(self) -> int:
        return self._size

    def pad_id(self) -> int:
        return self._control[0]

    def eos_id(self) -> int:
        return self._control[1]

    def bos_id(self) -> int:
        return self._control[2]

    def unk_id(self) -> int:
        return self._control[3]

    def id_to_piece(self, id_: int) -> str:
        """The piece of an id; an empty string where the vocabulary has a gap."""
        return self.tokenizer.id_to_token(id_) or ""

    def piece_to_id(self, piece: str) -> int:
        """The id of a piece, `unk_id` if there is none."""
        id_ = self.tokenizer.token_to_id(piece)
        return self.unk_id() if id_ is None else id_

    def encode(self, text: str | Sequence[str]) -> list:
        """The ids of a text, or a list of them for each of a list of texts; no control tokens are added."""
        if not isinstance(text, str):
            return [self.encode(part) for part in text]
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(list(ids))


Tokenizer = sentencepiece.SentencePieceProcessor | JsonTokenizer


def find_tokenizer(source: str | Path, revision: str | None = None) -> Path:
    """The tokenizer.model of a model, or tokenizer.json where it has none; presets read with the embedded base's.

    Downloads from the hub the small files beside it, too. The file need not exist: `load_tokenizer` says so.
    """
    source = EMBEDDED if preset_of(source) else source
    file = resolve(source, ["tokenizer.model", ADDED, *BESIDE], revision) / "tokenizer.model"
    return file if file.exists() else resolve(source, ["tokenizer.json"], revision) / "tokenizer.json"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The sentencepiece model or tokenizer.json at `path`. Raises UserError if it is absent or another kind of file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"{path}: not found, nor a tokenizer.model: copy either from the model that this one was made from, such "
            "as huggingface.co/google/paligemma-3b-pt-224 (for a Mamba, state-spaces/mamba-130m-hf)"
        )
    if path.suffix == ".json":
        return JsonTokenizer(path)
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: not a sentencepiece model ({error}): download the file again") from None
    beside = path.with_name(ADDED)  # of a model that has learned more tokens
    added = read_json(beside).keys() - {SLOT} if beside.is_file() else ()
    if foreign := [token for token in sorted(added) if tokenizer.id_to_piece(tokenizer.piece_to_id(token)) != token]:
        raise UserError(f"{beside}: adds {quoted(foreign)}: remove {path.name}, so that tokenizer.json is read")
    return tokenizer
