"""A published Mamba language model into `model.mamba.MambaLM`: examined whole, and only then read.

In: a folder or hub id with config.json and safetensors, under the names of transformers (`state-spaces/mamba-*-hf`) or
of the original repository. Out: the model in eval mode, in the dtype and on the device asked for.
Next: `model/generate.py` for text alone, `model/qmamba.py` for pictures.
"""

import json
from pathlib import Path

import torch

from model.common import UserError
from model.mamba import MambaLM
from model.source import resolve
from model.system_configs import MambaConfig
from weights.streaming import INDEX_FILE, SINGLE_FILE, compare, find_tensors, in_one_line, shorten, stream_into

EMBEDDING = "backbone.embeddings.weight"
# what else holds it: the original repository's name, and the tied head, which may be stored besides or in its place
SAME = ("backbone.embedding.weight", "lm_head.weight")


def load_mamba(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> MambaLM:
    """The language model of `source`, a folder or a hub id at `revision`, in eval mode, its parameters trainable.

    Everything that is wrong with sizes, names, dtypes and files is found before a tensor is read, and told in one
    UserError. The head is the embedding: a stored `lm_head` must equal it, or a UserError says so.
    """
    folder = resolve(source, ["config.json", "model*.safetensors", INDEX_FILE], revision)
    if not (folder / SINGLE_FILE).exists() and not (folder / INDEX_FILE).exists():
        pickles = [file.name for file in folder.glob("*.bin")] or ["pytorch_model.bin"]
        raise UserError(
            f"{source}: holds no safetensors; pickles ({shorten(pickles)}) can run any code when opened, and are not: "
            "take the model whose name ends in -hf, such as state-spaces/mamba-130m-hf, or, if you trust the file, "
            "save what torch.load(FILE, weights_only=True) returns with safetensors.torch.save_file"
        )
    entries, unreadable, problems = find_tensors(folder)
    model = None
    try:
        model = _empty(_read_config(folder / "config.json"), dtype)
    except UserError as error:
        problems.insert(0, str(error))
    except (RuntimeError, MemoryError, OverflowError) as error:
        problems.insert(0, f"{folder / 'config.json'}: impossible sizes ({error}): download the file again")
    if model is not None and (entries or unreadable):
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        meant = {name: name for name in wanted} | dict.fromkeys(SAME, EMBEDDING)
        comparison = compare(entries, unreadable, meant, wanted)
        problems += comparison.problems(folder, entries)
    if problems:
        raise UserError(in_one_line(folder, problems))
    stream_into(model, entries, comparison.name_map, device)
    return model


def _empty(config: MambaConfig, dtype: torch.dtype) -> MambaLM:
    """Names, shapes and dtype without memory."""
    with torch.device("meta"):
        return MambaLM(config).to(dtype).eval()


def _read_config(path: Path) -> MambaConfig:
    try:
        return MambaConfig.from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: not found: a model folder holds config.json beside its tensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object ({error}): download the file again") from None
