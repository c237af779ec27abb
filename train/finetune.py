"""Fine-tune a PaliGemma with LoRA and differential attention: the main job of this project.

In: a base model and data. Out: a run folder with the adapter, the metrics, a picture of the loss, checkpoints to resume
from, and accuracies before and after.

    python -m train.finetune                                       the embedded base and scenes: minutes on a laptop
    python -m train.finetune --base google/paligemma-3b-pt-224 --data vqav2:DIR --recipe paper-2
    python -m train.finetune --plan …                              what such a run takes; no GPU is needed
    python -m train.finetune --resume runs/embedded-twin-1         go on where it was interrupted
    torchrun --nproc_per_node=8 -m train.finetune …                several GPUs; with --shard the weights are spread
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lora import adapter
from model.common import run_command, write_text
from model.paligemma import PaliGemma
from train.checkpoint import checkpoints, load_weights
from train.data.sources import read_records
from train.distributed import World, join_world, leave_world
from train.flags import RunArguments
from train.metrics import draw_loss
from train.optim import count, trainable
from train.origin import check_resume, data_fingerprints, origin_of
from train.plan import plan, plan_table
from train.run_folder import check_empty, run_folder
from train.settings import Settings, parse, run_stem, step_layout
from train.summary import evaluate, print_summary, summarize
from train.supervised import train_on
from train.systems.open import load_base, open_model, open_processor, open_stage, weights_dtype
from weights.export import export_model
from weights.fingerprint import tensor_fingerprint
from weights.load import load_model


def fine_tune(settings: Settings, arguments: RunArguments, world: World) -> None:
    """The whole run: measure, train, write the result, measure again, write the summary."""
    check_empty(arguments.out)
    if arguments.resume is None:
        step_layout(settings, world.size)  # refused before hours of evaluation
    records = read_records(settings)
    model, optimizer = open_model(settings, world.device)
    processor, files = open_processor(settings, model)
    learned = count(trainable(model).values())
    if world.is_first:
        print_sizes(model, learned, settings, world)
    with run_folder(arguments, settings, run_stem(settings), "train.finetune", world) as run:
        kept = {}
        if world.is_first:
            fingerprints = {"base": base_fingerprint(model, settings), **data_fingerprints(records)}
            dtype = weights_dtype(settings, world.device)
            kept["origin"] = origin_of(settings, fingerprints, world.device, dtype)
            check_resume(run, kept["origin"], arguments.allow_changed)
        if settings.evaluate and not checkpoints(run):
            name = "start" if settings.is_grafted else "before"
            kept[name] = evaluate(model, processor, settings, name, world)
            if settings.is_grafted:
                del model, optimizer  # one model at a time: it may be as large as the memory
                kept["before"] = evaluate(load_base(settings, world.device), processor, settings, "before", world)
                model, optimizer = open_model(settings, world.device)
        progress = train_on(records, model, optimizer, processor, settings, run, world, kept)
        write_result(model, settings, run, world, files)
        if settings.evaluate and settings.shard and world.size > 1:
            del model, optimizer
            model = reopen(settings, run, world)
        after = evaluate(model, processor, settings, "after", world) if settings.evaluate else None
        if world.is_first:
            summary = summarize(settings, progress, after, learned)
            write_text(run / "summary.json", json.dumps(summary, indent=1) + "\n")
            draw_loss(run)
            print_summary(summary, settings, run)


def base_fingerprint(model: PaliGemma, settings: Settings) -> str:
    """A hash of the weights that training starts from: of the base, or of the whole model that is trained."""
    return tensor_fingerprint(model.state_dict()) if settings.writes_model else adapter.fingerprint(model)


def print_sizes(model: PaliGemma, learned: int, settings: Settings, world: World) -> None:
    """Print what is trained: the base, its size, the share of it that is trained, the device."""
    total = count(model.parameters())
    staged = settings.stage is not None
    kind = f"{settings.arch}, stage {settings.stage}" if staged else f"attention {settings.attention}"
    print(
        f"{settings.base}: {total:,} parameters, {learned:,} of them trainable "
        f"({100 * learned / total:.2f} %), {kind}, on {world.device}",
        flush=True,
    )


def write_result(model: PaliGemma, settings: Settings, run: Path, world: World, files: Sequence[Path]) -> None:
    """Write the adapter to `run`, or the whole model, with the `files` that belong beside it, to `run/model`."""
    if not settings.writes_model:
        adapter.save(model, run, settings.base, settings.question_prompt, write=world.is_first)
    elif world.is_first:
        if settings.shard and world.size > 1:  # no process holds the model: build it from the last checkpoint
            dtype, cpu = next(model.parameters()).dtype, torch.device("cpu")
            staged = settings.stage is not None
            model = open_stage(settings, dtype, cpu)[0] if staged else load_model(settings.base, dtype=dtype)
            load_weights(checkpoints(run)[-1], model)
        export_model(model, run / "model", companions=files)
    world.barrier()


def reopen(settings: Settings, run: Path, world: World) -> PaliGemma:
    """The trained model from the files that `write_result` has written, whole on each process."""
    if settings.writes_model:
        return load_base(replace(settings, base=str(run / "model")), world.device)
    model = load_base(settings, world.device)
    adapter.load(model, run)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    settings, arguments = parse(argv, __doc__)
    if arguments.plan:
        print(plan_table([plan(settings, gpus=arguments.gpus)], arguments.gpu))
        return
    world = join_world(settings.device)
    try:
        fine_tune(settings, arguments, world)
    finally:
        leave_world()


if __name__ == "__main__":
    run_command(main)
