"""Adapters: LoRA injected into a model by path, merged, switched off, and exchanged with PEFT as files.

In: a `PaliGemma`, plain or grafted by `model/differential.py`. Out: the same model with `LoRALinear` in place of the
matched layers and only the adapter trainable; on disk a folder of adapter_config.json and adapter_model.safetensors.
Next: `train/finetune.py` trains it, `weights/export.py` merges it.

The files are PEFT's: it loads an adapter saved here onto transformers' PaliGemma, and the reverse. What PEFT does not
know is added where it does no harm: the grafts' parameters under `differential.` beside the LoRA tensors, the calls
that repeat the grafts under the key `differential` of the config (PEFT warns that it ignores it, rightly: there the
model would be another one), and the fingerprint of the base in the metadata of the tensor file.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from lora.layer import LoRALinear
from model.common import UserError, atomic_path, write_text
from model.differential import graft
from model.lowrank import LowRank
from weights.fingerprint import tensor_fingerprint

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's wrapper around a transformers model,
HF_PREFIX = "model."  # in which our paths begin one level deeper
GRAFT_PREFIX = "differential."

# The paper's choice: q, k, v, o, gate, up and down of the decoder, and nothing of the vision tower.
DECODER_TARGETS = r"language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


def inject(model: nn.Module, targets: str | list[str], r: int, alpha: float, dropout: float = 0.0) -> list[str]:
    """Put LoRA of rank `r`, scaled by alpha / r, on every linear layer that `targets` names; return their paths.

    `targets` is PEFT's target_modules: a regular expression that must match a whole path, or a list of endings of
    paths, at dots; with or without transformers' leading "model.". A list like ["q_proj"] finds the vision tower too.
    Then only the adapter is trainable: the LoRA matrices and what a graft has added. Layers that a graft has made are
    passed over, they are trained whole. Raises UserError if no layer matches, or for values out of range.
    """
    if r < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise UserError(f"LoRA r {r}, alpha {alpha}, dropout {dropout}: expected r ≥ 1, alpha > 0 and 0 ≤ dropout < 1")
    candidates = _linear_paths(model)
    paths = [path for path in candidates if _matches(targets, path)]
    if not paths:
        raise UserError(
            f"LoRA targets {targets!r} match no free linear layer: a string is a regular expression for the whole "
            f"path, a list names endings; paths look like {', '.join(candidates[-7:]) or '(none is left)'}"
        )
    for path in paths:
        _wrap(model, path, r, alpha, dropout)
    _train_adapter_only(model)
    return paths


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Every layer that carries LoRA, by its path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What an adapter consists of, LoRA and grafts, by its name in the file."""
    halves = {
        f"{PEFT_PREFIX}{HF_PREFIX}{path}.{half}.weight": layer.lora.get_submodule(half).weight
        for path, layer in lora_layers(model).items()
        for half in ("lora_A", "lora_B")
    }
    return halves | {GRAFT_PREFIX + name: model.get_parameter(name) for name in getattr(model, "grafted", [])}


def merge(model: nn.Module) -> None:
    """Fold every LoRA update into its weight; the forward pass stays the same up to rounding. Idempotent.

    The original weights are kept in main memory until `unmerge`: 4 GB for the decoder of 3B in bf16. Raises UserError,
    and merges nothing, for quantized weights, and where a second branch of the attention is built on the same base
    weight: it would see the first branch's update.
    """
    layers = lora_layers(model)
    for path, layer in layers.items():
        if not layer.base_layer.weight.is_floating_point():
            raise UserError(f"{path}: its weights are quantized: open the base as it is, load the adapter, merge there")
        attention = model.get_submodule(path.rpartition(".")[0])
        if path.endswith(("q_proj", "k_proj")) and not getattr(attention, "mergeable", True):
            raise UserError(
                f"{path}: cannot be merged: in attention of kind {attention.kind!r} a second branch shares this weight "
                "and would get the first one's update: keep the adapter unmerged"
            )
    for layer in layers.values():
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """Restore every merged weight to the bit. Idempotent."""
    for layer in lora_layers(model).values():
        layer.unmerge()


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Switch every low-rank update off, a graft's included, for the length of the block. Blocks may nest.

    Merged layers are unmerged meanwhile: the point is to hear the base.
    """
    merged = [layer for layer in lora_layers(model).values() if layer.merged]
    before = {module: module.enabled for module in model.modules() if isinstance(module, LowRank)}
    try:
        for layer in merged:
            layer.unmerge()
        for module in before:
            module.enabled = False
        yield
    finally:
        for module, enabled in before.items():
            module.enabled = enabled
        for layer in merged:
            layer.merge()


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """A short hash of the weights below the adapter: names, shapes, and 64 values of each tensor, in bf16.

    It is the same for a checkpoint opened in fp32 and in bf16 (fp16 rounds differently), whether merged or not, and
    another one after any training of the base, or a merge into it. What a graft replaced is not part of it. A quantized
    model has that of its base.
    """
    if (known := getattr(model, "base_fingerprint", None)) is not None:
        return known
    adapter = set(adapter_parameters(model).values())
    merged = {layer.base_layer.weight: layer.original for layer in lora_layers(model).values() if layer.merged}
    base = {
        name.replace(".base_layer.", "."): _whole(merged.get(parameter, parameter))
        for name, parameter in model.named_parameters()
        if parameter not in adapter
    }
    return tensor_fingerprint(base)


def save(model: nn.Module, folder: str | Path, base: str | None = None) -> None:
    """Write the adapter of `model` to `folder` in PEFT's format. `base` names the checkpoint below it, for readers.

    The config comes last: a folder that has one is complete. Raises UserError if the model has no adapter.
    """
    parameters = adapter_parameters(model).items()
    tensors = {name: _whole(parameter).detach().cpu().contiguous() for name, parameter in parameters}
    if not tensors:
        raise UserError("the model has no adapter to save: inject LoRA, or graft a variant, first")
    metadata = {"format": "pt", "base_fingerprint": fingerprint(model)}
    layers = {HF_PREFIX + path: layer for path, layer in lora_layers(model).items()}
    ranks = {path: layer.lora.lora_A.out_features for path, layer in layers.items()}
    alphas = {path: layer.alpha for path, layer in layers.items()}
    r, alpha = next(iter(ranks.values()), 1), next(iter(alphas.values()), 1)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": next((layer.lora.dropout for layer in layers.values()), 0.0),
        "bias": "none",
        "inference_mode": True,
        # whole paths: an ending would reach into the vision tower
        "target_modules": list(layers),
        "rank_pattern": {path: rank for path, rank in ranks.items() if rank != r},
        "alpha_pattern": {path: value for path, value in alphas.items() if value != alpha},
    }
    if getattr(model, "grafts", None):
        config["differential"] = model.grafts
    with atomic_path(Path(folder) / TENSOR_FILE) as temporary:
        save_file(tensors, temporary, metadata)
    write_text(Path(folder) / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def load(model: nn.Module, folder: str | Path, *, force: bool = False) -> list[str]:
    """Put the adapter in `folder`, ours or PEFT's, on a plain `model`; return the paths that carry LoRA.

    Grafts are repeated first, so that every tensor finds its place. `force` skips the comparison of the base.
    Raises UserError: no such files, a feature of PEFT that is not plain LoRA, another base than the adapter's, a model
    that has an adapter already, or tensors that are missing, unexpected or of another shape. The model is then to be
    thrown away: it may hold a part of the adapter.
    """
    folder = Path(folder)
    if adapter_parameters(model):
        raise UserError(f"{folder}: the model has an adapter already: load this one onto a plain base")
    config = _read_config(folder / CONFIG_FILE)
    tensors, metadata = _read_tensors(folder / TENSOR_FILE)
    for call in config.get("differential", []):
        graft(model, **call)
    expected = metadata.get("base_fingerprint")  # PEFT leaves none
    if expected and not force and expected != (actual := fingerprint(model)):
        raise UserError(
            f"{folder}: this adapter belongs to another base: it was trained on "
            f"{config.get('base_model_name_or_path') or 'a base without a name'} (fingerprint {expected}), the model "
            f"is {actual}: load that base, or force the adapter onto this one"
        )
    candidates = _linear_paths(model)
    sources = {}  # our path → the path that the file uses, which alpha_pattern speaks of
    found = {}
    for name, tensor in tensors.items():
        key = re.fullmatch(re.escape(PEFT_PREFIX) + r"(.+)\.(lora_[AB]\.weight)", name)
        if key and (path := _our_path(key[1])) in candidates:
            sources[path] = key[1]
            name = f"{PEFT_PREFIX}{HF_PREFIX}{path}.{key[2]}"
        found[name] = tensor
    for path in candidates:
        # what the config promises and the file lacks is wrapped too, and reported as missing below
        if path in sources or _promised(config, path):
            half = found.get(f"{PEFT_PREFIX}{HF_PREFIX}{path}.lora_A.weight")
            r = config.get("r", 8) if half is None else len(half)
            alpha = _alpha(config, sources.get(path, HF_PREFIX + path))
            if config.get("use_rslora"):  # scaled by alpha / √r
                alpha *= r**0.5
            _wrap(model, path, r, alpha, config.get("lora_dropout", 0.0))
    _train_adapter_only(model)
    _copy(found, adapter_parameters(model), folder / TENSOR_FILE)
    return list(lora_layers(model))


def base_of(folder: str | Path) -> str | None:
    """The base that the adapter in `folder` names, if it names one. Raises UserError if there is no adapter."""
    return _read_config(Path(folder) / CONFIG_FILE).get("base_model_name_or_path")


def _linear_paths(model: nn.Module) -> list[str]:
    """Every linear layer that may carry LoRA: part neither of an adapter nor of a graft."""
    own = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, LoRALinear | LowRank))
    grafted = set(getattr(model, "grafted", []))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not path.startswith(own) and f"{path}.weight" not in grafted
    ]


def _matches(targets: str | list[str], path: str) -> bool:
    if isinstance(targets, str):
        try:
            return any(re.fullmatch(targets, name) for name in (path, HF_PREFIX + path))
        except re.error as error:
            raise UserError(f"LoRA targets {targets!r} are no regular expression ({error}): correct it") from None
    return any(f".{HF_PREFIX}{path}".endswith(f".{ending}") for ending in targets)


def _wrap(model: nn.Module, path: str, r: int, alpha: float, dropout: float) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, LoRALinear(model.get_submodule(path), r, alpha, dropout))


def _train_adapter_only(model: nn.Module) -> None:
    model.requires_grad_(False)
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP2 has sharded; every process must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Keys of PEFT's config that do not change what the saved tensors compute, or that `load` heeds. Any other key with a
# value is a feature that would be lost in silence.
_HARMLESS = {
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "lora_dropout",
    "bias",
    "inference_mode",
    "differential",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "init_lora_weights",
    "auto_mapping",
    "eva_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others (pissa, olora, …) change the base too


def _read_config(path: Path) -> dict:
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


def _read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except FileNotFoundError:
        raise UserError(f"{path}: not found: save the adapter as safetensors; pickles are not read") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error}): save or download the adapter again") from None


def _our_path(path: str) -> str:
    """Our path for transformers': today's, or that of before 4.52 (…model below the decoder, none above)."""
    path = path.removeprefix(HF_PREFIX)
    return re.sub(r"^(language_model)\.model\.|^(vision_tower)\.vision_model\.", r"\1\2.", path)


def _promised(config: dict, path: str) -> bool:
    """Whether PEFT would wrap `path`; not asked where a choice of layers (layers_to_transform) narrows the targets."""
    targets, excluded = config.get("target_modules") or [], config.get("exclude_modules") or []
    return config.get("layers_to_transform") is None and _matches(targets, path) and not _matches(excluded, path)


def _alpha(config: dict, path: str) -> float:
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return alpha
    return config.get("lora_alpha", 8)


@torch.no_grad()
def _copy(found: dict[str, torch.Tensor], wanted: dict[str, nn.Parameter], where: Path) -> None:
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"unexpected {name}" for name in found.keys() - wanted.keys()]
    problems += [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(wanted[name].shape)}"
        for name in wanted.keys() & found.keys()
        if found[name].shape != wanted[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"{where}: does not fit the model: {'; '.join(sorted(problems)[:8])}{more}: load its own base")
    for name, parameter in wanted.items():
        parameter.copy_(found[name])
