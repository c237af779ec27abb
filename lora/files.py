"""PEFT's adapter files, read and checked: adapter_config.json and adapter_model.safetensors.

PEFT loads an adapter saved here onto transformers' PaliGemma, and the reverse. What PEFT does not have is added where
it ignores it: the parameters of grafts under `differential.` beside the LoRA tensors, the calls that repeat the grafts
under the key `differential` of the config (PEFT warns that it ignores this key, because without the graft the model
computes something else), and the fingerprint of the base in the metadata of the tensor file.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lora.patterns import ENDING, full_matches
from lora.quantize import KINDS
from model.common import Expected, UserError, file_errors, open_regular, quoted, read_json, shown
from model.lowrank import MAX_ALPHA, MAX_RANK

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's wrapper around a transformers model
HF_PREFIX = "model."  # before each of our paths in transformers' PaliGemma
GRAFT_PREFIX = "differential."

_TEXT, _RANK, _ALPHA = Expected(str), Expected(int, 1, MAX_RANK), Expected(float, 1e-9, MAX_ALPHA)

# The keys that are read: what a value may be, and its items if it is a list, or its values if it is an object.
_FIELDS: dict[str, tuple[Expected | None, type, Expected | None]] = {
    "base_model_name_or_path": (_TEXT, list, None),
    "prompt": (_TEXT, list, None),  # our own: the template of its questions
    "differential": (None, list, Expected(dict)),  # our own: the grafts
    "quantized": (Expected(str, choices=tuple(KINDS)), list, None),  # our own: how the base was held in training
    "r": (_RANK, list, None),
    "lora_alpha": (_ALPHA, list, None),
    "lora_dropout": (Expected(float, 0, 0.99), list, None),
    "target_modules": (_TEXT, list, _TEXT),
    "exclude_modules": (_TEXT, list, _TEXT),
    "layers_to_transform": (Expected(int), list, Expected(int)),
    "layers_pattern": (_TEXT, list, _TEXT),
    "rank_pattern": (None, dict, _RANK),
    "alpha_pattern": (None, dict, _ALPHA),
    "use_rslora": (Expected(bool), list, None),
    "inference_mode": (Expected(bool), list, None),
}
# Keys that do not change what the saved tensors compute. A value under any other key is a feature that would be lost
# without notice.
_HARMLESS = set(
    "peft_type bias init_lora_weights auto_mapping eva_config megatron_core peft_version qalora_group_size revision "
    "runtime_config task_type".split()
)
_HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others (pissa, olora, …) change the base too


def tensor_name(path: str, half: str) -> str:
    """The name in the file of `half`, lora_A or lora_B, of the layer at our `path`."""
    return f"{PEFT_PREFIX}{HF_PREFIX}{path}.{half}.weight"


def read_config(folder: str | Path) -> dict:
    """The config of the adapter in `folder`, without the keys that are null.

    Raises UserError: no file, no JSON, a value of another type or range, or a feature beyond plain LoRA.
    """
    path = Path(folder) / CONFIG_FILE
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{shown(path)}: no LoRA adapter: expected peft_type 'LORA': only that kind can be loaded")
    known = _HARMLESS | _FIELDS.keys()
    unknown = [f"{shown(key, 80)} {quoted(value)}" for key, value in config.items() if value and key not in known]
    if config.get("bias", "none") != "none":
        unknown.append(f"bias {quoted(config['bias'])}")
    if config.get("init_lora_weights") not in _HARMLESS_INITS:
        unknown.append(f"init_lora_weights {quoted(config['init_lora_weights'])}")
    if unknown:
        features = ", ".join(unknown[:8])
        raise UserError(f"{shown(path)}: uses {features}, but only plain LoRA can be loaded: convert it with PEFT")
    config = {key: value for key, value in config.items() if value is not None}
    for key in config.keys() & _FIELDS.keys():
        _check_field(key, config[key], shown(path))
    return config


def _check_field(key: str, value, where: str) -> None:
    single, container, items = _FIELDS[key]
    expected = [str(single)] if single else []
    if items:
        expected.append(f"{'a list' if container is list else 'an object'} whose values are each {items}")
    if items and isinstance(value, container):
        is_right = all(map(items.accepts, value.values() if isinstance(value, dict) else value))
    else:
        is_right = single is not None and single.accepts(value)
    if not is_right:
        raise UserError(f"{where}: {key} is {quoted(value)}, expected {' or '.join(expected)}: correct the file")


def read_tensors(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of the adapter in `folder` by name, and the file's metadata. Raises UserError."""
    path = Path(folder) / TENSOR_FILE
    if not path.exists():
        raise UserError(f"{shown(path)}: not found: save the adapter as safetensors; pickles are not read")
    open_regular(path).close()
    try:
        with file_errors(path), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{shown(path)}: not a safetensors file ({error}): save the adapter again") from None


def split_name(name: str) -> tuple[str, str] | None:
    """The path, as the file spells it, and the half of a LoRA tensor; None for any other name."""
    match = re.fullmatch(re.escape(PEFT_PREFIX) + r"(.+)\.(lora_[AB])\.weight", name)
    return (match[1], match[2]) if match else None


def our_path(path: str) -> str:
    """Our path for transformers': today's, or that of before 4.52 (…model below the decoder, none above)."""
    path = path.removeprefix(HF_PREFIX)
    return re.sub(r"^(language_model)\.model\.|^(vision_tower)\.vision_model\.", r"\1\2.", path)


def matching(targets: str | list[str], paths: Iterable[str]) -> set[str]:
    """Those of our `paths` that PEFT's target_modules name: by a regular expression, or by a list of endings.

    The expression must match a whole path; endings begin at a dot. Either may have transformers' leading "model." or
    not. Raises UserError for a string that is no regular expression.
    """
    paths = list(paths)
    if isinstance(targets, str):
        (found,) = full_matches([targets], [*paths, *(HF_PREFIX + path for path in paths)])
        return {path for path in paths if path in found or HF_PREFIX + path in found}
    endings = tuple(f".{ending}" for ending in targets)
    return {path for path in paths if f".{HF_PREFIX}{path}".endswith(endings)}


def promised(config: Mapping, paths: Iterable[str]) -> set[str]:
    """Those of our `paths` that PEFT would wrap; none if the config narrows its targets (layers_to_transform)."""
    if "layers_to_transform" in config:
        return set()
    return matching(config.get("target_modules", []), paths) - matching(config.get("exclude_modules", []), paths)


def ranks_and_alphas(config: Mapping, paths: Collection[str]) -> tuple[dict[str, int], dict[str, float]]:
    """r and alpha of each layer by its path as the file spells it; LoRA is scaled by alpha / r.

    As in PEFT, the first pattern that matches an ending of the path counts; an ending begins at a dot.
    """

    def chosen(by_pattern: Mapping[str, Any], default: Any) -> dict[str, Any]:
        found = full_matches([f"{ENDING}({pattern})" for pattern in by_pattern], paths)
        values = dict.fromkeys(paths, default)
        for value, matched in reversed(list(zip(by_pattern.values(), found, strict=True))):
            values |= dict.fromkeys(matched, value)
        return values

    ranks = chosen(config.get("rank_pattern", {}), config.get("r", 8))
    alphas = chosen(config.get("alpha_pattern", {}), config.get("lora_alpha", 8))
    if config.get("use_rslora"):  # scaled by alpha / √r
        alphas = {path: alpha * ranks[path] ** 0.5 for path, alpha in alphas.items()}
    return ranks, alphas


def base_of(folder: str | Path) -> str | None:
    """The base that the adapter in `folder` names, if it names one. Raises UserError if there is no adapter."""
    return read_config(folder).get("base_model_name_or_path")
