"""A checkpoint of a published geometry with random weights, for the loader's tests and trials at full size.

In: a preset's name. Out: a folder with config.json and safetensors, as the hub's, in the memory of one file.
"""

import argparse
import json
from math import ceil, prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import PRESETS
from model.device import DTYPES
from weights.load import INDEX_FILE, empty_model
from weights.mapping import dialect_names

BLOCK = 1 << 22  # random values are drawn once and repeated: only their size and scale matter here


def make_checkpoint(folder: Path, preset: str, dtype: torch.dtype, shards: int = 1) -> None:
    """Write `shards` files in dialect A. Matrices have unit gain, norms and biases are small."""
    config, weight_map = PRESETS[preset], {}
    shapes = {name: tuple(tensor.shape) for name, tensor in empty_model(config).state_dict().items()}
    names = list(dialect_names(shapes, "A").items())
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    folder.mkdir(parents=True)
    for number in range(shards):
        file, tensors = f"model-{number + 1:05d}-of-{shards:05d}.safetensors", {}
        for name, ours in names[number::shards]:
            shape = shapes[ours]
            scale = 0.02 if len(shape) == 1 else prod(shape[1:]) ** -0.5
            values = (block * scale).to(dtype)
            tensors[name] = values.repeat(ceil(prod(shape) / BLOCK))[: prod(shape)].view(shape)
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    described = config.to_dict() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--preset", choices=PRESETS, default="paligemma-3b-224", help="geometry")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the tensors")
    parser.add_argument("--shards", type=int, default=3, help="number of files")
    args = parser.parse_args()
    make_checkpoint(args.out, args.preset, DTYPES[args.dtype], args.shards)
