"""LoRA: injected into a model by path, merged, switched off, and exchanged with PEFT as files.

The matched layers become `LoRALinear`, and only the adapter is trainable. On disk are PEFT's
adapter_config.json and adapter_model.safetensors. PEFT ignores the prompt, a key of the config, and
the fingerprint of the base in the metadata of the tensor file. With a graft, its parameters stand
as `differential.…` beside the LoRA tensors, and the calls that repeat it in the config: PEFT would
leave them out, so `peft_type` is another one, which PEFT refuses.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.common import UserError, atomic_path, quoted, read_json, shown, without_none, write_text
from model.config import config_errors
from model.differential import Variant, graft, new_parameters
from model.gemma import Adaptable
from model.lowrank import LowRank
from weights.fingerprint import gathered, tensor_fingerprint
from weights.load import open_tensors, save_tensors
from weights.mapping import dialect_names
from weights.quantize import Int8Embedding, QuantizedLinear, pack, replaceable

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
# what the names in a file begin with
PEFT = "base_model.model."  # of LoRA: PEFT's wrapper
GRAFT = "differential."  # of a graft's parameters
OLD = "model."  # before every path of ours, in earlier files of language models
# The paper's choice: q, k, v, o, gate, up and down of the decoder, and nothing of the vision tower.
DECODER_TARGETS = r"language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
# Keys of PEFT that can be loaded, here and in _NUMBERS, _PLAIN and _OTHERS. Any other key with a
# value is a feature that loading would lose.
_TEXTS = set("base_model_name_or_path prompt quantized peft_version task_type".split())
# these may not be null; for other keys null means the default
_NUMBERS = {"r", "lora_alpha", "lora_dropout"}
GRAFTED = "DIFFERENTIAL_LORA"  # the peft_type beside a graft; earlier files have LORA there too
# Values of plain LoRA. Other initial values ("pissa", "olora", …) change the base too.
_PLAIN = {
    "peft_type": ["LORA", GRAFTED],
    "bias": ["none"],
    "revision": ["main"],
    "init_lora_weights": [True, False, "gaussian", "eva", "orthogonal"],
}
_OTHERS = """target_modules exclude_modules layers_to_transform layers_pattern rank_pattern alpha_pattern use_rslora
    differential inference_mode auto_mapping eva_config megatron_core qalora_group_size runtime_config"""


# keys of rank_pattern and alpha_pattern that match any path fast: no group is repeated
SIMPLE = re.compile(
    r"""(?=.{,200}\Z)                                  # at most 200 characters
    (?:(?:\\?[\w.^$|-]|\[[\w.\\^-]+\]|\))*              # characters, sets, closing parentheses
       (?:(?:\\?[\w.-]|\[[\w.\\^-]+\])(?:[*+?]|\{[\d,]+\})\??  # then one that is repeated,
          |\((?:\?:)?                                 # or a group that opens,
       )){,3}                                         # this at most three times
    (?:\\?[\w.^$|-]|\[[\w.\\^-]+\]|\))*""",
    re.VERBOSE,
)


class LoRALinear(nn.Module):
    """W x + (alpha / r)·B·A·dropout(x) (Hu et al. 2021, Eq. 3), x (…, in_features). `base_layer`,
    PEFT's name, holds W. Differential attention with two branches calls `base_layer` once and adds
    `lora`, and its second update, itself."""

    def __init__(
        self,
        base_layer: nn.Linear,
        r: int,
        alpha: float,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.base_layer, self.alpha = base_layer, alpha
        device = base_layer.weight.device
        sizes = base_layer.in_features, base_layer.out_features
        self.lora = LowRank(*sizes, r, alpha, dropout, device)
        # W while merged; not a buffer, so it is neither saved nor moved
        self.original: Tensor | None = None
        self.train(base_layer.training)

    @property
    def merged(self) -> bool:
        return self.original is not None

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer(x)
        return base if self.merged else self.lora.add_to(base, x)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the update to the weight: summed in fp32 (fp64 for an fp64 base), rounded once to the
        weight's dtype. W itself is kept in main memory: (W + Δ) − Δ is not W in floating point."""
        if not self.merged:
            weight = self.base_layer.weight
            exact = torch.promote_types(weight.dtype, torch.float32)
            self.original = weight.detach().cpu()
            weight.data = (weight.to(exact) + self.lora.delta_weight().to(exact)).to(weight.dtype)

    def unmerge(self) -> None:
        """Restore W, to the bit."""
        if self.original is not None:
            weight = self.base_layer.weight
            weight.data = self.original.to(weight)
            self.original = None


def matching(targets: str | list[str], paths: Mapping[str, str]) -> list[str]:
    """Those of our paths that PEFT's target_modules name, in our spelling or in transformers'.

    A string is a regular expression for whole paths, a list names their endings, at dots. paths:
    {transformers' path: ours}.
    """
    if isinstance(targets, list):
        targets = rf"(.*\.)?({'|'.join(map(re.escape, targets))})"
    found = []
    for theirs, ours in paths.items():
        if any(re.fullmatch(targets, path) for path in (theirs, ours, OLD + ours)):
            found.append(ours)
    return found


def free_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer that may carry LoRA, by its path: part neither of an adapter nor of a
    graft."""
    grafted = new_parameters(model)
    layers = {}
    taken = ()  # the beginnings of paths below adapters
    for path, module in model.named_modules():
        if isinstance(module, LoRALinear | LowRank):
            taken += (f"{path}.",)
        elif isinstance(module, Int8Embedding) or path.startswith(taken):
            continue
        elif isinstance(module, nn.Linear) and f"{path}.weight" not in grafted:
            layers[path] = module
    return layers


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Every layer that carries LoRA, by its path."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def published_layers(model: Adaptable) -> dict[str, LoRALinear]:
    """Every layer that carries LoRA, by its path in transformers' model."""
    layers = lora_layers(model)
    return {theirs: layers[ours] for theirs, ours in dialect_names(layers, model.published).items()}


def adapter_parameters(model: Adaptable) -> dict[str, nn.Parameter]:
    """The parameters of the adapter, LoRA and grafts, by their names in the file."""
    parameters = {}
    for path, layer in published_layers(model).items():
        for half in ("lora_A", "lora_B"):
            parameters[f"{PEFT}{path}.{half}.weight"] = getattr(layer.lora, half).weight
    return parameters | {
        GRAFT + name: parameter for name, parameter in new_parameters(model).items()
    }


def inject(
    model: Adaptable,
    targets: str | list[str],
    r: int,
    alpha: float,
    dropout: float = 0.0,
) -> list[str]:
    """Put LoRA of rank `r`, scaled by alpha / r, on every linear layer that `targets` names; return
    their paths.

    `targets`: see `matching`; a list like ["q_proj"] reaches the vision tower too. Afterwards only
    LoRA and parameters of grafts are trainable. Raises UserError if no layer matches, or for values
    out of range.
    """
    layers = free_layers(model)
    try:
        paths = matching(targets, dialect_names(layers, model.published))
    except re.error as error:
        raise UserError(
            f"LoRA targets: {quoted(targets)} is no regular expression ({error}): correct it"
        ) from None
    if not paths:
        known = ", ".join(list(layers)[-7:]) or "(none is left)"
        raise UserError(
            f"LoRA targets {targets!r} match no free linear layer: paths look like {known}"
        )
    for path in paths:
        model.set_submodule(path, LoRALinear(layers[path], r, alpha, dropout))
    model.requires_grad_(False)
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)
    return paths


def merge(model: Adaptable) -> None:
    """Add every LoRA update to its weight; the forward pass stays the same up to rounding.
    Idempotent.

    The original weights are kept in main memory until `unmerge`: 4 GB for the decoder of 3B in
    bf16. All quantized weights are put back first. Raises UserError, and merges nothing, where a
    second branch reads the same base weight.
    """
    layers = lora_layers(model)
    for path in layers:
        parent, _, name = path.rpartition(".")
        attention = model.get_submodule(parent)
        if isinstance(attention, Variant) and name in attention.read_twice:
            raise UserError(
                f"{path}: cannot be merged: in attention of kind {attention.kind!r} a second branch "
                "shares this weight: keep the adapter unmerged"
            )
    if model.quantized is not None:
        model.base_fingerprint = fingerprint(model)
        model.was_quantized, model.quantized = model.quantized, None
        for path, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear):
                model.set_submodule(path, module.put_back())
    for layer in layers.values():
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """Restore every merged weight to the bit. Idempotent."""
    for layer in lora_layers(model).values():
        layer.unmerge()


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within the block, every low-rank update is off, merged ones and those of grafts included.
    Blocks may nest."""
    merged = [layer for layer in lora_layers(model).values() if layer.merged]
    enabled = [m for m in model.modules() if isinstance(m, LowRank) and m.enabled]
    try:
        unmerge(model)
        for module in enabled:
            module.enabled = False
        yield
    finally:
        for module in enabled:
            module.enabled = True
        for layer in merged:
            layer.merge()


def unload(model: Adaptable) -> None:
    """Take LoRA off: each layer is again the one that it wrapped. Raises UserError for a graft,
    which stays."""
    if model.grafts:
        raise UserError("a graft cannot be taken off: load the base anew")
    for path, layer in lora_layers(model).items():
        layer.unmerge()
        model.set_submodule(path, layer.base_layer)


def quantize(model: Adaptable, kind: str = "int8", head: bool = False) -> None:
    """Turn every frozen linear layer of `model` into that of `weights.quantize.KINDS`, in place;
    embedding and head only with `head`. `load` quantizes its base in the same way. Raises UserError
    as `replaceable`, for merged LoRA, and where no layer is frozen."""
    layers, trained = replaceable(model, kind, head), set(adapter_parameters(model).values())
    if any(layer.merged for layer in lora_layers(model).values()):
        raise UserError(
            f"LoRA is merged into the weights that are to be quantized to {kind}: unmerge it first"
        )
    frozen = {path: layer for path, layer in layers.items() if layer[0].weight not in trained}
    if not frozen and model.quantized is None:
        raise UserError(
            f"no layer is frozen, so that none is held in {kind}: inject LoRA first, or call "
            "requires_grad_(False)"
        )
    pack(model, kind, frozen)


def fingerprint(model: Adaptable) -> str:
    """A short hash of the weights without the adapter: names, shapes, and 64 values of each tensor,
    in bf16.

    It is the same in fp32 and in bf16 (fp16 rounds differently), merged or not, quantized or not,
    and changes with any training of the base. Weights that a graft has replaced are not part of it.
    `base_fingerprint` is taken if set.
    """
    if model.base_fingerprint is not None:
        return model.base_fingerprint
    adapter = set(adapter_parameters(model).values())
    weights: list = [(name, p) for name, p in model.named_parameters() if p not in adapter]
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear | LoRALinear) and module.original is not None:
            weights.append((f"{path}.weight", module.original))
    # of equal names the last one counts: the original, not what merging or quantizing made of it
    plain = {name.replace(".base_layer.", "."): tensor for name, tensor in weights}
    return tensor_fingerprint(plain)


def save(
    model: Adaptable,
    folder: str | Path,
    base: str | None = None,
    prompt: str | None = None,
    write=True,
) -> None:
    """Write the adapter of `model` to `folder` in PEFT's format: the config, which names `base`,
    last.

    prompt: the template of the questions that it was trained on, for evaluation. Where FSDP2 has
    sharded the model, every process must call this; one of them with `write`. Raises UserError if
    the model has no adapter, or if other parameters are trained too.
    """
    parameters = adapter_parameters(model)
    if not parameters:
        raise UserError("the model has no adapter to save: inject LoRA, or graft a variant, first")
    held = set(parameters.values())
    if other := [n for n, p in model.named_parameters() if p.requires_grad and p not in held]:
        raise UserError(
            f"{len(other)} parameters outside the adapter are trained ({other[0]}, …): freeze them"
        )
    # 1. the tensors
    tensors = {}
    for name, parameter in parameters.items():
        whole = gathered(parameter).detach()  # one at a time, and kept only where it is written
        tensors[name] = whole.cpu().contiguous() if write else torch.empty(0)
    # one entry: the package writes several in random order
    metadata = {"base_fingerprint": fingerprint(model)}
    # 2. the config; targets are whole paths: an ending would match more layers
    layers = published_layers(model)
    sizes = [(layer.lora.r, layer.alpha, layer.lora.dropout) for layer in layers.values()]
    r, alpha, dropout = sizes[0] if sizes else (1, 1, 0.0)
    config = {
        "peft_type": GRAFTED if model.grafts else "LORA",
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(layers),
        "rank_pattern": {p: layer.lora.r for p, layer in layers.items() if layer.lora.r != r},
        "alpha_pattern": {p: layer.alpha for p, layer in layers.items() if layer.alpha != alpha},
    }
    added = {
        "prompt": prompt,
        "quantized": model.quantized or model.was_quantized,
        "differential": model.grafts or None,
    }
    config |= without_none(added)
    # 3. the files
    if write:
        with atomic_path(Path(folder) / TENSOR_FILE) as temporary:
            save_tensors(tensors, temporary, metadata)
        write_text(Path(folder) / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def read_config(folder: str | Path) -> dict:
    """The config of the adapter in `folder`, without null keys. Raises UserError for all but plain
    LoRA and grafts."""
    path = Path(folder) / CONFIG_FILE
    raw = read_json(path)
    config = {key: value for key, value in raw.items() if value is not None or key in _NUMBERS}
    known = _TEXTS | _NUMBERS | _PLAIN.keys() | set(_OTHERS.split())
    strange = []
    for key, value in config.items():  # a None left here is a number that must be given
        is_unknown = value and key not in known
        is_no_text = key in _TEXTS and not isinstance(value, str)
        is_not_plain = value not in _PLAIN.get(key, [value])
        if value is None or is_unknown or is_no_text or is_not_plain:
            strange.append(key)
    if strange:
        features = ", ".join(f"{shown(key, 80)} {quoted(config[key])}" for key in strange[:8])
        raise UserError(
            f"{shown(path)}: uses {features}, but only plain LoRA can be loaded: convert it with "
            "PEFT"
        )
    return config


def load(
    model: Adaptable, folder: str | Path, *, force: bool = False, whole: bool = False
) -> list[str]:
    """Put the adapter in `folder`, ours or PEFT's, on a plain `model`; return the paths that carry
    LoRA.

    Grafts are repeated first, and the base is quantized as in training, except with `whole`.
    `force` skips the comparison of the base. Raises UserError for another base, and whatever does
    not fit; the model must then not be used any more.
    """
    folder = Path(folder)
    if adapter_parameters(model):
        raise UserError(
            f"{folder}: the model has an adapter already: load this one onto a plain base"
        )
    # 1. grafts are repeated
    config, file = read_config(folder), open_tensors(folder / TENSOR_FILE)
    with config_errors(folder):
        for call in config.get("differential", []):
            attention = call.pop("kind")
            diff_in = call.pop("where")
            if attention == "v2":
                call.setdefault("exact", False)  # as files without the option mean
            graft(model, attention, diff_in=diff_in, **call)
    # 2. the base must be that of training
    expected = (file.metadata() or {}).get("base_fingerprint")  # PEFT leaves none
    actual = fingerprint(model)
    if expected and expected != actual and not force:
        base = shown(config.get("base_model_name_or_path", "a base without a name"))
        raise UserError(
            f"{folder}: was trained on another base, {base} ({shown(expected, 80)}), this is "
            f"{actual}: load that one, or force the adapter onto this"
        )
    # 3. LoRA is injected, and every tensor must fit
    with config_errors(folder):
        tensors = _put_lora(model, config, {name: file.get_tensor(name) for name in file.keys()})
    parameters = adapter_parameters(model)
    problems = [f"missing {name}" for name in parameters.keys() - tensors.keys()]
    problems += [f"unexpected {shown(name)}" for name in tensors.keys() - parameters.keys()]
    for name in parameters.keys() & tensors.keys():
        tensor, shape = tensors[name], parameters[name].shape
        # in fp32, which it will have
        finite = tensor.is_floating_point() and tensor.float().isfinite().all()
        if tensor.shape != shape or not finite:
            problems.append(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected finite floats "
                f"{tuple(shape)}"
            )
    if problems:
        raise UserError(
            f"{folder / TENSOR_FILE}: does not fit the model, {len(problems)} problems: "
            f"{'; '.join(sorted(problems)[:8])}: load its own base"
        )
    # 4. the values: written while nothing is trainable, so that autograd does not see it
    model.requires_grad_(False)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name]).requires_grad_(True)
    kind = config.get("quantized")
    if kind and model.quantized is None and not whole:
        quantize(model, kind)
    return list(lora_layers(model))


def _put_lora(
    model: Adaptable,
    config: dict,
    tensors: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Put LoRA on the layers of an adapter's file; return its tensors under the names of `save`."""
    layers = free_layers(model)
    names = dialect_names(layers, model.published)
    theirs = {ours: path for path, ours in names.items()}
    # 1. the file's tensors, under the names of `save`
    renamed = {}
    in_file = {}  # by our path of a layer: its path as the file spells it
    for name, tensor in tensors.items():
        if match := re.fullmatch(rf"{re.escape(PEFT)}(.+)\.(lora_[AB])\.weight", name):
            path = names.get(match[1], match[1].removeprefix(OLD))
            # before transformers 4.52 below the decoder and the tower, not above
            path = re.sub(r"^(language_model|vision_tower)\.(vision_)?model\.", r"\1.", path)
            if path in layers:
                in_file[path] = match[1]
                name = f"{PEFT}{theirs[path]}.{match[2]}.weight"
        if name in renamed:
            raise UserError(f"holds {name} twice, in two spellings")
        renamed[name] = tensor
    # 2. layers that the config names, though the file has no tensor of them
    targets = config.get("target_modules")
    if isinstance(targets, list) and not config.keys() & {"exclude_modules", "layers_to_transform"}:
        for path in matching(targets, names):
            in_file.setdefault(path, theirs[path])

    def value(patterns: str, default: str, path: str) -> Any:
        """The value of the first key of config[patterns] that matches an ending of the path, at a
        dot as in PEFT; else config[default], or 8 as in PEFT."""
        for key, given in config.get(patterns, {}).items():
            if not SIMPLE.fullmatch(key):
                raise UserError(
                    f"{patterns}: {quoted(key)} is neither a name nor simple, and may take hours to match"
                )
            if re.fullmatch(rf"(.*\.)?({key})", path):
                return given
        return config.get(default, 8)

    # 3. LoRA on each
    for path, name in in_file.items():
        r = value("rank_pattern", "r", name)
        alpha = value("alpha_pattern", "lora_alpha", name)
        if config.get("use_rslora"):
            alpha = alpha * r**0.5  # scaled by alpha / √r
        layer = LoRALinear(layers[path], r, alpha, config.get("lora_dropout", 0.0))
        model.set_submodule(path, layer)
    return renamed
