"""The training loop: accumulate, unscale, clip, step, log, save. It knows no command line and no
data set.

A micro-batch has `names` of its rows, `tokens` (how many are supervised), and `bad`, a line for
each unusable record. An order has `total`, the number of steps, `most_bad`, how many records may be
unusable, and `steps(first, workers, pin)`: this process's micro-batches of each.
"""

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eval.command import THREADS
from model.common import UserError, shown
from model.device import autocast_dtype, autocast_of
from train.checkpoint import Progress, load_checkpoint, newest_progress, save_checkpoint
from train.distributed import World, set_gradient_sync, spread
from train.flags import flag
from train.optim import rate_factor, reconnect, set_rates, trainable
from train.run import Interrupted, Log, catch_signals
from weights.fingerprint import gathered


@dataclass(frozen=True)
class LoopSettings:
    """The settings of the loop, which those of every training command inherit. Each is a flag of
    the same name."""

    schedule: str = flag("cosine", "decay after warm-up", choices=["linear", "cosine", "constant"])
    warmup: float = flag(20, "warm-up steps; below 1, a share of all steps", least=0, most=1e12)
    clip: float = flag(1.0, "largest gradient norm; 0 does not clip", least=0, most=1e12)
    seed: int = flag(0, "of initialisation, order and dropout", least=0)
    device: str = flag("auto", "cuda, mps, cpu, … (default: cuda or mps if there is one)")
    threads: int | None = flag(None, THREADS, least=1, most=1024)
    autocast: str = flag(
        "auto", "default: bf16 on CUDA, else none", choices=["auto", "none", "bf16", "fp16"]
    )
    shard: bool = flag(False, "with torchrun: FSDP2 instead of DDP")
    compile: bool = flag(False, "torch.compile the model")
    checkpointing: bool = flag(False, "recompute activations of decoder and projector, for memory")
    workers: int | None = flag(
        None, "processes that prepare batches (default: 0, on CUDA up to 8)", least=0, most=1024
    )
    max_bad: int | None = flag(
        None,
        "unusable records to leave out before the run stops, at most half of all (default: 20; of "
        "fewer than 200 records a tenth, at least one)",
        least=0,
    )
    checkpoint_every: int = flag(200, "steps between checkpoints", least=1)
    keep: int = flag(2, "checkpoints to keep", least=1)

    def most_bad(self, count: int) -> int:
        """How many of `count` records may be unusable."""
        most = max(1, min(20, count // 10)) if self.max_bad is None else self.max_bad
        return min(most, count // 2)


class Diverged(UserError):
    """The loss is no longer finite."""


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    order: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    settings: LoopSettings,
    run: Path,
    world: World,
    *,
    validate: Callable[[int, Progress], dict] | None = None,
    progress: Progress | None = None,
    on_log: Callable[[int, dict], object] | None = None,
) -> Progress:
    """Train `model` in place, from the newest checkpoint in `run` if there is one; returns the
    run's progress.

    loss(model, micro): moves the micro-batch to the device; the sum over its supervised tokens.
    validate(step, progress): metrics after so many updates; it may set `progress.stopped`.
    progress: None reads the newest. on_log(step, metrics): gets in the first process what
    metrics.jsonl gets. A step without a usable record changes nothing. Raises Diverged, UserError
    for too many unusable records and for another number of processes, Interrupted after a signal,
    once all is saved.
    """
    progress = progress or newest_progress(run) or Progress(world.size)
    if progress.processes != world.size:
        raise UserError(
            f"--resume {shown(run)}: the run has {progress.processes} processes, this call "
            f"{world.size}: start as many"
        )
    update = Update(model, optimizer, loss, settings, world, order.total)
    if progress.step:
        load_checkpoint(run, progress, optimizer)
        update.scaler.load_state_dict(progress.scaler or update.scaler.state_dict())
    with catch_signals() as received, closing(Log(run, order.total, progress, world)) as log:
        pin = world.device.type == "cuda"
        for micros in order.steps(progress.step, settings.workers, pin):
            if progress.stopped is not None:
                break
            # 1. the step
            step = progress.step
            tokens = count_records(micros, progress, order.most_bad, world)
            record, signals = update(step, micros, tokens, received)
            progress.step += 1

            # 2. the log, with scores of held-out examples
            record |= log.speed(tokens)
            if validate:
                record |= validate(progress.step, progress)
            log.write(record)
            if on_log and world.is_first:
                on_log(step, record)

            # 3. a checkpoint
            is_last = signals or progress.step in (order.total, progress.stopped)
            if is_last or progress.step % settings.checkpoint_every == 0:
                log.sync()
                progress.scaler = update.scaler.state_dict()
                save_checkpoint(run, progress, model, optimizer, world, settings.keep)
                log.go_on()
            if signals:
                raise Interrupted(received[0] if received else signal.SIGTERM)
    if not progress.samples:
        raise UserError(
            f"all {len(progress.bad)} records were unusable; the first: {progress.bad[0]}"
        )
    return progress


class Update:
    """A step of training: accumulate, unscale, clip, step."""

    def __init__(
        self,
        model,
        optimizer,
        loss,
        settings: LoopSettings,
        world: World,
        total: int,
    ):
        """As for `fit`; total: steps of the run."""
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.settings, self.world, self.total = settings, world, total
        dtype = autocast_dtype(settings.autocast, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
        # the model as it is called: within DDP or FSDP2, compiled
        self.called = spread(model, world, settings.shard, dtype, settings.compile)
        reconnect(optimizer, model)

    def __call__(
        self, step: int, micros: Sequence, tokens: int, received: Sequence[int]
    ) -> tuple[dict[str, float], int]:
        """Update the weights from this process's micro-batches; returns the metrics of the step,
        and how many signals all processes have received so far.

        tokens: how many are supervised, in all processes. received: the signals of this process.

        Without tokens nothing changes: momentum and decay would move the weights all the same.
        """
        # 1. gradients
        self.model.train()
        # a seed for each step and process: so no random state is saved
        torch.manual_seed((self.settings.seed * 1_000_003 + step) * 1_009 + self.world.rank)
        losses = self.backward(micros, tokens) if tokens else []
        if tokens:
            self.scaler.unscale_(self.optimizer)
        parameters = trainable(self.model).values()
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip or math.inf)

        # 2. what all processes must know; the device is read once
        *losses, norm = torch.stack([*losses, gathered(norm)]).float().tolist()
        loss_sum, signals = self.world.sums(sum(losses), len(received))
        check_loss(loss_sum, losses, step, micros, self.world)
        # a scaler skips a step of infinite gradients, and halves its scale, which is 1 without fp16
        if not (math.isfinite(norm) or self.scaler.get_scale() > 1):
            raise Diverged(
                f"step {step}: the loss is finite, but the norm of its gradient is {norm}: lower --lr"
            )

        # 3. the update
        factor = rate_factor(step, self.total, self.settings.warmup, self.settings.schedule)
        set_rates(self.optimizer, factor)
        if tokens:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        record = {"step": step}
        if tokens:
            record["loss"] = loss_sum / tokens
        rate = self.optimizer.param_groups[-1]["lr"]
        return record | {"lr": rate, "gradient_norm": norm}, signals

    def backward(self, micros: Sequence, tokens: int) -> list[Tensor]:
        """Add up the gradients of the mean loss over `tokens`; returns the sums of the
        micro-batches."""
        losses = []
        for number, micro in enumerate(micros):
            set_gradient_sync(self.called, number == len(micros) - 1)
            with autocast_of(self.settings.autocast, self.world.device):
                value = self.loss(self.called, micro)
            # DDP and FSDP2 average over the processes
            self.scaler.scale(value * (self.world.size / tokens)).backward()
            losses.append(value.detach())
        return losses


def count_records(
    micros: Sequence,
    progress: Progress,
    most_bad: int,
    world: World,
) -> int:
    """Add the samples and unusable records of a step to `progress`; returns its supervised tokens,
    of all processes.

    Raises UserError for more than `most_bad` unusable records.
    """
    share = [(len(micro.names), micro.tokens, micro.bad) for micro in micros]
    tokens = 0
    for samples, supervised, bad in chain(*world.gather(share)):
        progress.samples += samples
        tokens += supervised
        progress.bad += bad
    if not tokens:
        progress.empty_steps += 1
    # every epoch reports a record again
    progress.bad = list(dict.fromkeys(progress.bad))
    if len(progress.bad) > most_bad:
        raise UserError(
            f"{len(progress.bad)} records are unusable, more than {most_bad}: correct them, or "
            f"raise --max-bad (up to half of all); the last: {progress.bad[-1]}"
        )
    return tokens


def check_loss(
    total: float,
    losses: Sequence[float],
    step: int,
    micros: Sequence,
    world: World,
) -> None:
    """Raise Diverged, in every process and with the names of the records, if a loss is not finite.

    total: the sum of the losses of all processes. losses: of the `micros` of this one.
    """
    if math.isfinite(total):
        return
    damaged = []
    for loss, micro in zip(losses, micros, strict=True):
        if not math.isfinite(loss):
            damaged.append((loss, micro.names))
    # those of the first process that has any
    loss, names = next(chain(*world.gather(damaged)), (total, ["all"]))
    raise Diverged(
        f"step {step}: the loss is {loss} on {', '.join(names)}: lower --lr, or look at these records"
    )
