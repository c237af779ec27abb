"""Make the embedded text base, from which WINGS starts: a decoder that knows text alone, beside the embedded tower.

    python -m train.embedded.text          minutes on two cores

In: a seed. Out: runs/embedded-text, a PaliGemma whose decoder has learned the sentences of `sentences.py`
from random weights, causally, and whose projector knows nothing. `train/systems/wings.py` opens it as `embedded-text`,
whatever its own --seed is; another one is made with --out DIR and given as --base DIR.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from eval.records import Record
from model.common import run_command
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.data.batches import MicroBatch, collate
from train.embedded.sentences import sentence
from train.flags import flag, read_flags
from train.optim import Rule, make_adamw, matching, parameter_groups, rate_factor, set_rates
from train.run import check_empty
from train.supervised import supervised_loss
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


def sentences(step: int, seed: int, processor: Processor) -> MicroBatch:
    """The ROWS sentences of a step, the tasks in turn. No token sees a later one, in the prompt too."""
    drawn = [sentence(TASKS[n % len(TASKS)], "train", n, seed) for n in range(step * ROWS, (step + 1) * ROWS)]
    records = [Record(str(n), str(n), (), ((s.prefix, s.suffix),)) for n, s in enumerate(drawn)]
    micro = collate(records, processor)
    return replace(micro, batch=replace(micro.batch, token_type_ids=torch.ones_like(micro.batch.input_ids)))


def make_text_base(seed: int, folder: Path, steps: int = STEPS) -> PaliGemma:
    """The text base of `seed` in `folder`, where it is trained unless it is there already."""
    if (folder / "config.json").exists():
        return load_model(folder)
    base, processor = load_model(EMBEDDED), Processor.from_source(EMBEDDED)
    model = initialize(PaliGemma(base.config), seed).train()
    model.vision_tower.load_state_dict(base.vision_tower.state_dict())
    groups = parameter_groups(model, [Rule(matching(model, r"language_model\..*"), RATE, 1e-9)])
    optimizer = make_adamw(groups, (0.9, 0.98))
    for step in tqdm(range(steps), "text"):
        micro = sentences(step, seed, processor)
        (supervised_loss(model, micro) * (1 / micro.tokens)).backward()
        clip_grad_norm_(model.language_model.parameters(), 1.0)
        set_rates(optimizer, rate_factor(step, steps, 0.05, "cosine"))
        optimizer.step()
        optimizer.zero_grad()
    export_model(model.eval(), folder, companions=companions(EMBEDDED))
    return model


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(TextBaseOptions, "train.embedded.text", __doc__, argv)
    check_empty(options.out)
    make_text_base(options.seed, options.out)
    print(f"{options.out}: the base of python -m train.finetune --arch wings --stage 1")


if __name__ == "__main__":
    run_command(main)
