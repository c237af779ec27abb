"""Study: is a differential language model, trained from random weights, better than a plain one of
the same size?

    python -m train.compare --rows text            up to 0.6 million parameters, two cores
    python -m train.compare --rows text --quick    two sizes, shorter runs
    python -m train.reproduce text --sizes small --tokens 2e9 --batch-size 64 \\
        --device cuda --text DIR

In: text, by default the source of Python's standard library, and the tasks of
`eval/systems/text/tasks.py`, each at its largest number of records, needles or examples. Out: the
report, with λ, and the figures of Ye et al. (2024) beside ours. Runs of one size and seed are a
pair: both kinds have equal parameters to within 1 %, the same rows in the same order, and, but for
λ and the norm by head, the same initial weights to the bit. Differential attention has half as many
heads, each twice as wide; so has `wide`, a plain row. A task that gets no harder with its number
does not count. The loss on validation text chooses the rates. Of the paper's experiments are
missing: scaling beyond a miniature, downstream tasks, hallucination, outliers and attention in few
bits, and the ablations.
"""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from eval.report import markdown_table
from eval.systems.text import measures
from eval.systems.text.corpus import Corpus, kept_corpus, open_corpus
from eval.systems.text.tasks import SYMBOLS
from model.common import write_text
from model.device import choose_device
from model.differential import lambdas
from model.systems.configs import TEXT_PRESETS
from train.distributed import World
from train.flags import flag, from_values, several
from train.optim import parameter_count
from train.run import lock_folder
from train.studies import built, engine, report
from train.studies.cells import Job, digest
from train.studies.rules import Measure
from train.studies.training import deciding, read_given
from train.systems.text import TextSettings, train_text
from weights.export import export_model

KINDS = ("plain", "differential")
SIZES = ("0.6m", "0.3m", "0.2m")  # the main one first
RATES = (3e-3, 6e-3, 1.2e-2)  # to try first
QUICK = {
    "sizes": ("0.3m", "0.1m"),
    "tokens": 1.5e5,
    "limit": 50,
    "seeds": 5,
    "positive": False,
    "rates": (1.2e-2, 2.4e-2, 4.8e-2),
}
PREDICTED = (  # from a run of three seeds in which nothing was retrieved, and from Ye et al. 2024
    ("loss", "worse", "+0.09 nats at 0.64 million parameters"),
    ("recall", "better", "the paper: less attention goes to noise"),
    ("needle", "better", "the paper, Table 2"),
    ("examples", "better", "the paper, section 3.5"),
    ("order", "better", "the paper, section 3.5"),
)
# Ye et al. 2024, Table 3: shares of the attention at 3B, mean over depths, plain and differential
SHARES = {
    "attention": ("on the answer", "0.05", "0.32"),
    "attention-noise": ("on noise", "0.51", "0.02"),
}
# seconds of a step of differential attention beside plain attention's, on a CPU, measured once
TIMES = 1.4
TITLES = {
    "recall": "one of {} records",
    "needle": "one of {} needles in a text",
    "examples": "after {} examples",
}


@dataclass(frozen=True)
class Options(engine.StudyOptions, TextSettings):
    sizes: tuple[str, ...] = several(TEXT_PRESETS, "the main one first", SIZES, metavar="PRESET")
    limit: int = flag(100, "windows of text, and tests of each task", least=5, metavar="N")
    positive: bool = flag(True, "the positive control, a minute")
    tokens: float = flag(3e5, "tokens of a run", least=1, most=1e15)
    length: int = flag(256, "positions of a row", least=max(measures.EXAMPLES) + 4, most=2**20)
    checkpoint_every: int = flag(250, "steps between checkpoints", least=1)


def make(options: Options, job: Job, folder: Path) -> dict:
    """Train the model of a cell in its folder, a run folder that `eval.systems.text` reads, and
    measure it."""
    # 1. training
    settings = replace(options, **dict(job.changes), lr=job.rate, seed=job.seed)
    corpus = kept_corpus(Path(settings.corpus))
    world = World(0, 1, choose_device(settings.device))
    model, progress = train_text(settings, corpus, folder, world)
    facts = {"parameters": parameter_count(model.parameters()), "seconds": progress.seconds}
    facts["lambda"] = [value.item() for value in lambdas(model).values()]
    # 2. scores
    asked = (model, corpus, settings.length, options.limit)
    scores = {}
    for split in ("validation", "test"):
        panels = {}
        for name in ("nll", "recall", "needle", "examples"):
            panels |= measures.MEASURES[name](*asked, split)
        scores[split] = {name: hardest(panels[name]) for name in TITLES}
        scores[split]["order"] = [1 - margin for margin in hardest(panels["examples-margin"])]
        scores[split]["loss"] = window_losses(panels["nll"])
        if split == "validation":
            facts["ladders"] = {name: ladder(panels[name]) for name in TITLES}
    shares = measures.MEASURES["attention"](*asked)
    facts |= {name: float(np.mean(shares[name].values)) for name in SHARES}
    # 3. the run folder
    decided = deciding(settings, TextSettings)
    write_text(folder / "config.json", json.dumps(decided, indent=1) + "\n")
    shutil.rmtree(folder / "model", ignore_errors=True)  # of a study that was killed here
    export_model(model, folder / "model")  # pyright: ignore[reportArgumentType]
    shutil.rmtree(folder / "checkpoints")
    return {"scores": scores, "facts": facts}


def ladder(panel: measures.Scores) -> list[float]:
    """The mean score by number of records, needles or examples, the fewest first."""
    numbers, values = np.array(panel.labels), np.array(panel.values)
    return [float(values[numbers == number].mean()) for number in np.unique(numbers)]


def hardest(panel: measures.Scores) -> list[float]:
    """The scores of the tests with the most records, needles or examples."""
    most = max(panel.labels)
    return [value for label, value in zip(panel.labels, panel.values, strict=True) if label == most]


def window_losses(panel: measures.Scores) -> list[float]:
    """The loss of each window of text in nats a token; the panel has a mean for each bin of
    positions."""
    bins = measures.context_bins(max(panel.labels))
    widths = [(last - first) / bins[-1][1] for first, last in bins]
    return (np.reshape(panel.values, (-1, len(bins))) @ widths).tolist()


def study_of(options: Options, corpus: Corpus) -> engine.Study:
    # 1. rows, of each size
    rows, pairs = {}, {}
    for size in options.sizes:
        for kind in (*KINDS, "wide"):
            row = f"{kind}, {size}"
            rows[row] = (("attention", kind), ("preset", size))
            if kind != "plain":
                pairs[row] = (f"plain, {size}",)
    lengthen = None
    if not options.quick:
        times = {row: TIMES for row in rows if row.startswith("differential")}
        lengthen = ("tokens", options.tokens, times)
    # 2. each task at the largest number that fits a row, and the loss on text
    length, tests = options.length, range(options.limit)
    most = {
        "recall": max(number for number in measures.RECALL if number + 4 < length),
        "needle": max(number for number in measures.NEEDLES if 3 * number < length),
        "examples": max(measures.EXAMPLES),
    }
    tasks = {}
    for name, number in most.items():
        chance = 100 * measures.chance(name, number)
        tasks[name] = Measure(TITLES[name].format(number), tests, chance)
    order = "of them in any order: 100 less best minus worst"
    tasks["order"] = Measure(order, tests, in_mean=False)
    tasks["loss"] = Measure(
        "loss on text, nats",
        [str(document) for _, document in measures.windows(corpus, length, options.limit)],
        is_share=False,
        margin=0.03,
        less_is_better=True,
        in_mean=False,
        failed=math.log(corpus.tokenizer.vocab_size()),
    )
    # 3. the study
    decided = deciding(replace(options, corpus=corpus.digest, text=()), TextSettings)
    main_row = f"differential, {options.preset}"
    return engine.Study(
        name="compare-text",
        title="Differential against plain language models, from nothing",
        rows=rows,
        make=partial(make, options),
        key=digest(decided, options.limit),
        measures=tasks,
        beside={"plain attention of the same size": pairs},
        rates=options.rates or RATES,
        main="loss",
        lengthen=lengthen,
        predictions=tuple((main_row, *prediction) for prediction in PREDICTED),
        more=partial(blocks, options),
    )


def blocks(options: Options, run: engine.Run) -> list:
    """λ, and the paper's figures. `eval.systems.text all CELL…` measures the cells by depth and
    number."""
    first = options.sizes[0]
    rows = {kind: f"{kind}, {first}" for kind in KINDS}
    # 1. λ
    weights = np.mean([cell["lambda"] for cell in run.facts(rows["differential"])], axis=0)
    by_layer = ", ".join(f"{weight:.2f}" for weight in weights)
    # 2. attention, as the paper shows it
    shares = []
    for name, (title, *published) in SHARES.items():
        here = []
        for row in rows.values():
            here.append(f"{np.mean([cell[name] for cell in run.facts(row)]):.3f}")
        shares.append([f"attention {title}", *published, *here])
    head = ["share of", *KINDS, *(f"{kind}, here" for kind in KINDS)]
    found = [
        f"λ of {first} by layer, mean over seeds: {by_layer}.",
        "## Published (Ye et al. 2024, 3B) and here",
        markdown_table(head, shares),
    ]
    return found + built.blocks(run, built.ORIGINAL) if options.positive else found


def main(argv: Sequence[str] | None = None) -> None:
    decided = ("attention", "preset", "corpus", "lr")
    given = read_given(Options, argv, "train.compare --rows text", __doc__, QUICK, decided)
    options = from_values(Options, given)
    folder = "compare-text-quick" if options.quick else "compare-text"
    out = options.out or Path("runs", folder)
    options = replace(options, out=out, corpus=f"{out}/corpus", preset=options.sizes[0])
    vocabulary = TEXT_PRESETS[options.preset].vocab_size
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out):  # a running study keeps its corpus
        corpus = open_corpus(Path(options.corpus), options.text, vocabulary, SYMBOLS)
        print(f"{len(corpus.ids['train']):,} tokens of text to learn from", file=sys.stderr)
        report.publish(study_of(options, corpus), options)
