"""Make the tokenizer of the embedded models: a small sentencepiece model with one piece for every word of the tasks.

    python -m train.embedded.tokenizer

In: the words of `eval/scenes.py`. Out: tokenizer.model, by default `weights/tiny/tokenizer.model`. A new tokenizer
needs new models: the order of its pieces is part of them.

Its settings are Gemma's. Then come `<mask>`, which transformers would add otherwise, "\\n", and `<loc0000>` …
`<loc1023>` as symbols. `<image>` is not a piece: its id is the first after the last piece. BPE learns the most frequent
merges first, so the frequencies of the words fix the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from eval.scenes import PLURALS, WORDS
from eval.text.corpus import sentencepiece_model
from model.common import atomic_path, run_command
from model.source import BUNDLED_FOLDER
from train.flags import flag, read_flags


@dataclass(frozen=True)
class TokenizerOptions:
    """The flag of this command."""

    out: Path = flag(BUNDLED_FOLDER / "tokenizer.model", "file to write", metavar="FILE")


def words() -> dict[str, int]:
    """The frequencies of words that may begin a text, as used and in lower case, and of those after a space."""
    bare = sorted({form for word in WORDS for form in (word, word.lower())})
    spaced = [f" {word}" for word in bare], [f" {word}" for word in sorted(set(PLURALS) - set(bare))]
    return dict.fromkeys(bare, 10_000) | dict.fromkeys(spaced[0], 100) | dict.fromkeys(spaced[1], 1)


def train_tokenizer() -> bytes:
    """The sentencepiece model, serialised. The same bytes on every call with one version of sentencepiece."""
    frequencies = words()
    exhausted = sentencepiece.SentencePieceProcessor(model_proto=_train(frequencies, 4096))
    # pieces: the merges in the order learned, then single characters
    last = max(exhausted.piece_to_id(form.replace(" ", "▁")) for form in frequencies if len(form) > 1)
    return _train(frequencies, last + 1 + len({*"".join(frequencies)}))


def _train(frequencies: dict[str, int], size: int) -> bytes:
    """The model with at most `size` pieces: training ends with the last possible merge."""
    symbols = ["<mask>", "\n", *(f"<loc{value:04d}>" for value in range(1024))]
    names = {f"{name}_piece": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    spec = {"vocab_size": size, "hard_vocab_limit": False, "character_coverage": 1.0, "user_defined_symbols": symbols}
    # unlike Gemma no digits are split: here "▁3" is a piece like any word
    spec |= names | {"input_format": "tsv", "split_digits": False}
    return sentencepiece_model((f"{form}\t{count}" for form, count in frequencies.items()), **spec)


def main(argv: Sequence[str] | None = None) -> None:
    out = read_flags(TokenizerOptions, "train.embedded.tokenizer", __doc__, argv).out
    with atomic_path(out) as temporary:
        temporary.write_bytes(train_tokenizer())
    print(f"{out}: {sentencepiece.SentencePieceProcessor(model_file=str(out)).vocab_size()} pieces")


if __name__ == "__main__":
    run_command(main)
