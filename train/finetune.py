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

import sys

if not __package__:  # `python train/finetune.py`: the project's other packages cannot be found
    print(
        "error: run it from the project's folder: python -m train.finetune; or pip install -e . there", file=sys.stderr
    )
    sys.exit(2)

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lora import adapter
from model.common import run_command, shown, write_text
from model.device import choose_device
from model.differential import KINDS
from model.mamba import choose_kernel
from model.paligemma import PaliGemma
from train.align import align, check_align
from train.checkpoint import checkpoints, write_folder
from train.data.sources import read_records
from train.distributed import World, whole_model
from train.flags import RunArguments
from train.metrics import draw_loss
from train.optim import count, trainable
from train.origin import check_resume, data_fingerprints, origin_of
from train.plan import plan, plan_table
from train.processes import choose_processes, several
from train.run_folder import check_empty, run_folder
from train.settings import Settings, parse, run_stem, step_layout
from train.show_batch import show_batch
from train.summary import can_export, evaluate, print_summary, summarize, write_answers
from train.supervised import is_sharded, processes_of, train_on
from train.systems.open import load_base, load_start, open_model, open_processor, weights_dtype
from train.validation import ASKED, Watch, open_held_out
from weights.export import export_model
from weights.fingerprint import tensor_fingerprint


def fine_tune(
    settings: Settings, arguments: RunArguments, outline: PaliGemma, meet: Callable[[], World], device: torch.device
) -> None:
    """The whole run: measure, train, write the result, measure again, write the summary.

    outline: the model on the meta device. meet: joins the processes of the run.
    """
    check_empty(arguments.out)
    choose_kernel(outline, settings.kernel, device)
    records = read_records(settings, known=(files_read := {}))  # mistakes are found before weights are read
    if settings.align:
        check_align(outline, records)
    world = meet()
    step_layout(settings, processes_of(arguments.resume, world))
    model = load_start(settings, world.device)
    processor, files = open_processor(settings, model)
    held_out = open_held_out(settings, processor, world, files_read) if settings.evaluate else None
    learned = count(trainable(outline).values())
    if world.is_first:
        print_start(count(outline.parameters()), learned, settings, world)
    with run_folder(arguments, settings, run_stem(settings), "train.finetune", world) as run:
        kept, begins = {}, settings.evaluate and not checkpoints(run)
        measure = partial(evaluate, processor=processor, settings=settings, world=world, held_out=held_out)
        if begins:
            kept["before"] = measure(model, title="before")
        model, optimizer = open_model(settings, world.device, model)
        if not settings.writes_model:
            model.base_fingerprint = adapter.fingerprint(model)  # which every saved adapter stores
        if world.is_first:
            fingerprints = {"base": base_fingerprint(model, settings), **data_fingerprints(records)}
            kept["origin"] = origin_of(settings, fingerprints, world, weights_dtype(settings, world.device))
            check_resume(run, kept["origin"], arguments.allow_changed)
        if begins and settings.is_grafted:
            kept["start"] = measure(model, title="start")
        if settings.align and not checkpoints(run):
            align(model, records, settings, world)
        write = partial(write_weights, settings=settings, world=world, files=files)
        watch = None
        if held_out and settings.eval_every != 0:
            watch = Watch(held_out, run, write, most=0 if is_sharded(settings, world) else ASKED)
        progress = train_on(records, model, optimizer, processor, settings, run, world, kept, watch and watch.check)
        result = run / "model" if settings.writes_model else run
        if settings.writes_model:
            write_folder(partial(write, model), result, world)
        else:
            write(model, result)
        results = {name: progress[name] for name in ("before", "start") if name in progress}
        if settings.evaluate:
            if is_sharded(settings, world):
                del model, optimizer
                model = reopen(settings, result, world)
            results["after"] = measure(model, title="after")
        if held_out:
            if settings.keep_best and progress.get("best", {}).get("since"):
                model = optimizer = None  # one model at a time: it may be as large as the memory
                model = reopen(settings, run / "best", world)
                results["best"] = held_out.measure(model, "held-out, best")
            results["blind"] = held_out.measure(model, "held-out, blind", without_pictures=True)
        if world.is_first:
            split = world.size if world.splits_rows else arguments.processes
            summary = summarize(settings, split, progress, results, learned, held_out)
            write_text(run / "summary.json", json.dumps(summary, indent=1) + "\n")
            draw_loss(run)
            answers = write_answers(run, held_out, results) if held_out else []
            print_summary(summary, results, settings, run, answers)


def base_fingerprint(model: PaliGemma, settings: Settings) -> str:
    """A hash of the weights that training starts from: of the base, or of the whole model that is trained."""
    return tensor_fingerprint(model.state_dict()) if settings.writes_model else adapter.fingerprint(model)


def print_start(total: int, learned: int, settings: Settings, world: World) -> None:
    """Print what is trained: the base, its size, the share of it that is trained, the device."""
    staged = settings.stage is not None
    kind = f"{settings.arch}, stage {settings.stage}" if staged else f"attention {settings.attention}"
    print(
        f"{settings.base}: {total:,} parameters, {learned:,} of them trainable "
        f"({100 * learned / total:.2f} %), {kind}, on {world.device}"
        + (f", {world.size} processes" if world.size > 1 else ""),
        flush=True,
    )
    if not staged and not can_export(settings):
        foldable = " and ".join(f"--attention {name}" for name, kind in KINDS.items() if kind.foldable)
        print(f"this model cannot become plain weights (weights.export); {foldable} can, without swiglu-new")


def write_weights(model: PaliGemma, folder: Path, settings: Settings, world: World, files: Sequence[Path]) -> None:
    """Write the adapter, or the whole model with the `files` that belong beside it. Every process must call it."""
    if not settings.writes_model:
        adapter.save(model, folder, settings.base, settings.question_prompt, write=world.is_first)
    else:
        whole = whole_model(model, world) if is_sharded(settings, world) else model
        if world.is_first:
            export_model(whole, folder, companions=files)
    world.barrier()


def reopen(settings: Settings, folder: Path, world: World) -> PaliGemma:
    """The trained model from the files that `write_weights` has written, whole on each process."""
    if settings.writes_model:
        return load_base(replace(settings, base=str(folder)), world.device)
    model = load_base(settings, world.device)
    adapter.load(model, folder)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    settings, arguments = parse(argv, __doc__)
    if arguments.plan:
        print(plan_table([plan(settings, gpus=arguments.gpus)], arguments.gpu))
        return
    if arguments.show_batch:
        for line in show_batch(settings, arguments.show_batch):
            print(shown(line, 10_000))
        return
    device = choose_device(settings.device)
    outline, _ = open_model(settings, torch.device("meta"))
    processes = choose_processes(arguments.processes, settings, outline, arguments.resume)
    with several(processes, settings.device, argv) as meet:
        fine_tune(settings, arguments, outline, meet, device)


if __name__ == "__main__":
    run_command(main)
