"""Study: which choices of the Q-Mamba projector matter, on the embedded scenes?

    python -m train.compare --rows qmamba

In: the embedded vision tower and the embedded language model, from which every row starts. Out: comparison.md,
comparison.json, rows.png and differences.png in --out: the paper's Table 2 (local or global attention), Table 3 (the
connector's weights), Table 4 (the scan order), the number of queries, and a linear projector before a transformer.

Every row is trained in the two stages of `train/recipes.py`: its projector alone, then language model and projector.
All rows of a seed are trained on the same pictures in the same order, and answer the same questions. A difference is
that to the row it is compared with, example by example. There are no pretrained weights for the transformer, so it is
first trained on the scenes in words that the embedded Mamba was trained on (`train/embedded/mamba.py`).

The trained connector of Table 3 is that of row `connector`, which has no queries: connector and linear projector
before Mamba, as in VL-Mamba, of the same seed. Table 4 takes models that were trained in both directions and scans in
one direction alone, as the paper does; nothing is trained for it.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from eval import scenes
from eval.records import sample_record
from eval.report import markdown_table
from eval.run import Ask, ask_all
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from model.processor import Processor, load_tokenizer
from model.qmamba import QMamba, QMambaProjector
from model.siglip import Siglip
from model.source import EMBEDDED
from model.system_configs import QMambaConfig
from train.distributed import join_world
from train.embedded.mamba import accuracy, teach
from train.flags import flag
from train.loop import LoopOptions, fit
from train.optim import count
from train.recipes import STAGES, stage_defaults
from train.settings import Settings
from train.studies import engine
from train.studies.encoded import EncodedOrder, EncodedRecords, encode, encoded_loss
from train.studies.engine import ScaledOptions, ScaledStudy, deciding, describe_runs, difference, spell
from train.systems.open import make_optimizer, stage_rules
from train.systems.qmamba import TINY, TINY_MAMBA, Parts, open_qmamba
from weights.fingerprint import exact_fingerprint
from weights.load import load_mamba, load_model

VERSION = 1  # of the code that decides a cell's result: raise it to compute all cells again

TASKS = ("vqa", "locate", "count", "exist")  # in equal parts
SAMPLES = {number: stage.embedded["samples"] for number, stage in STAGES["qmamba"].items()}
SCENES_IN_WORDS = 20_000  # that the transformer's language model is trained on
# a transformer that, with its projector, has as many parameters as row `local`
CONTROL = replace(PRESETS["tiny"], text=replace(PRESETS["tiny"].text, num_hidden_layers=2, intermediate_size=496))


@dataclass(frozen=True)
class QMambaOptions(ScaledOptions):
    """The flags of this study."""

    limit: int = flag(400, "questions of each task", least=1, metavar="N")
    out: Path = flag(Path("runs/compare-qmamba"), engine.OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class ProjectorRow:
    """A trained model. kind: "qmamba", "connector" (no queries) or "transformer". changes: of the projector's
    configuration. connector: the row whose trained connector it starts from."""

    kind: str = "qmamba"
    changes: dict = field(default_factory=dict)
    connector: str | None = None


ProjectorRow.__qualname__ = "Row"  # what a row prints as is part of the names of finished cells


ROWS: dict[str, ProjectorRow] = {
    "local": ProjectorRow(),
    "global": ProjectorRow(changes={"local_attention": False}),
    "4 queries": ProjectorRow(changes={"queries": 4}),
    "16 queries": ProjectorRow(changes={"queries": 16}),
    "connector": ProjectorRow("connector"),
    "trained connector": ProjectorRow(connector="connector"),
    "transformer": ProjectorRow("transformer"),
}
ORDERS = ("forward", "backward")  # single scan directions in which a trained row is evaluated once more
FORWARD, BACKWARD = (f"trained connector, {order}" for order in ORDERS)
TABLES = {  # by title: what the paper reports, and rows with the row that each is compared with
    "Table 2: who may see whom": ("The paper: global 73.12, local 75.01 on VQAv2.", {"global": "local", "local": None}),
    "The number of queries, of 16 features, local": (
        "The paper: more queries do better, with falling returns.",
        {"4 queries": "local", "local": None, "16 queries": "local"},
    ),
    "Table 3: the connector's weights": (
        "The paper: from scratch 74.22, from a trained VL-Mamba 75.01 on VQAv2.",
        {"local": None, "trained connector": "local"},
    ),
    "Table 4: the order in which a bidirectionally trained connector reads": (
        "The paper: reading forward alone does not harm, and can help.",
        {"trained connector": None, FORWARD: "trained connector", BACKWARD: "trained connector"},
    ),
    "Without queries: linear projectors, of 16 features each": (
        "",
        {"local": None, "connector": "local", "transformer": "local"},
    ),
}


PUBLISHED = (
    ("Table 1: other Mamba models on six benchmarks", "missing: needs their weights and the benchmarks"),
    ("Table 1: 128 to 729 queries", "4, 8 and 16 queries for 16 features"),
    ("Table 1: seconds of a fine-tuning step", "in the table of the number of queries, stage 2, on this machine"),
    ("Tables 2 and 3", "as published, on the embedded scenes"),
    ("Table 4", "as published: trained in both directions, read in one"),
)


class ConnectorProjector(QMambaProjector):
    """Q-Mamba's projector without its queries: each feature is a vector, as in VL-Mamba (Qiao et al. 2024)."""

    def __init__(self, config: QMambaConfig):
        super().__init__(config)
        del self.queries, self.blocks

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.output(self.connector(self.vision_norm(self.vision_proj(features))))


@cache
def vision_tower() -> Siglip:
    """The frozen tower of all rows; as in Q-Mamba its features are those before the last layer."""
    tower = load_model(EMBEDDED).vision_tower.requires_grad_(False)
    tower.config = replace(tower.config, feature_layer=Parts.feature_layer)
    return tower


def make_qmamba(study: "QMambaStudy", row: ProjectorRow, seed: int) -> QMamba:
    """A fresh projector between the embedded vision tower and the embedded language model."""
    changes = row.changes
    if row.kind == "connector":
        changes = {"queries": vision_tower().config.num_image_tokens}
    option = tuple(f"{name}={json.dumps(value)}" for name, value in changes.items())
    settings = Settings(arch="qmamba", stage=1, seed=seed, option=option)
    model = open_qmamba(settings, torch.float32, torch.device("cpu"))
    fresh = model.multi_modal_projector
    if row.kind == "connector":
        model.multi_modal_projector = plain = ConnectorProjector(model.config)
        plain.load_state_dict({name: fresh.state_dict()[name] for name in plain.state_dict()})
    if row.connector:
        state, own = trained_weights(study, row.connector, seed), fresh.state_dict()
        parts = ("vision_proj.", "vision_norm.", "connector.")
        prefix = "multi_modal_projector."
        fresh.load_state_dict(own | {name: state[prefix + name] for name in own if name.startswith(parts)})
    model.vision_tower = vision_tower()
    return model


def make_transformer(study: "QMambaStudy", seed: int) -> PaliGemma:
    """A fresh linear projector between the embedded vision tower and a Gemma trained on the scenes in words."""
    model = initialize(PaliGemma(CONTROL), seed)
    model.vision_tower = vision_tower()
    model.language_model.load_state_dict(load_file(study.out / run_language(study)["file"]))
    return model


@dataclass(frozen=True)
class QMambaStudy(ScaledStudy):
    """limit: questions of a task."""

    def samples(self, number: int) -> int:
        return self.scaled(number, 32)

    def settings(self, stage: int, seed: int) -> Settings:
        """Those of `python -m train.finetune --arch qmamba`, but for the number of samples."""
        own = {"arch": "qmamba", "stage": stage, "samples": self.samples(SAMPLES[stage]), "seed": seed}
        own |= {"checkpoint_every": 10**9, "measure_every": 0}
        return Settings(**(stage_defaults("qmamba", stage, True) | own))


def save_weights(study: QMambaStudy, weights: dict[str, torch.Tensor], folder: Path) -> dict:
    """Write a cell's weights. Returns {"file"}: where they are in the study's folder."""
    save_file(weights, folder / "model.safetensors")
    return {"file": str((folder / "model.safetensors").relative_to(study.out))}


def open_processor(model: PaliGemma) -> Processor:
    return Processor(model.config, load_tokenizer(TINY_MAMBA / "tokenizer.model"))


def run_language(study: QMambaStudy) -> dict:
    """{"answer_tokens", "cpu_seconds", "file"} of the Gemma trained on scenes in words.

    "answer_tokens": the percentage that it predicts, see `train.embedded.mamba.accuracy`.
    """

    def work(folder: Path) -> dict:
        model = initialize(PaliGemma(CONTROL))
        processor = open_processor(model)
        teach(model, list(model.language_model.parameters()), processor, study.samples(SCENES_IN_WORDS))
        saved = save_weights(study, model.language_model.state_dict(), folder)
        return saved | {"answer_tokens": accuracy(model, processor)}

    parts = ("language", VERSION, study.samples(SCENES_IN_WORDS), CONTROL)
    return study.finish("the transformer's language", parts, work)[0]


def trained_weights(study: QMambaStudy, name: str, seed: int) -> dict[str, torch.Tensor]:
    """What the row has learned."""
    return load_file(study.out / run_row(study, name, seed)["file"])


def run_row(study: QMambaStudy, name: str, seed: int) -> dict:
    """{"scores": by task, "read": the same by scan order, "trainable", "accuracy", "cpu_seconds", "file"}."""
    row = ROWS[name]
    stages = {stage: study.settings(stage, seed) for stage in SAMPLES}

    def work(folder: Path) -> dict:
        model = make_transformer(study, seed) if row.kind == "transformer" else make_qmamba(study, row, seed)
        processor = open_processor(model)
        for stage, settings in stages.items():
            samples = encoded_samples(settings.samples, seed, stage)
            seconds = learn(model, processor, settings, samples, folder / f"{stage}")
        learned = {name: p for name, p in model.named_parameters() if not name.startswith("vision_tower.")}
        result = save_weights(study, learned, folder) | {"trainable": count(learned.values()), "read": {}}
        result["seconds_a_step"] = seconds
        for stage in stages:
            shutil.rmtree(folder / f"{stage}")
        model.eval()
        result["scores"] = scores = ask(model, processor, study.limit)
        for order in ORDERS if row.connector else ():
            model.multi_modal_projector.connector.order = order
            result["read"][order] = ask(model, processor, study.limit)
        return result | {"accuracy": 100 * sum(map(sum, scores.values())) / study.limit / len(TASKS)}

    settings = [deciding(settings) for settings in stages.values()]
    donor = ROWS[row.connector] if row.connector else None
    sizes = (TINY, CONTROL, study.samples(SCENES_IN_WORDS))
    parts = ("row", VERSION, study.fingerprint, row, donor, sizes, study.limit, TASKS, settings)
    return study.finish(f"{name}, seed {seed}", parts, work)[0]


def learn(model: PaliGemma, processor: Processor, settings: Settings, samples: EncodedRecords, folder: Path) -> float:
    """Train what the stage of `settings` trains, in place. Returns seconds a step."""
    optimizer = make_optimizer(model, stage_rules(settings), settings)
    folder.mkdir(exist_ok=True)
    order = shuffled(samples, processor, settings.batch_size, settings.seed)
    progress = fit(model, optimizer, order, encoded_loss, LoopOptions.of(settings), folder, join_world("cpu"))
    return progress["seconds"] / order.total


@lru_cache(maxsize=2)  # both stages of a seed
def encoded_samples(count: int, seed: int, stage: int = 1) -> EncodedRecords:
    """`count` samples of the train split, the tasks in turn. No stage gets a sample of the one before."""
    first = stage * 6_000_000
    numbers = ((TASKS[number % len(TASKS)], first + number // len(TASKS)) for number in range(count))
    records = [sample_record(scenes.sample(task, "train", number, seed), "train") for task, number in numbers]
    return encode(records, vision_tower())


def shuffled(samples: EncodedRecords, processor: Processor, batch_size: int, seed: int) -> EncodedOrder:
    """Each sample once, in an order that depends on the seed alone, in whole micro-batches."""
    order = torch.randperm(len(samples.records), generator=torch.Generator().manual_seed(seed)).split(batch_size)
    return EncodedOrder(len(samples.records) // batch_size, lambda step: samples.batch(processor, order[step].tolist()))


@cache
def questions(task: str, limit: int) -> list[scenes.Sample]:
    return [scenes.sample(task, "test", number) for number in range(limit)]


def ask(model: PaliGemma, processor: Processor, limit: int) -> dict[str, list[float]]:
    """Whether each answer of the test split is exactly right, by task."""
    result = {}
    for task in TASKS:
        asked = questions(task, limit)
        asks = [Ask(str(number), str(s.image_id), s.scene.render, s.prefix) for number, s in enumerate(asked)]
        answers = ask_all(model, processor, asks, max_new_tokens=6)
        result[task] = [float(answer == s.suffix) for answer, s in zip(answers, asked, strict=True)]
    return result


def collect(study: QMambaStudy, seeds: Sequence[int]) -> dict[str, list[dict]]:
    """Cells by seed, of each row and of each row with one scan order."""
    cells = {(name, seed): run_row(study, name, seed) for seed in seeds for name in ROWS}  # a seed's samples once
    found = {}
    for name in ROWS:
        found[name] = of_row = [cells[name, seed] for seed in seeds]
        for order in of_row[0]["read"]:
            found[f"{name}, {order}"] = [cell | {"scores": cell["read"][order]} for cell in of_row]
    return found


def summarize(study: QMambaStudy, found: dict[str, list[dict]], seeds: Sequence[int]) -> dict:
    """comparison.json. Accuracies are in percent; "mean" is over all tasks."""
    pictures = {task: [f"{task}/{s.image_id}" for s in questions(task, study.limit)] for task in TASKS}
    groups = {"mean": sum(pictures.values(), []), **pictures}
    scores, rows = {}, {}
    for name, cells in found.items():
        by_task = {task: 100 * np.array([cell["scores"][task] for cell in cells]) for task in TASKS}
        scores[name] = {"mean": np.concatenate(list(by_task.values()), axis=1), **by_task}
        rows[name] = {
            "trainable": cells[0]["trainable"],
            "seconds_a_step": cells[0].get("seconds_a_step"),  # of stage 2; cells of an older version have none
            "cpu_seconds": round(sum(cell["cpu_seconds"] for cell in cells)),
            "test": {measure: describe_runs(runs, groups[measure]) for measure, runs in scores[name].items()},
        }
    differences = {
        f"{name} - {other}": {m: difference(scores[name][m], scores[other][m], groups[m]) for m in groups}
        for _, rows_of_table in TABLES.values()
        for name, other in rows_of_table.items()
        if other is not None
    }
    train = {task: [scenes.sample(task, "train", number) for number in range(2_000)] for task in TASKS}
    chance = {task: scenes.blind(train[task], questions(task, study.limit))["overall"] for task in TASKS}
    language = run_language(study)
    return {
        "version": VERSION,
        "scale": study.scale,
        "seeds": list(seeds),
        "questions": study.limit,
        "tasks": TASKS,
        "samples": {str(stage): study.samples(number) for stage, number in SAMPLES.items()},
        "projector": asdict(TINY),
        "settings": {str(stage): asdict(study.settings(stage, seeds[0])) for stage in SAMPLES},
        "chance": chance | {"mean": sum(chance.values()) / len(chance)},
        "cpu_seconds": round(language["cpu_seconds"] + sum(rows[name]["cpu_seconds"] for name in ROWS)),
        "rows": rows,
        "differences": differences,
        "language": {
            "Mamba": json.loads((TINY_MAMBA / "pretraining.json").read_text())["answer_tokens"],
            "transformer": language["answer_tokens"],
        },
    }


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    measures, first, second = ["mean", *summary["tasks"]], *summary["samples"].values()
    blocks = [
        f"{len(summary['seeds'])} seed(s); {first:,} samples in stage 1, {second:,} in stage 2; {summary['questions']} "
        "questions of each task in the test split, exact answers in %, and in brackets 95 % bootstrap intervals over "
        "seeds and pictures. A difference is in percentage points, on the same examples and seeds; `*`: its interval "
        "excludes 0; n.s.: not significant. Guess: the likeliest answer to the question, without a picture."
    ]
    for title, (published, rows_of_table) in TABLES.items():
        body = [["guess", "", "", *(f"{summary['chance'][measure]:.1f}" for measure in measures), ""]]
        for name, other in rows_of_table.items():
            row = summary["rows"][name]
            cells = [spell(row["test"]["mean"]), *(f"{row['test'][task]['mean']:.1f}" for task in summary["tasks"])]
            gain = f"{spell(summary['differences'][f'{name} - {other}']['mean'])} to {other}" if other else ""
            seconds = "" if row["seconds_a_step"] is None else f"{row['seconds_a_step']:.2g}"
            body.append([name, f"{row['trainable']:,}", seconds, *cells, gain])
        table = markdown_table(["row", "parameters", "s a step", *measures, "difference of the mean"], body)
        blocks += [f"## {title}", published, table]
    title = "Q-Mamba on the embedded scenes"
    return engine.compose(title, *blocks, conclusions=conclusions(summary), published=PUBLISHED)


def conclusions(summary: dict) -> list[str]:
    """The differences in words, and what limits them."""
    gains = {pair.replace(" - ", " against "): {"mean": of["mean"]} for pair, of in summary["differences"].items()}
    sentences = engine.conclude(gains, len(summary["seeds"]))
    sentences.append(
        "Asked about scenes in words, before they saw a picture, the embedded Mamba had {Mamba:.1f} % of "
        "the answers' tokens right, the transformer {transformer:.1f} %: that much of their difference is "
        "no projector's.".format(**summary["language"])
    )
    guess = summary["chance"]["mean"]
    for name, row in summary["rows"].items():
        if row["test"]["mean"]["low"] <= guess:
            sentences.append(f"{name} cannot be told from guessing without a picture ({guess:.1f} %).")
    sentences.append("All rows share the rates of the embedded Q-Mamba, which were found on row `local`.")
    return sentences


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """rows.png and differences.png."""
    rows, gains = summary["rows"], summary["differences"]
    label = "difference, percentage points"
    return {
        "rows.png": [
            engine.chart(
                {name: row["test"][measure] for name, row in rows.items()},
                "all tasks" if measure == "mean" else measure,
                "exact answers, %",
                ("guess without a picture", summary["chance"][measure]),
            )
            for measure in ("mean", *summary["tasks"])
        ],
        "differences.png": [
            engine.chart({pair: of["mean"] for pair, of in gains.items()}, "all tasks", label, ("no difference", 0.0))
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = engine.read_options(QMambaOptions, "qmamba", __doc__, argv)
    seeds = range(options.seeds)
    fingerprint = exact_fingerprint(load_mamba(TINY_MAMBA)) + exact_fingerprint(vision_tower())
    study = QMambaStudy(options.out, options.scale, options.limit, fingerprint)
    engine.run_study(options.out, lambda: summarize(study, collect(study, seeds), seeds), to_markdown, draw)
