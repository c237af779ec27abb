"""Byte-level BPE, GPT-NeoX's for the published Mamba models and Qwen's, with the methods that others call.

In: a tokenizer.json. Out: text to ids and back, by the methods of a `sentencepiece.SentencePieceProcessor`, which
cannot read such a file. No other file imports the optional package `tokenizers`.
"""

from collections.abc import Sequence
from pathlib import Path

from model.common import UserError

END = "<|endoftext|>"  # the token for begin, end and padding; of a Mamba all three ids are 0 in config.json


class BytePairTokenizer:
    """Byte-level BPE with the methods of sentencepiece. No token is unknown: any text is a string of bytes."""

    def __init__(self, tokenizer, end: int):
        # the spelling of a control token in a text is text: only the processor inserts control tokens
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer, self.end = tokenizer, end

    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def pad_id(self) -> int:
        return self.end

    bos_id = eos_id = unk_id = pad_id

    def id_to_piece(self, id_: int) -> str:
        return self.tokenizer.id_to_token(id_)

    def piece_to_id(self, piece: str) -> int:
        """The id of a piece, `unk_id` if there is none."""
        found = self.tokenizer.token_to_id(piece)
        return self.end if found is None else found

    def encode(self, text: str | Sequence[str], out_type: type = int) -> list:
        """The ids of a text (with out_type=str its pieces), or of each text of a list; no control tokens are added."""
        if not isinstance(text, str):
            return [self.encode(one, out_type) for one in text]
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.tokens if out_type is str else encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def load_bpe(path: str | Path) -> BytePairTokenizer:
    """The tokenizer.json at `path`. Raises UserError if it is another kind, or the package `tokenizers` is absent."""
    try:
        from tokenizers import Tokenizer  # optional: only for models that have no tokenizer.model
    except ImportError:
        raise UserError(
            f"{path}: is read by the package tokenizers, which is not installed: pip install tokenizers"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package has no exception class of its own
        raise UserError(f"{path}: not a tokenizer ({error}): download the file again") from None
    end = tokenizer.token_to_id(END)
    if end is None:
        raise UserError(f"{path}: has no {END}: this is not GPT-NeoX's tokenizer (Mamba's) or Qwen's")
    return BytePairTokenizer(tokenizer, end)
