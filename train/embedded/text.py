"""Make the embedded text base, from which WINGS starts: a decoder that knows text alone, beside the embedded tower.

    python -m train.embedded.text          minutes on two cores; after an interruption the same command goes on

In: a seed. Out: runs/embedded-text, a PaliGemma whose decoder has learned the sentences of `eval/text/sentences.py`
from random weights, causally, and whose projector knows nothing. `train/systems/wings.py` opens it as `embedded-text`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.records import Record
from eval.text import sentences
from model.common import run_command
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.embedded.frozen import learn, prepare
from train.flags import flag, read_flags
from train.optim import Rule, matching
from train.run import Interrupted, check_empty, lock_folder
from train.systems.wings import TEXT_FOLDER
from weights.export import companions, export_model
from weights.load import load_model

# half of the text is lookup: it takes the longest to learn
TASKS = ("add", "lookup", "copy", "lookup", "fact", "lookup")
STEPS, ROWS, RATE = 900, 48, 3e-3


@dataclass(frozen=True)
class TextBaseOptions:
    """The flags of this command."""

    out: Path = flag(TEXT_FOLDER, "folder to write", metavar="DIR")
    seed: int = flag(0, "of the weights and the sentences", least=0)


def text_record(number: int, seed: int, tasks: Sequence[str] = TASKS) -> Record:
    """A sentence of the train split, the tasks in turn."""
    s = sentences.sentence(tasks[number % len(tasks)], "train", number, seed)
    return Record(f"{s.task}/{number}", f"{s.task}/{number}", (), ((s.prefix, s.suffix),))


def make_text_base(seed: int, folder: Path, steps: int = STEPS) -> PaliGemma:
    """The text base of `seed` in `folder`, where it is trained unless it is there already; an interrupted call goes on.

    The folder appears when it is complete. Its checkpoints lie in a hidden folder beside it until then.
    """
    if (folder / "config.json").exists():
        return load_model(folder)
    base, processor = load_model(EMBEDDED), Processor.from_source(EMBEDDED)
    model = initialize(PaliGemma(base.config), seed)
    model.vision_tower.load_state_dict(base.vision_tower.state_dict())
    rules = [Rule(matching(model, r"language_model\..*"), RATE, 1e-9)]
    records = [text_record(number, seed) for number in range(steps * ROWS)]
    run = folder.with_name(f".{folder.name}-{seed}-{steps}")
    run.mkdir(parents=True, exist_ok=True)
    with lock_folder(run):
        learn(model, rules, prepare(records, processor, ROWS), run)
        export_model(model, folder, companions=companions(EMBEDDED))
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
