"""GPT-NeoX's tokenizer, which the published Mambas read with, behind the few calls that `model/processor.py` makes.

In: a tokenizer.json. Out: text to ids and back, by the methods of a `sentencepiece.SentencePieceProcessor`, which
cannot read such a file: this is the one place that needs the package `tokenizers`, and nothing else imports it.
Next: `model/processor.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from model.common import UserError

END = "<|endoftext|>"  # beginning, end and padding alike: the ids of all three are 0 in the published config.json files


class BytePairTokenizer:
    """Byte-level BPE with the methods of sentencepiece. Nothing is unknown to it: any text is spelled out in bytes."""

    def __init__(self, tokenizer, end: int):
        # what spells a control token is text: only the processor places those
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
        """The ids of a text (its pieces with out_type=str), or a list of them for a list of texts; nothing is added."""
        if not isinstance(text, str):
            return [self.encode(one, out_type) for one in text]
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.tokens if out_type is str else encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def load_bpe(path: str | Path) -> BytePairTokenizer:
    """The tokenizer.json at `path`. Raises UserError if it is no such file, or the package `tokenizers` is absent."""
    if not Path(path).is_file():
        raise UserError(
            f"{path}: not found, nor a tokenizer.model: copy the tokenizer.json of the language model, such as "
            "huggingface.co/state-spaces/mamba-130m-hf"
        )
    try:
        from tokenizers import Tokenizer  # optional: for models with such a file alone
    except ImportError:
        raise UserError(
            f"{path}: is read by the package tokenizers, which is not installed: pip install tokenizers"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"{path}: not a tokenizer ({error}): download the file again") from None
    end = tokenizer.token_to_id(END)
    if end is None:
        raise UserError(f"{path}: has no {END}: this is not GPT-NeoX's tokenizer, which Mamba reads with")
    return BytePairTokenizer(tokenizer, end)
