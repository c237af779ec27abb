"""The positive control of studies of attention: a task in which two attention maps help, and by a
known amount.

A narrow head has to read the class of one marked position among 63 others of random classes. Its
logits are bounded to ±1 (a soft cap): the marked position gets at most e² times the weight of
another, and the sum over the others is noise. The best that one map and a linear reader can do is
84.7 %. A map minus another one removes what they have in common, and reaches 100 %. The rules of
all studies have to find this, and nothing of dex, which has one map.

It shows that the instrument finds an effect of 15 points where there is one; not that real tasks
have one.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Attention
from model.differential import KINDS, Variant, options_of
from train.optim import rate_factor
from train.studies import report
from train.studies.cells import Job
from train.studies.engine import Run, Study
from train.studies.rules import FEWEST_SEEDS, Measure

CLASSES = 8
OTHERS = 63  # positions beside the marked one
WIDTH = 8  # of the head
RANK = 4  # of variants that have one
STEPS = 300
ROWS = 64  # of a step
TESTS = 1000
REMOVED = "the second map removes what both have in common"
PREDICTIONS = (
    ("twin", "built", "better", f"{REMOVED}: 100 % against 84.7 %"),
    ("v2", "built", "better", "the same"),
    ("dex", "built", "equivalent", "one map, and a linear change of what it reads"),
)
ORIGINAL = (("split", "built", "better", REMOVED),)


def best_of_one_map(cap: float = 1.0, others: int = OTHERS, draws: int = 200_000) -> float:
    """The accuracy in percent of the best map with logits within ±cap, and of a linear reader: the
    class with the largest sum of weights, counted on draws."""
    dice = np.random.default_rng(0)
    sums = dice.multinomial(others, [1 / CLASSES] * CLASSES, size=draws).astype(float)
    sums[:, 0] += math.exp(2 * cap)
    return 100 * float((sums[:, 0] >= sums.max(axis=1)).mean())


def without_second_map(attention: Variant) -> None:
    """Make λ 0: of `shared`, plain attention and the norm by head are left."""
    attention.coefficient = partial(torch.zeros, 1)


def draw(rows: int, seed: int, others: int = OTHERS) -> tuple[Tensor, Tensor]:
    """x (rows, others + 2, H): one-hot classes, a mark, and the question last; and the class of the
    marked position."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (rows, others + 1), generator=generator)
    marked = torch.randint(others + 1, (rows, 1), generator=generator)
    x = torch.zeros(rows, others + 2, CLASSES + 2)
    x[:, :-1, :CLASSES] = F.one_hot(classes, CLASSES)
    x[:, :, CLASSES].scatter_(1, marked, 1.0)
    x[:, -1, -1] = 1
    return x, classes.gather(1, marked)[:, 0]


def make(job: Job, folder: Path) -> dict:
    """A cell of `train`. The job may change what that takes."""
    changes = {"attention": job.row} | dict(job.changes)
    return train(job.rate, job.seed, **changes)


def train(
    rate: float,
    seed: int,
    attention: str,
    cap=1.0,
    others=OTHERS,
    steps=0,
    drawn=0,
    one_map=False,
    **options,
) -> dict:
    """One kind of attention, all of whose weights are trained from nothing, on examples that all
    cells share.

    steps: 0 are STEPS. drawn: other numbers are other initial values, on the same examples.
    options: of the variant.
    """
    # 1. a head of the variant
    torch.manual_seed(seed + drawn)
    plain = Attention(CLASSES + 2, 1, 1, WIDTH, scale=WIDTH**-0.5, softcap=cap)
    if "r" in options_of(attention):
        options = {"r": RANK, "alpha": 2.0 * RANK} | options
    head = KINDS[attention](plain, 1, **options)
    if one_map:
        without_second_map(head)
    optimizer = torch.optim.AdamW(head.parameters(), rate, weight_decay=0.0)

    def answer(x: Tensor) -> Tensor:
        return 10 * head(x, positions=1)[:, 0, :CLASSES]  # at the question: (rows, CLASSES)

    # 2. training
    steps = steps or STEPS
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, steps, 0.1, "cosine")
        x, right = draw(ROWS, (seed + 1) * 1_000_003 + step, others)
        F.cross_entropy(answer(x), right).backward()
        optimizer.step()
        optimizer.zero_grad()
    # 3. the score of each example
    scores = {}
    for number, split in (1, "validation"), (2, "test"):
        x, right = draw(TESTS, number, others)
        scores[split] = {"built": (answer(x).argmax(-1) == right).tolist()}
    return {"scores": scores, "facts": {}}


def blocks(run: Run, predictions: tuple[tuple, ...] = PREDICTIONS) -> list:
    """Blocks of the report of another study, which the cells of this one belong to."""
    beside = {row: ("softmax",) for row, *_ in predictions}
    study = Study(
        name="built",
        title="The built task",
        rows=dict.fromkeys(["softmax", *beside], ()),
        make=make,
        key="",
        measures={"built": Measure("built task", range(TESTS), 100 / CLASSES, in_mean=False)},
        beside={"softmax": beside},
        rates=(0.01, 0.02, 0.04),
        main="built",
        predictions=predictions,
    )
    part = Run(study, run.out, run.jobs, FEWEST_SEEDS)
    part.compute()
    run.parts.append(part)
    title = "## Positive control: the built task (train/studies/built.py)"
    best = f"The best that one bounded map can do is {best_of_one_map():.1f} %"
    return [title, f"{best}; two maps can reach 100 %.", *report.sections(part, "###")]
