"""Adapters: LoRA injected into a model by path, merged, switched off, and exchanged with PEFT as files.

In: a `PaliGemma`, plain or grafted by `model/graft.py`. Out: the same model with `LoRALinear` in place of the matched
layers and only the adapter trainable; on disk a folder in the format of `lora/files.py`.
"""

import contextlib
import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lora.files import (
    CONFIG_FILE,
    GRAFT_PREFIX,
    HF_PREFIX,
    TENSOR_FILE,
    base_of,
    matching,
    our_path,
    promised,
    ranks_and_alphas,
    read_config,
    read_tensors,
    split_name,
    tensor_name,
)
from lora.layer import LoRALinear
from lora.quantize import Int8Embedding, QuantizedLinear, replaceable
from model.common import UserError, atomic_path, quoted, shown, write_text
from model.graft import Adaptable, graft, new_parameters
from model.lowrank import LowRank, check_low_rank
from model.variants import Differential
from weights.fingerprint import gathered, tensor_fingerprint

__all__ = ["base_of", "disabled", "fingerprint", "inject", "load", "merge", "save", "unmerge"]

# The paper's choice: q, k, v, o, gate, up and down of the decoder, and nothing of the vision tower.
DECODER_TARGETS = r"language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


def inject(model: Adaptable, targets: str | list[str], r: int, alpha: float, dropout: float = 0.0) -> list[str]:
    """Put LoRA of rank `r`, scaled by alpha / r, on every linear layer that `targets` names; return their paths.

    `targets` is PEFT's target_modules: a regular expression that must match a whole path, or a list of endings of
    paths, at dots; with or without transformers' leading "model.". A list like ["q_proj"] matches the vision tower too.
    Afterwards only the adapter is trainable: the LoRA matrices and the parameters of grafts. Layers that a graft has
    made get no LoRA; all of their weights are trained. Raises UserError if no layer matches, or for values out of
    range.
    """
    check_low_rank(r, alpha, dropout)
    layers = _free_layers(model)
    matched = matching(targets, layers)
    paths = [path for path in layers if path in matched]
    if not paths:
        raise UserError(
            f"LoRA targets {targets!r} match no free linear layer: a string is a regular expression for the whole "
            f"path, a list names endings; paths look like {', '.join(list(layers)[-7:]) or '(none is left)'}"
        )
    for path in paths:
        model.set_submodule(path, LoRALinear(layers[path], r, alpha, dropout))
    _train_adapter_only(model)
    return paths


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Every layer that carries LoRA, by its path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the adapter, LoRA and grafts, by their names in the file."""
    parameters = {}
    for path, layer in lora_layers(model).items():
        parameters[tensor_name(path, "lora_A")] = layer.lora.lora_A.weight
        parameters[tensor_name(path, "lora_B")] = layer.lora.lora_B.weight
    return parameters | {GRAFT_PREFIX + name: parameter for name, parameter in new_parameters(model).items()}


def merge(model: nn.Module) -> None:
    """Add every LoRA update to its weight; the forward pass stays the same up to rounding. Idempotent.

    The original weights are kept in main memory until `unmerge`: 4 GB for the decoder of 3B in bf16. Quantized weights
    are put back first, those of layers without LoRA too. Raises UserError, and merges nothing, where a second branch of
    the attention reads the same base weight: it would get the first branch's update too.
    """
    layers = lora_layers(model)
    for path in layers:
        parent, _, name = path.rpartition(".")
        attention = model.get_submodule(parent)
        if isinstance(attention, Differential) and name in attention.read_twice:
            raise UserError(
                f"{path}: cannot be merged: in attention of kind {attention.kind!r} a second branch shares this weight "
                "and would get the first one's update: keep the adapter unmerged"
            )
    quantized = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    if quantized and isinstance(model, Adaptable):
        model.base_fingerprint = fingerprint(model)
    for path, module in quantized.items():
        model.set_submodule(path, module.put_back())
    for layer in layers.values():
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """Restore every merged weight to the bit. Idempotent."""
    for layer in lora_layers(model).values():
        layer.unmerge()


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within the block, switch every low-rank update off, those of grafts included. Blocks may nest.

    Merged layers are unmerged within the block, so that it computes what the base does.
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


def quantize(model: Adaptable, kind: str = "int8", head: bool = False) -> int:
    """Turn every frozen linear layer of `model` into that of `lora.quantize.KINDS`, in place; returns how many.

    Embedding, head, norms and all trained parameters are unchanged; with `head` see `lora.quantize.replaceable`. The
    model keeps the fingerprint of its weights before: an adapter trained here names the base in full precision, and
    `load` quantizes that in the same way. Frozen means `requires_grad` is off. Raises UserError as `replaceable`, and
    for merged LoRA.
    """
    layers, own = replaceable(model, kind, head), set(adapter_parameters(model).values())
    if any(layer.merged for layer in lora_layers(model).values()):
        raise UserError(f"LoRA is merged into the weights that are to be quantized to {kind}: unmerge it first")
    layers = {path: layer for path, layer in layers.items() if layer[0].weight not in own}
    for path, (module, quantized) in layers.items():
        model.set_submodule(path, quantized(module).train(module.training))
    model.quantized = kind
    return len(layers)


@torch.no_grad()
def fingerprint(model: Adaptable) -> str:
    """A short hash of the weights without the adapter: names, shapes, and 64 values of each tensor, in bf16.

    It is the same for a checkpoint opened in fp32 and in bf16 (fp16 rounds differently), whether merged or not. It
    changes with any training of the base, or a merge into it. Weights that a graft has replaced are not part of it, and
    quantized ones are those before. Where `base_fingerprint` is set, it is that.
    """
    if model.base_fingerprint is not None:
        return model.base_fingerprint
    adapter = set(adapter_parameters(model).values())
    layers = lora_layers(model).values()
    originals = {layer.base_layer.weight: layer.original for layer in layers if layer.original is not None}
    base: dict[str, Any] = {
        name.replace(".base_layer.", "."): originals.get(parameter, parameter)
        for name, parameter in model.named_parameters()
        if parameter not in adapter
    }
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            base[f"{path.replace('.base_layer', '')}.weight"] = module.original
    return tensor_fingerprint(base)


def save(
    model: Adaptable, folder: str | Path, base: str | None = None, prompt: str | None = None, write: bool = True
) -> None:
    """Write the adapter of `model` to `folder` in PEFT's format. `base` names the checkpoint below it, for readers;
    `prompt` is the template of the questions that it was trained on, for evaluation.

    Where FSDP2 has sharded it, every process must call this; one of them with `write`. The config is written last: a
    folder that has one is complete. Raises UserError if the model has no adapter.
    """
    parameters, tensors = adapter_parameters(model), {}
    if not parameters:
        raise UserError("the model has no adapter to save: inject LoRA, or graft a variant, first")
    for name, parameter in parameters.items():
        whole = gathered(parameter)
        if write:
            tensors[name] = whole.detach().cpu().contiguous()
    metadata = {"format": "pt", "base_fingerprint": fingerprint(model)}
    if not write:
        return
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
        # whole paths: an ending would match in the vision tower too
        "target_modules": list(layers),
        "rank_pattern": {path: rank for path, rank in ranks.items() if rank != r},
        "alpha_pattern": {path: value for path, value in alphas.items() if value != alpha},
    }
    if prompt is not None:
        config["prompt"] = prompt
    if model.quantized is not None:
        config["quantized"] = model.quantized
    if model.grafts:
        config["differential"] = [record.arguments() for record in model.grafts]
    with atomic_path(Path(folder) / TENSOR_FILE) as temporary:
        save_file(tensors, temporary, metadata)
    write_text(Path(folder) / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def load(model: Adaptable, folder: str | Path, *, force: bool = False) -> list[str]:
    """Put the adapter in `folder`, ours or PEFT's, on a plain `model`; return the paths that carry LoRA.

    Grafts are repeated first, because the file holds their parameters; the base is quantized as it was in training.
    `force` skips the comparison of the base.
    Raises UserError: no such files, a feature of PEFT that is not plain LoRA, another base than the adapter's, a model
    that has an adapter already, or tensors that are missing, unexpected, of another shape, not floating point or not
    finite. The model must then not be used any more: it may hold the grafts.
    """
    folder = Path(folder)
    if adapter_parameters(model):
        raise UserError(f"{folder}: the model has an adapter already: load this one onto a plain base")
    config, (tensors, metadata) = read_config(folder), read_tensors(folder)
    for call in config.get("differential", []):
        if "kind" not in call or "model" in call:
            raise UserError(f"{folder}: {quoted(call)} is no graft: correct the key 'differential' of {CONFIG_FILE}")
        graft(model, **call)
    expected = metadata.get("base_fingerprint")  # PEFT leaves none
    if expected and not force and expected != (actual := fingerprint(model)):
        base = shown(config.get("base_model_name_or_path") or "a base without a name")
        raise UserError(
            f"{folder}: this adapter belongs to another base: it was trained on {base} (fingerprint "
            f"{shown(expected, 80)}), the model is {actual}: load that base, or force the adapter onto this one"
        )
    layers = _free_layers(model)
    spelt, found = _by_our_names(tensors, layers, folder / TENSOR_FILE)
    # those that are named and missing in the file, too
    spelt = {path: HF_PREFIX + path for path in promised(config, layers)} | spelt
    ranks, alphas = ranks_and_alphas(config, spelt.values())
    wanted = {GRAFT_PREFIX + name: tuple(parameter.shape) for name, parameter in new_parameters(model).items()}
    for path, name in spelt.items():
        wanted[tensor_name(path, "lora_A")] = (ranks[name], layers[path].in_features)
        wanted[tensor_name(path, "lora_B")] = (layers[path].out_features, ranks[name])
    _check_tensors(found, wanted, folder / TENSOR_FILE)
    for path, name in spelt.items():
        lora = LoRALinear(layers[path], ranks[name], alphas[name], config.get("lora_dropout", 0.0))
        model.set_submodule(path, lora)
    _train_adapter_only(model)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.copy_(found[name])
    if (kind := config.get("quantized")) and model.quantized is None:
        quantize(model, kind)
    return list(lora_layers(model))


def _by_our_names(
    tensors: dict[str, torch.Tensor], paths: Container[str], where: Path
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The paths in the file of those of `paths` that it has tensors for, and its tensors under the names of `save`."""
    spelt, found = {}, {}
    for name, tensor in tensors.items():
        parts = split_name(name)
        if parts and (path := our_path(parts[0])) in paths:
            spelt[path] = parts[0]
            name = tensor_name(path, parts[1])
        if name in found:
            raise UserError(f"{where}: {name} is there under two names: save the adapter again")
        found[name] = tensor
    return spelt, found


def _check_tensors(found: dict[str, torch.Tensor], wanted: dict[str, tuple[int, ...]], where: Path) -> None:
    """Raise UserError unless `found` has the names and shapes `wanted`, of finite floating-point numbers."""
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"unexpected {shown(name)}" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        tensor, shape = found[name], wanted[name]
        if tensor.shape != shape:
            problems.append(f"{name} is {tuple(tensor.shape)}, expected {shape}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}, expected floating point")
        elif not tensor.float().isfinite().all():  # in fp32, which it will have
            problems.append(f"{name} has values that are not finite")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"{where}: does not fit the model: {'; '.join(sorted(problems)[:8])}{more}: load its own base")


def _free_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer that may carry LoRA, by its path: part neither of an adapter nor of a graft."""
    low_rank = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, LoRALinear | LowRank))
    grafted = new_parameters(model)
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Int8Embedding)
        and not path.startswith(low_rank)
        and f"{path}.weight" not in grafted
    }


def _train_adapter_only(model: nn.Module) -> None:
    model.requires_grad_(False)
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)
