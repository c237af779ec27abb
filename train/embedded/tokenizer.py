"""Make the tokenizer of the embedded models: a small sentencepiece model with one piece for every word of the tasks.

    python -m train.embedded.tokenizer

In: the words of `eval/scenes.py`. Out: tokenizer.model, by default `weights/tiny/tokenizer.model`. A new tokenizer
needs new models: the order of its pieces is part of them. The `pretraining.json` of the base has its hash.

Its settings are Gemma's: BPE with byte fallback, no normalisation, no space added in front or removed, pad 0, eos 1,
bos 2, unk 3. Then come `<mask>`, which transformers would add otherwise, "\\n", and `<loc0000>` … `<loc1023>` as
symbols. `<image>` is not a piece: its id is the first after the last piece.

BPE learns the most frequent merges first, so the frequencies of the words fix the order: the bare words (10,000 times
each), the words after a space (100), plurals (1). The vocabulary ends where the last word has become one piece.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from eval.scenes import PLURALS, WORDS
from model.common import atomic_path, run_command
from model.source import BUNDLED_FOLDER
from train.flags import flag, read_flags

CONTROL = ("pad", "eos", "bos", "unk")


@dataclass(frozen=True)
class TokenizerOptions:
    """The flag of this command."""

    out: Path = flag(BUNDLED_FOLDER / "tokenizer.model", "file to write", metavar="FILE")


def words() -> tuple[list[str], list[str]]:
    """Words that may begin a text, in the case they are used and in lower case; and words that never do."""
    bare = sorted({form for word in WORDS for form in (word, word.lower())})
    return bare, sorted(set(PLURALS) - set(bare))


def train_tokenizer() -> bytes:
    """The sentencepiece model, serialised. The same bytes on every call with one version of sentencepiece."""
    bare, plurals = words()
    frequencies = dict.fromkeys(bare, 10_000) | dict.fromkeys((f" {word}" for word in bare), 100)
    frequencies |= dict.fromkeys((f" {word}" for word in plurals), 1)
    characters = len(set("".join(frequencies)))
    exhausted = sentencepiece.SentencePieceProcessor(model_proto=_train(frequencies, 4096))
    # pieces: the merges in the order learned, then single characters
    last = max(exhausted.piece_to_id(form.replace(" ", "▁")) for form in frequencies if len(form) > 1)
    return _train(frequencies, last + 1 + characters)


def _train(frequencies: dict[str, int], size: int) -> bytes:
    """The model with at most `size` pieces: training ends with the last possible merge."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(f"{form}\t{count}" for form, count in frequencies.items()),
        model_writer=model,
        input_format="tsv",
        model_type="bpe",
        vocab_size=size,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=False,  # unlike Gemma: here "▁3" is a piece like any word
        **{f"{name}_id": number for number, name in enumerate(CONTROL)},
        **{f"{name}_piece": f"<{name}>" for name in CONTROL},
        user_defined_symbols=["<mask>", "\n", *(f"<loc{value:04d}>" for value in range(1024))],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    out = read_flags(TokenizerOptions, "train.embedded.tokenizer", __doc__, argv).out
    with atomic_path(out) as temporary:
        temporary.write_bytes(train_tokenizer())
    size = sentencepiece.SentencePieceProcessor(model_file=str(out)).vocab_size()
    print(f"{out}: {size} pieces; <image> is id {size}, the embedding has {-(-(size + 1) // 64) * 64} rows")


if __name__ == "__main__":
    run_command(main)
