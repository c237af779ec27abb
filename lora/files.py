"""PEFT's adapter files, read and checked: adapter_config.json and adapter_model.safetensors.

PEFT loads an adapter saved here onto transformers' PaliGemma, and the reverse. What PEFT does not have is added where
it ignores it: the parameters of grafts under `differential.` beside the LoRA tensors, the calls that repeat the grafts
under the key `differential` of the config (PEFT warns that it ignores this key, because without the graft the model
computes something else), and the fingerprint of the base in the metadata of the tensor file.
"""

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model.common import UserError

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's wrapper around a transformers model
HF_PREFIX = "model."  # before each of our paths in transformers' PaliGemma
GRAFT_PREFIX = "differential."

# Keys of PEFT's config that `load` reads, or that do not change what the saved tensors compute. A value under any other
# key is a feature that would be lost without notice.
_HARMLESS = set(
    "peft_type base_model_name_or_path r lora_alpha lora_dropout bias inference_mode differential target_modules "
    "exclude_modules layers_to_transform layers_pattern rank_pattern alpha_pattern use_rslora init_lora_weights "
    "auto_mapping eva_config megatron_core peft_version qalora_group_size revision runtime_config task_type "
    "prompt".split()  # our own: the template of its questions
)
_HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others (pissa, olora, …) change the base too


def tensor_name(path: str, half: str) -> str:
    """The name in the file of `half`, lora_A or lora_B, of the layer at our `path`."""
    return f"{PEFT_PREFIX}{HF_PREFIX}{path}.{half}.weight"


def read_config(folder: str | Path) -> dict:
    """The config of the adapter in `folder`. Raises UserError: no file, no JSON, or a feature beyond plain LoRA."""
    path = Path(folder) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: not found: an adapter is a folder of {CONFIG_FILE} and {TENSOR_FILE}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}): save or download the adapter again") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"{path}: no LoRA adapter: expected peft_type 'LORA': only that kind can be loaded")
    unknown = [f"{key} {value!r}" for key, value in config.items() if value and key not in _HARMLESS]
    if config.get("bias", "none") != "none":
        unknown.append(f"bias {config['bias']!r}")
    if config.get("init_lora_weights") not in _HARMLESS_INITS:
        unknown.append(f"init_lora_weights {config['init_lora_weights']!r}")
    if unknown:
        raise UserError(f"{path}: uses {', '.join(unknown)}, but only plain LoRA can be loaded: convert it with PEFT")
    return config


def read_tensors(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of the adapter in `folder` by name, and the file's metadata. Raises UserError."""
    path = Path(folder) / TENSOR_FILE
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path}: not found: save the adapter as safetensors; pickles are not read") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error}): save or download the adapter again") from None


def split_name(name: str) -> tuple[str, str] | None:
    """The path, as the file spells it, and the half of a LoRA tensor; None for any other name."""
    match = re.fullmatch(re.escape(PEFT_PREFIX) + r"(.+)\.(lora_[AB])\.weight", name)
    return (match[1], match[2]) if match else None


def our_path(path: str) -> str:
    """Our path for transformers': today's, or that of before 4.52 (…model below the decoder, none above)."""
    path = path.removeprefix(HF_PREFIX)
    return re.sub(r"^(language_model)\.model\.|^(vision_tower)\.vision_model\.", r"\1\2.", path)


def matches(targets: str | list[str], path: str) -> bool:
    """Whether PEFT's target_modules name our `path`: a regular expression for all of it, or a list of endings.

    Either may have transformers' leading "model." or not. Raises UserError for a string that is no regular expression.
    """
    if isinstance(targets, str):
        try:
            return any(re.fullmatch(targets, name) for name in (path, HF_PREFIX + path))
        except re.error as error:
            raise UserError(f"LoRA targets {targets!r} are no regular expression ({error}): correct it") from None
    return any(f".{HF_PREFIX}{path}".endswith(f".{ending}") for ending in targets)


def is_promised(config: dict, path: str) -> bool:
    """Whether PEFT would wrap `path`; False if the config narrows its targets to some layers (layers_to_transform)."""
    targets, excluded = config.get("target_modules") or [], config.get("exclude_modules") or []
    return config.get("layers_to_transform") is None and matches(targets, path) and not matches(excluded, path)


def alpha_of(config: dict, path: str, r: int) -> float:
    """alpha of a layer of rank `r`, by `path` as the file spells it; LoRA is scaled by alpha / r."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    return alpha * r**0.5 if config.get("use_rslora") else alpha  # rank-stabilised: alpha / √r


def base_of(folder: str | Path) -> str | None:
    """The base that the adapter in `folder` names, if it names one. Raises UserError if there is no adapter."""
    return read_config(folder).get("base_model_name_or_path")
