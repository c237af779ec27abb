"""What the attention study compares: its rows, its flags, and what was predicted before it ran."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from eval.needle import PROTOCOLS
from model.common import UserError
from train.flags import flag
from train.recipes import RECIPES
from train.studies.cells import (
    FineTuningRow,
    NeedleOptions,
    fine_tune_scattered,
    fine_tune_slow_maps,
    open_base,
    without,
)
from train.studies.engine import SeededOptions, read_rates
from train.studies.rules import Prediction

SAMPLES = 3_200  # of a run on the embedded scenes
# the paper's Table 1
VQA_SCORES = {"paper-1": 53.21, "paper-2": 51.91, "paper-3": 35.72, "paper-4": 33.91, "paper-5": 41.32}

# What `--rows` accepts, besides the names of rows. A new experiment is an entry here.
GROUPS: dict[str, tuple[FineTuningRow, ...]] = {
    "attention": (
        FineTuningRow("baseline", run=open_base),
        FineTuningRow("fine-tuned"),
        FineTuningRow("shared", {"attention": "shared"}),
        FineTuningRow("split", {"attention": "split"}),
        FineTuningRow("twin", {"attention": "twin"}),
        FineTuningRow("twin-small", {"attention": "twin", "option": ("mu=0.25",)}),
        FineTuningRow("twin-token", {"attention": "twin", "option": ("mu=0.25", "by_token=true")}),
        FineTuningRow("twin-half", {"attention": "twin", "option": ("mu=0.25", "half=true")}),
        FineTuningRow("v2", {"attention": "v2"}),
        FineTuningRow("v2-grouped", {"attention": "v2", "option": ("shared_by=4",)}),
        FineTuningRow("dex", {"attention": "dex"}),
        FineTuningRow("dex-entropy", {"attention": "dex"}, run=fine_tune_scattered),
    ),
    "more": (
        FineTuningRow("split-fresh", {"attention": "split", "option": ('rope_pairs="fresh"',)}),
        FineTuningRow("twin-slow", {"attention": "twin"}, run=fine_tune_slow_maps),
        FineTuningRow("twin-tiny", {"attention": "twin", "option": ("mu=0.1",)}),
    ),
    "feed-forward": (
        FineTuningRow("swiglu", {"feed_forward": "swiglu"}),
        FineTuningRow("swiglu-new", {"feed_forward": "swiglu-new"}),
    ),
    "paper": tuple(FineTuningRow(name, RECIPES[name], published=score) for name, score in VQA_SCORES.items()),
}

# Of the mean over all measures, "all", against the control of as many parameters. From an earlier run with three seeds.
PREDICTIONS = (
    Prediction("shared", "all", "worse", "it disturbs the pretrained weights at step 0"),
    Prediction("split", "all", "worse", "it disturbs the pretrained weights at step 0"),
    Prediction("twin", "all", "worse", "μ = 1 doubles the noise of two adapters: −11 points at 4×4, three seeds"),
    Prediction("twin-small", "all", "equivalent", "a quarter of the second map adds little noise"),
    Prediction("twin-slow", "all", "equivalent", "after twin was seen: its rate is held down by the steps of q and k"),
    Prediction("twin-tiny", "all", "equivalent", "nearly plain LoRA"),
    Prediction("v2", "all", "equivalent", "starts at 0.018 of the second map; −3 points at 4×4, n.s."),
    Prediction("v2-grouped", "all", "equivalent", "as v2"),
    Prediction("dex", "all", "equivalent", "linear in the head's output; no other map"),
    Prediction("dex-entropy", "all", "equivalent", "as dex, on half of the heads"),
)
# What --quick changes, besides the samples of a run
QUICK = {"rows": "fine-tuned,twin,dex", "limit": 128, "seeds": 5, "most_seeds": 5}
QUICK_SAMPLES = 800

NAMES = "; ".join(f"{group}: {', '.join(row.name for row in rows)}" for group, rows in GROUPS.items())


@dataclass(frozen=True)
class AttentionOptions(NeedleOptions, SeededOptions):
    """The flags of the attention study, besides those of `train.finetune`."""

    rows: str = flag(
        "attention",
        f"rows, or groups of them ({NAMES}); or a study with flags of its own, which --rows NAME --help shows: wings, "
        "qmamba, text, scratch",
        metavar="NAME,…",
    )
    rates: tuple[float, ...] | None = flag(
        None,
        "peak learning rates to try first (default: the first row's own, its double and fourfold)",
        type=read_rates,
        metavar="A,B,…",
    )
    rungs: str = flag("", "difficulties on the embedded scenes, as n2o2,n4o1 (default: chosen by the control's score)")
    timed: bool = flag(True, "on the embedded scenes: a second control that trains as long as its row")
    mechanism: bool = flag(True, "on the embedded scenes: what the attention of every row does, two seconds a run")
    limit: int = flag(
        600,
        "VQA questions of the test split; half as many of each other kind; half of all for validation",
        least=1,
        metavar="N",
    )
    protocol: str | None = flag(
        None,
        "of the needle tests: one-word answers, parsed strictly, or the likelier of the words (default: constrained on "
        "the embedded scenes, else paper)",
        choices=PROTOCOLS[:2],
    )
    json: bool = flag(False, "print comparison.json instead of the tables (default: --no-json)")


def pick_rows(names: str, given: Collection[str] = ()) -> list[FineTuningRow]:
    """The rows that `--rows` names, comma-separated, each once; flags that are `given` hold for the paper's rows too.

    Raises UserError for an unknown name.
    """
    by_name = {row.name: row for rows in GROUPS.values() for row in rows}
    picked = {}
    for name in names.split(","):
        if name not in GROUPS and name not in by_name:
            raise UserError(f"--rows {name}: choose of {', '.join([*GROUPS, *by_name])}")
        picked |= {row.name: row for row in GROUPS.get(name, (by_name.get(name),))}
    return [replace(row, changes=without(row.changes, given)) for row in picked.values()]
