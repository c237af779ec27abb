"""Study: does a second attention map find facts among others like them, in a model that somebody
pretrained?

    python -m train.compare --rows real --base FOLDER [--text FILE] [--quick]

In: a published language model, such as `python -m weights.gguf` writes, and prose. Each row is a
graft with LoRA beside it, trained for the same steps of one row, in two designs that leave room:

- few: 1, 2 or 4 facts in 200 tokens are asked. Does what was learned in a quiet room hold in a
  loud one?
- prose: the next token of 320 tokens; the facts are asked without training.

Tests are of other forms, cities, values and prose, see `eval/systems/needles.py`: LOUD rungs, and a
QUIET one, and each seed has its own: ten seeds of 8 contexts are 80 contexts of a rung. The fall is
what a context loses from the quiet rung to the loud ones. The control is the mean of two plain
rows; `plain + head norm` is `shared` with λ = 0. `mean`, `gate`, `temperature` and `sink` are
controls with one part each of what a second map may do; in free rows λ and μ have a rate of their
own. Rates are not searched for.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from eval.systems.needles import Haystack, measure, sentences_of
from model.common import UserError
from model.systems.chat import load_text_tokenizer
from model.systems.language import LanguageModel
from train.flags import flag, from_values
from train.settings import Settings
from train.studies import engine, report
from train.studies.cells import Job, digest
from train.studies.rules import Measure
from train.studies.training import descend, facts_of, open_row, read_given
from weights.fingerprint import exact_fingerprint
from weights.load import load_text

QUIET = (512, 4)  # tokens and facts
LOUD = ((512, 16), (1024, 32))
ASKED = 4  # facts of a context
LENGTHS = {"few": 200, "prose": 320}  # tokens of a row
TIMES = 1.15  # seconds of a step with two maps beside plain LoRA's, measured once
PLAIN = ("plain", "plain again")
ROWS = {
    "plain": {"kind": "softmax"},
    "plain again": {"kind": "softmax", "drawn": 1000},  # other initial values, the same rows
    "plain + head norm": {"kind": "shared", "one_map": True},
    "twin-small": {"kind": "twin", "mu": 0.25},
}
ROWS |= {kind: {"kind": kind} for kind in "v2 dex mean gate temperature sink".split()}
# λ and μ at ten times the rate: at LoRA's they hardly move in so few steps
FREE = 2e-3
ROWS |= {
    "mean free": {"kind": "mean", "scalar_lr": FREE},
    "twin-small free": {"kind": "twin", "mu": 0.25, "scalar_lr": FREE},
    "v2 free": {"kind": "v2", "scalar_lr": FREE},
}
# written before any row but plain was trained, of the one-map controls before these were, and of the
# free rows after two seeds of the others: by row, what each design does to exact answers
FEW_STEPS = "so few steps part no two maps far enough to cancel what both see"
PREDICTED = {
    "plain + head norm": ("worse", "a norm that the model never had loses what it knows"),
    "twin-small": ("equivalent", FEW_STEPS),
    "v2": ("equivalent", FEW_STEPS),
    "dex": ("equivalent", "one map, and a linear change of what it reads"),
    "mean": ("equivalent", "the other facts take the attention, not all positions alike"),
    "gate": ("equivalent", "LoRA on o_proj scales heads too, not by token"),
    "temperature": ("equivalent", "one of the changes that LoRA on q_proj can make"),
    "sink": ("equivalent", "pretrained heads have one already, the first token"),
    "mean free": ("worse", "what lowers the loss of a quiet room is no floor of a loud one"),
    "twin-small free": ("equivalent", "both maps see the same others, whatever their weight"),
    "v2 free": ("equivalent", "both maps see the same others, whatever their weight"),
}
QUICK = {"seeds": 1, "contexts": 3, "steps": 5}


@dataclass(frozen=True)
class Options(engine.StudyOptions):
    base: str = flag("", "folder of a published language model", metavar="FOLDER")
    text: Path | None = flag(None, "prose (default: Python's reference manual)", metavar="FILE")
    contexts: int = flag(8, "of a rung, other ones for each seed", least=1, metavar="N")
    steps: int = flag(40, "of a run", least=1)
    rate: float = flag(2e-4, "of LoRA", least=0)


@cache
def haystacks(base: str, text: Path | None) -> dict[str, Haystack]:
    """By split."""
    tokenizer = load_text_tokenizer(base)
    sentences = sentences_of(text)
    return {split: Haystack(tokenizer, sentences, split) for split in ("train", "test")}


def row_of(haystack: Haystack, design: str, dice: random.Random) -> tuple[list[int], list[int]]:
    """Token ids, and labels: answers alone, or all tokens of prose; −100 means none."""
    length = LENGTHS[design]
    if design == "prose":
        begin = haystack.tokenizer.begin
        ids = sum(haystack.prose(dice, length - len(begin)), begin)
        return ids, ids
    context = haystack.context(dice, length, dice.choice((1, 2, 4)), 2)
    ids, labels = list(context.ids), [-100] * length
    for question, answer in context.questions:
        ids += question + answer
        labels += [-100] * len(question) + answer
    return ids, labels


def loss_of(model: LanguageModel, ids: list[int], labels: list[int]) -> torch.Tensor:
    """Nats a token."""
    return F.cross_entropy(model(torch.tensor([ids]))[0, :-1], torch.tensor(labels[1:]))


def make(options: Options, job: Job, folder: Path) -> dict:
    """Train a row, and ask it."""
    return train(options, job.seed, **dict(job.changes))


def train(
    options: Options,
    seed: int,
    design: str,
    steps: int,
    kind: str,
    drawn=0,
    scalar_lr: float | None = None,
    **graft,
) -> dict:
    """A cell. drawn: other numbers are other initial values, on the same rows. scalar_lr: of λ and
    μ. graft: of `open_row`."""
    # 1. the model, its graft and LoRA
    settings = Settings(
        base=options.base,
        device="cpu",
        r=16,
        alpha=32.0,
        lr=options.rate,
        scalar_lr=scalar_lr,
        seed=seed + drawn,
    )
    model, optimizer = open_row(load_text(options.base), settings, kind, **graft)
    # 2. training
    of = haystacks(options.base, options.text)
    dice = random.Random(f"train/{seed}")
    losses = (loss_of(model, *row_of(of["train"], design, dice)) for _ in range(steps))
    descend(model.train(), optimizer, losses, steps)
    # 3. what it finds, and what it costs elsewhere
    first = seed * options.contexts
    scores = asked(model.eval(), of["test"], range(first, first + options.contexts))
    return {"scores": {"test": scores}, "facts": facts_of(model)}


@torch.no_grad()
def asked(model: LanguageModel, haystack: Haystack, contexts: range) -> dict[str, list[float]]:
    """The scores of all measures, on contexts of these numbers."""
    exact = {}
    scores = {"exact": [], "signal": []}
    for rung in (QUIET, *LOUD):
        questions = measure(model, haystack, *rung, contexts, ASKED)["questions"]
        right = [float(question["exact"]) for question in questions]
        exact[rung] = np.reshape(right, (-1, ASKED)).mean(1)
        if rung == QUIET:
            scores["quiet"] = right
            continue
        scores["exact"] += right
        for q in questions:  # a share may be 0, whose logarithm decides nothing
            ratio = max(q["asked"], 1e-9) / max(q["others"], 1e-9)
            scores["signal"].append(np.log(ratio))
    loud = np.mean([exact[rung] for rung in LOUD], axis=0)
    scores["fall"] = (exact[QUIET] - loud).tolist()
    if not exact[QUIET].any():  # who finds nothing has lost all
        scores["fall"] = [1.0] * len(loud)
    dice = random.Random(f"prose/{contexts.start}")
    rows = [row_of(haystack, "prose", dice) for _ in contexts]
    scores["loss"] = [loss_of(model, *row).item() for row in rows]
    return scores


def study_of(options: Options) -> engine.Study:
    # 1. the rows of each design, beside its plain ones
    rows, tables = {}, {}
    for design in LENGTHS:
        names = {row: f"{row}, {design}" for row in ROWS}
        for row, name in names.items():
            rows[name] = (*{"design": design, "steps": options.steps, **ROWS[row]}.items(),)
        plain = tuple(names[row] for row in PLAIN)
        variants = [name for row, name in names.items() if row not in PLAIN]
        tables[f"plain LoRA, {design}"] = dict.fromkeys(variants, plain)
        tables[f"plain, A/A, {design}"] = {plain[1]: plain[:1]}
    two_maps = [f"{row}, few" for row in ("twin-small", "v2")]
    tables["one plain row, few"] = dict.fromkeys(two_maps, ("plain, few",))
    # 2. the measures
    contexts = range(options.contexts)
    one = [context for context in contexts for _ in range(ASKED)]
    many = [f"{rung}/{context}" for rung in LOUD for context in one]
    rungs = [f"{length} tokens, {facts} facts" for length, facts in LOUD for _ in one]
    beside = {"is_share": False, "in_mean": False}
    signal = "attention, log of asked ÷ others"
    loss = "loss on prose, nats"
    measures = {
        "exact": Measure("exact among many", many, rungs=rungs),
        "quiet": Measure("exact among few", one, in_mean=False),
        "fall": Measure("the fall", contexts, less_is_better=True, in_mean=False),
        "signal": Measure(signal, many, margin=0.2, rungs=rungs, failed=-20.0, **beside),
        "loss": Measure(loss, contexts, margin=0.03, less_is_better=True, failed=11.0, **beside),
    }
    # 3. the study
    predictions = []
    for row, (verdict, reason) in PREDICTED.items():
        predictions += [(f"{row}, {design}", "exact", verdict, reason) for design in LENGTHS]
    model = load_text(options.base)
    read = [
        (of.tokenizer.begin, of.sentences) for of in haystacks(options.base, options.text).values()
    ]
    decided = exact_fingerprint(model), model.config, read
    return engine.Study(
        name="compare-real",
        title="Two attention maps in a pretrained model: one fact among many",
        rows=rows,
        make=partial(make, options),
        key=digest(decided, options.contexts, options.rate),
        measures=measures,
        beside=tables,
        main="exact",
        lengthen=("steps", options.steps, dict.fromkeys(two_maps, TIMES)),
        predictions=tuple(predictions),
    )


def main(argv: Sequence[str] | None = None) -> None:
    given = read_given(Options, argv, "train.compare --rows real", __doc__, QUICK, ("rates",))
    options = from_values(Options, given)
    if not options.base:
        raise UserError("--base: give the folder of a published language model")
    report.publish(study_of(options), options)
