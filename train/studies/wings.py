"""Study: does a language model forget text while it is tuned on pictures, and do the learners of WINGS prevent that?

    python -m train.compare --rows wings [--quick]

In: the embedded vision tower, and a small decoder trained on text alone: sums, copying, lookup and facts, those of
`eval/text/sentences.py`. Out: comparison.md, comparison.json and wings.png in --out: what is left of the text after
tuning on pictures alone, how well the pictures are read, and the attention shift, with 95 % intervals.

The decoder is trained from random weights on text, once for each seed, and joined with the vision tower by a fresh
projector. Every row of a seed is then trained on the same pictures in the same order; seeds differ in the order, in the
place of the picture within the question, and in all weights that are fresh. The answer names what is in each of the 16
squares. In the first stage the projector is trained (and WINGS's visual learners), in the second what the row says.
Attention is causal everywhere. Further rows have 5 and 20 % of text among the pictures, at the rates of those without.
Rows are compared at the end of their runs, and where they first read as many pictures as each other, see
`train/studies/wings_front.py`: there a row has the rate of the second stage that keeps most text, mean of three seeds.
Rates, seeds and verdicts are those of `train/studies/rules.py`; the main difference is wings − full, which is not known
while a run of either does not read so many. With `--quick` one decoder serves all seeds, training is shorter, and only
the first pair is trained, at one rate and without text. Two pairs of rows differ in nothing but the learners:

    wings     decoder, projector, learners and routers      against full, decoder and projector
    learners  projector, learners and routers               against lora, projector and as many parameters of LoRA
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from eval.statistics import Estimate, estimate
from eval.text import sentences
from model.processor import Processor
from model.source import EMBEDDED
from train.embedded import text as text_base
from train.flags import flag
from train.studies import engine, rules
from train.studies.engine import QuickOptions, ScaledOptions, describe, difference
from train.studies.rules import Prediction
from train.studies.wings_front import compare_at_levels, judge_levels, kept, main_gain, pictures_of
from train.studies.wings_report import draw, to_markdown
from train.studies.wings_runs import (
    FACTOR,
    FIRST_RATE,
    FULL,
    MIXED,
    QUESTION,
    QUICK,
    RANK,
    RATES,
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

    seeds: int | None = flag(
        None, f"runs of a row, at least (default: {rules.LEAST_SEEDS}; 3 with --quick)", least=1, metavar="N"
    )
    most_seeds: int | None = flag(
        None,
        f"runs of a row if wings - full is not yet known to ±3 points (default: {rules.MOST_SEEDS}; 3 with --quick)",
        least=1,
        metavar="N",
    )
    limit: int = flag(100, "questions of each text task, and pictures", least=1, metavar="N")
    out: Path = flag(Path("runs/compare-wings"), engine.OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class WingsResults:
    """Cells: of the text-only decoders by seed, of the first stage by whether it has learners and by seed, and of each
    row by rate, seed and share of text; what was tried, by row and factor of its rate."""

    before: list[dict]
    starts: dict[bool, list[dict]]
    runs: dict[tuple[str, float, int, float], dict]
    tried: rules.Scores

    @property
    def arms(self) -> list[tuple[str, float]]:
        """Rows and shares of text."""
        return list(dict.fromkeys((name, share) for name, _, _, share in self.runs))

    def factor(self, name: str) -> float:
        return rules.best_rate(self.tried[name])

    def rate(self, name: str) -> float:
        """That of a row, which it also has with text among the pictures."""
        return self.factor(name) * RATES[name]

    def of_arm(self, name: str, share: float, rate: float | None = None) -> list[dict]:
        """The cells of a row with so much text, at its rate or another, by seed."""
        wanted = name, rate or self.rate(name), share
        found = {seed: cell for (row, rate, seed, text), cell in self.runs.items() if (row, rate, text) == wanted}
        return [found[seed] for seed in sorted(found)]

    def points(self, name: str, share: float, rate: float | None = None) -> list[list[dict]]:
        """By seed, the start of the second stage and its checkpoints."""
        starts = self.starts[ROWS[name].learners]
        cells = self.of_arm(name, share, rate)
        return [[start, *cell["course"]] for start, cell in zip(starts, cells, strict=False)]


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
    """All cells: of the first seeds at all rates, then of as many as are needed at the rate of each row. Those that do
    not need each other are computed side by side."""

    def finish(jobs: Sequence[tuple]) -> list[dict]:
        return engine.side_by_side(partial(compute, options), jobs, processes, spell_job)

    def begin(seeds: Sequence[int]) -> None:
        decoders = {cells.decoder(seed): ("text", cells.decoder(seed)) for seed in seeds}
        finish([*decoders.values(), ("pictures",)])
        results.before.extend(cells.get("text", seed) for seed in seeds)
        first = [(learners, seed) for learners in (True, False) for seed in seeds]
        for (learners, _), cell in zip(first, finish([("first", *run) for run in first]), strict=True):
            results.starts[learners].append(cell)

    def tune(seeds: Sequence[int], rates: Mapping[str, Sequence[float]], shares: Sequence[float] = (0.0,)) -> None:
        """Seed by seed: a process reads the pictures of a seed once."""
        wanted = [
            (name, rate, seed, share) for seed in seeds for share in shares for name in rates for rate in rates[name]
        ]
        results.runs.update(zip(wanted, finish([("tuned", *run) for run in wanted]), strict=True))

    def score(factors: Sequence[float]) -> rules.Scores:
        tune(first, {name: [factor * RATES[name] for factor in factors] for name in plan.rows})
        return {
            name: {
                factor: float(
                    np.mean([kept(points, most) for points in results.points(name, 0.0, factor * RATES[name])])
                )
                for factor in factors
            }
            for name in plan.rows
        }

    def main_pair() -> list[list[list[dict]]]:
        return [results.points(name, 0.0) for name in MIXED]

    plan, most, least = cells.study.plan, quarter(cells.study), options.seeds or rules.LEAST_SEEDS
    results = WingsResults([], {True: [], False: []}, {}, {})
    first = range(min(least, rules.TUNING_SEEDS))
    begin(first)
    results.tried.update(rules.bracket(plan.factors, score))
    done = len(first)
    while done < least or not rules.enough(main_gain(*main_pair(), most), done, least, options.most_seeds or least):
        more = range(done, max(least, done + 1))
        begin(more)
        tune(more, {name: [results.rate(name)] for name in plan.rows})
        done = more.stop
    tune(range(done), {name: [results.rate(name)] for name in MIXED}, plan.mixed)
    return results


def validation(runs: Mapping[tuple[str, float, int, float], dict], name: str) -> dict[float, float]:
    """Percent of the validation pictures, mean over seeds, by the rates that were tried for a row."""
    own = {place: cell for place, cell in runs.items() if (place[0], place[-1]) == (name, 0.0)}
    return rules.mean_scores(own, (cell["validation"] for cell in own.values()))[name]


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


def correlation(points: Sequence[Mapping]) -> Estimate | None:
    """Correlation (Pearson) of attention shift and lost text over a seed's checkpoints, mean over seeds: all runs of
    a seed start from one decoder, and count as one. None where fewer than two seeds have one."""
    each = []
    for seed in sorted({one["seed"] for one in points}):
        both = np.array([(one["shift"], one["lost"]) for one in points if one["seed"] == seed])
        if both.std(axis=0).min() > 1e-9:
            each.append(np.corrcoef(both.T)[0, 1])
    return estimate(each) if len(each) > 1 else None


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


def summarize(study: WingsStudy, results: WingsResults) -> dict:
    """comparison.json."""
    rows, before = {}, pooled(results.before)
    for name, share in results.arms:
        cells = results.of_arm(name, share)
        starts = results.starts[ROWS[name].learners]
        rows[arm_title(name, share)] = describe_cells(cells, before) | {
            "trains": ROWS[name].title,
            "trained": cells[0]["trained"],
            "rate": results.rate(name),
            "kept": {f"{factor * RATES[name]:g}": 100 * text for factor, text in results.tried[name].items()},
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
    common = {}
    for name, control in PAIRS.items():
        if name in rows and (factor := results.factor(control)) != results.factor(name):
            both = (results.points(row, 0.0, factor * RATES[row]) for row in (name, control))
            one, other = (points[: rules.TUNING_SEEDS] for points in both)
            common[name] = {"control": control, "at_levels": compare_at_levels(one, other, quarter(study))}
    judge_levels(at_levels)
    judge_levels({name: row["at_levels"] for name, row in common.items()})
    verdicts = {
        name: {level: found["verdict"] for level, found in of_row.items() if "verdict" in found}
        for name, of_row in at_levels.items()
    }
    points = checkpoints(study, results)
    rho = correlation(points)
    return {
        "quick": study.plan is QUICK,
        "seeds": list(range(len(results.before))),
        "scale": study.scale,
        "limit": study.limit,
        "steps": study.steps,
        "rank": RANK,
        "rows": rows,
        "common": common,
        "edges": rules.edges(results.tried),
        "before": describe_cells(results.before, before),
        "stage_1": {START_TITLES[on]: describe_cells(cells, before) for on, cells in results.starts.items()},
        "predictions": rules.check(PREDICTIONS, verdicts),
        "per_run": study.plan.checkpoints,
        "runs": len({(one["row"], one["rate"], one["seed"]) for one in points}),
        "checkpoints": points,
        "correlation": rho and engine.verdict(rho),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = engine.read_options(WingsOptions, "wings", __doc__, argv)
    options = engine.with_seeds(options, not options.quick)
    cells, processes = open_cells(options), engine.default_processes("cpu", options.threads)

    def find() -> dict:
        return summarize(cells.study, collect(options, cells, processes))

    engine.run_study(options.out, find, to_markdown, draw, processes=processes)
