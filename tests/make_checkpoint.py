"""A checkpoint of a published geometry with random weights, for the loader's tests and trials at full size.

In: a preset's name. Out: a folder with config.json and safetensors, as the hub's, in little memory.
"""

import argparse
import json
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from model.common import UserError, run_command, write_text
from model.config import PRESETS
from model.device import DTYPES
from weights.checkpoint import empty_model
from weights.mapping import DIALECTS, dialect_names
from weights.streaming import byte_size, write_checkpoint

BLOCK = 1 << 22  # random values are drawn once and repeated: only their size and scale matter here


def make_checkpoint(folder: Path, preset: str, dtype: torch.dtype, shards: int = 1, dialect: str = "A") -> None:
    """Write files of about equal size, `shards` at most. Matrices have unit gain, norms and biases are small."""
    config = PRESETS[preset]
    shapes = {name: tuple(tensor.shape) for name, tensor in empty_model(config, dtype).state_dict().items()}
    names = dialect_names(shapes, dialect)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))

    def chunks(published: str):
        shape = shapes[names[published]]
        scale = 0.02 if len(shape) == 1 else prod(shape[1:]) ** -0.5
        values = (block * scale).to(dtype)
        for start in range(0, prod(shape), BLOCK):
            yield values[: min(BLOCK, prod(shape) - start)]

    tensors = {published: (dtype, shapes[ours]) for published, ours in names.items()}
    ends = list(accumulate(byte_size(*spec) for spec in tensors.values()))
    groups: list[list[str]] = [[] for _ in range(shards)]
    for name, end in zip(tensors, ends, strict=True):
        groups[(end - 1) * shards // ends[-1]].append(name)
    folder.mkdir(parents=True)
    write_checkpoint(folder, tensors, chunks, [group for group in groups if group])
    described = config.to_dict() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_text(folder / "config.json", json.dumps(described, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--preset", choices=PRESETS, default="paligemma-3b-224", help="geometry")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the tensors")
    parser.add_argument("--shards", type=int, default=1, help="number of files, at most")
    parser.add_argument("--dialect", choices=DIALECTS, default="A", help="names of the tensors (weights/mapping.py)")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise UserError(f"{args.out}: exists already: remove it or give another folder")
    if args.shards < 1:
        raise UserError(f"--shards is {args.shards}, expected 1 or more")
    make_checkpoint(args.out, args.preset, DTYPES[args.dtype], args.shards, args.dialect)
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.iterdir()) / 1e9:.2f} GB")


if __name__ == "__main__":
    run_command(main)
