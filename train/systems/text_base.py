"""Make the embedded text base, from which WINGS starts: a decoder that knows text alone, beside the
embedded tower.

    python -m train.systems.text_base          minutes on two cores

In: a seed. Out: runs/embedded-text, a PaliGemma whose decoder has learned sentences from random
weights, causally, and whose projector knows nothing. `train/systems/wings.py` opens it as
`embedded-text`, whatever its own --seed is; another one is made with --out DIR and given as --base
DIR. `train/systems/studies/wings.py` measures how much of the sentences a model forgets when it is trained
on pictures:

    add       How many are 7 and 5?                                  12
    copy      Caption: cat 4 key dog 9. What is the caption?         cat 4 key dog 9
    lookup    Row: cat 4 key dog 9. What is in column 3?             key
    fact      What is a tiger?                                       animal

A prompt to copy or to look up belongs to exactly one split, by its hash. All splits ask the same
140 sums and facts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from eval.command import add_flag, command_parser, whole
from eval.data.pictures import CATEGORIES, NAMES, Dice, split_of
from eval.data.records import Record
from eval.data.scenes import with_article
from model.common import run_command
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.data.batches import MicroBatch, collate
from train.model import supervised_loss
from train.optim import Rule, make_adamw, parameter_groups, parameter_names
from train.run import check_empty
from train.studies.training import descend
from train.systems.wings import TEXT_FOLDER
from weights.export import companions, export_model
from weights.load import load_model

TASKS = ("add", "copy", "lookup", "fact")
# in turn: lookup takes the longest to learn
LEARNED = ("add", "lookup", "copy", "lookup", "fact", "lookup")
WORDS = [*NAMES, *map(str, range(10))]
STEPS = 900
ROWS = 48  # sentences of a step
RATE = 3e-3


def sentence(task: str, split: str, index: int, seed: int = 0) -> tuple[str, str]:
    """Prompt and answer number `index` of a task's endless stream: the same on every machine."""
    dice = Dice(f"sentence/{task}/{split}/{seed}/{index}")
    if task == "add":
        a = dice.below(10)
        b = dice.below(10)
        return f"How many are {a} and {b}?", str(a + b)
    if task == "fact":
        name = dice.pick(NAMES)
        answer = next(kind for kind, names in CATEGORIES.items() if name in names)
        return f"What is {with_article(name)}?", answer
    while True:  # until the prompt belongs to the split
        words = dice.draw(WORDS, 3 + dice.below(4) if task == "copy" else 5)
        said = " ".join(words)
        prompt, answer = f"Caption: {said}. What is the caption?", said
        if task == "lookup":
            column = dice.below(5)
            prompt, answer = f"Row: {said}. What is in column {column + 1}?", words[column]
        if split_of((prompt,)) == split:
            return prompt, answer


def sentences(step: int, seed: int, processor: Processor) -> MicroBatch:
    """The ROWS sentences of a step, the tasks in turn. No token sees a later one, in the prompt
    too."""
    records = []
    for number in range(step * ROWS, (step + 1) * ROWS):
        turn = sentence(LEARNED[number % len(LEARNED)], "train", number, seed)
        records.append(Record(turn[0], turn[0], (), (turn,)))
    micro = collate(records, processor)
    causal = torch.ones_like(micro.batch.input_ids)
    return replace(micro, batch=replace(micro.batch, token_type_ids=causal))


def make_text_base(seed: int, folder: Path, steps: int = STEPS) -> PaliGemma:
    """The text base of `seed` in `folder`, where it is trained unless it is there already."""
    if (folder / "config.json").exists():
        return load_model(folder)
    base = load_model(EMBEDDED)
    processor = Processor.from_source(EMBEDDED)
    model = initialize(PaliGemma(base.config), seed).train()
    model.vision_tower.load_state_dict(base.vision_tower.state_dict())
    decoder = Rule(parameter_names(model, r"language_model\..*"), RATE, 1e-9)
    optimizer = make_adamw(parameter_groups(model, [decoder]), (0.9, 0.98))

    def losses() -> Iterator[torch.Tensor]:
        for step in tqdm(range(steps), "text"):
            micro = sentences(step, seed, processor)
            yield supervised_loss(model, micro) * (1 / micro.tokens)

    descend(model, optimizer, losses(), steps, warmup=0.05)
    export_model(model.eval(), folder, companions=companions(EMBEDDED))
    return model


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("train.systems.text_base", __doc__)
    add_flag(parser, "--out", "folder to write", TEXT_FOLDER, type=Path, metavar="DIR")
    add_flag(parser, "--seed", "of the weights and the sentences", 0, type=whole(0))
    args = parser.parse_args(argv)
    check_empty(args.out)
    make_text_base(args.seed, args.out)
    print(f"{args.out}: the base of python -m train.systems.wings --stage 1")


if __name__ == "__main__":
    run_command(main)
