"""The report of the paper's experiment: its tables beside ours, what it leaves open, Figure 2 and the learning curves.

In: reproduction.json, as `train/studies/paper.py` makes it. Out: Markdown and pictures.
"""

from collections.abc import Sequence

from PIL import Image

from eval import figures
from eval.report import markdown_table
from train.studies import engine
from train.studies.attention_report import grid
from train.studies.engine import spell

TITLES = {"baseline": "baseline", "without": "fine-tuned", "with": "fine-tuned, differential attention"}
# What the paper leaves open, or says in two ways: subject, its words, where the default comes from, setting
OPEN = (
    ("where attention is replaced", "“both Siglip and Gemma”", "the paper", "diff_in"),
    ("optimizer", "“the Adam optimizer”, and a weight decay", "the paper", "optimizer"),
    ("rows of a step", "“a batch size of 4”, rate / batch = 1e-4", "the paper", "step_batch"),
    ("second momentum", "nothing", "the authors' code", "beta2"),
    ("schedule", "nothing", "the authors' code", "schedule"),
    ("warm-up steps", "nothing", "the authors' code", "warmup"),
    ("largest gradient norm", "nothing", "this project", "clip"),
    ("LoRA dropout", "nothing", "the authors' code", "dropout"),
    ("projections with LoRA; none in SigLIP", "nothing", "the authors' code", "targets"),
    ("answer to learn", "nothing", "the authors' code", "answers"),
    (
        "words of a question, in training and evaluation",
        "nothing; its code: the bare question in evaluation",
        "this project",
        "prompt",
    ),
    ("epochs", "one for Part 2, nothing for Part 1", "the paper", "epochs"),
    ("pictures held out from training", "nothing; its code asks about training pictures", "this project", "validation"),
    ("seed", "nothing", "this project", "seed"),
    ("weights", "nothing", "this project", "dtype"),
    ("matrix products", "nothing; its code: bf16", "this project", "autocast"),
)
FIXED = (
    "Without a flag: SwiGLU replaces the decoder's MLP, with int(8/3·d) hidden units drawn at random (Eq. 7); λ's "
    "vectors are drawn from N(0, 0.1), the norms' gains start at 1, layers count from 1; the original differential "
    "attention splits the heads' dimensions, each half with a RoPE of its own. The authors' code draws the gains from "
    "N(0, 0.1), counts layers from 0, and freezes λ and the gains when it adds LoRA: here they are trained."
)


def table_1(summary: dict) -> list[str]:
    """Table 1, and the baseline."""
    head = ["model", "differential", "feed-forward", "rate", "rank/alpha", "decay", "the paper", "here", "parameters"]
    rows = [["baseline", "", "", "", "", "", "", spell(one["score"]), ""] for one in summary["baseline"]]
    for result in summary["part_1"]:
        own = result["settings"]
        kind = {"softmax": "no", "split": "yes (original)"}.get(own["attention"], "yes")
        feed_forward = "MLP" if own["feed_forward"] == "mlp" else "SwiGLU"
        numbers = [f"{own['lr']:g}", f"{own['r']}/{own['alpha']:g}", f"{own['weight_decay']:g}"]
        rows.append(
            [result["name"], kind, feed_forward, *numbers, f"{result['published']:.2f}", spell(result["score"])]
            + [f"{result['trainable'] or 0:,}"]
        )
    if summary["chance"] is not None:
        rows.insert(0, ["best guess, no picture", "", "", "", "", "", "", f"{summary['chance']:.2f}", ""])
    return markdown_table(head, rows)


def table_2(summary: dict) -> list[str]:
    """Table 2, with the VQA scores of Part 2."""
    vqa = {kind: spell(result["score"]) for kind, result in summary["part_2"].items()}
    if summary["baseline"]:
        vqa["baseline"] = spell(summary["baseline"][0]["score"])
    rows = [["chance", "", "", "25.00", ""]] if summary["needles"] else []
    for kind, title in TITLES.items():
        if kind not in {**vqa, **summary["needles"]}:
            continue
        needle = summary["needles"].get(kind)
        found = [f"{needle['published']:.2f}", spell(needle["score"])] if needle else ["", ""]
        rows.append([title, summary["chosen"].get(kind, ""), *found, vqa.get(kind, "")])
    return markdown_table(["model", "as", "index accuracy, the paper", "here", "VQA, here"], rows)


def run_table(summary: dict) -> list[str]:
    """What each run took; runs that were trained elsewhere have told less."""

    def number(value: float | None, unit: float = 1, digits: int = 0) -> str:
        return "" if value is None else f"{value / unit:,.{digits}f}"

    head = ["run", "examples", "steps", "tokens", "seconds", "memory, peak MiB"]
    rows = []
    for result in [*summary["part_1"], *summary["part_2"].values()]:
        run = result["run"]
        values = [number(run.get(name)) for name in ("samples", "steps", "tokens", "seconds")]
        rows.append([result["name"], *values, number(run.get("peak_bytes"), 2**20)])
    return markdown_table(head, rows)


def open_table(summary: dict) -> list[str]:
    """What the paper leaves open, what was chosen, from where, and the flag that changes it."""
    results = [*summary["part_1"], *summary["part_2"].values()]
    if not results:
        return []
    rows = []
    for subject, words, source, setting in OPEN:
        chosen = dict.fromkeys(spell_setting(result["settings"][setting]) for result in results)
        rows.append([subject, words, ", ".join(chosen), source, f"--{setting.replace('_', '-')}"])
    scored = "“the official VQAv2 scoring method”, and Eq. 8, which is another"
    rows.append(["scoring", scored, summary["scoring"], "the paper", "--scoring"])
    return markdown_table(["open", "the paper", "here", "source of the default", "flag"], rows)


def spell_setting(value) -> str:
    """A setting in a table."""
    return f"`{value}`".replace("|", "\\|") if isinstance(value, str) else f"{value:g}"


def to_markdown(summary: dict) -> str:
    """reproduction.md."""
    counts = summary["examples"]
    blocks = [
        f"The paper's plan on base {summary['base']} and data {summary['data']}, one seed as published. "
        f"{counts['vqa']:,} VQA questions ({summary['scoring']} scoring), {counts['needles']:,} needle tests. In "
        "brackets: 95 % bootstrap intervals over pictures. They say nothing of how another seed would do.",
        "## Table 1: VQA after 40 % of the training pictures, in %",
        table_1(summary),
        choice(summary),
        "## Table 2: needles in 2×2, index accuracy in %, after all pictures",
        table_2(summary),
        "The paper's index accuracy is the mean over the four places of tests in which row and column are right."
        if summary["needles"]
        else "No needles: they need --coco and --captions.",
    ]
    if summary["needles"]:
        blocks += ["## Figure 2: accuracy by place", "![accuracy by place](figure2.png)"]
    blocks += ["## The runs", run_table(summary)]
    if curves(summary):
        blocks.append("![loss by examples seen](learning.png)")
    blocks += ["## What the paper leaves open", open_table(summary), FIXED]
    return engine.compose("The differential PaliGemma experiment", *blocks, conclusions=conclusions(summary))


def choice(summary: dict) -> str:
    """Which models go on to Part 2."""
    chosen, paper = summary["chosen"], {"without": "paper-1", "with": "paper-2"}
    parts = [f"{name} {kind} differential attention" for kind, name in chosen.items()]
    as_published = all(paper[kind] == name for kind, name in chosen.items())
    return (
        f"Best of each kind, and so in Part 2: {', '.join(parts)}; {'as' if as_published else 'not as'} in the paper."
    )


def conclusions(summary: dict) -> list[str]:
    """What agrees with the paper, what does not, and what cannot be said."""
    lines = []
    by_score = sorted(summary["part_1"], key=lambda one: -one["score"]["mean"])
    published = sorted(summary["part_1"], key=lambda one: -one["published"])
    if len(by_score) > 1:
        orders = [" > ".join(one["name"] for one in ranked) for ranked in (by_score, published)]
        same = "the same order" if orders[0] == orders[1] else f"another order; the paper: {orders[1]}"
        lines.append(f"Table 1 here: {orders[0]}: {same}.")
    for name, gain in summary["differences"].items():
        lines += engine.conclude({f"Differential against fine-tuned, {name}": {name: gain}}, seeds=2)[:1]
    if len(pair := list(summary["part_2"].values())) == 2 and summary["differences"]:
        first, second = (one["settings"] for one in pair)
        if differ := [name for name in ("feed_forward", "lr", "r", "weight_decay") if first[name] != second[name]]:
            lines.append(
                f"The two of Part 2 differ in more than attention ({', '.join(differ)}): what lies between them is not "
                "attention's alone. `train.compare` compares with controls."
            )
    needles = summary["needles"]
    wide = [TITLES[kind] for kind, one in needles.items() if one["score"]["low"] <= 25 <= one["score"]["high"]]
    if wide:
        lines.append(f"Cannot be told from guessing (25 %) in the needle tests: {', '.join(wide)}.")
    low = [TITLES[kind] for kind, one in needles.items() if one["score"]["high"] < 25]
    if low:
        lines.append(
            f"Below guessing in the needle tests, since many answers are not the words asked for: {', '.join(low)}."
        )
    if len(needles) == 3 and any(one["score"]["high"] > 0 for one in needles.values()):
        gap = needles["with"]["published"] - needles["baseline"]["published"]
        width = max(one["score"]["high"] - one["score"]["low"] for one in needles.values())
        lines.append(
            f"The paper's differences of up to {gap:.2f} points are {'smaller' if gap < width / 2 else 'larger'} than "
            f"half of the widest interval here ({width / 2:.1f} points, {summary['examples']['needles']:,} tests)."
        )
    results = [*summary["part_1"], *summary["part_2"].values()]
    lines += [f"{one['name']}: the run diverged and scores 0: {one['diverged']}" for one in results if one["diverged"]]
    if summary["data"] == "embedded":
        lines.append(
            "A miniature: a base of two million parameters and drawn scenes try the plan, and its numbers neither "
            "confirm nor refute the paper's."
        )
    return lines


def curves(summary: dict) -> dict[str, Sequence[tuple[float, float]]]:
    """Loss by examples seen, of each run that has one."""
    results = [*summary["part_1"], *summary["part_2"].values()]
    return {one["name"]: one["run"]["curve"] for one in results if one["run"]["curve"]}


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """figure2.png and learning.png, where there is something to draw."""
    pictures = {}
    if needles := summary["needles"]:
        grids = {TITLES[kind]: grid(result["by"]) for kind, result in needles.items()}
        pictures["figure2.png"] = [figures.heatmaps(grids, "MMNeedle, M = 1, N = 2")]
    if lines := curves(summary):
        chart = figures.line_chart(
            lines, "Learning curves", "examples seen", "loss, nats a token", width=860, log_y=True
        )
        pictures["learning.png"] = [chart]
    return pictures
