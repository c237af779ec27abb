"""What a run trains, a base with its graft and adapter: opened, trained, written, reopened.

In: the settings of a run. Out: the model, the optimizer over the parameters that are trained, the
processor; and the supervised training on pictures and text, see `train/loop.py`. Where a kind of
settings opens another model, it registers how at `load_start`, `learning_rules`, `open_processor`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from lora import adapter
from model.common import UserError
from model.device import choose_dtype
from model.differential import default_options, graft
from model.paligemma import PaliGemma
from model.processor import Processor
from train.align import small_tower
from train.checkpoint import Progress
from train.data.batches import MicroBatch, Order, shifted
from train.distributed import World, whole_model
from train.loop import fit
from train.optim import (
    OPTIMIZERS,
    SCALARS,
    MuonAdamW,
    Rule,
    parameter_groups,
    parameter_names,
    trainable,
)
from train.settings import Settings
from weights.export import companions, export_model
from weights.load import load_model


def weights_dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """The dtype of the weights. "auto" is fp32 where whole weights are trained.

    Neighbouring bf16 numbers differ by 2⁻⁸ of a weight or more. An update of less than half of
    that, such as 1e-5 of a weight, would round to nothing.
    """
    is_fp32 = settings.writes_model and settings.dtype == "auto"
    return choose_dtype("fp32" if is_fp32 else settings.dtype, device)


def load_base(settings: Settings, device: torch.device) -> PaliGemma:
    """The base without graft and adapter, in its dtype, on `device`."""
    model = load_model(settings.base, dtype=weights_dtype(settings, device), device=device)
    if not hasattr(model, "vision_tower"):
        raise UserError(
            f"{settings.base}: is a language model for text alone: take a model that reads pictures"
        )
    return model


@singledispatch
def load_start(settings: Settings, device: torch.device) -> PaliGemma:
    """What training starts from: the base, without graft and adapter."""
    model = load_base(settings, device)
    if settings.new_tower:
        small_tower(model)
    return model


def open_model(
    settings: Settings, device: torch.device, start: PaliGemma | None = None
) -> tuple[PaliGemma, Optimizer]:
    """The base, grafted and adapted, with an optimizer over the parameters that are trained.
    start: of `load_start`, changed in place; None loads it."""
    model = load_start(settings, device) if start is None else start
    rules = learning_rules(settings, model)
    model.set_checkpointing(settings.checkpointing)
    if settings.quantize:
        adapter.quantize(model, settings.quantize)
    return model, make_optimizer(model, rules, settings)


@singledispatch
def learning_rules(settings: Settings, model: PaliGemma) -> list[Rule]:
    """Graft and adapt `model` in place; returns which of its parameters learn, and how."""
    if settings.is_grafted:
        options = default_options(settings.attention, settings.r, settings.alpha, settings.dropout)
        options |= settings.options
        graft(
            model,
            settings.attention,
            diff_in=settings.diff_in,
            feed_forward=settings.feed_forward,
            seed=settings.seed,
            **options,
        )
    if settings.full:
        # at the full rate, the decoder's gradients undid what an aligned tower had learned
        tower = {r"vision_tower\..*": 0.1} if settings.align else {}
        return rules_of(model, settings, tower | {".*": 1.0})
    torch.manual_seed(settings.seed)  # LoRA's A is drawn here
    adapter.inject(
        model,
        settings.targets,
        settings.r,
        settings.alpha,
        settings.dropout,
    )
    names = list(trainable(model))
    rules = [Rule(names, settings.lr, settings.weight_decay)]
    scalars = [name for name in names if re.fullmatch(SCALARS, name)]
    if scalars:
        # with muon, scalar_lr is the rate of all that AdamW updates: see `make_optimizer`
        has_own = settings.scalar_lr is not None and settings.optimizer != "muon"
        rules.insert(0, Rule(scalars, settings.scalar_lr if has_own else settings.lr))
    return rules


def rules_of(
    model: PaliGemma,
    settings: Settings,
    factors: Mapping[str, float],
) -> list[Rule]:
    """Rules for parameters by pattern of their names, each with a factor of the rate."""
    rules = []
    for pattern, factor in factors.items():
        names = parameter_names(model, pattern)
        rules.append(Rule(names, settings.lr * factor, settings.weight_decay))
    return rules


def make_optimizer(
    model: PaliGemma,
    rules: Sequence[Rule],
    settings: Settings,
) -> Optimizer:
    """The optimizer that `settings` name, over the parameters that `rules` do."""
    groups = parameter_groups(model, rules)
    betas = (0.9, settings.beta2)
    if settings.optimizer != "muon":
        return OPTIMIZERS[settings.optimizer](groups, betas=betas)
    ratio = 0.1
    if settings.scalar_lr is not None and settings.lr:
        ratio = settings.scalar_lr / settings.lr
    return MuonAdamW(groups, betas, ratio)


@singledispatch
def open_processor(settings: Settings, model: PaliGemma) -> tuple[Processor, list[Path]]:
    """The processor of `model`, and the files that belong beside its weights, such as the
    tokenizer's."""
    processor = Processor.from_source(settings.base, max_length=settings.max_length)
    processor.config = model.config  # of a new tower
    if not settings.writes_model:
        return processor, []
    return processor, companions(settings.base)


def train_on(
    order: Order,
    model: PaliGemma,
    optimizer: Optimizer,
    settings: Settings,
    run: Path,
    world: World,
    **options,
) -> Progress:
    """Train `model` in place on `order`; returns the run's progress. options: of `fit`."""
    tokenizer = order.processor.tokenizer
    location = tokenizer.piece_to_id("<loc0000>")
    has_boxes = tokenizer.id_to_piece(location) == "<loc0000>"

    def loss(called: torch.nn.Module, micro: MicroBatch) -> Tensor:
        micro = micro.to(world.device)
        ids = micro.batch.input_ids
        is_location = (ids >= location) & (ids < location + 1024)
        # a box would have to move with its picture
        if settings.shift and not (has_boxes and is_location.any()):
            pixels = shifted(micro.batch.pixel_values)
            micro = replace(micro, batch=replace(micro.batch, pixel_values=pixels))
        return supervised_loss(called, micro, settings.label_smoothing)

    return fit(model, optimizer, order, loss, settings, run, world, **options)


def supervised_loss(
    model: torch.nn.Module, micro: MicroBatch, label_smoothing: float = 0.0
) -> Tensor:
    """The sum of cross-entropies over the supervised tokens, see `model.paligemma.logits_or_loss`."""
    return model(
        **inputs(micro),
        positions_to_keep=micro.positions,
        targets=micro.targets,
        label_smoothing=label_smoothing,
    )


def inputs(micro: MicroBatch) -> dict[str, Tensor]:
    """The arguments of the model that are the batch itself."""
    return {name: tensor for name, tensor in vars(micro.batch).items() if name != "labels"}


def write_trained(
    model: PaliGemma,
    folder: Path,
    settings: Settings,
    world: World,
    files: Sequence[Path],
) -> None:
    """Write the adapter, or the whole model with the `files` that belong beside it. Every process
    must call it."""
    if settings.writes_model:
        whole = whole_model(model, world)
        if world.is_first:
            export_model(whole, folder, companions=files)
    else:
        adapter.save(
            model,
            folder,
            settings.base,
            settings.question_prompt,
            write=world.is_first,
        )
    world.barrier()


def open_trained(settings: Settings, folder: Path, device: torch.device) -> PaliGemma:
    """The trained model from the files that `write_trained` has written, whole on each process, in
    the dtypes of training."""
    if settings.writes_model:
        return load_base(replace(settings, base=str(folder)), device)
    model = load_base(settings, device)
    adapter.load(model, folder)
    if settings.quantize:
        adapter.quantize(model, settings.quantize)
    return model
