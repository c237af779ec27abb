"""Rewrite a published pytorch_model.bin as safetensors, which is all that this project opens.

    python -m weights.convert state-spaces/mamba-130m OUT

In: a folder or a hub id with pytorch_model.bin, or the files of its index. Out: OUT with model.safetensors (or parts
and their index), config.json and the files of the tokenizer; it appears when everything is in it. The file is a pickle,
and a pickle can run any code when it is opened as such: here PyTorch reads it with weights_only, which builds tensors
and plain containers, runs nothing else, and refuses the file for anything more. Tensors that share memory, such as a
tied head, are written once.
"""

import argparse
import pickle
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from model.common import UserError, file_errors, quoted, read_json, run_command, shown
from model.source import resolve
from weights.export import COMPANIONS, new_folder, require_new, split_by_size
from weights.streaming import DTYPE_NAMES, in_folder, shorten, write_checkpoint

SINGLE_PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of torch.save, by name, mapped from it. Raises UserError for a file that holds more."""
    with file_errors(path):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"{path}: is no file of tensors alone, and nothing in it was run ({shown(reason)[:200]}): take a model "
                "that comes as safetensors"
            ) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise UserError(f"{path}: expected tensors by name, as state_dict() gives them: take the published file")
    if strange := [name for name, tensor in found.items() if tensor.dtype not in DTYPE_NAMES or not tensor.is_cpu]:
        raise UserError(f"{path}: tensors not in {', '.join(DTYPE_NAMES.values())}: {shorten(strange)}")
    return found


def find_pickles(folder: Path) -> list[Path]:
    """pytorch_model.bin, or the files that its index names. Raises UserError."""
    index = folder / PICKLE_INDEX
    if (folder / SINGLE_PICKLE).is_file():
        return [folder / SINGLE_PICKLE]
    if not index.is_file():
        raise UserError(f"{folder}: holds neither {SINGLE_PICKLE} nor {PICKLE_INDEX}: there is nothing to convert")
    weight_map = read_json(index, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{index}: weight_map is {quoted(weight_map)}, expected a file name for each tensor")
    return [in_folder(folder, file, index) for file in sorted(set(weight_map.values()))]


def convert(source: str, out: Path, max_shard_gb: float = 5) -> list[str]:
    """Write the tensors of `source` to the folder `out`; returns the names that were aliases of others."""
    require_new(out)
    folder = resolve(source, [SINGLE_PICKLE, "pytorch_model*.bin", PICKLE_INDEX, "config.json", *COMPANIONS])
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[tuple, str] = {}
    aliases = []
    for path in find_pickles(folder):
        for name, tensor in read_pickle(path).items():
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and seen.setdefault(place, name) != name:
                aliases.append(name)
            elif name in tensors:
                raise UserError(f"{path}: holds {shown(name)}, as another of its files does: download them again")
            else:
                tensors[name] = tensor
    if not tensors:
        raise UserError(f"{folder}: holds no tensors: download it again")
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with new_folder(out) as temporary:
        write_checkpoint(
            temporary, specs, lambda name: [tensors[name].reshape(-1)], split_by_size(specs, max_shard_gb * 1e9)
        )
        for name in ("config.json", *COMPANIONS):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, temporary / name)
    return aliases


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", help="a folder or a hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    args = parser.parse_args(argv)
    aliases = convert(args.source, args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    left_out = f"; without {shorten(aliases)}, the same tensors as others" if aliases else ""
    print(f"{args.out}: {size:,} bytes of safetensors; nothing in the pickle was run{left_out}")


if __name__ == "__main__":
    run_command(main)
