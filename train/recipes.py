"""Recipes: settings of a fine-tuning run that others have published, or that were found here.

In: a recipe's name, and the base, whose pictures have a side. Out: settings by name, how they
differ from what was published, and the table of `--recipe help`.
"""

from functools import cache

from model.common import UserError, shown
from model.registry import read_config
from model.source import preset_of, resolve

# The paper's Table 1 (its section 4), and the transfer of PaliGemma's authors (Beyer et al. 2024,
# appendix J)

_PAPER = {
    "batch_size": 4,  # "a batch size of 4", and the rule rate / batch = 1e-4
    "step_batch": 4,
    "optimizer": "adam",
    "schedule": "linear",
    "warmup": 50,
    "epochs": 1,
    "fraction": 0.4,
    "diff_in": "both",
    "r": 32,
    "alpha": 64.0,
    "dropout": 0.1,
    "prompt": "answer {question}",
}
_FAST = _PAPER | {"lr": 4e-4, "weight_decay": 1e-9}
_SLOW = _PAPER | {"lr": 2e-5, "weight_decay": 1e-8}
_PLAIN = {"attention": "softmax", "feed_forward": "mlp"}
_WHOLE = {"attention": "softmax", "full": True, "weight_decay": 0.0}
RECIPES: dict[str, dict] = {
    "paper-1": _FAST | _PLAIN,
    "paper-2": _FAST | {"attention": "shared", "feed_forward": "swiglu-new"},
    "paper-3": _SLOW | _PLAIN | {"r": 16, "alpha": 32.0},
    "paper-4": _SLOW | {"attention": "shared", "feed_forward": "mlp"},
    "paper-5": {
        **_SLOW,
        "attention": "split",
        "feed_forward": "swiglu-new",
        "option": ('rope_pairs="fresh"',),
    },
    "paligemma": {
        **_WHOLE,
        "lr": 1e-5,
        "beta2": 0.999,
        "schedule": "cosine",
        "warmup": 0.05,
        "clip": 1.0,
        "epochs": 10,
        "batch_size": 16,
        "step_batch": 256,
        "prompt": "answer en {question}",
        "answers": "sampled",
    },
    # The embedded base on other pictures than its 40 emojis: a small tower learns first, then all
    # else. Questions of one picture in one batch make the picture matter, and share its
    # encoding.
    "own": {
        **_WHOLE,
        "new_tower": True,
        "shift": True,
        "align": 500,
        "validation": 0.05,
        "warmup": 0.04,
        "optimizer": "muon",
        "lr": 0.01,
        "batch_size": 32,
        "per_picture": 8,
        "patience": 5,
    },
    "lora": {},  # with a graft, as by default on the embedded scenes, also on own pictures
    # LoRA on a base of published size; it was never run. The rate is ten times the authors' for
    # whole weights, by the rule of "LoRA Without Regret" (Schulman et al. 2025). Hugging Face's
    # script (merveenoyan/smol-vision) has 2e-5, 4 × 4 rows a step and bf16, Roboflow's maestro
    # (paligemma_2/core.py) 1e-5 and 4 × 8.
    "one-gpu": {
        "lr": 1e-4,
        "warmup": 0.05,
        "batch_size": 16,
        "step_batch": 16,
        "beta2": 0.999,
        "checkpointing": True,
        "dtype": "bf16",
    },
}

# The authors' transfers by task and side of the pictures, see HELP. All have the second momentum,
# the schedule and the clipping of the recipe `paligemma`.
TRANSFERS = """
task         side  epochs  lr    wd    rows  smoothing  prompt
vqav2         224      10  1e-5  1e-6   256  0          answer en {question}
vqav2         448      10  1e-5  0      256  0          answer en {question}
textvqa       224       5  3e-6  0      256  0          answer en {question}
textvqa       448      10  3e-6  3e-7   256  0          answer en {question}
textvqa       896      10  3e-6  0      256  0          answer en {question}
vizwizvqa     224      10  1e-5  0      256  0          answer en {question}
vizwizvqa     448      10  1e-5  0      256  0          answer en {question}
gqa           224       1  1e-5  0      256  0          answer en {question}
gqa           448       1  1e-5  0      256  0          answer en {question}
docvqa        224      10  1e-5  1e-6   256  0          {question}
docvqa        448      10  1e-5  1e-6   256  0          {question}
docvqa        896      10  1e-5  1e-6   256  0          {question}
chartqa       224      30  1e-5  1e-6   256  0.2        {question}
chartqa       448      30  1e-5  1e-6   256  0.2        {question}
infovqa       224       3  1e-5  1e-6   256  0.4        answer en {question}
infovqa       448       3  1e-5  1e-6   128  0.4        answer en {question}
infovqa       896       3  3e-6  3e-7    32  0.4        answer en {question}
refcoco_seg   224     100  3e-5  0      256  0.3        {question}
refcoco_seg   448     100  1e-5  0      256  0.3        {question}
refcoco_seg   896     100  1e-5  0       64  0.3        {question}
cococap       224       5  1e-5  1e-6   256  0          caption en
cococap       448       5  1e-5  1e-6   256  0          caption en
"""
# What differs here: of every task, and of some
NOTES = """
loss: theirs is the mean over a step's examples, each the mean over its tokens; here all tokens of a step count alike
wd: theirs, the share of a weight that a step takes off, does not depend on the rate: --weight-decay is wd / lr
wd: of theirs only matrices of the vision tower and the projector decay, here all weights
gqa: at 448 pixels their vision tower and projector are frozen, here they learn
chartqa: their decoder has dropout 0.1, here it has none
infovqa: their answers are in lower case: write those of the data so
refcoco_seg: their decoder has dropout 0.1 at 224 pixels, here it has none
refcoco_seg: their epoch has one phrase of each picture, here all that are records
refcoco_seg: an answer of the data is four <loc…> and sixteen <seg…>
cococap: the data brings the prompt `caption en` and five `answers` a picture, of which an epoch has one
"""
HELP = f"""{TRANSFERS}
From google-research/big_vision at 0127fb6, configs/proj/paligemma/transfers/TASK.py (`sweep_best`).
--recipe paligemma:TASK takes the row of the side of the base's pictures, in pixels; else the next
smaller one, else the smallest. No transfer to detection is published. What differs here:
{NOTES}"""
PREFIX = "paligemma:"
ROWS = [line.split(None, 7) for line in TRANSFERS.strip().splitlines()[1:]]
TASKS = list(dict.fromkeys(PREFIX + row[0] for row in ROWS))


def recipe_of(name: str, base: str) -> dict:
    """The settings of a recipe; none of an unknown one. Raises UserError for a transfer where the
    base reads no pictures."""
    if name not in TASKS:
        return RECIPES.get(name, {})
    _, epochs, lr, decay, rows, smoothing, prompt = published_row(name, base)
    rate = float(lr)
    settings = {
        "epochs": int(epochs),
        "lr": rate,
        "weight_decay": round(float(decay) / rate, 9),
        "step_batch": int(rows),
        "label_smoothing": float(smoothing),
    }
    if "{question}" in prompt:
        settings["prompt"] = prompt
    return RECIPES["paligemma"] | settings


@cache
def published_row(name: str, base: str) -> list[str]:
    """The values of a transfer, from the side on: of the base's side or the next smaller one, else
    of the smallest."""
    config = preset_of(base) or read_config(resolve(base, ["config.json"]) / "config.json")
    if not hasattr(config, "vision"):
        raise UserError(f"--recipe {name}: {shown(base)} reads no pictures: take a PaliGemma")
    rows = [row[1:] for row in ROWS if PREFIX + row[0] == name]
    chosen = rows[0]
    for row in rows:  # from small to large
        if int(row[0]) <= config.vision.image_size:
            chosen = row
    return chosen


def differences(name: str, base: str) -> list[str]:
    """Lines that say how a run differs from the published one; of a transfer alone."""
    if name not in TASKS:
        return []
    side = published_row(name, base)[0]
    lines = [f"published for pictures of {side} pixels, see --recipe help; what differs here:"]
    about = ("loss", "wd", name.removeprefix(PREFIX))
    lines += [line for line in NOTES.splitlines() if line.split(":")[0] in about]
    return lines
