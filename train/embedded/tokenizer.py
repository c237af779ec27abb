"""The tokenizer of the embedded base: a small sentencepiece model with one piece for every word of the tasks.

In: the words of `eval/scenes.py`. Out: `weights/tiny/tokenizer.model`. Next: `train/embedded/base.py` pins its hash.

Its settings are those of Gemma's: BPE with byte fallback, text taken as it is (no normalisation, no space put in
front, none removed), pad 0, eos 1, bos 2, unk 3; then `<mask>`, without which transformers would add one, "\\n" and
`<loc0000>` … `<loc1023>` as symbols of their own. `<image>` is no piece: its id is the first after the last piece.

It is made of words, not of a text. A merge is learned the earlier the more frequent it is, so frequencies fix the
order: first the bare words (10,000 times each), then the space before them (100), then plurals (1), and the vocabulary
ends where the last word has become one piece.

The order of the pieces is part of every checkpoint trained with them: a new tokenizer needs a new base.

    python -m train.tokenizer
"""

import argparse
import io
from pathlib import Path

import sentencepiece

from eval.scenes import PLURALS, WORDS
from model.common import atomic_path
from model.source import BUNDLED_FOLDER


def words() -> tuple[list[str], list[str]]:
    """Words that may begin a text, in the case they are used and in lower case, and those that never do."""
    bare = sorted({form for word in WORDS for form in (word, word.lower())})
    return bare, sorted(set(PLURALS) - set(bare))


def train_tokenizer() -> bytes:
    """The sentencepiece model, serialised. The same bytes on every call with one version of sentencepiece."""
    bare, plurals = words()
    frequencies = {
        **dict.fromkeys(bare, 10_000),
        **dict.fromkeys((f" {word}" for word in bare), 100),
        **dict.fromkeys((f" {word}" for word in plurals), 1),
    }
    characters = len(set("".join(frequencies)))
    exhausted = sentencepiece.SentencePieceProcessor(model_proto=_train(frequencies, 4096))
    # merges come in the order learned, then the characters they are made of
    last = max(exhausted.piece_to_id(form.replace(" ", "▁")) for form in frequencies if len(form) > 1)
    return _train(frequencies, last + 1 + characters)


def _train(frequencies: dict[str, int], size: int) -> bytes:
    """`size` is an upper limit: training ends with the last possible merge."""
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
        split_digits=False,  # Gemma splits them; here "▁3" is a piece like any word
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=["<mask>", "\n", *(f"<loc{value:04d}>" for value in range(1024))],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.tokenizer", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=BUNDLED_FOLDER / "tokenizer.model", help="default: %(default)s")
    args = parser.parse_args(argv)
    with atomic_path(args.out) as temporary:
        temporary.write_bytes(train_tokenizer())
    size = sentencepiece.SentencePieceProcessor(model_file=str(args.out)).vocab_size()
    print(f"{args.out}: {size} pieces; <image> is id {size}, the embedding has {-(-(size + 1) // 64) * 64} rows")
