"""Surgery: `graft` puts a variant of attention into a plain model, `fold` makes a plain model of it again.

In: a `Adaptable` model, such as `PaliGemma`. Out: the same model, its weights untouched, with the variant's own
parameters beside them. `model.grafts` records every call.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from model.attention import Attention, attention_modules
from model.common import UserError, quoted
from model.gemma import Gemma, GemmaMLP
from model.linear import Linear
from model.variants import KINDS, Differential, base_layer, check_option, options_of

# The stacks of layers that `where` chooses from.
TOWERS = {"decoder": ["language_model.layers"], "vision": ["vision_tower.encoder.layers"]}
TOWERS["both"] = TOWERS["decoder"] + TOWERS["vision"]

FEED_FORWARDS = ("mlp", "swiglu", "swiglu-new")


@dataclass(frozen=True)
class Graft:
    """One call of `graft`: its arguments, with all of the variant's options."""

    kind: str
    where: str = "decoder"
    feed_forward: str = "mlp"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that repeat the call, as JSON can hold them: the format of adapters."""
        fields = {"kind": self.kind, "where": self.where, "feed_forward": self.feed_forward, "seed": self.seed}
        return fields | dict(self.options)


class Adaptable(nn.Module):
    """A model with a Gemma decoder, which grafts, LoRA and quantization change in place."""

    config: Any
    language_model: Gemma
    grafts: tuple[Graft, ...] = ()  # in the order of the calls
    base_fingerprint: str | None = None  # of the frozen weights, before they were quantized; None: not known yet
    quantized: str | None = None  # how the frozen weights are held, of `lora.quantize.KINDS`; None: as they are

    def set_checkpointing(self, on: bool) -> None:
        """Let the layers of the decoder compute their activations again in the backward pass, to save memory."""
        self.language_model.checkpointing = on

    def new_cache(self, capacity: int) -> list:
        """An empty memory of `capacity` positions for each layer of the decoder."""
        return self.language_model.new_cache(capacity)


class SwiGLU(nn.Module):
    """(swish(x·W_G) ⊙ x·W_1)·W_2 with a hidden width of int(8/3·H), fresh (the paper, Eq. 7).

    It replaces a pretrained MLP by random weights: the pretrained answers are lost at step 0. The names differ from
    the published ones, so that LoRA's targets do not match: all of it is trained.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        width = int(8 / 3 * hidden_size)
        self.w_g = Linear(hidden_size, width, bias=False)
        self.w_1 = Linear(hidden_size, width, bias=False)
        self.w_2 = Linear(width, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if torch.is_autocast_enabled(x.device.type) else x.to(self.w_g.weight.dtype)
        return self.w_2(F.silu(self.w_g(h)) * self.w_1(h)).to(x.dtype)


def graft(
    model: Adaptable, kind: str, *, where: str = "decoder", feed_forward: str = "mlp", seed: int = 0, **options
) -> list[str]:
    """Turn a plain model into a variant, in place, and return the names of its new parameters.

    kind: a key of KINDS; `options` are the keyword arguments of its class. where: "decoder", "vision" or "both".
    feed_forward of the decoder (the paper, Table 1): "mlp" as published, "swiglu" with the published weights and a silu
    gate, or "swiglu-new", fresh. New parameters are fp32, trainable, on the model's device (meta included) and the same
    for the same seed. A tower is grafted once; the other may follow in a second call.
    Raises UserError for an unknown kind, place, feed-forward or option, for an option's value from which nothing would
    be learned, and for a tower that is grafted already. The model is then unchanged.
    """
    record = _checked(kind, where, feed_forward, seed, options)
    attentions = _plain_attentions(model, where, KINDS[kind].read_twice)
    before = {name for name, _ in model.named_parameters()}
    device = model.language_model.embed_tokens.weight.device
    new: list[tuple[nn.Module, str, nn.Module]] = []
    # drawn on the CPU, so that a seed gives the same numbers on every device
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.default_generator.manual_seed(seed)
        for path, attention in attentions.items():
            number = int(path.rpartition(".")[2]) + 1
            variant = KINDS[kind](attention, number, **record.options)
            new.append((model.get_submodule(path), "self_attn", variant.to(device)))
        if feed_forward == "swiglu-new":
            width = model.config.text.hidden_size
            new += [(layer, "mlp", SwiGLU(width).to(device)) for layer in model.language_model.layers]
    for layer, name, module in new:
        layer.add_module(name, module.train(layer.training))
    if feed_forward == "swiglu":
        for module in model.language_model.modules():
            if isinstance(module, GemmaMLP):
                module.activation = "silu"
    model.grafts = (*model.grafts, record)
    return [name for name, _ in model.named_parameters() if name not in before]


def _checked(kind: str, where: str, feed_forward: str, seed: int, options: dict) -> Graft:
    """The record of a call. Raises UserError for names that are not known."""
    choices = (("variant", kind, KINDS), ("place", where, TOWERS), ("feed_forward", feed_forward, FEED_FORWARDS))
    for what, value, known in choices:
        if not isinstance(value, str) or value not in known:
            raise UserError(f"unknown {what} {quoted(value)}: choose one of {', '.join(known)}")
    if feed_forward != "mlp" and where == "vision":
        raise UserError(f"feed_forward {feed_forward!r} concerns the decoder: graft it with where 'decoder' or 'both'")
    defaults = options_of(kind)
    if unknown := sorted(set(options) - set(defaults)):
        raise UserError(f"{kind!r} has no option {', '.join(unknown)}: it takes {', '.join(defaults) or 'none'}")
    for name, value in options.items():
        check_option(kind, name, value)
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise UserError(f"seed is {quoted(seed)}, expected an integer from 0 to 2⁶³ − 1")
    return Graft(kind, where, feed_forward, seed, defaults | options)


def _plain_attentions(model: nn.Module, where: str, read_twice: tuple[str, ...]) -> dict[str, Attention]:
    """The attention of each layer of a place, by the layer's path.

    Raises UserError unless all are plain, and for merged LoRA on a projection that two branches are to read.
    """
    attentions = {}
    for tower in TOWERS[where]:
        for index, layer in model.get_submodule(tower).named_children():
            path, attention = f"{tower}.{index}", layer.get_submodule("self_attn")
            if isinstance(attention, Differential):
                raise UserError(f"{path} has {attention.kind!r} attention already: graft a freshly loaded model")
            if type(attention) is not Attention:
                raise UserError(f"{path} is {type(attention).__name__}: a graft replaces plain attention alone")
            for name in read_twice:
                if getattr(attention.get_submodule(name), "merged", False):
                    raise UserError(f"{path}.self_attn.{name}: its LoRA is merged: unmerge it before this graft")
            attentions[path] = attention
    return attentions


def variants_of(model: nn.Module) -> dict[str, Differential]:
    """Every grafted attention of a model by its path, in order."""
    return {path: m for path, m in attention_modules(model).items() if isinstance(m, Differential)}


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `graft` has added, by name, in the model's order; LoRA on a variant's projections is not."""
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, Differential | SwiGLU)
        for name, parameter in module.named_parameters()
        if isinstance(module, SwiGLU) or name.partition(".")[0] not in module.projections()
    }


def check_adapted(model: nn.Module) -> None:
    """Raise UserError for a variant whose second branch would stay equal to the first, for want of LoRA."""
    for path, module in variants_of(model).items():
        if module.divides_adapter and not any(hasattr(getattr(module, name), "lora") for name in module.read_twice):
            raise UserError(
                f"{path}: half divides the rank of LoRA on {' or '.join(module.read_twice)} between two branches, but "
                "neither has LoRA: add one of them to --targets"
            )


def _rewrite(projection: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a linear `change` of inputs to W, and to A where LoRA is merged: (W + B·A)·M = W·M + B·(A·M)."""
    if lora := getattr(projection, "lora", None):
        projection.unmerge()
        lora.lora_A.weight.copy_(change(lora.lora_A.weight))
    weight = base_layer(projection).weight
    weight.copy_(change(weight))
    if lora:
        projection.merge()


@torch.no_grad()
def fold(model: Adaptable) -> None:
    """Make a grafted model plain again, in place, where plain parts can compute the same: softmax, dex, swiglu.

    In fp32 it is exact up to rounding; a dex folded into a bf16 weight is rounded to it. Merged LoRA is folded too, so
    that it can still be unmerged. Raises UserError, and folds nothing, for the other variants, while LoRA is unmerged,
    and for weights in 8 bits.
    """
    variants = variants_of(model)
    for path, module in variants.items():
        if not module.foldable:
            raise UserError(f"{path}: plain attention cannot compute {module.kind!r}: keep it as base and adapter")
        output = module.get_submodule(module.output_name)
        if not getattr(output, "merged", True):
            raise UserError(f"{path}.{module.output_name} carries LoRA: merge the adapter before folding the graft")
        if module.rewrites_output and not base_layer(output).weight.is_floating_point():
            raise UserError(
                f"{path}.{module.output_name}: its weights are quantized: fold before, or open the base anew"
            )
    feed_forwards = {record.feed_forward for record in model.grafts}
    if "swiglu-new" in feed_forwards:
        raise UserError("feed_forward 'swiglu-new' is no part of the published format: keep it as base and adapter")
    for path, module in variants.items():
        if module.rewrites_output:
            _rewrite(module.get_submodule(module.output_name), module.folded)
        with torch.device("meta"):
            plain = Attention(**module.sizes())
        plain.adopt(module)
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).add_module(name, plain.train(module.training))
    if "swiglu" in feed_forwards:
        text = dataclasses.replace(model.config.text, hidden_activation="silu")
        model.config = dataclasses.replace(model.config, text=text)
        model.language_model.config = text
    model.grafts = ()
