"""Fine-tune a PaliGemma with LoRA and differential attention: the main job of this project.

In: a base model and data. Out: a run folder with the adapter, the metrics, a picture of the loss, checkpoints to resume
from, and accuracies before and after.

    python -m train.finetune                                       the embedded base and scenes: minutes on a laptop
    python -m train.finetune --base google/paligemma-3b-pt-224 --data vqav2:DIR --recipe paper-2
    python -m train.finetune --data jsonl:FILE --show-batch        your own data, as the model reads them
    python -m train.finetune --plan …                              what such a run takes; no GPU is needed
    python -m train.finetune --resume runs/embedded-dex-1          go on where it was interrupted
    torchrun --nproc_per_node=8 -m train.finetune …                several GPUs; with --shard the weights are spread
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch

from lora import adapter
from model.common import run_command, shown, write_text
from model.paligemma import PaliGemma
from train.checkpoint import Progress, atomic_folder, newest_progress
from train.data.sources import read_records
from train.distributed import World, is_sharded, joined_world
from train.optim import count, trainable
from train.run import data_fingerprints, draw_loss, run_folder, set_origin
from train.settings import Arguments, Settings, parse, run_stem
from train.supervised import make_order, train_on
from train.systems.open import load_start, open_model, open_processor, open_trained, write_trained
from train.validation import evaluate, open_held_out


def fine_tune(settings: Settings, arguments: Arguments, world: World) -> None:
    """The whole run: data, model, loop, summary."""
    with run_folder(arguments, settings, run_stem(settings), "train.finetune", world) as run:
        outline, _ = open_model(settings, torch.device("meta"))  # mistakes are reported before weights are read
        records = read_records(settings)
        processor, files = open_processor(settings, outline)
        progress = world.gather(newest_progress(run))[0] or Progress(world.size)
        begins, results = progress.step == 0, progress.results
        order = make_order(records, processor, settings, world, progress.processes)
        held_out = open_held_out(settings, processor, world) if settings.evaluate else None

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
        progress = train_on(order, model, optimizer, settings, run, world, validate=validate, progress=progress)

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
        if world.is_first:
            summary = summarize(settings, progress, results, count(trainable(outline).values()), held_out)
            write_text(run / "summary.json", json.dumps(summary, indent=1) + "\n")
            draw_loss(run)
            answers = write_answers(run, held_out, results) if held_out else []
            print_summary(summary, results, settings, run, answers)


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
    if settings.base == "embedded" and any(source.startswith("coco:") for source in settings.data):
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
    with joined_world(settings.device) as world:
        fine_tune(settings, arguments, world)


if __name__ == "__main__":
    run_command(main)
