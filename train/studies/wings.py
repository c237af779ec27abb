"""Study: does a language model forget text while it is tuned on pictures, and do the learners of WINGS prevent that?

    python -m train.compare --rows wings [--quick]

In: the embedded vision tower, and a small decoder trained on text alone: sums, copying, lookup and facts, those of
`eval/text/sentences.py`. Out: comparison.md, comparison.json and wings.png in --out: what is left of the text after
tuning on pictures alone, how well the pictures are read, and the attention shift, with 95 % intervals.

The decoder is trained from random weights on text, once for each seed, and joined with the vision tower by a fresh
projector. Every row of a seed is then trained on the same pictures in the same order; seeds differ in the order, in the
place of the picture within the question, and in all weights that are fresh. The answer names what is in each of the 16
squares. In the first stage the projector is trained (and WINGS's visual learners), in the second what the row says.
Attention is causal everywhere. The rate of a row in the second stage is the lowest of those tried that reads the
validation pictures about as well as the best, mean over seeds. Further rows have 5 and 20 % of text among the pictures.
Rows are compared at the end of their runs, and where they first read as many pictures as each other, see
`train/studies/wings_front.py`. With `--quick` one decoder serves all seeds, training is shorter, and only the first
pair is trained, at one rate and without text. Two pairs of rows differ in nothing but the learners:

    wings     decoder, projector, learners and routers      against full, decoder and projector
    learners  projector, learners and routers               against lora, projector and as many parameters of LoRA
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from eval.statistics import correlation
from eval.text import sentences
from model.processor import Processor
from model.source import EMBEDDED
from train.embedded import text as text_base
from train.flags import flag
from train.studies import engine
from train.studies.engine import QuickOptions, ScaledOptions, describe, difference
from train.studies.rules import Prediction, best_rate, check, mean_scores
from train.studies.wings_front import compare_at_levels, judge_levels, pictures_of
from train.studies.wings_report import draw, to_markdown
from train.studies.wings_runs import (
    FACTOR,
    FIRST_RATE,
    FULL,
    MIXED,
    QUESTION,
    QUICK,
    RANK,
    ROWS,
    ROWS_A_STEP,
    WingsStudy,
    encode_training,
    first_stage,
    mean_of,
    quarter,
    second_stage,
    train_text,
)
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

VERSION = 4  # of the code that decides a cell's result: raise it to compute all cells again

MARGIN = 1.0  # points on the validation pictures that a lower rate may cost
PAIRS = {"wings": "full", "learners": "lora"}
# written before rows were compared at an equal accuracy; the measure is a level of `train/studies/wings_front.py`
PREDICTIONS = (
    Prediction("wings", "90", "worse", "-15 points at the end of equally long runs; the paper has it better"),
    Prediction("learners", "90", "worse", "-35 points at the end of equally long runs; the paper has it better"),
)
START_TITLES = {True: "projector, learners", False: "projector"}  # what is trained in stage 1


@dataclass(frozen=True)
class WingsOptions(QuickOptions, ScaledOptions):
    """The flags of this study."""

    limit: int = flag(100, "questions of each text task, and pictures", least=1, metavar="N")
    out: Path = flag(Path("runs/compare-wings"), engine.OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class WingsResults:
    """Cells: of the text-only decoders by seed, of the first stage by whether it has learners and by seed, and of each
    row by rate, seed and share of text; the rate that is chosen for a row."""

    before: list[dict]
    starts: dict[bool, list[dict]]
    runs: dict[tuple[str, float, int, float], dict]
    rates: dict[str, float]

    @property
    def arms(self) -> list[tuple[str, float]]:
        """Rows and shares of text."""
        return list(dict.fromkeys((name, share) for name, _, _, share in self.runs))

    def of_arm(self, name: str, share: float) -> list[dict]:
        """The cells of a row with so much text, at its rate, by seed."""
        wanted = name, self.rates[name], share
        return [cell for (row, rate, _, text), cell in self.runs.items() if (row, rate, text) == wanted]

    def points(self, name: str, share: float) -> list[list[list[dict]]]:
        """By seed and rate, the start of the second stage and its checkpoints."""
        found: dict[int, list[list[dict]]] = {}
        for (row, _, seed, text), cell in self.runs.items():
            if (row, text) == (name, share):
                found.setdefault(seed, []).append([self.starts[ROWS[name].learners][seed], *cell["course"]])
        return [found[seed] for seed in sorted(found)]


class Cells:
    """The cells of a study by what decides them: computed, or read from disk where they are finished."""

    def __init__(self, options: WingsOptions):
        base, processor = load_model(EMBEDDED), Processor.from_source(EMBEDDED)
        fingerprint = exact_fingerprint(base)
        plan = QUICK if options.quick else FULL
        self.study = WingsStudy(options.out, options.scale, options.limit, fingerprint, processor, base, plan)

    def finish(self, title: str, parts: tuple, work: Callable[[Path], dict]) -> tuple[tuple, dict, Path]:
        """`parts`, which decide a cell, its result, and its folder."""
        return parts, *self.study.finish(title, parts, work)

    def pictures(self) -> tuple[tuple, dict, Path]:
        """Those of training, encoded."""
        parts = ("pictures", VERSION, self.study.fingerprint, self.study.steps, ROWS_A_STEP)
        return self.finish("the training pictures", parts, partial(encode_training, self.study))

    def text(self, seed: int) -> tuple[tuple, dict, Path]:
        study, seed = self.study, self.decoder(seed)
        parts = ("wings", VERSION, study.scale, study.limit, study.fingerprint, seed, *text_base.RECIPE)
        return self.finish(f"text, seed {seed}", parts, partial(train_text, study, seed))

    def decoder(self, seed: int) -> int:
        """The seed of the decoder that a seed starts from."""
        return 0 if self.study.plan.one_decoder else seed

    def first(self, learners: bool, seed: int) -> tuple[tuple, dict, Path]:
        """The first stage."""
        study, (parts, _, text), pictures = self.study, self.text(seed), self.pictures()[2]
        parts += (seed, learners, study.plan.steps, ROWS_A_STEP, FIRST_RATE, RANK, QUESTION)
        title = f"stage 1 {'with' if learners else 'without'} learners, seed {seed}"
        return self.finish(title, parts, partial(first_stage, study, learners, text / "model", pictures, seed))

    def tuned(self, name: str, rate: float, seed: int, text: float) -> tuple[tuple, dict, Path]:
        """The second stage of a row, with a share of text."""
        parts, _, start = self.first(ROWS[name].learners, seed)
        parts += (name, rate, text, FACTOR, self.study.plan.checkpoints)
        work = partial(second_stage, self.study, name, rate, text, start / "model", self.pictures()[2], seed)
        return self.finish(f"{arm_title(name, text)}, rate {rate:g}, seed {seed}", parts, work)

    def get(self, kind: str, *arguments) -> dict:
        """The result of a cell, `kind` "pictures", "text", "first" or "tuned"."""
        return getattr(self, kind)(*arguments)[1]


def spell_job(job: tuple, result: dict) -> str:
    return f"{' '.join(map(str, job))}: {result['cpu_seconds']:.0f} CPU seconds"


open_cells = lru_cache(maxsize=1)(Cells)  # once in each process


def compute(options: WingsOptions, job: tuple) -> dict:
    return open_cells(options).get(*job)


def collect(options: WingsOptions, cells: Cells, processes: int) -> WingsResults:
    """All cells. Those that do not need each other are computed side by side."""

    def finish(jobs: Sequence[tuple]) -> list[dict]:
        return engine.side_by_side(partial(compute, options), jobs, processes, spell_job)

    seeds, plan = range(options.seeds), cells.study.plan
    decoders = {cells.decoder(seed): ("text", cells.decoder(seed)) for seed in seeds}
    finish([*decoders.values(), ("pictures",)])
    before = [cells.get("text", seed) for seed in seeds]
    first = [(learners, seed) for learners in (True, False) for seed in seeds]
    starts = dict(zip(first, finish([("first", *run) for run in first]), strict=True))
    # seed by seed: a process reads the pictures of a seed once
    runs = [(name, rate, seed, 0.0) for seed in seeds for name, of_row in plan.rates.items() for rate in of_row]
    found = dict(zip(runs, finish([("tuned", *run) for run in runs]), strict=True))
    rates = {name: best_rate(validation(found, name), MARGIN) for name in plan.rates}
    mixed = [(name, rates[name], seed, share) for seed in seeds for share in plan.mixed for name in MIXED]
    found |= zip(mixed, finish([("tuned", *run) for run in mixed]), strict=True)
    by_learners = {learners: [starts[learners, seed] for seed in seeds] for learners in (True, False)}
    return WingsResults(before, by_learners, found, rates)


def validation(runs: Mapping[tuple[str, float, int, float], dict], name: str) -> dict[float, float]:
    """Percent of the validation pictures, mean over seeds, by the rates that were tried for a row."""
    own = {place: cell for place, cell in runs.items() if (place[0], place[-1]) == (name, 0.0)}
    return mean_scores(own, (cell["validation"] for cell in own.values()))[name]


def arm_title(name: str, share: float) -> str:
    return f"{name}, {100 * share:g} % text" if share else name


def pooled(cells: Sequence[dict]) -> np.ndarray:
    """Right or wrong (seeds, sentences), in percent, one task after the other."""
    return 100 * np.array([[grade for grades in cell["text"].values() for grade in grades] for cell in cells])


def checkpoints(study: WingsStudy, results: WingsResults) -> list[dict]:
    """Every checkpoint of the second stage: its attention shift, and the points of text that it has lost."""
    known = [mean_of(cell["text"], quarter(study)) for cell in results.before]
    return [
        {"row": arm_title(name, share), "rate": rate, "seed": seed, "step": one["step"], "shift": one["shift"]}
        | {"lost": known[seed] - mean_of(one["text"]), "pictures": pictures_of(one)}
        for (name, rate, seed, share), cell in results.runs.items()
        for one in cell["course"]
    ]


def by_task(cells: Sequence[dict]) -> dict[str, float]:
    return {task: 100 * float(np.mean([cell["text"][task] for cell in cells])) for task in sentences.TASKS}


def scores_of(cells: Sequence[dict]) -> dict[str, np.ndarray]:
    """Text and pictures in percent and the attention shift, each (seeds, examples)."""
    shift = np.array([cell["shift"] for cell in cells], dtype=float)
    pictures = 100 * np.array([cell["pictures"] for cell in cells])
    return {"text": pooled(cells), "pictures": pictures, "shift": np.nan_to_num(shift, nan=1.0)}


def describe_cells(cells: Sequence[dict], before: np.ndarray) -> dict:
    """Intervals of all measures, and of the change of text."""
    scores = scores_of(cells)
    found = {what: describe(values) for what, values in scores.items()}
    return found | {"change": difference(scores["text"], before), "by_task": by_task(cells)}


def summarize(study: WingsStudy, results: WingsResults, seeds: Sequence[int]) -> dict:
    """comparison.json."""
    rows, before = {}, pooled(results.before)
    for name, share in results.arms:
        cells, rate = results.of_arm(name, share), results.rates[name]
        starts = results.starts[ROWS[name].learners]
        rows[arm_title(name, share)] = describe_cells(cells, before) | {
            "trains": ROWS[name].title,
            "trained": cells[0]["trained"],
            "rate": rate,
            "validation": {f"{rate:g}": accuracy for rate, accuracy in validation(results.runs, name).items()},
            "laws_percent": np.mean([cell["laws"] for cell in cells], axis=0).tolist(),
            "laws_percent_before": np.mean([start["laws"] for start in starts], axis=0).tolist(),
            "flat": int(np.isnan(np.array([cell["shift"] for cell in cells], dtype=float)).sum()),
        }
        if (control := PAIRS.get(name)) is not None:
            own, other = (scores_of(results.of_arm(row, share)) for row in (name, control))
            curves = (results.points(row, share) for row in (name, control))
            rows[arm_title(name, share)] |= {
                "control": arm_title(control, share),
                "difference": {what: difference(own[what], other[what]) for what in own},
                "at_levels": compare_at_levels(*curves, quarter(study)),
            }
    at_levels = {name: row["at_levels"] for name, row in rows.items() if "at_levels" in row}
    judge_levels(at_levels)
    verdicts = {
        name: {level: found["verdict"] for level, found in of_row.items() if "verdict" in found}
        for name, of_row in at_levels.items()
    }
    points = checkpoints(study, results)
    run = [f"{one['row']} {one['rate']} {one['seed']}" for one in points]
    rho = correlation([one["shift"] for one in points], [one["lost"] for one in points], run)
    return {
        "quick": study.plan is QUICK,
        "seeds": list(seeds),
        "scale": study.scale,
        "limit": study.limit,
        "steps": study.steps,
        "rank": RANK,
        "rows": rows,
        "before": describe_cells(results.before, before),
        "stage_1": {START_TITLES[on]: describe_cells(cells, before) for on, cells in results.starts.items()},
        "predictions": check(PREDICTIONS, verdicts),
        "per_run": study.plan.checkpoints,
        "runs": len(set(run)),
        "checkpoints": points,
        "correlation": rho and engine.verdict(rho),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = engine.read_options(WingsOptions, "wings", __doc__, argv)
    cells, processes = open_cells(options), engine.default_processes("cpu", options.threads)

    def find() -> dict:
        return summarize(cells.study, collect(options, cells, processes), range(options.seeds))

    engine.run_study(options.out, find, to_markdown, draw, processes=processes)
