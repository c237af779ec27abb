"""Make the tokenizer of the embedded models: a small sentencepiece model with one piece for every word of the tasks.

    python -m train.tokenizer

In: the words of `eval/scenes.py`. Out: tokenizer.model, by default `weights/tiny/tokenizer.model`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from model.common import atomic_path, run_command
from model.source import BUNDLED_FOLDER
from train.embedded.tokenizer import train_tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.tokenizer", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=BUNDLED_FOLDER / "tokenizer.model", help="default: %(default)s")
    args = parser.parse_args(argv)
    with atomic_path(args.out) as temporary:
        temporary.write_bytes(train_tokenizer())
    size = sentencepiece.SentencePieceProcessor(model_file=str(args.out)).vocab_size()
    print(f"{args.out}: {size} pieces; <image> is id {size}, the embedding has {-(-(size + 1) // 64) * 64} rows")


if __name__ == "__main__":
    run_command(main)
