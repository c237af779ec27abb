"""Fine-tune a PaliGemma with LoRA and differential attention: the main job of this project.

In: a base model and data. Out: a run folder with the adapter, the metrics, a picture of the loss, checkpoints to resume
from, and accuracies before and after.

    python -m train.finetune                                       the embedded base and scenes: minutes on a laptop
    python -m train.finetune --base google/paligemma-3b-pt-224 --data vqav2:DIR --recipe paper-2
    python -m train.finetune --resume runs/embedded-twin-1         go on where it was interrupted
    torchrun --nproc_per_node=8 -m train.finetune …                several GPUs; with --shard the weights are spread
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from eval import figures, needle, scenes, vqa
from lora import adapter
from model.common import UserError, run_command, write_text
from model.device import DTYPES
from model.differential import lambdas, map_distance
from model.paligemma import PaliGemma
from model.processor import Processor
from train.checkpoint import checkpoints, load_checkpoint, load_weights, read_state, save_checkpoint
from train.data import records as data
from train.data.batches import MicroBatch, Order, idle
from train.data.features import FeatureCache
from train.data.records import Record
from train.data.shards import Shards
from train.distributed import World, ask_together, join_world, leave_world, set_gradient_sync, spread
from train.optim import SCALARS, count, rate_factor, reconnect, set_rates, trainable
from train.settings import Settings, new_run, parse, run_stem
from train.systems.open import load_base, open_model, open_processor, open_stage
from weights.export import export_model
from weights.load import load_model

# ---------------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------------


def read_records(settings: Settings, split: str = "train") -> Sequence[Record]:
    """The records of a split. Raises UserError for data that is absent or empty."""
    kind, _, path = settings.data.partition(":")
    share = {"split": split, "fraction": settings.fraction, "validation": settings.validation, "seed": settings.seed}
    if settings.data == "embedded":
        return data.embedded_records(settings.tasks.split(","), split, settings.samples, settings.seed)
    if kind == "vqav2" and path:
        records = data.vqav2_records(Path(path), settings.prompt, sampled=settings.answers == "sampled", **share)
    elif kind == "jsonl" and path:
        records = data.jsonl_records(Path(path), **share)
    elif kind == "shards" and path:
        records = Shards(path, buffer=settings.shuffle_buffer, sampled=settings.answers == "sampled", **share)
    else:
        raise UserError(f"--data {settings.data}: expected embedded, vqav2:DIR, jsonl:FILE or shards:PATTERN")
    if not records:
        raise UserError(f"--data {settings.data}: no {split} records: check --validation and --fraction")
    return records


def evaluate(model: PaliGemma, processor: Processor, settings: Settings, title: str, world: World) -> dict:
    """Accuracies in percent on held-out data: {"vqa", "needle"} and their details; None where the data has no such.

    The processes of `world` share the questions, and all get the result.
    """
    was_training, ask_all = model.training, partial(ask_together, world)
    model.eval()
    result: dict = {"vqa": None, "needle": None}
    if settings.data == "embedded":
        result["vqa_details"] = vqa.evaluate_embedded(
            model, processor, settings.eval_limit, f"VQA, {title}", ask_all=ask_all
        )
        tests = {
            kind: needle.evaluate_embedded(
                model, processor, kind, settings.eval_limit // 2, f"{kind}, {title}", ask_all=ask_all
            )
            for kind in dict.fromkeys(settings.tasks.split(","))
            if kind in scenes.NEEDLES
        }
        result |= {"vqa": result["vqa_details"]["overall"], "needle": tests.get("n2o1"), "needle_details": tests}
    elif settings.data.startswith("vqav2:"):
        folder = Path(settings.data.partition(":")[2])
        held_out = {record.name for record in read_records(settings, "validation")}
        result["vqa_details"] = vqa.evaluate_files(
            model,
            processor,
            folder / data.QUESTIONS_FILE,
            folder / data.ANNOTATIONS_FILE,
            folder,
            settings.prompt,
            limit=settings.eval_limit,
            only=held_out,
            progress=f"VQA, {title}",
            ask_all=ask_all,
        )
        result["vqa"] = result["vqa_details"]["overall"]
    model.train(was_training)
    return result


def supervised_loss(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The sum of cross-entropies over the supervised tokens; the head runs at their positions alone."""
    batch = micro.batch
    return model(
        batch.input_ids,
        batch.pixel_values,
        batch.token_type_ids,
        batch.attention_mask,
        positions_to_keep=micro.positions,
        image_features=micro.features,
        image_index=micro.image_index,
        targets=micro.targets,
    )


def open_cache(model: PaliGemma, settings: Settings, world: World) -> FeatureCache | None:
    """The features that `--cache-features` keeps. Raises UserError where the vision tower learns or is sharded."""
    if settings.cache_features is None:
        return None
    if settings.shard and world.size > 1:
        raise UserError("--cache-features: with --shard no process holds a whole vision tower: leave one of them out")
    return FeatureCache.open(settings.cache_features, model)


@torch.no_grad()
def with_features(model: PaliGemma, micro: MicroBatch, cache: FeatureCache | None) -> MicroBatch:
    """The micro-batch with all its features: pictures that the cache did not know are encoded, and made known.

    All are rounded to bf16, those too: a run learns the same whether the cache was empty or full.
    """
    if cache is None or not micro.keys:
        return micro
    new = model.encode_images(micro.batch.pixel_values).to(torch.bfloat16)
    for key, features in zip(micro.keys, new, strict=True):
        cache.save(key, features)
    return replace(micro, features=micro.features.index_copy(0, micro.unseen, new))


def free_sizes(micro: MicroBatch) -> None:
    """Tell torch.compile which sizes change from batch to batch, lest it compile anew for every length.

    It takes sizes of 1 apart: a batch of a single row or picture is compiled by itself.
    """
    batch = micro.batch
    for tensor in (batch.input_ids, batch.token_type_ids, batch.attention_mask, micro.positions, micro.targets):
        torch._dynamo.maybe_mark_dynamic(tensor, (0, 1))
    for tensor in (batch.pixel_values, micro.features, micro.image_index):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def train(
    model: PaliGemma,
    optimizer: torch.optim.Optimizer,
    processor: Processor,
    settings: Settings,
    run: Path,
    world: World,
    before: dict | None = None,
    records: Sequence[Record] | None = None,
    order: Order | None = None,
    loss_of: Callable[[nn.Module, MicroBatch], torch.Tensor] | None = None,
) -> dict:
    """Train `model` in place, from the newest checkpoint of `run` if it has one; returns the loop's own progress.

    records: what to learn from (None: the train split of `settings.data`). What are no questions about pictures brings
    its own `order`, with `total`, `steps` and micro-batches like those of `train/data/batches.py`, and `loss_of` one of
    them, summed over its tokens (None: `supervised_loss`). Raises Diverged for a loss that is not finite, naming the
    batch, and UserError for too many unusable records. SIGTERM and Ctrl-C end it after the running step, with a
    checkpoint, as `Interrupted`.
    """
    found = checkpoints(run)
    # a run that goes on with another number of processes keeps the micro-batches of its steps
    processes = read_state(found[-1])["progress"].get("processes", world.size) if found else world.size
    cache = open_cache(model, settings, world)
    order = order or Order(
        read_records(settings) if records is None else records,
        processor,
        batch_size=settings.batch_size,
        accumulate=world.share(settings.accumulate * processes),
        epochs=settings.epochs,
        steps=settings.steps,
        seed=settings.seed,
        per_picture=settings.per_picture,
        rank=world.rank,
        world_size=world.size,
        cache=cache,
    )
    autocast_dtype = {"auto": "bf16" if world.device.type == "cuda" else "none"}.get(
        settings.autocast, settings.autocast
    )
    autocast = (
        torch.autocast(world.device.type, DTYPES[autocast_dtype])
        if autocast_dtype != "none"
        else contextlib.nullcontext()
    )
    scaler = torch.amp.GradScaler(world.device.type, enabled=autocast_dtype == "fp16")
    progress = {"metrics_bytes": 0, "bad": [], "seconds": 0.0, "samples": 0, "before": before, "processes": processes}
    step = 0
    called = spread(model, world, settings.shard)
    reconnect(optimizer, model)
    if found:
        state = load_checkpoint(found[-1], model, optimizer, scaler)
        step, progress = state["step"], state["progress"]
    metrics = Metrics(run / "metrics.jsonl", progress["metrics_bytes"]) if world.is_first else None
    if settings.compile:
        called = torch.compile(called)
    # a sharded model's parts cannot be looked into alone
    measures = settings.measure_every and world.is_first and not (settings.shard and world.size > 1)
    warmup = int(settings.warmup if settings.warmup >= 1 else settings.warmup * order.total)
    scalars = [p for name, p in trainable(model).items() if re.fullmatch(SCALARS, name)]
    started, seconds_before = time.perf_counter(), progress["seconds"]
    model.train()

    def save() -> None:
        progress["seconds"] = seconds_before + time.perf_counter() - started
        if metrics is not None:
            progress["metrics_bytes"] = metrics.sync()
        save_checkpoint(run, step, model, optimizer, progress, scaler, settings.keep, write=world.is_first)
        world.barrier()

    bar = tqdm(total=order.total, initial=step, desc="training", unit="step", disable=not world.is_first)
    with catch_signals() as stop, bar:
        for micros in order.steps(step, settings.workers, pin=world.device.type == "cuda"):
            torch.manual_seed((settings.seed * 1_000_003 + step) * 1_009 + world.rank)  # dropout needs no other state
            told = [(len(micro.names), micro.tokens, micro.bad) for micro in micros]
            samples, tokens, bad = zip(*(one for of_process in world.gather(told) for one in of_process), strict=True)
            progress["samples"] += sum(samples)
            progress["bad"] += [line for lines in bad for line in lines]
            tokens = sum(tokens)
            if len(progress["bad"]) > settings.max_bad:
                raise UserError(
                    f"{len(progress['bad'])} unusable records, more than --max-bad {settings.max_bad}; the last: "
                    f"{progress['bad'][-1]}"
                )
            set_rates(optimizer, rate_factor(step, order.total, warmup, settings.schedule))
            loss_sum, weight = 0.0, world.size / max(tokens, 1)  # DDP and FSDP2 average over processes
            for number, micro in enumerate(micros):
                if micro.is_empty:  # other processes wait for this one's gradients
                    micro = idle(processor)
                micro = last = micro.to(world.device)
                set_gradient_sync(called, number == len(micros) - 1)
                with autocast:
                    micro = last = with_features(model, micro, cache)
                    if settings.compile:
                        free_sizes(micro)
                    loss = (loss_of or supervised_loss)(called, micro)
                if not torch.isfinite(loss):
                    raise Diverged(
                        f"step {step}: the loss is {loss.item()} on {', '.join(micro.names)}: lower --lr, or look at "
                        "these records"
                    )
                scaler.scale(loss * weight).backward()
                loss_sum += loss.item()
            scaler.unscale_(optimizer)
            norm, scalar_norm = gradient_norm(trainable(model).values()), gradient_norm(scalars)
            if settings.clip:
                nn.utils.clip_grads_with_norm_(list(trainable(model).values()), settings.clip, norm)
            record = {"step": step, "loss": world.total(loss_sum) / max(tokens, 1)}
            record |= {"lr": optimizer.param_groups[-1]["lr"], "gradient_norm": whole(norm)}
            if scalars:
                record["scalar_gradient_norm"] = whole(scalar_norm)
            if measures and step % settings.measure_every == 0:
                record |= measure(model, last)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if metrics is not None:
                metrics.write(record)
                spent = seconds_before + time.perf_counter() - started
                bar.set_postfix_str(f"loss {record['loss']:.3f}, {progress['samples'] / spent:.0f} samples/s")
                bar.update()
            stopping = bool(world.total(float(bool(stop))))
            if stopping or step == order.total or step % settings.checkpoint_every == 0:
                save()
            if stopping:
                raise Interrupted(stop[0] if stop else signal.SIGTERM)
    return progress


def measure(model: PaliGemma, micro: MicroBatch) -> dict:
    """λ or μ, and the total variation distance between the two maps, by layer, on one micro-batch."""
    batch = micro.batch
    model.eval()
    distance = map_distance(
        model,
        input_ids=batch.input_ids,
        pixel_values=batch.pixel_values,
        token_type_ids=batch.token_type_ids,
        attention_mask=batch.attention_mask,
        image_features=micro.features,
        image_index=micro.image_index,
    )
    model.train()
    record = {
        "lambda": {path: value.tolist() for path, value in lambdas(model).items()},
        "map_distance": {path: value.item() for path, value in distance.items()},
    }
    return {name: by_layer for name, by_layer in record.items() if by_layer}


def whole(norm: torch.Tensor) -> float:
    """A norm as a number, also when FSDP2 has spread it."""
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


class Diverged(UserError):
    """The loss is no longer finite."""


class Interrupted(Exception):
    """A signal asked the run to end; it was saved."""


@contextlib.contextmanager
def same_command_goes_on() -> Iterator[None]:
    """End the program where its block was interrupted, as the signal would have: what is done is kept in cells."""
    try:
        yield
    except Interrupted as stopped:
        print("\nsaved; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + stopped.args[0])


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C fill the list instead of ending the process in the middle of a step; a second one does."""
    received: list[int] = []

    def handler(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Metrics:
    """`metrics.jsonl`, and TensorBoard beside it if that is installed. What is after `size` bytes is forgotten."""

    def __init__(self, path: Path, size: int):
        path.touch()
        os.truncate(path, size)
        self.file = path.open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(path.parent / "tensorboard")
        except ImportError:
            self.board = None

    def write(self, record: dict) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, record["step"])

    def sync(self) -> int:
        """Bring it to disk; its length in bytes."""
        os.fsync(self.file.fileno())
        return self.file.tell()


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def fine_tune(settings: Settings, run: Path, world: World) -> None:
    """The whole job: measure, train, measure again, write down."""
    model, optimizer = open_model(settings, world.device)
    processor, files = open_processor(settings, model)
    learning = count(trainable(model).values())
    if world.is_first:
        total = count(model.parameters())
        staged = settings.stage is not None
        kind = f"{settings.arch}, stage {settings.stage}" if staged else f"attention {settings.attention}"
        print(
            f"{settings.base}: {total:,} parameters, {learning:,} of them trainable "
            f"({100 * learning / total:.2f} %), {kind}, on {world.device}",
            flush=True,
        )
    before = None
    if settings.evaluate and not checkpoints(run):
        before = evaluate(model, processor, settings, "before", world)
    progress = train(model, optimizer, processor, settings, run, world, before)
    is_spread = settings.shard and world.size > 1
    if not settings.writes_model:
        adapter.save(model, run, base=settings.base)  # every process: a sharded tensor is gathered by all
    elif world.is_first:
        if is_spread:  # no process holds the model: it is put together from the last checkpoint
            dtype, cpu = next(model.parameters()).dtype, torch.device("cpu")
            staged = settings.stage is not None
            model = open_stage(settings, dtype, cpu)[0] if staged else load_model(settings.base, dtype=dtype)
            load_weights(checkpoints(run)[-1], model)
        export_model(model, run / "model", companions=files)
    world.barrier()
    if is_spread and settings.evaluate:
        del model, optimizer
        model = load_base(
            replace(settings, base=str(run / "model")) if settings.writes_model else settings, world.device
        )
        if not settings.writes_model:
            adapter.load(model, run)
    after = evaluate(model, processor, settings, "after", world) if settings.evaluate else None
    if not world.is_first:
        return
    none = {"vqa": None, "needle": None}
    summary = {
        "before": progress["before"] or none,
        "after": after or none,
        "trainable_parameters": learning,
        "seconds": round(progress["seconds"], 1),
        "samples": progress["samples"],
        "left_out": progress["bad"],
    }
    if settings.evaluate and settings.data == "embedded":
        summary["blind"] = vqa.blind_embedded(settings.eval_limit)
    write_text(run / "summary.json", json.dumps(summary, indent=1) + "\n")
    draw_loss(run)
    print_summary(summary, settings, run)


def draw_loss(run: Path) -> None:
    """`loss.png`: every step, and its running mean."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]
    lines = {
        "each step": list(zip(steps, losses, strict=True)),
        f"mean of {width}": list(zip(steps, smooth, strict=True)),
    }
    chart = figures.line_chart(lines, f"{run.name}: loss", "step", "nats a token", pale=["each step"])
    figures.save(chart, run / "loss.png")


def print_summary(summary: dict, settings: Settings, run: Path) -> None:
    def row(name: str, *values) -> None:
        print(f"{name:<34}" + "".join(f"{'-' if value is None else f'{value:.1f}':>9}" for value in values))

    before, after = summary["before"], summary["after"]
    if settings.evaluate:
        print(f"\n{'accuracy, %':<34}{'before':>9}{'after':>9}{'chance':>9}")
    if settings.evaluate and settings.data == "embedded":
        blind = summary["blind"]
        row("VQA (chance: blind, no picture)", before["vqa"], after["vqa"], blind["overall"])
        for kind in after["vqa_details"]["per_answer_type"]:
            values = [result["vqa_details"]["per_answer_type"][kind] for result in (before, after)]
            row(f"  {kind}", *values, blind.get(kind))
        words = {
            "n2o1": "needle, 2×2, one object each",
            "n2o2": "needle, 2×2, two objects each",
            "n4o1": "needle, 4×4, one object each",
        }
        for kind, accuracy in after["needle_details"].items():
            row(words[kind], before["needle_details"][kind], accuracy, 100 / scenes.NEEDLES[kind][0] ** 2)
        if before["needle"] is not None and before["needle"] < 25:
            print("A needle score below chance before training mostly means that its question was never seen.")
    elif settings.evaluate:
        row("VQA", before["vqa"], after["vqa"], None)
    if summary["left_out"]:
        print(f"left out {len(summary['left_out'])} records: {summary['left_out'][0]} …")
    print(
        f"\n{summary['samples']:,} samples in {summary['seconds']:.0f} s; in {run}: "
        + ("model/" if settings.writes_model else "adapter_model.safetensors, adapter_config.json")
        + ", metrics.jsonl, loss.png, summary.json, checkpoints/"
    )
    what = f"--model {run / 'model'}" if settings.writes_model else f"--adapter {run}"
    print(
        f"next: python -m eval.vqa {what}; python -m eval.needle {what}; "
        f"python -m eval.ask {what} --image FILE --prompt 'answer en Where is the dog?'"
    )


def main(argv: Sequence[str] | None = None) -> None:
    settings, out, resume = parse(argv, __doc__)
    world = join_world(settings.device)
    try:
        run = resume or (new_run(settings, out, run_stem(settings)) if world.is_first else None)
        if world.size > 1:
            names = [str(run)]
            torch.distributed.broadcast_object_list(names)
            run = Path(names[0])
        fine_tune(settings, run, world)
    except Interrupted as stopped:
        print(f"\nsaved; go on with: python -m train.finetune --resume {run}", file=sys.stderr)
        sys.exit(128 + stopped.args[0])
    finally:
        leave_world()


if __name__ == "__main__":
    run_command(main)
