"""Study: which choices of the Q-Mamba projector matter, on the embedded scenes?

    python -m train.compare --rows qmamba

In: the embedded eye and the embedded language model, which no row changes before its own training. Out: comparison.md,
comparison.json, rows.png and differences.png in --out: the paper's Table 2 (who may see whom), Table 3 (the connector's
weights), Table 4 (the scan order), the number of queries, and a linear projector before a transformer.
Next: nothing; these are the results.

Every row is trained in the two stages of `train/recipes.py`: its projector alone, then language model and
projector. All rows of a seed learn from the same pictures in the same order, and answer the same questions; a
difference is that to the row it is to be compared with, example by example. The transformer, which no pretrained
weights exist for, is first taught by the words that the embedded Mamba was taught by (`train/embedded/mamba.py`).

The trained connector of Table 3 is that of row `connector`, which has no queries: connector and linear projector
before Mamba, as VL-Mamba is built, of the same seed. Table 4 reads models that were trained in both directions in one
direction alone, as the paper does; nothing is trained for it.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eval import figures, scenes
from eval.run import Ask, ask_all
from eval.statistics import bootstrap
from model.common import write_text
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from model.processor import Processor, load_tokenizer
from model.qmamba import QMamba, QMambaProjector, initialize_projector
from model.siglip import Siglip
from model.source import EMBEDDED
from model.system_configs import QMambaConfig
from train.data.batches import MicroBatch, supervised
from train.distributed import join_world
from train.embedded.mamba import accuracy, teach
from train.loop import LoopOptions, fit
from train.optim import Rule, count, make_radam, parameter_groups
from train.recipes import STAGES, stage_defaults
from train.settings import Settings
from train.signals import same_command_goes_on
from train.studies.attention import spell, stack, table
from train.studies.cells import cell, study_arguments
from train.supervised import supervised_loss
from train.systems.qmamba import TINY, TINY_MAMBA, Parts
from weights.fingerprint import exact_fingerprint
from weights.load import load_mamba, load_model

VERSION = 1  # of the code that decides a cell's result: raise it, and all cells are done again

TASKS = ("vqa", "locate", "count", "exist")  # learned each as often as another
SAMPLES = {number: stage.embedded["samples"] for number, stage in STAGES["qmamba"].items()}
TOLD = 20_000  # scenes that teach the transformer its language
# a transformer that, with its projector, has as many parameters as row `local`
CONTROL = replace(PRESETS["tiny"], text=replace(PRESETS["tiny"].text, num_hidden_layers=2, intermediate_size=496))

# ---------------------------------------------------------------------------------------------------------------------
# What is compared
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A trained model. `kind`: a key of MAKERS; `changes` of the projector; `connector` is that of another row."""

    kind: str = "qmamba"
    changes: dict = field(default_factory=dict)
    connector: str | None = None


ROWS: dict[str, Row] = {
    "local": Row(),
    "global": Row(changes={"local_attention": False}),
    "4 queries": Row(changes={"queries": 4}),
    "16 queries": Row(changes={"queries": 16}),
    "connector": Row("connector"),
    "trained connector": Row(connector="connector"),
    "transformer": Row("transformer"),
}
ORDERS = ("forward", "backward")  # in which a trained row is read once more
# title, what the paper says, (row, the row it is compared with) …
TABLES = (
    (
        "Table 2: who may see whom",
        "The paper: global 73.12, local 75.01 on VQAv2.",
        (("global", "local"), ("local", None)),
    ),
    (
        "The number of queries, of 16 features, local",
        "The paper: more queries do better, with falling returns.",
        (("4 queries", "local"), ("local", None), ("16 queries", "local")),
    ),
    (
        "Table 3: the connector's weights",
        "The paper: from scratch 74.22, from a trained VL-Mamba 75.01 on VQAv2.",
        (("local", None), ("trained connector", "local")),
    ),
    (
        "Table 4: the order in which a bidirectionally trained connector reads",
        "The paper: reading forward alone does not harm, and can help.",
        (
            ("trained connector", None),
            ("trained connector, forward", "trained connector"),
            ("trained connector, backward", "trained connector"),
        ),
    ),
    (
        "Without queries: linear projectors, of 16 features each",
        "",
        (("local", None), ("connector", "local"), ("transformer", "local")),
    ),
)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


class ConnectorProjector(QMambaProjector):
    """Q-Mamba's projector without its queries: each feature is a vector, as in VL-Mamba (Qiao et al. 2024)."""

    def __init__(self, config: QMambaConfig):
        super().__init__(config)
        del self.queries, self.blocks

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.output(self.connector(self.vision_norm(self.vision_proj(features))))


@cache
def eye() -> Siglip:
    """The frozen tower of all rows, read before its last layer as Q-Mamba does."""
    tower = load_model(EMBEDDED).vision_tower.requires_grad_(False)
    tower.config = replace(tower.config, feature_layer=Parts.feature_layer)
    return tower


def make_qmamba(bench: "Bench", row: Row, seed: int) -> QMamba:
    """A fresh projector between the embedded eye and the embedded language model."""
    text = load_mamba(TINY_MAMBA)
    projector = replace(TINY, **row.changes)
    if row.kind == "connector":
        projector = replace(projector, queries=eye().config.num_image_tokens)
    config = QMambaConfig(eye().config, projector, text.config, text.config.vocab_size - 1)
    model = QMamba(config)
    fresh = model.multi_modal_projector
    initialize_projector(fresh, seed)
    if row.kind == "connector":
        model.multi_modal_projector = plain = ConnectorProjector(config)
        plain.load_state_dict({name: fresh.state_dict()[name] for name in plain.state_dict()})
    if row.connector:
        state, own = bench.weights(row.connector, seed), fresh.state_dict()
        parts = ("vision_proj.", "vision_norm.", "connector.")
        prefix = "multi_modal_projector."
        fresh.load_state_dict(own | {name: state[prefix + name] for name in own if name.startswith(parts)})
    model.vision_tower, model.language_model = eye(), text.backbone
    return model


def make_transformer(bench: "Bench", row: Row, seed: int) -> PaliGemma:
    """A fresh linear projector between the embedded eye and a Gemma that was taught the language of the scenes."""
    model = initialize(PaliGemma(CONTROL), seed)
    model.vision_tower = eye()
    model.language_model.load_state_dict(load_file(bench.out / bench.language()["file"]))
    return model


MAKERS: dict[str, Callable] = {"qmamba": make_qmamba, "connector": make_qmamba, "transformer": make_transformer}


# ---------------------------------------------------------------------------------------------------------------------
# What is learned and asked
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """Samples whose pictures are encoded already: features (pictures, I, H) of the eye, and whose is whose."""

    features: torch.Tensor
    pictures: list[int]
    samples: list[scenes.Sample]


@lru_cache(maxsize=2)  # both stages of a seed
@torch.no_grad()
def make_lessons(count: int, seed: int, stage: int = 1) -> Lessons:
    """`count` samples of the train split, the tasks in turn; no stage sees what another has seen."""
    processor = Processor(PRESETS["tiny"], load_tokenizer(TINY_MAMBA / "tokenizer.model"))
    keys, pixels, first = {}, [], stage * 6_000_000
    samples = [
        scenes.sample(TASKS[number % len(TASKS)], "train", first + number // len(TASKS), seed)
        for number in range(count)
    ]
    pictures = [keys.setdefault((s.task, s.image_id), len(keys)) for s in samples]
    shown = dict(zip(pictures, samples, strict=True))
    for start in range(0, len(keys), 64):
        drawn = [shown[picture].scene.render() for picture in range(start, min(start + 64, len(keys)))]
        pixels.append(eye()(processor(drawn, ["-"] * len(drawn)).pixel_values))
    return Lessons(torch.cat(pixels), pictures, samples)


class Lesson:
    """An order of micro-batches for `train.loop.fit`, drawn by the seed alone, with features for pictures."""

    def __init__(self, lessons: Lessons, processor: Processor, batch_size: int, seed: int):
        self.lessons, self.processor, self.batch_size, self.seed = lessons, processor, batch_size, seed
        self.total = len(lessons.samples) // batch_size

    def steps(self, first: int, workers: int = 0, pin: bool = False) -> Iterator[list[MicroBatch]]:
        order = torch.randperm(len(self.lessons.samples), generator=torch.Generator().manual_seed(self.seed))
        for rows in list(order.split(self.batch_size))[first : self.total]:
            yield [self.batch(rows.tolist())]

    def batch(self, rows: list[int]) -> MicroBatch:
        samples = [self.lessons.samples[row] for row in rows]
        batch = self.processor.pad([self.processor.layout(1, s.prefix, s.suffix) for s in samples])
        batch = replace(batch, image_index=torch.arange(len(rows)))
        positions, targets = supervised(batch.labels)
        features = self.lessons.features[[self.lessons.pictures[row] for row in rows]]
        return MicroBatch(
            batch,
            positions,
            targets,
            int((targets != -100).sum()),
            tuple(f"{s.task}/{s.question_id}" for s in samples),
            features=features,
        )


def projected_loss(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The loss on features of the eye, which the projector has still to pass."""
    return supervised_loss(model, replace(micro, features=model.multi_modal_projector(micro.features)))


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


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What all cells share: folder, length of everything against the default, questions of a task."""

    out: Path
    scale: float
    limit: int
    fingerprint: str

    def samples(self, number: int) -> int:
        return max(32, round(self.scale * number))

    def name_of(self, folder: Path) -> str:
        """Where a cell keeps its weights, as its result says it."""
        return str((folder / "model.safetensors").relative_to(self.out))

    def language(self) -> dict:
        """{"answer_tokens", "cpu_seconds", "file"} of a Gemma that is taught scenes in words; the first as
        `pretrain_mamba.accuracy` has it."""

        def work(folder: Path) -> dict:
            started, model = time.process_time(), initialize(PaliGemma(CONTROL))
            processor = Processor(CONTROL, load_tokenizer(TINY_MAMBA / "tokenizer.model"))
            teach(model, list(model.language_model.parameters()), processor, self.samples(TOLD))
            save_file(model.language_model.state_dict(), folder / "model.safetensors")
            return {
                "answer_tokens": accuracy(model, processor),
                "file": self.name_of(folder),
                "cpu_seconds": time.process_time() - started,
            }

        parts = ("language", VERSION, self.samples(TOLD), CONTROL)
        return cell(self.out, "the transformer's language", parts, work)

    def weights(self, name: str, seed: int) -> dict[str, torch.Tensor]:
        """What the row learned."""
        return load_file(self.out / self.run(name, seed)["file"])

    def run(self, name: str, seed: int) -> dict:
        """{"scores": by task, "read": the same by order of reading, "trainable", "cpu_seconds", "file"}."""
        row = ROWS[name]
        stages = {stage: self.settings(stage, seed) for stage in SAMPLES}

        def work(folder: Path) -> dict:
            started, model = time.process_time(), MAKERS[row.kind](self, row, seed)
            processor = Processor(model.config, load_tokenizer(TINY_MAMBA / "tokenizer.model"))
            for stage, settings in stages.items():
                learn(model, processor, settings, make_lessons(settings.samples, seed, stage), folder / f"{stage}")
            learned = {name: p for name, p in model.named_parameters() if not name.startswith("vision_tower.")}
            save_file(learned, folder / "model.safetensors")
            for stage in stages:
                shutil.rmtree(folder / f"{stage}")
            model.eval()
            result = {"trainable": count(learned.values()), "scores": ask(model, processor, self.limit), "read": {}}
            if row.connector:
                for order in ORDERS:
                    model.multi_modal_projector.connector.order = order
                    result["read"][order] = ask(model, processor, self.limit)
            right = sum(map(sum, result["scores"].values())) / self.limit / len(TASKS)
            return result | {
                "accuracy": 100 * right,
                "cpu_seconds": time.process_time() - started,
                "file": self.name_of(folder),
            }

        settings = [asdict(settings) for settings in stages.values()]
        donor = ROWS[row.connector] if row.connector else None
        sizes = (TINY, CONTROL, self.samples(TOLD))
        parts = ("row", VERSION, self.fingerprint, row, donor, sizes, self.limit, TASKS, settings)
        return cell(self.out, f"{name}, seed {seed}", parts, work)

    def settings(self, stage: int, seed: int) -> Settings:
        """Those of `python -m train.finetune --arch qmamba`, but for the number of samples."""
        own = {
            "arch": "qmamba",
            "stage": stage,
            "samples": self.samples(SAMPLES[stage]),
            "seed": seed,
            "checkpoint_every": 10**9,
            "measure_every": 0,
        }
        return Settings(**(stage_defaults("qmamba", stage, "embedded") | own))


def learn(model: PaliGemma, processor: Processor, settings: Settings, lessons: Lessons, folder: Path) -> None:
    """Train what the stage of `settings` trains, in place."""
    rates = STAGES["qmamba"][settings.stage].rates
    rules = [Rule(pattern, settings.lr * factor, settings.weight_decay) for pattern, factor in rates.items()]
    optimizer = make_radam(parameter_groups(model, rules), (0.9, settings.beta2))
    folder.mkdir(exist_ok=True)
    order = Lesson(lessons, processor, settings.batch_size, settings.seed)
    fit(model, optimizer, order, projected_loss, LoopOptions.of(settings), folder, join_world("cpu"))


# ---------------------------------------------------------------------------------------------------------------------
# What came out
# ---------------------------------------------------------------------------------------------------------------------


def collect(bench: Bench, seeds: Sequence[int]) -> dict[str, dict]:
    """{row or row, order: {"trainable", "scores": by task (seeds, examples)}}."""
    found = {}
    done = {(name, seed): bench.run(name, seed) for seed in seeds for name in ROWS}  # a seed's lessons are made once
    for name in ROWS:
        cells = [done[name, seed] for seed in seeds]
        shown = {name: [c["scores"] for c in cells]}
        shown |= {f"{name}, {order}": [c["read"][order] for c in cells] for order in cells[0]["read"]}
        for title, scores in shown.items():
            found[title] = {
                "trainable": cells[0]["trainable"],
                "cpu_seconds": sum(c["cpu_seconds"] for c in cells),
                "scores": {task: [s[task] for s in scores] for task in TASKS},
            }
    return found


def summarize(bench: Bench, found: dict[str, dict], seeds: Sequence[int]) -> dict:
    """comparison.json: all that the tables say; accuracies are in percent, and the mean is that of the tasks."""
    pictures = {task: [f"{task}/{s.image_id}" for s in questions(task, bench.limit)] for task in TASKS}
    everywhere = [picture for of_task in pictures.values() for picture in of_task]

    def columns(scores: dict[str, list]) -> dict[str, tuple[list, list]]:
        joined = [[value for task in TASKS for value in scores[task][run]] for run in range(len(seeds))]
        return {"mean": (joined, everywhere)} | {task: (scores[task], pictures[task]) for task in TASKS}

    rows = {
        name: {
            "trainable": row["trainable"],
            "cpu_seconds": round(row["cpu_seconds"]),
            "test": {
                column: bootstrap([[100 * v for v in run] for run in runs], groups)._asdict()
                | {"by_seed": [100 * sum(run) / len(run) for run in runs]}
                for column, (runs, groups) in columns(row["scores"]).items()
            },
        }
        for name, row in found.items()
    }
    differences = {}
    for *_, pairs in TABLES:
        for name, other in pairs:
            if other is None:
                continue
            mine, theirs = columns(found[name]["scores"]), columns(found[other]["scores"])
            gains = differences[f"{name} - {other}"] = {}
            for column, (runs, groups) in mine.items():
                gain = bootstrap(
                    [
                        [100 * (a - b) for a, b in zip(run, base, strict=True)]
                        for run, base in zip(runs, theirs[column][0], strict=True)
                    ],
                    groups,
                )
                gains[column] = gain._asdict() | {"significant": gain.significant}
    told = [scenes.sample(task, "train", number) for task in TASKS for number in range(2_000)]
    chance = {
        task: scenes.blind([s for s in told if s.task == task], questions(task, bench.limit))["overall"]
        for task in TASKS
    }
    return {
        "version": VERSION,
        "scale": bench.scale,
        "seeds": list(seeds),
        "questions": bench.limit,
        "tasks": TASKS,
        "samples": {str(stage): bench.samples(number) for stage, number in SAMPLES.items()},
        "projector": asdict(TINY),
        "settings": {str(stage): asdict(bench.settings(stage, seeds[0])) for stage in SAMPLES},
        "chance": chance | {"mean": sum(chance.values()) / len(chance)},
        "rows": rows,
        "differences": differences,
        "language": {
            "Mamba": json.loads((TINY_MAMBA / "pretraining.json").read_text())["answer_tokens"],
            "transformer": bench.language()["answer_tokens"],
        },
    }


def tell(summary: dict) -> str:
    """comparison.md."""
    columns, first, second = ["mean", *summary["tasks"]], *summary["samples"].values()
    lines = [
        "# Q-Mamba on the embedded scenes",
        "",
        f"{len(summary['seeds'])} seed(s); {first:,} samples in stage 1, {second:,} in stage 2; {summary['questions']} "
        "questions of each task in the test split, exact answers in %, and in brackets 95 % bootstrap intervals over "
        "seeds and pictures. A difference is in percentage points, on the same examples and seeds; `*`: its interval "
        "excludes 0; n.s.: not significant. Guess: the likeliest answer to the question, without a picture.",
        "",
    ]
    for title, published, pairs in TABLES:
        body = [["guess", "", *(f"{summary['chance'][column]:.1f}" for column in columns), ""]]
        for name, other in pairs:
            row = summary["rows"][name]
            gain = spell(summary["differences"][f"{name} - {other}"]["mean"]) if other else ""
            body.append(
                [
                    name,
                    f"{row['trainable']:,}",
                    spell(row["test"]["mean"]),
                    *(f"{row['test'][task]['mean']:.1f}" for task in summary["tasks"]),
                    f"{gain} to {other}" if other else "",
                ]
            )
        lines += [
            f"## {title}",
            "",
            *([published, ""] if published else []),
            *table(["row", "parameters", *columns, "difference of the mean"], body),
            "",
        ]
    lines += ["## In words", "", *(f"- {sentence}" for sentence in conclude(summary)), ""]
    return "\n".join(lines)


def conclude(summary: dict) -> list[str]:
    """What may be said of the differences, and what may not."""
    sentences = []
    for name, gains in summary["differences"].items():
        gain = gains["mean"]
        verdict = ("better" if gain["mean"] > 0 else "worse") if gain["significant"] else "no significant difference"
        sentences.append(f"{name}: {verdict} ({spell(gain)}).")
    sentences.append(
        "Asked about scenes in words, before they saw a picture, the embedded Mamba had {Mamba:.1f} % of "
        "the answers' tokens right, the transformer {transformer:.1f} %: that much of their difference is "
        "no projector's.".format(**summary["language"])
    )
    guess = summary["chance"]["mean"]
    for name, row in summary["rows"].items():
        if row["test"]["mean"]["low"] <= guess:
            sentences.append(f"{name} cannot be told from guessing without a picture ({guess:.1f} %).")
    if len(summary["seeds"]) < 10:
        sentences.append(
            f"{len(summary['seeds'])} seed(s) are few: intervals that resample them are rather too narrow "
            "than too wide."
        )
    sentences.append("All rows share the rates of the embedded Q-Mamba, which were found on row `local`.")
    return sentences


def draw(summary: dict, out: Path) -> list[str]:
    """rows.png and differences.png."""
    rows, gains = summary["rows"], summary["differences"]
    points = {
        "rows.png": [
            figures.interval_chart(
                [(name, *(row["test"][column][end] for end in ("mean", "low", "high"))) for name, row in rows.items()],
                {"mean": "all tasks"}.get(column, column),
                "exact answers, %",
                reference=("guess without a picture", summary["chance"][column]),
            )
            for column in ("mean", *summary["tasks"])
        ],
        "differences.png": [
            figures.interval_chart(
                [(name, *(gain["mean"][end] for end in ("mean", "low", "high"))) for name, gain in gains.items()],
                "all tasks",
                "difference, percentage points",
                reference=("no difference", 0.0),
            )
        ],
    }
    for name, charts in points.items():
        figures.save(stack(charts), out / name)
    return list(points)


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    args = study_arguments(argv, "qmamba", __doc__, 400, "questions of each task")
    started = time.perf_counter()
    fingerprint = exact_fingerprint(load_mamba(TINY_MAMBA)) + exact_fingerprint(eye())
    bench = Bench(args.out, args.scale, args.limit, fingerprint)
    with same_command_goes_on():
        found = collect(bench, range(args.seeds))
    summary = summarize(bench, found, range(args.seeds))
    text = tell(summary)
    write_text(args.out / "comparison.json", json.dumps(summary, indent=1) + "\n")
    write_text(args.out / "comparison.md", text)
    files = ["comparison.md", "comparison.json", *draw(summary, args.out)]
    print(text)
    spent = sum(row["cpu_seconds"] for name, row in summary["rows"].items() if name in ROWS)
    print(
        f"{spent:,} CPU seconds for all rows; this call {time.perf_counter() - started:,.0f} s on {args.threads} "
        f"threads; in {args.out}: {', '.join(files)}, cells/"
    )
