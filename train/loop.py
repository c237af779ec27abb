"""The training loop: accumulate, unscale, clip, step, log, save.

In: a model, its optimizer, the order of its micro-batches, and the loss of one. Out: the trained model, in place;
metrics.jsonl and checkpoints in the run folder. It knows no command line and no data set.
"""

import math
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, takewhile
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from model.common import UserError
from model.device import autocast_dtype, autocast_of
from train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from train.distributed import World, average_gradients, set_gradient_sync, spread
from train.metrics import Log
from train.optim import SCALARS, rate_factor, reconnect, set_rates, trainable
from train.signals import Interrupted, catch_signals
from weights.fingerprint import gathered


class Micro(Protocol):
    """A micro-batch: names of its rows, the number of supervised tokens, and a line for each unusable record."""

    names: tuple[str, ...]
    tokens: int
    bad: tuple[str, ...]

    def to(self, device: torch.device) -> "Micro": ...


class Order(Protocol):
    """`total` steps; `steps(first)` yields the micro-batches of each step of this process, from step `first` on."""

    total: int

    def steps(self, first: int, workers: int | None = 0, pin: bool = False) -> Iterator[Sequence[Micro]]: ...


@dataclass(frozen=True)
class LoopOptions:
    """Settings of the loop. `train/settings.py` describes each."""

    schedule: str = "cosine"
    warmup: float = 20
    clip: float = 1.0
    seed: int = 0
    autocast: str = "auto"
    compile: bool = False
    shard: bool = False
    workers: int | None = None
    max_bad: int = 20
    checkpoint_every: int = 200
    keep: int = 2

    @classmethod
    def of(cls, settings) -> "LoopOptions":
        """The fields that the dataclass `settings` has too."""
        names = [field.name for field in fields(cls) if hasattr(settings, field.name)]
        return cls(**{name: getattr(settings, name) for name in names})


class Diverged(UserError):
    """The loss is no longer finite."""


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    order: Order,
    loss: Callable[[nn.Module, Micro], torch.Tensor],
    options: LoopOptions,
    run: Path,
    world: World,
    *,
    measure: Callable[[int, Micro], dict] | None = None,
    validate: Callable[[int, dict], dict] | None = None,
    kept: Mapping | None = None,
) -> dict:
    """Train `model` in place, from the newest checkpoint in `run` if there is one; returns the run's progress.

    loss(model, micro): the sum over the supervised tokens. measure(step, micro), before, and validate(step, progress),
    after a step is taken: more values for the metrics; "stopped" in the progress ends training. kept: stored in the
    progress. A step without any usable record changes nothing and has no loss. Raises Diverged if the loss is not
    finite, UserError for too many unusable records, Interrupted after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    autocast, dtype = autocast_of(options.autocast, world.device), autocast_dtype(options.autocast, world.device)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    called = spread(model, world, options.shard, dtype, options.compile)
    reconnect(optimizer, model)
    step, progress = restore(run, model, optimizer, scaler, kept or {}, world)
    parameters = trainable(model)
    scalars = [parameter for name, parameter in parameters.items() if re.fullmatch(SCALARS, name)]
    log = Log(run, step, order.total, progress, world)
    model.train()
    with catch_signals() as received, log.bar:
        steps = order.steps(step, options.workers, pin=world.device.type == "cuda")
        for micros in takewhile(lambda _: "stopped" not in progress, steps):
            seed((options.seed * 1_000_003 + step) * 1_009 + world.rank, world.device)  # so no random state is saved
            tokens = count_records(micros, progress, options.max_bad, world)
            scale = world.size / max(1, tokens)  # DDP and FSDP2 average gradients over processes
            losses = add_gradients(called, micros if tokens else (), loss, scale, scaler, autocast, world)
            average_gradients(parameters.values(), world)
            if tokens:
                scaler.unscale_(optimizer)
            losses, norms = read_numbers(losses, clip_gradients(parameters.values(), scalars, options.clip))
            loss_sum, stopping = world.totals(sum(losses), float(bool(received)))
            check_finite(loss_sum, losses, step, micros, world, 0.0 if scaler.is_enabled() else norms["gradient_norm"])
            set_rates(optimizer, rate_factor(step, order.total, options.warmup, options.schedule))
            record = {"step": step, **({"loss": loss_sum / tokens} if tokens else {})}
            record |= {"lr": optimizer.param_groups[-1]["lr"], **norms}
            record |= measure(step, micros[-1]) if measure and tokens else {}
            if tokens:  # else momentum and decay would move the weights all the same
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            record |= log.speed(tokens)
            record |= validate(step, progress) if validate else {}
            log.write(record)
            if stopping or step == order.total or "stopped" in progress or step % options.checkpoint_every == 0:
                log.sync()
                save_checkpoint(run, step, model, optimizer, progress, scaler, options.keep, write=world.is_first)
                world.barrier()
                log.go_on()
            if stopping:
                raise Interrupted(received[0] if received else signal.SIGTERM)
    check_samples(progress)
    return progress


def add_gradients(
    model: nn.Module,
    micros: Sequence[Micro],
    loss: Callable[[nn.Module, Micro], torch.Tensor],
    scale: float,
    scaler: torch.amp.GradScaler,
    autocast: torch.autocast,
    world: World,
) -> list[torch.Tensor]:
    """Add the gradients of `scale` times the loss of each micro-batch; returns the losses."""
    losses = []
    for number, micro in enumerate(micros):
        set_gradient_sync(model, number == len(micros) - 1)
        with autocast:
            value = loss(model, micro.to(world.device))
        losses.append(value.detach())
        scaler.scale(value * scale).backward()
    return losses


def seed(number: int, device: torch.device) -> None:
    """`torch.manual_seed`, which takes half a millisecond of a step where it looks for devices that are not there."""
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(number)


def restore(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    kept: Mapping,
    world: World,
) -> tuple[int, dict]:
    """Restore the newest checkpoint of `run`; its step and progress, or those of a run that begins, with `kept`."""
    found = checkpoints(run)
    if found:
        state = load_checkpoint(found[-1], model, optimizer, scaler)
        return state["step"], state["progress"] | kept
    return 0, {"metrics_bytes": 0, "bad": [], "seconds": 0.0, "samples": 0, "processes": world.at_once, **kept}


def count_records(micros: Sequence[Micro], progress: dict, max_bad: int, world: World) -> int:
    """Add the samples and unusable records of a step to `progress`; returns its supervised tokens, of all processes.

    Raises UserError for more than `max_bad` unusable records.
    """
    bad = [line for micro in micros for line in micro.bad]
    samples, tokens, count = world.totals(
        sum(len(micro.names) for micro in micros), sum(micro.tokens for micro in micros), len(bad)
    )
    progress["samples"] += int(samples)
    if not tokens:
        progress["empty_steps"] = progress.get("empty_steps", 0) + 1
    if count:  # every epoch reports a record again
        progress["bad"] = list(dict.fromkeys([*progress["bad"], *chain.from_iterable(world.gather(bad))]))
    if len(progress["bad"]) > max_bad:
        raise UserError(
            f"{len(progress['bad'])} unusable records, more than --max-bad {max_bad}; the last: {progress['bad'][-1]}"
        )
    return int(tokens)


def check_samples(progress: dict) -> None:
    """Raise UserError for a run that has learned from no record at all."""
    if not progress["samples"]:
        raise UserError(f"all {len(progress['bad'])} records were unusable; the first: {progress['bad'][0]}")


def check_finite(
    total: float, losses: Sequence[float], step: int, micros: Sequence[Micro], world: World, norm: float = 0.0
) -> None:
    """Raise Diverged in every process, naming the records, if the loss of a micro-batch of any is not finite.

    norm: of the gradient that all processes have; if it is not finite, the step would leave no weight finite. A
    gradient scaler leaves such steps out itself.
    """
    if math.isfinite(total):
        if not math.isfinite(norm):
            raise Diverged(f"step {step}: the loss is finite, but the norm of its gradient is {norm}: lower --lr")
        return
    own = [(loss, *micro.names) for loss, micro in zip(losses, micros, strict=True) if not math.isfinite(loss)]
    loss, *names = next(chain.from_iterable(world.gather(own)), (total, "all"))
    raise Diverged(f"step {step}: the loss is {loss} on {', '.join(names)}: lower --lr, or look at these records")


def clip_gradients(
    parameters: Iterable[nn.Parameter], scalars: Sequence[nn.Parameter], largest: float
) -> dict[str, torch.Tensor]:
    """Clip the gradients to the norm `largest` (0: leave them); returns their norms before that, for the metrics."""
    parameters = list(parameters)
    norms = {"gradient_norm": gradient_norm(parameters)}
    if scalars:
        norms["scalar_gradient_norm"] = gradient_norm(scalars)
    if largest:
        nn.utils.clip_grads_with_norm_(parameters, largest, norms["gradient_norm"])
    return norms


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The norm of all gradients, taken as one vector."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def read_numbers(
    losses: Sequence[torch.Tensor], norms: Mapping[str, torch.Tensor]
) -> tuple[list[float], dict[str, float]]:
    """The losses and norms of a step as numbers, read from the device at once. FSDP2 may have sharded a norm."""
    numbers = torch.stack([value.float() for value in (*losses, *map(gathered, norms.values()))]).tolist()
    return numbers[: len(losses)], dict(zip(norms, numbers[len(losses) :], strict=True))
