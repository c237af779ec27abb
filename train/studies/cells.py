"""Rows and cells of the studies that fine-tune a base: what is trained, how, and its scores on fixed measures.

In: plain settings of the base, the changes of a row, a rate and a seed. Out: a cell, the JSON result of one run on the
measures of one split. Its folder is named by a hash of the settings that decide the result, the weights of the base,
the data and the version. So an interrupted study goes on, and a change computes only the affected cells again.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from eval.records import Record
from lora import adapter
from model.attention import Attention, attention_modules, tapped
from model.common import UserError, write_text
from model.paligemma import PaliGemma
from model.processor import DRAFT, Processor
from train.checkpoint import file_digest
from train.data.batches import MicroBatch
from train.distributed import World, join_world
from train.flags import FlagParser, RunArguments, add_flags, check_ranges, flag, from_values
from train.loop import Diverged
from train.metrics import peak_bytes, reset_peak
from train.optim import Rule, count, trainable
from train.settings import Settings, parse
from train.studies import engine
from train.studies.attention_data import Measure, training_mark, training_records
from train.studies.engine import cell_folder, deciding, digest
from train.supervised import forward, make_order, ready, train_on
from train.systems.open import load_base, open_model, open_processor

VERSION = 2  # of the code that decides a cell's result: raise it to compute all cells again

FACTS = "training.json"  # of a cell: what its training took

PLAIN = {"attention": "softmax", "feed_forward": "mlp", "option": ()}


@dataclass(frozen=True)
class NeedleOptions:
    """The flags of needle tests on COCO's pictures."""

    coco: str | None = flag(
        None,
        "with --data on disk: folder of COCO val2014 pictures, for 2×2 needle tests (default: no needle tests)",
        metavar="DIR",
    )
    captions: str | None = flag(None, "with --coco: MMNeedle's or COCO's caption file (default: none)", metavar="FILE")
    metadata: str | None = flag(
        None, "with --coco: folder of MMNeedle's own tests (default: drawn anew)", metavar="DIR"
    )


Options = TypeVar("Options")
WithNeedles = TypeVar("WithNeedles", bound=NeedleOptions)


def read_flags_of_both(
    options: type[Options],
    argv: Sequence[str] | None,
    program: str,
    description: str | None,
    decided: Collection[str],
    defaults: Sequence[str],
) -> tuple[Options, Settings, set[str], RunArguments]:
    """A study's own flags, the settings that all rows start from, which of these the command line gives, and the flags
    of `train.finetune` that are no settings.

    Raises UserError for flags of `train.finetune` that the study has `decided`.
    """
    parser = FlagParser(
        prog=f"python -m {program}",
        description=description,
        allow_abbrev=False,
        epilog="All other flags are those of `python -m train.finetune`, such as --base, --data, --samples or "
        f"--device, with its defaults but for {' '.join(defaults)}.",
    )
    add_flags(parser, options)
    known, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if word.startswith("--") and name in decided:
            raise UserError(f"{word}: the study decides that itself: `python -m {program} --help` lists its own flags")
    own = from_values(options, vars(known))
    check_ranges(own)
    settings, arguments = parse([*defaults, *rest])
    reader = FlagParser(add_help=False, allow_abbrev=False)
    add_flags(reader, Settings)
    return own, settings, set(vars(reader.parse_known_args(rest)[0])), arguments


def read_study(
    options: type[WithNeedles],
    argv: Sequence[str] | None,
    program: str,
    description: str | None,
    decided: Collection[str],
    defaults: Sequence[str],
) -> tuple[WithNeedles, Settings, set[str], RunArguments]:
    """`read_flags_of_both` for a study of variants: the settings are those of plain LoRA."""
    own, settings, given, arguments = read_flags_of_both(options, argv, program, description, decided, defaults)
    if own.coco and settings.is_embedded:
        raise UserError("--coco goes with --data on disk: the embedded scenes have needle tests of their own")
    if (own.captions or own.metadata) and not own.coco:
        raise UserError("--captions and --metadata belong to --coco: give that too")
    return own, replace(settings, **PLAIN), given, arguments


def without(changes: Mapping[str, object], given: Collection[str]) -> dict[str, object]:
    """The settings of a recipe but for those that flags override."""
    dropped = {*given, "step_batch"} if "accumulate" in given else set(given)
    return {name: value for name, value in changes.items() if name not in dropped}


@dataclass(frozen=True)
class FineTuningStudy:
    """What all cells share. base: the plain settings. measures: by split, such as validation and test, VQA first.

    ahead: computes cells that are to be read next, side by side; None: each is computed when it is read.
    """

    base: Settings
    out: Path
    world: World
    processor: Processor
    fingerprint: str
    measures: dict[str, list[Measure]]
    protocol: str = "paper"
    ahead: Callable[[Sequence["CellName"]], object] | None = None


def open_study(
    base: Settings, out: Path, measures: dict[str, list[Measure]], protocol: str = "paper"
) -> FineTuningStudy:
    """A study of the base that `base` names. Raises UserError under torchrun."""
    world = join_world(base.device)
    if world.size > 1:
        raise UserError("a study runs in one process: start it without torchrun")
    model = load_base(base, world.device)
    processor = open_processor(base, model)[0]
    return FineTuningStudy(base, out, world, processor, adapter.fingerprint(model), measures, protocol)


def open_base(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """The base, untrained."""
    return load_base(settings, study.world.device).requires_grad_(False)


def open_finished(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """The base with the adapter in `folder`. Raises UserError if it belongs to another base."""
    model = load_base(settings, study.world.device)
    adapter.load(model, folder)
    return model


def count_tokens(records: Sequence[Record], processor: Processor, samples: int) -> int:
    """The tokens of `samples` samples, pictures included, by the mean over up to 20,000 of the records.

    0 where no record can be used.
    """
    lengths = []
    for number in range(0, len(records), max(1, -(-len(records) // 20_000))):  # tar shards cannot be sliced
        with contextlib.suppress(UserError):  # training has left it out
            record = records[number]
            lengths.append(len(processor.row_of(len(record.pictures), record.turns or (("", ""),))[0]))
    return round(samples * sum(lengths) / len(lengths)) if lengths else 0


def fine_tune(settings: Settings, folder: Path, study: FineTuningStudy, first_rules: Sequence[Rule] = ()) -> PaliGemma:
    """The base with the adapter in `folder`, which is trained if it is absent. first_rules: see `open_model`."""
    if (folder / adapter.CONFIG_FILE).exists():
        return open_finished(settings, folder, study)
    reset_peak(study.world.device)
    model, optimizer = open_model(settings, study.world.device, first_rules=first_rules)
    records, _ = training_records(settings, study.base.seed)
    progress = train_on(records, model, optimizer, study.processor, settings, folder, study.world)
    facts = {name: progress[name] for name in ("seconds", "samples")}
    facts |= {"tokens": count_tokens(records, study.processor, progress["samples"])}
    facts |= {"trainable": count(trainable(model).values()), "peak_bytes": peak_bytes(study.world.device)}
    write_text(folder / FACTS, json.dumps(facts) + "\n")
    adapter.save(model, folder, settings.base, settings.question_prompt)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return model


def fine_tune_slow_maps(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """`fine_tune`, where all that changes queries and keys learns at a quarter of the rate."""
    pattern = r".*\.(q_proj\.lora|k_proj\.lora|q2|k2)\..*"
    return fine_tune(settings, folder, study, [Rule(pattern, settings.lr / 4, settings.weight_decay)])


def fine_tune_scattered(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """`fine_tune`, with dex on the half of each layer's heads whose attention is the most scattered before training.

    DEX chooses heads by the entropy of their attention too (Kong et al. 2025).
    """
    records, model = training_records(settings, study.base.seed)[0], open_base(settings, folder, study)
    order = make_order(records, study.processor, settings, study.world)
    micro = ready(next(iter(order.steps(0)))[0], model, study.processor, study.world.device)
    option = f"heads={json.dumps(scattered_heads(model, micro))}"
    return fine_tune(replace(settings, option=(*settings.option, option)), folder, study)


@torch.no_grad()
def scattered_heads(model: PaliGemma, micro: MicroBatch) -> list[list[int]]:
    """By layer of the decoder, the half of its heads whose attention on a micro-batch has the highest mean entropy."""
    chosen: dict[Attention, list[int]] = {}
    valid = micro.batch.attention_mask.bool()

    def watch(module: Attention) -> Callable[[torch.Tensor], None]:
        def tap(weights: torch.Tensor) -> None:
            entropy = torch.special.entr(weights.float()).sum(-1).transpose(1, 2)[valid].mean(0)  # (N,)
            chosen[module] = sorted(entropy.topk(max(1, len(entropy) // 2)).indices.tolist())

        return tap

    modules = attention_modules(model.language_model).values()
    with tapped({module: watch(module) for module in modules}):
        forward(model.eval(), micro)
    return [chosen[module] for module in modules]


@dataclass(frozen=True)
class FineTuningRow:
    """One line of the tables: changes of the base settings, and how its model is made.

    run: trains or opens the model of a cell in the cell's folder. finished: a run whose adapter is used in place of
    training. published: the paper's VQAv2 score. recipe: what a `run` with data of its own learns.
    """

    name: str
    changes: dict = field(default_factory=dict)
    run: Callable[[Settings, Path, FineTuningStudy], PaliGemma] = fine_tune
    finished: Path | None = None
    published: float | None = None
    recipe: str = ""

    @property
    def is_trained(self) -> bool:
        return self.run is not open_base

    def needs_control(self, settings: Settings) -> bool:
        """Whether it is anything but plain LoRA."""
        plain = replace(settings, **PLAIN) == settings
        return self.is_trained and not (plain and self.run is fine_tune)


CellName = tuple[FineTuningRow, float, int, str]  # row, rate, seed, split


def cell_settings(study: FineTuningStudy, row: FineTuningRow, rate: float, seed: int) -> Settings:
    return replace(study.base, **(row.changes | {"lr": rate, "seed": seed}))


def cell_file(study: FineTuningStudy, row: FineTuningRow, rate: float, seed: int, split: str) -> Path:
    """Where the result of a cell is, or will be."""
    settings = cell_settings(study, row, rate, seed)
    made_by, trained_on = row.run.__qualname__, ""
    if row.finished:
        made_by = f"adapter {file_digest(row.finished / adapter.TENSOR_FILE)}"
    elif row.is_trained:
        trained_on = row.recipe or training_mark(settings, study.base.seed)
    pixels = {} if settings.is_embedded else {"draft": DRAFT}  # how pictures on disk are decoded
    parts = (VERSION, study.fingerprint, made_by, trained_on, deciding(settings) | pixels)
    examples = [(measure.name, measure.examples) for measure in study.measures[split]]
    return cell_folder(study.out, *parts) / f"{split}-{digest(examples)}.json"


def run_cells(study: FineTuningStudy, names: Sequence[CellName]) -> list[dict]:
    """The results of cells, see `run_cell`, in this order."""
    if study.ahead:
        study.ahead([name for name in names if not cell_file(study, *name).exists()])
    return [run_cell(study, *name) for name in names]


def run_ahead(opener: Callable[[], FineTuningStudy], processes: int, names: Sequence[CellName]) -> None:
    """Compute cells side by side. opener: opens the study, once in each process."""
    engine.side_by_side(partial(_run_opened, opener), names, processes, _spell_cell)


def _run_opened(opener: Callable[[], FineTuningStudy], name: CellName) -> dict:
    return run_cell(opener(), *name)


def _spell_cell(name: CellName, result: dict) -> str:
    return f"{name_cell(*name)}: {spell_scores(result)}"


def run_cell(study: FineTuningStudy, row: FineTuningRow, rate: float, seed: int, split: str) -> dict:
    """{"scores": of each example by measure, "trainable", "diverged", "cpu_seconds", "file"}, on one split.

    A run whose loss is no longer finite scores 0, and "diverged" says where it happened.
    """
    settings, measures = cell_settings(study, row, rate, seed), study.measures[split]
    file = cell_file(study, row, rate, seed, split)

    def work(folder: Path) -> dict:
        write_text(folder / "config.json", json.dumps(asdict(settings), indent=1) + "\n")
        result = {
            "scores": {measure.name: [0.0] * len(measure.examples) for measure in measures},
            "trainable": None,
            "diverged": None,
            "file": str(file.relative_to(study.out)),
        }
        try:
            model = open_finished(settings, row.finished, study) if row.finished else row.run(settings, folder, study)
            model.eval()
            result["trainable"] = count(trainable(model).values())
            result["scores"] = {m.name: m.grade(model, study.processor, settings, folder) for m in measures}
        except Diverged as error:
            result["diverged"] = str(error)
        return result

    title = name_cell(row, rate, seed, split) if row.is_trained else row.name
    return engine.finish_cell(file, title, work, spell_scores)


def name_cell(row: FineTuningRow, rate: float, seed: int, split: str) -> str:
    return f"{row.name}, rate {rate:g}, seed {seed}, {split}"


def spell_scores(result: dict) -> str:
    accuracies = ", ".join(f"{name} {100 * np.mean(scores):.1f} %" for name, scores in result["scores"].items())
    return f"{accuracies} ({result['cpu_seconds']:.0f} CPU seconds)"
