"""Fine-tune a PaliGemma with LoRA and differential attention: the main job of this project.

In: a base model and data. Out: a run folder with the adapter, the metrics, a picture of the loss, checkpoints to resume
from, and accuracies before and after.

    python -m train.finetune                                       the embedded base and scenes: minutes on a laptop
    python -m train.finetune --base google/paligemma-3b-pt-224 --data vqav2:DIR --recipe paper-2
    python -m train.finetune --data jsonl:FILE --show-batch        your own data, as the model reads them
    python -m train.finetune --plan …                              what such a run takes; no GPU is needed
    python -m train.finetune --resume runs/embedded-dex-1          go on where it was interrupted
    torchrun --nproc_per_node=8 -m train.finetune …                several GPUs; with --shard the weights are spread

From Python, `finetune` takes the same flags, and examples that a program has made.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from eval.data.records import Record
from lora import adapter
from model.common import UserError, run_command, shown, write_text
from model.device import use_threads
from model.paligemma import PaliGemma
from model.processor import Processor
from train.align import align, is_taught
from train.checkpoint import Progress, atomic_folder, newest_progress
from train.data.batches import Order
from train.data.sources import MEMORY, example_records, read_split
from train.distributed import World, joined_world
from train.model import (
    load_start,
    open_model,
    open_processor,
    open_trained,
    train_on,
    write_trained,
)
from train.optim import parameter_count, trainable
from train.plan import report
from train.recipes import differences, recipe_of
from train.run import MEASURED, data_fingerprints, draw_loss, read_metrics, run_folder, set_origin
from train.settings import Arguments, Settings, parse
from train.show_batch import show_batch
from train.summary import print_summary, recommended, summary_of, write_answers
from train.validation import HeldOut, Metric, open_held_out

# of metrics.jsonl, beside what `metrics` of `finetune` add
OTHER_FIELDS = {
    *MEASURED,
    *"step loss lr gradient_norm held_out_loss exact_match vqa_accuracy AP mIoU".split(),
    *"lambda map_distance".split(),
}


class FineTuned(NamedTuple):
    """A run that has ended. run: its folder. summary: the content of summary.json, where "held_out"
    has the scores by column of the table. history: the lines of metrics.jsonl. model: with the
    weights that the run recommends."""

    run: Path
    summary: dict
    history: list[dict]
    model: PaliGemma
    processor: Processor


def finetune(
    data: str | Sequence[str] | Sequence[Mapping] | None = None,
    eval_data: str | Sequence[str] | Sequence[Mapping] | None = None,
    *,
    on_log: Callable[[int, dict], object] | None = None,
    metrics: Mapping[str, Metric] = {},
    **flags,
) -> FineTuned:
    """Fine-tune as the command does.

    data, eval_data: sources as in --data, or examples: a list of dicts as in a JSONL file, whose
    pictures are paths, Pillow images or uint8 arrays, or any data set with a length of such dicts
    by number. flags: those of the command but --plan and --show-batch, `base="…", epochs=3,
    out="runs/mine"`. on_log: gets each step and its line of metrics.jsonl. metrics: more scores of
    held-out examples, each a function of the answers and of the right ones, a text or, where the
    data give several, their list. With `resume` give the same examples again. Raises UserError.
    """
    taken = OTHER_FIELDS & metrics.keys()
    if taken:
        raise UserError(
            f"metrics: {', '.join(taken)} stands in metrics.jsonl for something else: choose "
            "another name"
        )
    # 1. data: sources are flags, examples stay in memory
    examples = {}
    for name, value in (("data", data), ("eval_data", eval_data)):
        if isinstance(value, str | Path):
            value = [str(value)]
        if value is not None and len(value) and isinstance(value[0], str):
            flags[name] = list(value)
        elif value is not None:
            source = f"{MEMORY}{name}"
            examples[source] = value
            if not flags.get("resume"):
                flags[name] = [source]

    # 2. settings
    for name in ("out", "resume"):
        if flags.get(name):
            flags[name] = Path(flags[name])
    settings, arguments = parse(flags)
    if arguments.plan or arguments.show_batch:
        raise UserError(
            "plan and show_batch print instead of training: call the command, python -m "
            "train.finetune"
        )
    if examples.keys() - {*settings.data, *settings.eval_data}:
        raise UserError("resume: the run has its data from files: leave data and eval_data out")

    # 3. the run
    memory = {}
    for source, of_source in examples.items():
        name = source.removeprefix(MEMORY)
        memory[source] = example_records(of_source, name, settings.images or ".")
    return run_settings(settings, arguments, memory, on_log, metrics)


def run_settings(
    settings: Settings,
    arguments: Arguments,
    memory: Mapping[str, list[Record]] = {},
    on_log: Callable[[int, dict], object] | None = None,
    metrics: Mapping[str, Metric] = {},
) -> FineTuned:
    """The whole run: data, model, loop, summary. memory: the records of `finetune`'s examples, by
    their source."""
    with (
        joined_world(settings.device) as world,
        run_folder(arguments, settings, world) as run,
    ):
        # 1. mistakes are reported before weights are read
        outline, _ = open_model(settings, torch.device("meta"))
        use_threads(settings.threads, outline)
        records = read_split(settings, memory=memory)
        processor, files = open_processor(settings, outline)
        order = Order(records, processor, settings, world)
        held_out = open_held_out(settings, processor, world, memory, metrics)
        # all go on from what the first process reads
        progress = world.gather(newest_progress(run))[0] or Progress(world.size)
        print_start(outline, settings, world)

        # 2. training; its model is let go, since one may be as large as the memory
        progress = train_model(
            settings, order, held_out, run, world, progress, files, arguments.allow_changed, on_log
        )

        # 3. what was learned
        model = score_trained(settings, held_out, run, world, progress)
        learned = parameter_count(trainable(outline).values())
        summary = summary_of(settings, progress, progress.results, learned, held_out)
        if world.is_first:
            write_text(run / "summary.json", json.dumps(summary, indent=1) + "\n")
            draw_loss(run)
            if held_out:
                write_answers(run, held_out, progress.results)
            print_summary(summary, progress.results, settings, run)
        return FineTuned(run, summary, read_metrics(run), model.eval(), processor)


def train_model(
    settings: Settings,
    order: Order,
    held_out: HeldOut | None,
    run: Path,
    world: World,
    progress: Progress,
    files: Sequence[Path],
    allow_changed: bool,
    on_log: Callable[[int, dict], object] | None,
) -> Progress:
    """Train from `progress` on, and write what was learned; `progress.results` gets the scores
    before. files: to write beside a whole model."""
    # 1. the base, and its answers
    model = load_start(settings, world.device)
    if world.is_first:
        of_held_out = held_out.records if held_out else ()
        data = data_fingerprints([*order.records, *of_held_out])
        fingerprints = {"base": adapter.fingerprint(model), **data}
        set_origin(run, progress, settings, fingerprints, allow_changed)
    progress = world.gather(progress)[0]  # the first process knows whether its scores hold
    results = progress.results
    if held_out and "before" not in results:
        results["before"] = held_out.evaluate_column(model, "before")

    # 2. what is trained, and its answers
    model, optimizer = open_model(settings, world.device, model)
    model.base_fingerprint = adapter.fingerprint(model)  # which every saved adapter stores
    if held_out and settings.is_grafted and "start" not in results:
        results["start"] = held_out.evaluate_column(model, "start")

    # 3. the vision tower alone, then all
    if settings.align:
        if not progress.step:
            align(model, order.records, settings, world, run, progress)
        # a taught tower is frozen: answers are as good, within noise, and steps a quarter shorter
        model.vision_tower.requires_grad_(not is_taught(order.records))
    validate = None
    if held_out:  # called with a step and the progress
        validate = partial(held_out.evaluate_step, model, run, order.total, files)
    progress = train_on(
        order,
        model,
        optimizer,
        settings,
        run,
        world,
        validate=validate,
        progress=progress,
        on_log=on_log,
    )

    # 4. the result
    target = nullcontext(run)
    if settings.writes_model:
        target = atomic_folder(run / "model", world)
    with target as folder:
        write_trained(model, folder, settings, world, files)
    return progress


def score_trained(
    settings: Settings,
    held_out: HeldOut | None,
    run: Path,
    world: World,
    progress: Progress,
) -> PaliGemma:
    """Open the last weights and the best ones in turn, one model at a time, and put their scores
    into `progress.results`; returns the model that the run recommends."""
    last = run / "model" if settings.writes_model else run
    model = open_trained(settings, last, world.device)
    if held_out is None:
        return model
    results = progress.results
    results["after"] = held_out.evaluate_column(model, "after")
    if settings.keep_best and progress.best and progress.best.since:
        del model
        model = open_trained(settings, run / "best", world.device)
        results["best"] = held_out.evaluate(model, "held-out, best")
        if recommended(results) is results["after"]:
            del model
            model = open_trained(settings, last, world.device)
    results["blind"] = held_out.evaluate(model, "held-out, blind", without_pictures=True)
    return model


def print_recipe(settings: Settings) -> None:
    """The recipe that the flags, the base or the data have chosen, and how it differs from the
    published one."""
    chosen = recipe_of(settings.recipe, settings.base)
    if not chosen:
        return
    whys = {
        "own": "own pictures on the toy model (--recipe lora has a graft): ",
        "one-gpu": "a base this large: ",
    }
    why = whys.get(settings.recipe, "")
    values = ", ".join(f"{name} {getattr(settings, name)}" for name in chosen)
    print(f"recipe {settings.recipe}: {why}{values}; a flag changes each", flush=True)
    for line in differences(settings.recipe, settings.base):
        print(f"  {line}", flush=True)


def print_start(outline: PaliGemma, settings: Settings, world: World) -> None:
    """The first process prints the base, its size, the share of it that is trained, the device, the
    threads with how long they spin, and the recipe."""
    if not world.is_first:
        return
    total = parameter_count(outline.parameters())
    learned = parameter_count(trainable(outline).values())
    size = f"{total:,} parameters, {learned:,} of them trainable ({100 * learned / total:.2f} %)"
    processes = f", {world.size} processes" if world.size > 1 else ""
    machine = f"{world.device}{processes}, CPU threads: {torch.get_num_threads()}"
    if spins := os.environ.get("GOMP_SPINCOUNT"):  # the user's, or ours on a busy machine
        machine += f", GOMP_SPINCOUNT={spins}"
    print(f"{settings.base}: {size}, {settings.subject}, on {machine}", flush=True)
    print_recipe(settings)
    if settings.is_beyond_base:
        print(
            "boxes: the embedded base finds its forty emoji alone, and does not learn others: take "
            "a published base"
        )


def run_flags(settings: Settings, arguments: Arguments) -> None:
    """Do what the flags ask for: plan the run, show a batch of it, or train."""
    if arguments.plan:
        print_recipe(settings)
        print(report(settings, arguments.gpu, arguments.gpus))
    elif arguments.show_batch:
        for line in show_batch(settings, arguments.show_batch):
            print(shown(line, 10_000))
    else:
        run_settings(settings, arguments)


def main(argv: Sequence[str] | None = None) -> None:
    run_flags(*parse(argv, __doc__))


if __name__ == "__main__":
    run_command(main)
