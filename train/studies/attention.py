"""Study: is an attention variant better than plain LoRA, beyond chance?

    python -m train.compare                      every variant, on the embedded base and scenes
    python -m train.compare --quick              three rows and short runs
    python -m train.compare --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE --rows twin

Every other flag is one of `train.finetune` and holds for all rows. A row stands beside the mean of all plain rows,
which differ in rank alone; beside plain LoRA of the smallest rank with at least as many trainable parameters; and
beside the same trained as long. The positive control, `train/studies/built.py`, is a task in which two maps are known
to help. Needles are answered by the likelier word of those asked for: what short runs say freely to "Top or Bottom?"
tells what they learned of the wording, not of the picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from eval.needle import PROTOCOLS
from lora import adapter
from model.common import UserError
from train.flags import flag
from train.optim import count, trainable
from train.settings import Settings
from train.studies import built, engine, report
from train.studies.cells import fine_tune
from train.studies.engine import MEAN, Study
from train.studies.measures import Task, data_mark, disk_tasks, embedded_tasks
from train.studies.options import StudyOptions, deciding, read_with_settings
from train.studies.pool import Job
from train.studies.rules import Prediction
from train.systems.open import load_base, open_model

PLAIN = {"attention": "softmax", "feed_forward": "mlp", "option": ()}
ROWS: dict[str, dict] = {
    "fine-tuned": PLAIN,
    "shared": PLAIN | {"attention": "shared"},
    "split": PLAIN | {"attention": "split"},
    "twin": PLAIN | {"attention": "twin"},
    "twin-small": PLAIN | {"attention": "twin", "option": ("mu=0.25",)},
    "v2": PLAIN | {"attention": "v2"},
    "dex": PLAIN | {"attention": "dex"},
    "swiglu": PLAIN | {"feed_forward": "swiglu"},
}
DEFAULT = [name for name in ROWS if name != "swiglu"]
# Written before the study was run, after an earlier run with three seeds.
PREDICTIONS = (
    Prediction("shared", MEAN, "worse", "it disturbs the pretrained weights at step 0"),
    Prediction("split", MEAN, "worse", "it disturbs the pretrained weights at step 0"),
    Prediction("twin", MEAN, "worse", "μ = 1 doubles the noise of two adapters: −11 points at 4×4, three seeds"),
    Prediction("twin-small", MEAN, "equivalent", "a quarter of the second map adds little noise"),
    Prediction("v2", MEAN, "equivalent", "starts at 0.018 of the second map; −3 points at 4×4, n.s."),
    Prediction("dex", MEAN, "equivalent", "linear in the head's output; no other map"),
)
QUICK = {"rows": ("fine-tuned", "twin", "dex"), "limit": 128, "seeds": 5}


@dataclass(frozen=True)
class Options(StudyOptions):
    """The flags of this study, besides those of `train.finetune`."""

    rows: tuple[str, ...] = flag(tuple(DEFAULT), "(default: all but swiglu)", choices=[*ROWS], nargs="+")
    limit: int = flag(600, "VQA questions; half as many of each other kind; half of all for validation", least=1)
    protocol: str = flag("constrained", "of the needle tests", choices=PROTOCOLS[:2])
    coco: str | None = flag(None, "with --data on disk: folder of COCO val2014, for needle tests (default: none)")
    captions: str | None = flag(None, "with --coco: MMNeedle's or COCO's caption file (default: none)")
    positive: bool = flag(True, "the positive control, a minute")


def control_by_size(base: Settings, changes: dict) -> tuple[str, dict]:
    """Name and changes of plain LoRA of the smallest rank with at least as many trainable parameters, and the same
    alpha / r. Parameters are counted on shapes alone."""

    def parameters(changes: dict) -> int:
        return count(trainable(open_model(replace(base, **changes), torch.device("meta"))[0]).values())

    rank = -(-parameters(changes) // parameters(PLAIN | {"r": 1}))
    return f"LoRA r{rank}", PLAIN | {"r": rank, "alpha": base.alpha * rank / base.r}


@cache
def tasks_of(base: Settings, options: Options, split: str) -> dict[str, Task]:
    limit = options.limit if split == "test" else max(1, options.limit // 2)
    if base.is_embedded:
        return embedded_tasks(split, limit, options.protocol)
    return disk_tasks(base, split, limit, options.protocol, options.coco, options.captions)


def make(base: Settings, options: Options, job: Job, folder: Path) -> dict:
    """A cell: an adapter that is trained unless it is there, and its scores on a split."""
    settings = replace(base, **dict(job.changes), lr=job.rate, seed=job.seed)
    return fine_tune(base, settings, tasks_of(base, options, job.split), folder)


def study_of(base: Settings, options: Options) -> Study:
    chosen, by_size = {name: ROWS[name] for name in options.rows}, {}
    for name in [name for name in options.rows if name != "fine-tuned"]:
        control, changes = control_by_size(base, ROWS[name])
        if changes["r"] == base.r and "fine-tuned" in options.rows:
            control = "fine-tuned"
        by_size[name], chosen[control] = (control,), chosen.get(control, changes)
    plain, longer = tuple(name for name in chosen if name not in by_size), None
    if base.is_embedded:
        longer = lambda changes, ratio: (*changes, ("samples", round(base.samples * ratio)))  # noqa: E731
    tasks = {split: tasks_of(base, options, split) for split in ("validation", "test")}
    marks = [task.mark for of_split in tasks.values() for task in of_split.values()]
    return Study(
        name="attention",
        title=f"Attention variants beside plain LoRA: base {base.base}, data {' '.join(base.data)}",
        rows={name: tuple(changes.items()) for name, changes in chosen.items()},
        make=partial(make, base, options),
        key=repr((deciding(base), adapter.fingerprint(load_base(base, torch.device("cpu"))), data_mark(base), marks)),
        measures=tasks["test"],
        beside={
            "the mean of all plain rows": dict.fromkeys(by_size, plain),
            "plain LoRA with at least as many parameters": by_size,
        },
        rates=options.rates or tuple(float(f"{base.lr * factor:.3g}") for factor in (1, 2, 4)),
        plain=plain,
        lengthen=longer,
        predictions=PREDICTIONS,
        more=built.blocks if options.positive else lambda run: [],
    )


def main(argv: Sequence[str] | None = None) -> None:
    flags = {"decided": "attention feed_forward option full tasks lr seed recipe", "quick_defaults": "--samples 800"}
    flags["defaults"] = "--samples 3200 --tasks vqa,n2o1,n2o2,n4o1"
    options, base = read_with_settings(Options, argv, "train.compare", __doc__, QUICK, **flags)
    if options.coco and base.is_embedded:
        raise UserError("--coco goes with --data on disk: the embedded scenes have needle tests of their own")
    print(report.write(engine.run(study_of(base, options), options)))
