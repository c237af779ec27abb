"""Study: is a differential language model, trained from random weights, better than a plain one of the same size?

    python -m train.compare --rows text                          three sizes, up to 0.6 million parameters, two cores
    python -m train.compare --rows text --quick                  two sizes, shorter runs
    python -m train.reproduce text --sizes small --tokens 2e9 --batch-size 64 --device cuda --text DIR

In: text, by default the source of Python's standard library, and the tasks of `eval/text/tasks.py`. Out: the report of
`train/studies/report.py`, with λ, the loss over tokens, and the figures of Ye et al. (2024) beside ours.

Runs of one size and seed are a pair: both kinds have equal parameters to within 1 %, the same rows in the same order,
and, but for λ and the norm by head, the same initial weights to the bit. The loss on validation text, after all tokens,
chooses a rate for each kind and size. Each task is asked at its largest number of records, needles or examples. A cell
is a run folder, which `python -m eval.text all RUN…` measures by depth, number and length of context.

Of the paper's experiments, scaling by size and by tokens is in miniature; examples in context are of an invented task;
missing are downstream tasks, hallucination, outliers and attention in few bits, and the ablations.
"""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from eval import figures
from eval.report import markdown_table
from eval.statistics import estimate
from eval.text import measures
from eval.text.corpus import Corpus, kept_corpus, open_corpus
from eval.text.tasks import SYMBOLS
from model.common import write_text
from model.differential import lambdas
from model.system_configs import TEXT_PRESETS
from train.distributed import join_world
from train.flags import flag, read_flags
from train.optim import count
from train.studies import built, engine, report
from train.studies.engine import Run, Study
from train.studies.options import StudyOptions, deciding
from train.studies.pool import Job, once
from train.studies.rules import Measure, Prediction
from train.systems.text import TextSettings, learn
from weights.export import export_model
from weights.load import load_model

KINDS = ("plain", "differential")
CURVE = 8  # points of the loss over tokens in a run
SIZES, RATES = ("0.6m", "0.3m", "0.2m"), (3e-3, 6e-3, 1.2e-2)  # the main size first; rates to try first
DEFAULTS = TextSettings(tokens=3e5, checkpoint_every=250)
QUICK = {"sizes": ("0.3m", "0.1m"), "tokens": 1.5e5, "limit": 50, "seeds": 5, "positive": False}
QUICK |= {"rates": (1.2e-2, 2.4e-2, 4.8e-2)}
PREDICTED = (  # from a run of three seeds in which nothing was retrieved, and from Ye et al. 2024
    ("loss", "worse", "+0.09 nats at 0.64 million parameters"),
    ("recall", "better", "the paper: less attention goes to noise"),
    ("needle", "better", "the paper, Table 2"),
    ("examples", "better", "the paper, section 3.5"),
    ("order", "better", "the paper, section 3.5"),
)
# Ye et al. 2024, Table 3: shares of the attention at 3B, mean over depths, plain and differential
SHARES = {"attention": ("on the answer", "0.05", "0.32"), "attention-noise": ("on noise", "0.51", "0.02")}
TITLES = {"recall": "one of {} records", "needle": "one of {} needles in a text", "examples": "after {} examples"}


@dataclass(frozen=True)
class Options(StudyOptions):
    """The flags of this study."""

    sizes: tuple[str, ...] = flag(SIZES, "the main one first", choices=list(TEXT_PRESETS), nargs="+", metavar="PRESET")
    limit: int = flag(100, "windows of text, and tests of each task", least=5, metavar="N")
    positive: bool = flag(True, "the positive control, a minute")
    text: tuple[str, ...] = flag((), "files, folders (default: Python's standard library)", nargs="*", metavar="PATH")
    tokens: float = flag(DEFAULTS.tokens, "tokens of a run", least=1, most=1e15)
    length: int = flag(DEFAULTS.length, "positions of a row", least=max(measures.EXAMPLES) + 4, most=2**20)
    batch_size: int = flag(DEFAULTS.batch_size, "rows of a step", least=1)
    device: str = flag(DEFAULTS.device, "cuda, cpu, … (default: cuda if there is one)")


def read_arguments(argv: Sequence[str] | None) -> tuple[Options, TextSettings]:
    """The study's flags, and the settings of its runs. Raises UserError."""
    options = read_flags(Options, "train.compare --rows text", __doc__, argv, QUICK)
    options = replace(options, out=options.out or Path("runs/compare-text" + "-quick" * options.quick))
    given = {name: getattr(options, name) for name in ("text", "tokens", "length", "batch_size", "device")}
    return options, replace(DEFAULTS, **given, preset=options.sizes[0], corpus=f"{options.out}/corpus")


# Cells


def make(settings: TextSettings, limit: int, job: Job, folder: Path) -> dict:
    """Train the model of a cell in its folder, unless it is there, and measure it on a split."""
    settings = replace(settings, **dict(job.changes), lr=job.rate, seed=job.seed)
    corpus, world = kept_corpus(Path(settings.corpus)), join_world(settings.device)

    def train() -> dict:
        write_text(folder / "config.json", json.dumps(asdict(settings), indent=1) + "\n")
        points = {round(settings.steps * (number + 1) / CURVE) for number in range(CURVE)}
        model, progress = learn(settings, corpus, folder, world, points=points)
        export_model(model, folder / "model")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        facts = {"parameters": count(model.parameters()), "seconds": progress.seconds}
        logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        done = [(line["step"] + 1, line["held_out_loss"]) for line in logged if "held_out_loss" in line]
        facts["curve"] = [(steps * settings.rows * settings.length, loss) for steps, loss in done]  # tokens, nats
        return facts | {"lambda": [value.item() for value in lambdas(model).values()]}

    facts, panels = once(folder / "facts.json", train), {}
    model = load_model(folder / "model", device=world.device)
    for name in ("nll", "recall", "needle", "examples"):
        panels |= measures.MEASURES[name](model, corpus, settings.length, limit, job.split)
    if job.split == "test":
        panels |= measures.MEASURES["attention"](model, corpus, settings.length, limit)
        facts |= {name: float(np.mean(panels[name].values)) for name in SHARES}
    scores = {name: hardest(panels[name]) for name in ("recall", "needle", "examples")}
    scores["order"] = [1 - margin for margin in hardest(panels["examples-margin"])]
    return {"scores": scores | {"loss": window_losses(panels["nll"])}, "facts": facts}


def hardest(panel: measures.Scores) -> list[float]:
    """The scores of the tests with the most records, needles or examples."""
    return [value for label, value in zip(panel.labels, panel.values, strict=True) if label == max(panel.labels)]


def window_losses(panel: measures.Scores) -> list[float]:
    """The loss of each window of text in nats a token; the panel has a mean for each bin of positions."""
    bins = measures.context_bins(max(panel.labels))
    widths = [(last - first) / bins[-1][1] for first, last in bins]
    return (np.reshape(panel.values, (-1, len(bins))) @ widths).tolist()


# The study


def measures_of(corpus: Corpus, length: int, limit: int) -> dict[str, Measure]:
    """The loss on text, and each task at the largest number that fits a row."""
    most = {"recall": max(number for number in measures.RECALL if number + 4 < length)}
    most |= {"needle": max(number for number in measures.NEEDLES if 3 * number < length)}
    most |= {"examples": max(measures.EXAMPLES)}
    documents = [str(document) for _, document in measures.windows(corpus, length, limit)]
    chances = {name: 100 * measures.chance(name, [number])[number] for name, number in most.items()}
    tasks = {name: Measure(TITLES[name].format(most[name]), range(limit), chances[name]) for name in most}
    order = Measure("of them in any order: 100 less best minus worst", range(limit), in_mean=False)
    more = {"margin": 0.03, "less_is_better": True, "in_mean": False, "failed": math.log(corpus.tokenizer.vocab_size())}
    loss = Measure("loss on text, nats", documents, is_share=False, **more)
    return tasks | {"order": order, "loss": loss}


def study_of(settings: TextSettings, options: Options, corpus: Corpus) -> Study:
    pairs = {f"differential, {size}": (f"plain, {size}",) for size in options.sizes}
    decides = deciding(replace(settings, corpus=corpus.digest, text=())), options.limit
    return Study(
        name="compare-text",
        title="Differential against plain language models, from nothing",
        rows={f"{kind}, {size}": (("attention", kind), ("preset", size)) for size in options.sizes for kind in KINDS},
        make=partial(make, settings, options.limit),
        key=repr(decides),
        measures=measures_of(corpus, settings.length, options.limit),
        beside={"plain attention of the same size": pairs},
        rates=options.rates or RATES,
        main="loss",
        lengthen=None if options.quick else lambda changes, ratio: (*changes, ("tokens", settings.tokens * ratio)),
        predictions=tuple(Prediction(f"differential, {settings.preset}", *prediction) for prediction in PREDICTED),
        more=partial(blocks, options),
    )


def blocks(options: Options, run: Run) -> list:
    """λ, the loss over tokens, the paper's figures, and the command that measures the runs by depth and number."""
    first = options.sizes[0]
    if not all(map(run.facts, run.cells)):
        return ["All runs of a row diverged."]
    facts = {kind: run.facts(f"{kind}, {first}") for kind in KINDS}
    weights = np.mean([cell["lambda"] for cell in facts["differential"]], axis=0)
    shares = []
    for name, (title, *published) in SHARES.items():
        means = [np.mean([cell[name] for cell in facts[kind]]) for kind in KINDS]
        shares.append([f"attention {title}", *published, *(f"{mean:.3f}" for mean in means)])
    curves = {kind: np.mean([cell["curve"] for cell in facts[kind]], axis=0).tolist() for kind in KINDS}
    title = f"loss over tokens, {first}, validation rows"
    figures.save(figures.line_chart(curves, title, "tokens", "nats a token"), run.out / "curve.png")
    parameters = [run.facts(f"plain, {size}")[0]["parameters"] for size in options.sizes]
    losses = np.array([[run.scores(f"{kind}, {size}")["loss"] for kind in KINDS] for size in options.sizes])
    jobs = [job for job in run.used if job.row in (f"{kind}, {first}" for kind in KINDS) and job.split == "test"]
    folders = [str(run.file(job).parent) for job in jobs]
    return [
        f"λ of {first} by layer, mean over seeds: {', '.join(f'{weight:.2f}' for weight in weights)}.",
        f"![{title}](curve.png)",
        "## Published (Ye et al. 2024, 3B) and here",
        markdown_table(["share of", *KINDS, *(f"{kind}, here" for kind in KINDS)], shares),
        equal_loss(parameters, losses, run.study.measures["loss"].groups),
        f"By depth, number and length of context: `python -m eval.text all {' '.join(folders)}`",
        *(built.blocks(run, built.ORIGINAL) if options.positive else []),
    ]


def equal_loss(parameters: Sequence[float], losses: np.ndarray, documents: Sequence[str]) -> str:
    """The share of plain attention's parameters with which differential attention has its loss, in a sentence.

    parameters: of each size, the main one first. losses: (sizes, kinds, seeds, windows), in nats. The loss is taken as
    a line over the logarithm of the parameters, with one slope b of both kinds: a gap g at the main size is worth a
    factor of exp(-g / b).
    """
    span = max(parameters) / min(parameters)
    slopes = np.polyfit(np.log(parameters), losses.mean(axis=(1, 3)), 1)[0] if span > 1 else np.zeros(losses.shape[2])
    slope, gap = estimate(slopes[:, None]), estimate(losses[0, 1] - losses[0, 0], documents)
    if not slope.high < -1e-9:
        return "The loss is not shown to fall with the parameters: no share of them for equal loss follows."
    share, low, high = np.exp(-np.array(gap[:3]) / slope.mean)
    words = f"{100 * share:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of plain attention's parameters"
    beyond = ": more than all sizes tried, so none follows" if max(high, 1 / low) > span else ""
    return f"Equal loss takes {words}{beyond} (published: 62 % at 6.8B), by the slope of {len(parameters)} sizes."


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = read_arguments(argv)
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, SYMBOLS)
    print(f"{len(corpus.ids['train']):,} tokens of text to learn from", file=sys.stderr)
    print(report.write(engine.run(study_of(settings, options, corpus), options)))
