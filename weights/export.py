"""Write a model to a folder that transformers opens: config.json and safetensors in one of the
published dialects.

The folder is complete or absent. transformers' AutoModelForImageTextToText and AutoProcessor open
it and answer as `weights.load.load_model` does; README.md is its model card.

    python -m weights.export runs/RUN OUT          a run, its adapter merged
    python -m weights.export SRC OUT [--dialect A] [--dtype bf16] [--max-shard-gb 5]
    python -m weights.export SRC OUT --adapter RUN --merge
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lora import adapter
from model.common import (
    Parser,
    UserError,
    file_errors,
    read_json,
    run_command,
    sync_files,
    sync_folder,
    write_text,
)
from model.config import PaliGemmaConfig
from model.device import DTYPES
from model.differential import fold
from model.images import preprocessing
from model.paligemma import PaliGemma
from model.source import EMBEDDED, local_path, own_file, preset_of, resolve
from model.turns import SLOT
from weights.card import model_card
from weights.load import INDEX_FILE, empty_model, examine, kind_of, read_model, save_tensors
from weights.mapping import DIALECTS, STORED_DTYPES, dialect_names

# files of the tokenizer, the processor and generation, copied unchanged
COMPANIONS = [
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
]


def export_model(
    model: PaliGemma,
    folder: str | Path,
    *,
    dialect: str = "A",
    dtype: torch.dtype | None = None,
    max_shard_gb: float = 5,
    companions: Iterable[Path] = (),
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write `model` to `folder`, which appears when everything is in it. Memory holds one file's
    tensors beside it.

    dialect: a key of `weights.mapping.DIALECTS`, for a PaliGemma. dtype: of all tensors; None keeps
    the model's. max_shard_gb: largest size of a file in 10⁹ bytes. companions: files to copy.
    texts: more files by name, which companions replace. Raises UserError for a folder that is not
    empty, a value that is not finite in the dtype, and as `plain_tensors`.
    """
    # slow to import, and not needed to load
    from huggingface_hub import split_torch_state_dict_into_shards

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty: give a new folder")
    # 1. which tensor is in which file
    tensors = plain_tensors(model)
    known = kind_of(model.config)[1].dialects
    prefixes = known.get(dialect) or next(iter(known.values()))
    names = dialect_names(tensors, prefixes)
    specs = {name: tensors[ours].to("meta", dtype) for name, ours in names.items()}
    split = split_torch_state_dict_into_shards(specs, max_shard_size=int(max_shard_gb * 1e9))
    # 2. the texts beside them
    # older versions of transformers read torch_dtype only, newer ones both
    stored = str(next(iter(specs.values())).dtype).removeprefix("torch.")
    config = model.config.to_dict() | {"torch_dtype": stored}
    written = {**(texts or {}), "config.json": json.dumps(config, indent=2) + "\n"}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        written[INDEX_FILE] = json.dumps(index, indent=2) + "\n"
    # 3. all files, in a folder that is renamed once it is complete
    temporary = folder.absolute().with_name(f".{folder.name}-{os.getpid()}.partial")
    with file_errors(folder):
        temporary.mkdir(parents=True)
        try:
            for file, part in split.filename_to_tensors.items():
                cast = {}
                for name in part:
                    tensor = tensors[names[name]].detach()
                    cast[name] = tensor.to("cpu", specs[name].dtype).contiguous()
                check_tensors(cast)
                save_tensors(cast, temporary / file, {"format": "pt"})
            for file in companions:
                if file.name.endswith("_config.json"):
                    written[file.name] = without_code(file)
                else:
                    shutil.copyfile(own_file(file), temporary / file.name)
            for name, text in written.items():
                write_text(temporary / name, text)
            sync_files(temporary)
            if folder.exists():  # it is empty; only POSIX can rename onto it
                folder.rmdir()
            temporary.rename(folder)
            sync_folder(temporary.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for a tensor that holds a value which is not finite."""
    for name, tensor in tensors.items():
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise UserError(
                f"{name} holds NaN, infinity, or more than {tensor.dtype} can: not exported"
            )


def without_code(file: Path) -> str:
    """The text of a configuration without the names of code that transformers would run. Raises
    UserError."""
    settings = read_json(own_file(file))
    for part in (settings, *settings.values()):
        if isinstance(part, dict):
            part.pop("auto_map", None)
    return json.dumps(settings, indent=1)


def plain_tensors(model: PaliGemma) -> dict[str, Tensor]:
    """The parameters of `model` under the names of a plain model, with merged LoRA in the weights.

    Raises UserError, which names the layer, for a model that computes anything else.
    """
    layers, modules = adapter.lora_layers(model), dict(model.named_modules())
    plain = empty_model(model.config)
    for path, layer in layers.items():
        if not layer.merged:
            raise UserError(
                f"{path}: carries an unmerged adapter: merge it first (lora.adapter.merge, or "
                "--merge)"
            )
    if type(model.config) is PaliGemmaConfig:
        layer = model.config.vision.feature_layer
        if layer is not None:
            raise UserError(
                f"feature_layer is {layer}: the published format reads the last layer of the tower"
            )
    for path, expected in plain.named_modules():
        module = layers[path].base_layer if path in layers else modules.get(path)
        same = type(module) is type(expected)
        if not same or getattr(module, "activation", None) != getattr(expected, "activation", None):
            raise UserError(
                f"{path}: is {type(module).__name__}, which the published format cannot express: "
                "fold the variant if it can be (model.differential.fold), else keep the base and "
                "its adapter"
            )
    state = model.state_dict()
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
    return {name: state[name] for name in plain.state_dict()}


def companions(source: str | Path, revision: str | None = None) -> list[Path]:
    """The files of `COMPANIONS` that the model `source` has. Raises UserError for a link out of its
    folder."""
    path = local_path(source)
    if preset_of(source):
        source = EMBEDDED  # presets use its tokenizer
    folder = path.parent if path.is_file() else resolve(source, COMPANIONS, revision)
    return [own_file(folder / name) for name in COMPANIONS if (folder / name).is_file()]


class Origin(NamedTuple):
    """What is exported, and where it comes from."""

    source: str  # the checkpoint to open
    base: str  # what training began with; the source itself, if it has not been trained here
    update: Path | None = None  # the adapter to merge into it
    run: Path | None = None  # the run that trained the adapter, or else the checkpoint


def locate(source: str, update: Path | None = None) -> Origin:
    """What `source` names: a run's folder, its model/ or best/, or a checkpoint. update: an adapter
    for it. Raises UserError for an adapter that names no base."""
    folder = local_path(source)
    if update is None and (folder / adapter.CONFIG_FILE).is_file():
        update, source = folder, adapter.read_config(folder).get("base_model_name_or_path", "")
        if not source:
            raise UserError(
                f"{folder}: names no base: export its base, with this as --adapter and --merge"
            )
    elif update is None and (folder / "model" / "config.json").is_file():  # which `--full` writes
        folder = folder / "model"
        source = str(folder)
    trained = (update or folder).absolute()
    settings, run, base = trained.parent / "config.json", None, source
    if trained.name in ("model", "best") and settings.is_file():
        run = trained.parent
    if update is not None:
        run = run or update
    elif run is not None:
        base = str(read_json(settings).get("base", source))
    return Origin(source, base, update, run)


def processor_files(config: PaliGemmaConfig) -> dict[str, str]:
    """What transformers' AutoProcessor and `generate` read beside weights and tokenizer.json: texts
    by file name."""
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "PaliGemmaProcessor",
            "image_seq_length": config.num_image_tokens,
            **preprocessing(config.vision.image_size),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GemmaTokenizer",
            "processor_class": "PaliGemmaProcessor",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "extra_special_tokens": {"image_token": SLOT},
        },
        "generation_config.json": {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "suppress_tokens": [config.image_token_id],  # as `model.generate.generate`
        },
    }
    return {
        name: json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        for name, content in files.items()
    }


def parser_of() -> Parser:
    """The flags of the command."""
    parser = Parser(
        "python -m weights.export",
        description="Write a model as safetensors that transformers opens.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="a run, folder, hub id, .npz, or 'embedded'")
    add("out", metavar="OUT", type=Path, help="folder to make")
    add("--revision", help="branch, tag or commit of a hub id (default: its main branch)")
    dialects = "names of the tensors, see weights/mapping.py (default: A, which all versions open)"
    add("--dialect", choices=DIALECTS, default="A", help=dialects)
    add("--dtype", choices=DTYPES, help="dtype of the tensors (default: as in the source)")
    add("--max-shard-gb", type=float, default=5, help="size of a file in 10^9 bytes (default: 5)")
    update = "adapter folder to load onto SRC (default: none)"
    add("--adapter", metavar="RUN", type=Path, help=update)
    add("--merge", action="store_true", help="with --adapter: merge it, the only way to export it")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser_of().parse_args(argv)
    if not 0 < args.max_shard_gb < 1e9:
        raise UserError(f"--max-shard-gb {args.max_shard_gb}: expected a size above 0, such as 5")
    if args.merge != (args.adapter is not None):
        raise UserError(
            "--adapter and --merge go together: an unmerged adapter is exchanged as its own folder"
        )
    # 1. the dtype: the only one of the source, else fp32
    origin = locate(args.source, args.adapter)
    checkpoint = examine(origin.source, args.revision)
    stored = {
        STORED_DTYPES.get(entry.dtype, torch.float32) for entry in checkpoint.entries.values()
    }
    dtype = stored.pop() if len(stored) == 1 else torch.float32
    wanted = DTYPES.get(args.dtype, dtype)
    if origin.update is not None:  # merging rounds once; else nothing is cast before it is written
        dtype = torch.promote_types(dtype, wanted)
    # 2. the model
    model = read_model(checkpoint, dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    if origin.update is not None:
        adapter.load(model, origin.update)
        adapter.merge(model)
        fold(model)
    # 3. the files beside it
    files = {file.name: file for file in companions(origin.source, args.revision)}
    texts = {}
    if type(model.config) is PaliGemmaConfig:
        if "tokenizer.json" not in files and origin.base != origin.source:
            files |= {
                file.name: file for file in companions(origin.base) if file.name == "tokenizer.json"
            }
        if "tokenizer.json" not in files:
            print(
                "AutoProcessor will not open it: the source has no tokenizer.json, copy "
                "PaliGemma's",
                file=sys.stderr,
            )
        step = "best" if Path(origin.update or origin.source).name == "best" else "last"
        card = model_card(model.config, count, args.out.name, origin.base, origin.run, step)
        texts = processor_files(model.config) | {"README.md": card}
        if "processor_config.json" in files:
            texts.pop("preprocessor_config.json")
    # 4. the folder
    export_model(
        model,
        args.out,
        dialect=args.dialect,
        dtype=wanted,
        max_shard_gb=args.max_shard_gb,
        companions=files.values(),
        texts=texts,
    )
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.iterdir()):,} bytes")


if __name__ == "__main__":
    run_command(main)
