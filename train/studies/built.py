"""The positive control of studies of attention: a task in which two attention maps help, and by a known amount.

A narrow head has to read the class of one marked position among 63 others of random classes. Its logits are bounded to
±1 (a soft cap), so that softmax cannot sharpen: the marked position gets at most e² times the weight of another, and
the sum over the others is noise. The best that any one map can do is counted by `best_of_one_map`: 84.7 %. A map minus
another one removes what they have in common, and reaches 100 %: the difference is known, and the study's own rules
(rates, seeds, intervals, verdicts) have to find it. Of dex, which has one map, they must find nothing.

It shows that the instrument finds an effect of 15 points where there is one; not that real tasks have one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from eval.statistics import estimate
from model.attention import Attention
from model.variants import KINDS, options_of
from train.optim import rate_factor
from train.studies import engine, rules
from train.studies.rules import Prediction

CLASSES, OTHERS, WIDTH, RANK = 8, 63, 8, 4
STEPS, ROWS, TESTS = 300, 64, 1000
RATES = (0.01, 0.02, 0.04)
VERSION = 1
PREDICTIONS = (
    Prediction("twin", "built", "better", "the second map removes what both have in common: 100 % against 84.7 %"),
    Prediction("v2", "built", "better", "the same"),
    Prediction("dex", "built", "equivalent", "one map, and a linear change of what it reads"),
)
ORIGINAL = (Prediction("split", "built", "better", "the second map removes what both have in common"),)


def best_of_one_map(draws: int = 200_000) -> float:
    """The accuracy in percent of the best bounded map: the class with the largest sum of weights, counted on draws."""
    counts = np.random.default_rng(0).multinomial(OTHERS, [1 / CLASSES] * CLASSES, size=draws).astype(float)
    counts[:, 0] += math.e**2
    return 100 * float((counts[:, 0] >= counts.max(axis=1)).mean())


def draw(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, OTHERS + 2, H): one-hot classes, a mark, and the question last; and the class of the marked position."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (rows, OTHERS + 1), generator=generator)
    marked = torch.randint(OTHERS + 1, (rows, 1), generator=generator)
    x = torch.zeros(rows, OTHERS + 2, CLASSES + 2)
    x[:, :-1, :CLASSES] = F.one_hot(classes, CLASSES)
    x[:, :, CLASSES].scatter_(1, marked, 1.0)
    x[:, -1, -1] = 1
    return x, classes.gather(1, marked)[:, 0]


def answer(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """Logits (rows, CLASSES) at the question."""
    return 10 * attention(x, positions=1)[:, 0, :CLASSES]


@dataclass(frozen=True)
class Job:
    """A run: one kind of attention, all of whose weights are trained from nothing."""

    out: Path
    kind: str
    rate: float
    seed: int


def run(job: Job) -> dict:
    """{"validation", "test": 0 or 1 for each example}, of examples that all runs share."""

    def work(folder: Path) -> dict:
        torch.manual_seed(job.seed)
        plain = Attention(CLASSES + 2, 1, 1, WIDTH, scale=WIDTH**-0.5, softcap=1.0)
        options = {"r": RANK, "alpha": 2.0 * RANK} if "r" in options_of(job.kind) else {}
        attention = KINDS[job.kind](plain, 1, **options)
        optimizer = torch.optim.AdamW(attention.parameters(), job.rate, weight_decay=0.0)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = job.rate * rate_factor(step, STEPS, 0.1, "cosine")
            x, right = draw(ROWS, (job.seed + 1) * 1_000_003 + step)
            F.cross_entropy(answer(attention, x), right).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return {
                split: (answer(attention, x).argmax(-1) == right).tolist()
                for split, (x, right) in (("validation", draw(TESTS, 1)), ("test", draw(TESTS, 2)))
            }

    file = engine.cell_folder(job.out, "built", VERSION, job.kind, job.rate, job.seed) / "result.json"
    return engine.finish_cell(file, f"built task, {job.kind}, rate {job.rate:g}, seed {job.seed}", work, spell_run)


def spell_run(result: dict) -> str:
    return f"{100 * np.mean(result['test']):.1f} %"


def find(out: Path, processes: int = 1, predictions: Sequence[Prediction] = PREDICTIONS) -> dict:
    """The rows of the built task, their judged differences to plain attention, and the predictions."""
    kinds = ("softmax", *(one.row for one in predictions))

    def runs(names: list[tuple[str, float, int]]) -> list[dict]:
        jobs = [Job(out, *name) for name in names]
        return engine.side_by_side(run, jobs, processes, lambda job, cell: f"built task, {job}: {spell_run(cell)}")

    def score(rates) -> dict[str, dict[float, float]]:
        names = [(kind, rate, seed) for kind in kinds for rate in rates for seed in range(rules.TUNING_SEEDS)]
        return rules.mean_scores(names, (np.mean(cell["validation"]) for cell in runs(names)))

    validation = rules.bracket(RATES, score)
    rates = {kind: rules.best_rate(tried) for kind, tried in validation.items()}
    seeds = range(rules.LEAST_SEEDS)
    cells = iter(runs([(kind, rates[kind], seed) for kind in kinds for seed in seeds]))
    scores = {kind: 100 * np.array([next(cells)["test"] for _ in seeds], dtype=float) for kind in kinds}
    gains = {kind: estimate(scores[kind] - scores["softmax"]) for kind in kinds[1:]}
    judged = rules.judge(gains)
    return {
        "best_of_one_map": best_of_one_map(),
        "rows": {kind: engine.describe(scores[kind]) | {"rate": rates[kind]} for kind in kinds},
        "differences": {kind: engine.verdict(gains[kind]) | judged[kind] for kind in gains},
        "predictions": rules.check(predictions, {kind: {"built": one["verdict"]} for kind, one in judged.items()}),
        "seeds": len(seeds),
    }
