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
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval.records import Record
from lora import adapter
from model.common import UserError, run_command, shown, write_text
from model.paligemma import PaliGemma
from model.processor import Processor
from train.checkpoint import Progress, atomic_folder, newest_progress
from train.data.sources import MEMORY, held_records, read_records
from train.distributed import World, is_sharded, joined_world
from train.optim import count, trainable
from train.run import MEASURED, data_fingerprints, draw_loss, read_metrics, run_folder, set_origin
from train.settings import Arguments, Settings, parse, run_stem
from train.supervised import make_order, train_on
from train.systems.open import load_start, open_model, open_processor, open_trained, write_trained
from train.validation import Metric, evaluate, open_held_out


class FineTuned(NamedTuple):
    """A run that has ended. run: its folder. summary: the content of summary.json, where "held_out" has the scores by
    column of the table. history: the lines of metrics.jsonl. model: with the weights that the run recommends."""

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

    data, eval_data: sources as in --data, or examples: a list of dicts as in a JSONL file, whose pictures are paths,
    Pillow images or uint8 arrays, or any data set with a length of such dicts by number. flags: those of the command
    but --plan and --show-batch, `base="…", epochs=3, out="runs/mine"`. on_log: gets each step and its line of
    metrics.jsonl. metrics: more scores of held-out examples, each a function of the answers and of the right ones, a
    text or, where the data give several, their list. With `resume` give the same examples again. Raises UserError.
    """
    names = "step loss lr gradient_norm held_out_loss exact_match vqa_accuracy AP lambda map_distance".split()
    if taken := {*MEASURED, *names} & {*metrics}:
        raise UserError(f"metrics: {', '.join(taken)} stands in metrics.jsonl for something else: choose another name")
    settings, arguments, memory = read_call({"data": data, "eval_data": eval_data}, flags)
    return fine_tune(settings, arguments, memory, on_log, metrics)


def read_call(data: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Settings, Arguments, dict[str, list[Record]]]:
    """The settings of a call of `finetune`, and the records of its examples by their source in the settings."""
    flags = flags | {name: Path(flags[name]) for name in ("out", "resume") if flags.get(name)}
    memory: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, str | Path) or value is not None and len(value) and isinstance(value[0], str):
            flags[name] = [str(value)] if isinstance(value, str | Path) else [*value]
        elif value is not None:
            memory[f"{MEMORY}{name}"] = value
            flags |= {} if flags.get("resume") else {name: [f"{MEMORY}{name}"]}
    settings, arguments = parse(flags)
    if arguments.plan or arguments.show_batch:
        raise UserError("plan and show_batch print instead of training: call the command, python -m train.finetune")
    if memory.keys() - {*settings.data, *settings.eval_data}:
        raise UserError("resume: the run has its data from files: leave data and eval_data out")
    folder = settings.images or "."
    return settings, arguments, {name: held_records(of, name[len(MEMORY) :], folder) for name, of in memory.items()}


def fine_tune(
    settings: Settings,
    arguments: Arguments,
    memory: Mapping[str, list[Record]] = {},
    on_log: Callable[[int, dict], object] | None = None,
    metrics: Mapping[str, Metric] = {},
) -> FineTuned:
    """The whole run: data, model, loop, summary. memory: of `read_call`; on_log and metrics: of `finetune`."""
    stem = run_stem(settings)
    with joined_world(settings.device) as world, run_folder(arguments, settings, stem, "train.finetune", world) as run:
        outline, _ = open_model(settings, torch.device("meta"))  # mistakes are reported before weights are read
        records = read_records(settings, memory=memory)
        processor, files = open_processor(settings, outline)
        progress = world.gather(newest_progress(run))[0] or Progress(world.size)
        begins, results = progress.step == 0, progress.results
        order = make_order(records, processor, settings, world, progress.processes)
        held_out = open_held_out(settings, processor, world, memory, metrics) if settings.evaluate else None

        model = load_start(settings, world.device)
        print_start(outline, settings, world)
        if begins and settings.evaluate:
            results["before"] = evaluate(model, processor, settings, "before", world, held_out)
        model, optimizer = open_model(settings, world.device, model)
        model.base_fingerprint = adapter.fingerprint(model)  # which every saved adapter stores
        if world.is_first:
            fingerprints = {"base": model.base_fingerprint, **data_fingerprints(records)}
            set_origin(run, progress, settings, fingerprints, arguments.allow_changed)
        if begins and settings.evaluate and settings.is_grafted:
            results["start"] = evaluate(model, processor, settings, "start", world, held_out)
        if begins and settings.align:
            from train.align import align

            align(model, records, settings, world)

        validate = held_out and partial(held_out.validate, model, run, order.total, files)
        also = {"progress": progress, "on_log": on_log}
        progress = train_on(order, model, optimizer, settings, run, world, validate=validate, **also)

        result = run / "model" if settings.writes_model else run
        with atomic_folder(result, world) if settings.writes_model else nullcontext(run) as folder:
            write_trained(model, folder, settings, world, files)
        if settings.evaluate:
            if is_sharded(model):
                del model, optimizer, validate
                model = open_trained(settings, result, world.device)
            results["after"] = evaluate(model, processor, settings, "after", world, held_out)
        from train.summary import print_summary, summarize, trained, write_answers

        if held_out:
            if settings.keep_best and progress.best and progress.best.since:
                model = optimizer = validate = None  # one model at a time: it may be as large as the memory
                model = open_trained(settings, run / "best", world.device)
                results["best"] = held_out.evaluate(model, "held-out, best")
                if trained(results) is results["after"]:
                    model = None
                    model = open_trained(settings, result, world.device)
            results["blind"] = held_out.evaluate(model, "held-out, blind", without_pictures=True)
        summary = summarize(settings, progress, results, count(trainable(outline).values()), held_out)
        if world.is_first:
            write_text(run / "summary.json", json.dumps(summary, indent=1) + "\n")
            draw_loss(run)
            answers = write_answers(run, held_out, results) if held_out else []
            print_summary(summary, results, settings, run, answers)
        return FineTuned(run, summary, read_metrics(run), model.eval(), processor)


def print_recipe(settings: Settings) -> None:
    """The recipe that the base or the data have chosen, and what it means."""
    notes = {
        "own": "own pictures, so that every weight learns after a new vision tower; --recipe lora has a graft",
        "one-gpu": "a base of published size, so {step_batch} rows a step, {batch_size} at a time, rate {lr:g}, "
        "warm-up {warmup:g}, checkpointing {checkpointing}, {dtype}; a flag changes each",
        "paligemma": "every weight, {step_batch} rows a step, rate {lr:g}, {epochs} epochs, as its authors",
    }
    if note := notes.get(settings.recipe):
        print(f"recipe {settings.recipe}: {note.format_map(vars(settings))}", flush=True)


def print_start(outline: PaliGemma, settings: Settings, world: World) -> None:
    """The first process prints the recipe, the base, its size, the share of it that is trained, and the device."""
    if not world.is_first:
        return
    print_recipe(settings)
    if settings.is_beyond_base:
        print("boxes: the embedded base finds its forty emoji alone, and does not learn others: take a published base")
    total, trained = count(outline.parameters()), count(trainable(outline).values())
    size = f"{total:,} parameters, {trained:,} of them trainable ({100 * trained / total:.2f} %)"
    kind = f"attention {settings.attention}" if settings.stage is None else f"{settings.arch}, stage {settings.stage}"
    processes = f", {world.size} processes" if world.size > 1 else ""
    print(f"{settings.base}: {size}, {kind}, on {world.device}{processes}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    settings, arguments = parse(argv, __doc__)
    if arguments.plan:
        from train.plan import report

        print_recipe(settings)
        print(report(settings, arguments.gpu, arguments.gpus))
        return
    if arguments.show_batch:
        from train.show_batch import show_batch

        for line in show_batch(settings, arguments.show_batch):
            print(shown(line, 10_000))
        return
    fine_tune(settings, arguments)


if __name__ == "__main__":
    run_command(main)
