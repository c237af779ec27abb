"""Make the embedded text base, from which WINGS starts: a decoder that knows text alone, beside the embedded tower.

    python -m train.embedded.text          minutes on two cores; after an interruption the same command goes on

In: a seed. Out: runs/embedded-text, a PaliGemma whose decoder has learned the sentences of `eval/text/sentences.py`
from random weights, causally, and whose projector knows nothing. `train/systems/wings.py` opens it as `embedded-text`,
whatever its own --seed is; another one is made with --out DIR and given as --base DIR.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from eval.records import Record
from eval.text import sentences
from model.common import run_command
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.data.batches import MicroBatch, collate
from train.distributed import World
from train.flags import flag, read_flags
from train.loop import LoopSettings, fit
from train.optim import Rule, make_adamw, matching, parameter_groups
from train.run import Interrupted, check_empty, lock_folder
from train.supervised import supervised_loss
from train.systems.wings import TEXT_FOLDER
from weights.export import companions, export_model
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

# half of the text is lookup: it takes the longest to learn
TASKS = ("add", "lookup", "copy", "lookup", "fact", "lookup")
STEPS, ROWS, RATE = 900, 48, 3e-3


@dataclass(frozen=True)
class TextBaseOptions:
    """The flags of this command."""

    out: Path = flag(TEXT_FOLDER, "folder to write", metavar="DIR")
    seed: int = flag(0, "of the weights and the sentences", least=0)


@dataclass(frozen=True)
class SentenceOrder:
    """Each of `total` steps learns ROWS sentences of the train split, the tasks in turn."""

    total: int
    seed: int
    processor: Processor

    def steps(self, first: int, workers: int | None = 0, pin: bool = False) -> Iterator[list[MicroBatch]]:
        """The micro-batch of each step from `first` on. No token sees a later one, in the prompt too."""
        for step in range(first, self.total):
            numbers = range(step * ROWS, (step + 1) * ROWS)
            drawn = [sentences.sentence(TASKS[n % len(TASKS)], "train", n, self.seed) for n in numbers]
            names = [f"{s.task}/{n}" for s, n in zip(drawn, numbers, strict=True)]
            records = [Record(name, name, (), ((s.prefix, s.suffix),)) for name, s in zip(names, drawn, strict=True)]
            micro = collate(records, self.processor)
            causal = replace(micro.batch, token_type_ids=torch.ones_like(micro.batch.input_ids))
            yield [replace(micro, batch=causal)]


def make_text_base(seed: int, folder: Path, steps: int = STEPS) -> PaliGemma:
    """The text base of `seed` in `folder`, where it is trained unless it is there already; an interrupted call goes on.

    The folder appears when it is complete. Its checkpoints lie in a hidden folder beside it until then.
    """
    if (folder / "config.json").exists():
        return load_model(folder)
    base, order = load_model(EMBEDDED), SentenceOrder(steps, seed, Processor.from_source(EMBEDDED))
    decides = exact_fingerprint(base), TASKS, ROWS, RATE, seed, steps
    model = initialize(PaliGemma(base.config), seed)
    model.vision_tower.load_state_dict(base.vision_tower.state_dict())
    groups = parameter_groups(model, [Rule(matching(model, r"language_model\..*"), RATE, 1e-9)])
    optimizer, settings = make_adamw(groups, (0.9, 0.98)), LoopSettings(schedule="cosine", warmup=0.05, clip=1.0)
    run = folder.with_name(f".{folder.name}-{sha256(repr(decides).encode()).hexdigest()[:8]}")
    run.mkdir(parents=True, exist_ok=True)
    with lock_folder(run):
        fit(model, optimizer, order, supervised_loss, settings, run, World(0, 1, torch.device("cpu")))
        export_model(model.eval(), folder, companions=companions(EMBEDDED))
        shutil.rmtree(run)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(TextBaseOptions, "train.embedded.text", __doc__, argv)
    check_empty(options.out)
    try:
        make_text_base(options.seed, options.out)
    except Interrupted as interrupted:
        interrupted.end_program("the same command goes on")
    print(f"{options.out}: model.safetensors, config.json, tokenizer.model")
    print("next: python -m train.finetune --arch wings --stage 1")


if __name__ == "__main__":
    run_command(main)
