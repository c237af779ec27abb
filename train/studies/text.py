"""Study: is a differential language model, trained from random weights, better than a plain one of the same size?

    python -m train.compare --rows text                          three sizes, up to 0.6 million parameters, two cores
    python -m train.compare --rows text --quick                  two sizes, shorter runs
    python -m train.compare --rows text --preset small --tokens 2e9 --batch-size 64 --device cuda --text DIR

In: text, by default the source of Python's standard library, and the tasks of `eval/text/tasks.py`. Out: comparison.md,
comparison.json and pictures: likelihood by context, recall, needles by depth, many examples and their order, attention
on the answer, the loss over tokens and by size, and the share of parameters that gives equal loss.

The rules are those of `train/studies/rules.py`. Of this study's own are:
- Runs of one size and seed are a pair: both kinds have equal parameters to within 1 %, the same rows in the same order,
  and, but for λ and the norm by head, the same initial weights to the bit.
- A rate for each kind and size, of one grid, by the mean validation loss of three seeds on a share of the tokens. A
  second table has, of each size whose kinds chose different rates, both at plain attention's.
- How many records, needles or examples a test has, is chosen for each size on the validation split: the hardest number
  at which plain attention is in range. The main difference of a size is the mean over the measures in range.
- The loss is judged in hundredths of a nat, which is about a percent of perplexity.
- A second control of the first size trains as long: on as many times the tokens as a step of differential attention
  takes the time of a plain one. The positive control is `train/studies/built.py`, learned by the same attention.
- PREDICTIONS, written before the study was run, as the rest in `train/studies/text_verdicts.py`.

A cell is one kind of attention, size, number of tokens, rate and seed, kept as a run folder that
`eval/text/measures.py` measures too. Cells are independent: `--processes` of them run side by side.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from eval.text.corpus import Corpus, find_corpus, kept_corpus, open_corpus
from eval.text.measures import DEPTHS, MEASURES, Scores
from eval.text.tasks import SYMBOLS
from model.common import UserError, write_text
from model.device import autocast_dtype
from model.differential import lambdas
from model.system_configs import TEXT_PRESETS, TextModelConfig
from model.text import new_model
from train.distributed import join_world
from train.flags import flag
from train.optim import count
from train.plan import PlanRow, plan_table, step_costs
from train.recipes import GPUS
from train.studies import built, engine, rules
from train.studies.attention_runs import paired_ratio
from train.studies.engine import PlannedOptions, ScaledOptions, cell_folder, deciding, finish_cell, read_rates
from train.studies.text_report import KINDS, MAIN, draw, to_markdown
from train.studies.text_verdicts import LADDERS, PREDICTIONS, choose_rungs, climb, gains, judge_sizes, window_losses
from train.systems.text import TextOrder, TextSettings, check, learn, make_optimizer, text_loss, validation_loss
from weights.checkpoint import empty_model
from weights.export import export_model

VERSION = 3  # of the code that decides a cell's result: raise it to compute all cells again

SHARES = (0.25, 0.5)  # of the tokens, for the loss by tokens; not with --quick
CURVE = 8  # points of the loss over tokens within a run,
CURVE_BATCHES = 4  # of the validation split
AS_IN_TEXT = "as in train.text"
# with so many tokens plain attention is in range at every size; with 4e5 it has 96 to 100 % of the records and 68 to
# 91 % of the needles
DEFAULTS = TextSettings(preset="0.6m", tokens=3e5, checkpoint_every=250)
SIZES = ("0.3m", "0.2m")  # beside the default size
QUICK = {"preset": "0.3m", "sizes": ("0.1m",), "tokens": 1.5e5, "limit": 50, "most_seeds": rules.LEAST_SEEDS}
QUICK |= {"rates": (1.2e-2, 2.4e-2, 4.8e-2), "positive": False}


@dataclass(frozen=True)
class TextOptions(PlannedOptions, ScaledOptions):
    """The flags of this study."""

    out: Path = flag(Path("runs/compare-text"), engine.OUT_HELP, metavar="DIR")
    seeds: int = flag(rules.LEAST_SEEDS, "runs of a kind and size, at least", least=1, metavar="N")
    most_seeds: int = flag(
        rules.MOST_SEEDS, "runs of the first size if its main difference is not yet known to ±3 points", least=1
    )
    rates: tuple[float, ...] = flag(
        (3e-3, 6e-3, 1.2e-2),
        "peak learning rates to try first, for both kinds (default: 3e-3,6e-3,1.2e-2)",
        type=read_rates,
        metavar="A,B,…",
    )
    search: float = flag(0.5, "share of the tokens that a rate is tried for", share=True, metavar="SHARE")
    limit: int = flag(100, "windows, tests of each difficulty", least=len(DEPTHS), metavar="N")
    threads: int = flag(torch.get_num_threads(), "CPU threads of all processes together", least=1, metavar="N")
    text: tuple[str, ...] = flag(
        (), "files or folders of plain text (default: Python's standard library)", nargs="*", metavar="PATH"
    )
    preset: str = flag(DEFAULTS.preset, AS_IN_TEXT, choices=list(TEXT_PRESETS))
    sizes: tuple[str, ...] = flag(
        (),
        "more presets (default: 0.3m 0.2m, none for another --preset; published: 830m 1.4b 2.8b 6.8b 13.1b)",
        nargs="*",
        choices=list(TEXT_PRESETS),
        metavar="PRESET",
    )
    tokens: float = flag(DEFAULTS.tokens, AS_IN_TEXT)
    length: int = flag(DEFAULTS.length, AS_IN_TEXT)
    batch_size: int = flag(DEFAULTS.batch_size, AS_IN_TEXT)
    accumulate: int = flag(DEFAULTS.accumulate, AS_IN_TEXT)
    device: str = flag(DEFAULTS.device, AS_IN_TEXT)
    plan: bool = flag(False, "train nothing: print what the runs take (memory, disk, hours)")
    gpu: str = flag("H100", "GPU of --plan", choices=list(GPUS))


def read_arguments(argv: Sequence[str] | None) -> tuple[TextOptions, TextSettings]:
    """The study's flags, and the settings of its runs. Raises UserError."""
    options = engine.read_options(TextOptions, "text", __doc__, argv)
    if not options.search > 0:
        raise UserError(f"--search is {options.search}, expected a share above 0")
    if options.quick:
        options = replace(options, **QUICK)
    elif not options.sizes and options.preset == DEFAULTS.preset:
        options = replace(options, sizes=SIZES)
    options = replace(options, sizes=tuple(size for size in dict.fromkeys(options.sizes) if size != options.preset))
    known = {field.name for field in fields(TextSettings)}
    given = {name: value for name, value in vars(options).items() if name in known}
    given |= {"tokens": options.tokens * options.scale, "corpus": str(options.out / "corpus")}
    settings = replace(DEFAULTS, **given)
    check(settings)
    for size in options.sizes:
        if TEXT_PRESETS[size].vocab_size != settings.vocab_size:
            raise UserError(
                f"--sizes {size}: has another vocabulary than --preset {options.preset}: losses would differ"
            )
    processes = options.processes or engine.default_processes(options.device, options.threads)
    return replace(options, processes=processes), settings


@dataclass(frozen=True)
class Job:
    """A cell to compute. limit: windows, and tests of each kind; 0 measures nothing but the validation loss."""

    out: Path
    settings: TextSettings
    limit: int

    @property
    def title(self) -> str:
        own = self.settings
        return f"{own.preset}, {own.attention}, rate {own.lr:g}, seed {own.seed}, {own.tokens:,.0f} tokens"


def run_cell(job: Job) -> dict:
    """{"parameters", "tokens", "loss" on validation, "curve": [tokens, loss] in training, "lambda" by layer, "seconds",
    "cpu_seconds", "folder", "ladders", "panels"}.

    ladders: of plain attention, percent right on the validation split by difficulty; panels: `Scores` on the test split
    by name. Both are empty for a limit of 0.
    """
    settings = job.settings
    corpus = kept_corpus(Path(settings.corpus))  # `main` has prepared it
    points = {round(settings.steps * (number + 1) / CURVE) for number in range(CURVE)} if job.limit else set()

    def work(folder: Path) -> dict:
        write_text(folder / "config.json", json.dumps(asdict(settings), indent=1) + "\n")
        started = time.perf_counter()
        model, _ = learn(settings, corpus, folder, join_world(settings.device), points=points, batches=CURVE_BATCHES)
        logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        tokens = settings.rows * settings.length
        result = {
            "parameters": count(model.parameters()),
            "tokens": settings.steps * tokens,
            "loss": validation_loss(model, corpus, settings),
            "curve": [[(one["step"] + 1) * tokens, one["held_out_loss"]] for one in logged if "held_out_loss" in one],
            "lambda": [value.item() for value in lambdas(model).values()],
            "folder": str(folder.relative_to(job.out)),
            "ladders": {},
            "panels": {},
        }
        if job.limit:
            if settings.attention == KINDS[0]:
                result["ladders"] = {
                    name: climb(MEASURES[name](model, corpus, settings.length, job.limit, split="validation")[name])
                    for name in LADDERS
                }
            for measure in MEASURES.values():
                found = measure(model, corpus, settings.length, job.limit)
                result["panels"] |= {name: scores._asdict() for name, scores in found.items()}
            shutil.rmtree(folder / "model", ignore_errors=True)
            export_model(model, folder / "model")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result | {"seconds": time.perf_counter() - started}

    decide = deciding(settings) | {"text": corpus.digest, "corpus": ""}
    return finish_cell(cell_folder(job.out, VERSION, decide, job.limit) / "result.json", job.title, work)


def run_cells(jobs: Sequence[Job], processes: int) -> list[dict]:
    """`run_cell` of each job, side by side."""

    def spell_cell(job: Job, cell: dict) -> str:
        return f"{job.title}: validation loss {cell['loss']:.4f} ({cell['cpu_seconds']:.0f} CPU seconds)"

    return engine.side_by_side(run_cell, jobs, processes, spell_cell)


class Runs:
    """The cells of a study, each computed once."""

    def __init__(self, options: TextOptions, settings: TextSettings):
        self.options, self.settings = options, settings
        self.sizes = (settings.preset, *options.sizes)
        self.rows = list(product(KINDS, self.sizes))

    def cells(self, wanted: Sequence[tuple[str, str, float, int, float]], limit: int) -> list[dict]:
        """Those of (kind, size, rate, seed, share of the tokens)."""
        jobs = [
            Job(
                self.options.out,
                replace(
                    self.settings, attention=kind, preset=size, lr=rate, seed=seed, tokens=share * self.settings.tokens
                ),
                limit,
            )
            for kind, size, rate, seed, share in wanted
        ]
        return run_cells(jobs, self.options.processes or 1)

    def tune(self) -> rules.Scores:
        """Minus the validation loss, by row and rate: the mean over seeds."""
        options = self.options
        limit = options.limit if options.search == 1 else 0  # a run with all tokens is a result too
        seeds = range(min(rules.TUNING_SEEDS, options.seeds))

        def score(rates: Sequence[float]) -> rules.Scores:
            wanted = [(*row, rate, seed, options.search) for seed in seeds for rate in rates for row in self.rows]
            names = [(name_of((kind, size)), rate) for kind, size, rate, *_ in wanted]
            return rules.mean_scores(names, (-cell["loss"] for cell in self.cells(wanted, limit)))

        if len(options.rates) == 1:
            return {name_of(row): {options.rates[0]: 0.0} for row in self.rows}
        return rules.bracket(options.rates, score)

    def step_ratio(self) -> float:
        """The CPU time of a training step of differential attention, the first size, in that of a plain one, measured
        once, to a tenth."""

        def work(folder: Path) -> dict:
            steps = []
            for kind in reversed(KINDS):
                settings = replace(self.settings, attention=kind)
                model = new_model(settings.preset, kind == "differential", 0)
                batch = TextOrder(kept_corpus(Path(settings.corpus)), settings).batch(0)
                steps.append((partial(text_loss, model, batch), make_optimizer(model, settings)))
            return {"ratio": paired_ratio(steps)}

        own = deciding(replace(self.settings, corpus=""))
        file = cell_folder(self.options.out, "step", VERSION, own) / "step.json"
        return round(finish_cell(file, "a step of both kinds", work)["ratio"], 1)

    def pair(
        self, size: str, rates: Mapping[str, float], seeds: int, share: float = 1.0, kinds: Sequence[str] = KINDS
    ) -> dict[str, list[dict]]:
        """The cells of both kinds, or of one, by seed."""
        wanted = [(kind, size, rates[name_of((kind, size))], seed, share) for seed in range(seeds) for kind in kinds]
        cells = self.cells(wanted, self.options.limit)
        return {kind: cells[number :: len(kinds)] for number, kind in enumerate(kinds)}


def name_of(row: tuple[str, str]) -> str:
    return f"{row[0]}, {row[1]}"


def compare(options: TextOptions, settings: TextSettings) -> dict:
    """Search rates, train and measure. Returns comparison.json."""
    runs = Runs(options, settings)
    scores, main = runs.tune(), settings.preset
    rates = {row: rules.best_rate(tried) for row, tried in scores.items()}
    pairs, count_ = {main: runs.pair(main, rates, options.seeds)}, options.seeds
    rungs = {main: choose_rungs(pairs[main][KINDS[0]])}
    most = max(options.seeds, options.most_seeds)
    while not rules.enough([gains(pairs[main], rungs[main])[MAIN]], count_, options.seeds, most):
        count_ += 1
        pairs[main] = runs.pair(main, rates, count_)
    pairs |= {size: runs.pair(size, rates, options.seeds) for size in options.sizes}
    rungs |= {size: choose_rungs(pairs[size][KINDS[0]]) for size in options.sizes}
    shares = () if options.quick else SHARES
    points = [(size, 1.0, pair) for size, pair in pairs.items()]
    points += [(main, share, runs.pair(main, rates, options.seeds, share)) for share in shares]
    judged, timed, common = judge_sizes(pairs, rungs), {}, {}
    if not options.quick and (ratio := runs.step_ratio()) > 1:
        pair = pairs[main] | runs.pair(main, rates, count_, ratio, KINDS[:1])
        timed = {f"{main}, {ratio} × tokens": judge_sizes({main: pair}, rungs)[main]}
    for size in pairs:
        plain, other = (name_of((kind, size)) for kind in KINDS)
        if rates[plain] != rates[other]:
            pair = runs.pair(size, rates | {other: rates[plain]}, min(rules.TUNING_SEEDS, options.seeds))
            common |= judge_sizes({size: pair}, rungs)
    return {
        "settings": asdict(settings),
        "quick": options.quick,
        "seeds": count_,
        "least_seeds": options.seeds,
        "limit": options.limit,
        "search": options.search,
        "rates": {
            row: {"chosen": rates[row], "validation": {f"{rate:g}": -score for rate, score in tried.items()}}
            for row, tried in scores.items()
        },
        "edges": rules.edges(scores),
        "rows": {
            name_of((kind, size)): [{key: value for key, value in cell.items() if key != "panels"} for cell in cells]
            for size, pair in pairs.items()
            for kind, cells in pair.items()
        },
        "rungs": rungs,
        "judged": judged,
        "timed": timed,
        "common": common,
        "positive": built.find(options.out, options.processes or 1, built.ORIGINAL) if options.positive else None,
        "predictions": rules.check(
            PREDICTIONS, {KINDS[1]: {name: one["verdict"] for name, one in judged[main].items()}}
        ),
        "scaling": [scaling_point(size, share, pair) for size, share, pair in points],
        "panels": {
            name: {kind: [cell["panels"][name] for cell in pairs[main][kind]] for kind in KINDS}
            for name in pairs[main][KINDS[0]][0]["panels"]
        },
    }


def scaling_point(size: str, share: float, runs: Mapping[str, list[dict]]) -> dict:
    """A size and a share of the tokens: the loss of each window of each run, and the documents of the windows."""
    scores = {kind: [window_losses(Scores(**cell["panels"]["nll"])) for cell in cells] for kind, cells in runs.items()}
    return {
        "preset": size,
        "share": share,
        "parameters": {kind: cells[0]["parameters"] for kind, cells in runs.items()},
        "tokens": runs["plain"][0]["tokens"],
        "losses": {kind: [losses.tolist() for losses, _ in own] for kind, own in scores.items()},
        "documents": scores["plain"][0][1],
    }


def plan_rows(options: TextOptions, settings: TextSettings, corpus: Corpus) -> list[PlanRow]:
    """What a run of each size takes: tasks and tokens change no step."""
    rows = []
    batch = TextOrder(corpus, replace(settings, needles=0.0, examples=0.0)).batch(0)
    autocast = autocast_dtype(settings.autocast, torch.device("cuda" if options.device == "auto" else options.device))
    for size, kind in product(dict.fromkeys((settings.preset, *options.sizes)), KINDS):
        model = empty_model(TextModelConfig.of(TEXT_PRESETS[size], kind == "differential"))
        parameters = count(model.parameters())
        costs = step_costs(model, batch, autocast, settings.accumulate > 1, text_loss)
        rows.append(
            PlanRow(
                name=f"{size}, {kind}",
                gpus=1,
                trainable=parameters,
                rows=settings.batch_size,
                step_rows=settings.rows,
                samples=settings.steps * settings.rows,
                steps=settings.steps,
                tokens=settings.steps * settings.rows * settings.length,
                plain=costs[0],
                checkpointed=costs[1],
                disk=4 * parameters,  # checkpoints are deleted when a cell is finished
                flops=costs[0].flops * settings.accumulate * settings.steps,
                left_out=(),
            )
        )
    return rows


def print_plan(options: TextOptions, settings: TextSettings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = find_corpus(Path(settings.corpus)) or open_corpus(
            Path(folder), settings.text, settings.vocab_size, SYMBOLS
        )
        print(plan_table(plan_rows(options, settings, corpus), options.gpu))
    tuning = min(rules.TUNING_SEEDS, options.seeds) * len(options.rates) * options.search * (len(options.rates) > 1)
    more = 0 if options.quick else options.seeds * sum(SHARES)
    print(
        f"\nEach kind has {tuning + options.seeds:g} such runs of a size (rates, seeds), of {settings.preset} {more:g} "
        "more (shares of the tokens), and more where rates or seeds are added. Several GPUs: torchrun -m train.text, "
        "for one run each."
    )


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = read_arguments(argv)
    if options.plan:
        print_plan(options, settings)
        return
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, SYMBOLS)
    print(f"{len(corpus.ids['train']):,} tokens of text to learn from", file=sys.stderr)
    write = partial(to_markdown, out=options.out)
    engine.run_study(
        options.out, lambda: compare(options, settings), write, draw, processes=options.processes, indent=None
    )
