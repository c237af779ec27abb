"""What a fine-tuning run leaves behind: its table, summary.json, answers to look at, and the
commands that go on.

Results are by column of the table: "before", "start", the grafted model that training starts from,
"after", "best", and "blind", the trained model on gray pictures.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from eval import figures
from eval.data.haystacks import NEEDLE_TITLES, NEEDLES
from eval.data.record import PROMPT, QUESTION_SOURCES, fill_prompt
from eval.detect import draw_row
from eval.report import interval_of
from eval.vqa import embedded, guess_accuracy
from model.common import write_text
from model.images import load_image
from train.checkpoint import Progress, Result
from train.run import read_metrics
from train.settings import Settings
from train.validation import HeldOut, draw_numbers, is_better, rows_of_boxes

SCORES = {
    "loss": "loss, nats a token",
    "exact_match": "exact match, %",
    "vqa_accuracy": "VQA accuracy, %",
    "AP": "boxes: AP, %",
    "mIoU": "masks: mIoU, %",
}
DRAWN = 12  # examples of answers.png
Results = Mapping[str, Result]


def recommended(results: Results) -> Result:
    """Of the weights that the run recommends: the best or the last, by all held-out examples."""
    after = results["after"]
    best = results.get("best")
    count = sum(match is not None for match in after.matches)
    if best is not None and is_better(best.scores, after.scores, count):
        return best
    return after


def summary_of(
    settings: Settings,
    progress: Progress,
    results: Results,
    size: int,
    held_out: HeldOut | None,
) -> dict:
    """The content of summary.json. size: the number of trained parameters."""
    summary = dict.fromkeys(("before", "after"), {"vqa": None, "needle": None})
    summary |= {name: result.tests for name, result in results.items() if result.tests}
    summary |= {
        "trainable_parameters": size,
        "seconds": round(progress.seconds, 1),
        "samples": progress.samples,
        "left_out": progress.bad,
        "empty_steps": progress.empty_steps,
    }
    if held_out is None:
        return summary
    if settings.is_embedded:
        summary["text_only_guess"] = guess_accuracy(embedded(settings.eval_limit))
    summary["held_out"] = {
        "examples": sum(loss is not None for loss in results["after"].losses),
        "asked": len(held_out.asked),  # a long answer has a loss alone
        **{name: result.scores for name, result in results.items()},
        "best_step": progress.best and progress.best.step,
        "stopped": progress.stopped,
        "over_blind": gain_over_blind(held_out, results),
    }
    return summary


def gain_over_blind(held_out: HeldOut, results: Results) -> dict | None:
    """How much better the trained model is with pictures than with gray ones, paired, over
    pictures: "measure", "mean", "low" and "high". The measure is the loss where nothing is matched.
    None for fewer than two pictures, which say nothing of others."""
    ours, blind = recommended(results), results["blind"]
    better, worse = ours.matches, blind.matches
    factor, measure = 100, "% exact match"
    if not any([*better, *worse]):
        better, worse = blind.losses, ours.losses
        factor, measure = 1, "nats an answer"
    gains, keys = [], []
    for record, a, b in zip(held_out.records, better, worse, strict=True):
        if record.pictures and a is not None and b is not None:
            gains.append(factor * (a - b))
            keys.append(record.key)
    if len({*keys}) < 2:
        return None
    return {"measure": measure} | interval_of(gains, keys)


def write_answers(run: Path, held_out: HeldOut, results: Results) -> None:
    """Write answers.jsonl and answers.png; none where nothing was asked."""
    if not held_out.asked:
        return
    # 1. all of them
    ours = recommended(results)
    lines = ""
    pictured = []
    for n in held_out.asked:
        record, match = held_out.records[n], ours.matches[n]
        line = {
            "name": record.name,
            "question": record.prefix,
            "truth": record.truth,
            "images": [str(path) for path in record.pictures if isinstance(path, Path)],
            **{name: result.answers[n] for name, result in results.items()},
            "right": None if match is None else bool(match),
        }
        lines += json.dumps(line, ensure_ascii=False) + "\n"
        if match is not None and record.pictures:
            pictured.append(n)
    write_text(run / "answers.jsonl", lines)
    if not pictured:
        return

    # 2. some of them, with their pictures
    cells = []
    title = f"{run.name}: held-out examples"
    for n in draw_numbers(pictured, DRAWN):
        record, after = held_out.records[n], ours.answers[n]
        before = results["before"].answers[n]
        if record.detection:
            cells.append(draw_row(rows_of_boxes([(record, after)])[0], held_out.coder))
        else:
            question = f"{record.prefix}\ntruth: {record.suffix}"
            caption = f"{question}\nbefore: {before}\nafter: {after}"
            cells.append((load_image(record.pictures[0]), caption, bool(ours.matches[n])))
    if record.detection:
        title += "; true boxes green, found ones orange"
    sheet = figures.contact_sheet(*zip(*cells, strict=True), title=title, lines=7)
    figures.save(sheet, run / "answers.png")


def print_summary(
    summary: dict,
    results: Results,
    settings: Settings,
    run: Path,
) -> None:
    """Print the accuracies, the best step, whether the pictures were used, the files, and the
    commands that go on."""
    # 1. how good it is
    if results:
        print_accuracies(summary, results, settings)
    held_out = summary.get("held_out", {})
    if step := held_out.get("stopped"):
        without = f"{settings.patience} evaluations without a better score"
        print(f"stopped early, after step {step}: {without}")
    if step := held_out.get("best_step"):
        by = "exact match, or within its noise by loss"
        if held_out["after"]["exact_match"] is None:
            by = "loss"
        place = f", in {run / 'best'}" if settings.keep_best else ""
        print(f"best, by {by}: after step {step}{place}")
    print_advice(held_out, settings, run)

    # 2. what it left out
    if left_out := summary["left_out"]:
        print(f"left out {len(left_out)} records: {left_out[0]} …")
    if count := summary["empty_steps"]:
        steps = "steps" if count > 1 else "step"
        print(f"{count} {steps} had no usable record, and changed nothing")

    # 3. what there is, and what comes next
    names = []
    for path in run.glob("[!.]*"):
        names.append(f"{path.name}/" if path.is_dir() else path.name)
    files = ", ".join(sorted(names))
    print(f"\n{summary['samples']:,} samples in {summary['seconds']:.0f} s; in {run}: {files}")
    takes_best = bool(results) and recommended(results) is results.get("best")
    print("next:", "\n      ".join(next_commands(settings, run, takes_best)))


def print_advice(held_out: Mapping, settings: Settings, run: Path) -> None:
    """Print what to try with own data if more steps may help, or the picture may not be used."""
    gain = held_out.get("over_blind")
    is_unseen = bool(gain) and gain["low"] <= 0
    if is_unseen:
        half = (gain["high"] - gain["low"]) / 2
        lost = f"{gain['mean']:.2f} {gain['measure']} (±{half:.2f}, a 95 % interval)"
        print(
            f"not shown to use the picture: with every picture gray the trained model loses {lost}"
        )
    records = read_metrics(run)
    losses = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    is_falling = False
    if len(losses) > 2:
        # the last loss is the least, and a tenth below that of the middle evaluation
        middle = losses[(len(losses) - 1) // 2]
        is_falling = losses[-1] == min(losses) < 0.9 * middle
    is_solved = (held_out.get("after", {}).get("exact_match") or 0) >= 95
    is_own = not settings.is_embedded and not settings.is_beyond_base
    if is_own and not is_solved and (is_falling or is_unseen):
        why = "still learning, or not enough: " if is_falling else ""
        print(f"{why}try {longer_run(settings, 2 * len(records))}")


def longer_run(settings: Settings, steps: int) -> str:
    """The command of a run of so many steps; of LoRA on the embedded base and own data, with the
    recipe `own`."""
    flags = [("--base", settings.base), ("--images", settings.images)]
    flags += [("--data", source) for source in settings.data]
    flags += [("--eval-data", source) for source in settings.eval_data]
    if settings.base == "embedded" and not settings.writes_model:
        flags.append(("--recipe", "own"))
    else:
        flags += [("--recipe", settings.recipe), ("--steps", str(steps))]
    words = list(settings.command)
    for name, value in flags:
        if value:
            words += [name, value]
    return shlex.join(words)


def print_accuracies(summary: dict, results: Results, settings: Settings) -> None:
    """The table of accuracies, and of guessing."""
    # 1. the columns
    columns = {name: cells_of(result.scores, result.tests) for name, result in results.items()}
    if settings.is_embedded:
        guess = summary["text_only_guess"]
        guessed = {
            "vqa": guess["overall"],
            "vqa_details": {"per_answer_type": guess},
            "needle_details": {kind: 100 / side**2 for kind, (side, *_) in NEEDLES.items()},
        }
        columns["chance"] = cells_of({}, guessed)

    # 2. the lines
    print(f"\n{'':<34}" + "".join(f"{name:>9}" for name in columns))
    if "held_out" in summary:
        held_out = summary["held_out"]
        counted = f"held-out, {held_out['examples']} examples"
        if held_out["asked"] < held_out["examples"]:
            counted += f", {held_out['asked']} of them asked"
        print(counted)
    for title in columns["after"]:
        is_metric = title.strip() in results["after"].scores  # of `finetune`
        decimals = 3 if is_metric or "loss" in title else 1
        line = f"{title:<34}"
        for cells in columns.values():
            value = cells.get(title)
            line += f"{'-':>9}" if value is None else f"{value:9.{decimals}f}"
        print(line)
    before = summary["before"]["needle"]
    if before is not None and before < 25:
        print(
            "A needle score below chance before training mostly means that its question was never "
            "seen."
        )


def cells_of(scores: Mapping, tests: Mapping) -> dict[str, float]:
    """The cells of a column by the titles of their lines: held-out scores, then accuracies on the
    embedded scenes."""
    cells = {}
    for name, value in scores.items():
        if value is not None:
            cells[f"  {SCORES.get(name, name)}"] = value
    if "vqa_details" in tests:
        cells["VQA, % (chance: without a picture)"] = tests["vqa"]
        for kind, value in tests["vqa_details"]["per_answer_type"].items():
            cells[f"  {kind}"] = value
        for kind, value in tests["needle_details"].items():
            cells[f"needle, {NEEDLE_TITLES[kind]}, %"] = value
    return cells


def next_commands(settings: Settings, run: Path, takes_best: bool) -> list[str]:
    """The commands that go on from a run. Of the embedded data they ask the last weights, as the
    table has done."""
    # 1. the model
    kind, folder = "adapter", run
    if settings.writes_model:
        kind, folder = "model", run / "model"
    if takes_best and not settings.is_embedded:
        folder = run / "best"
    folder = shlex.quote(str(folder))
    model = f"--{kind} {folder}"
    prompt = settings.question_prompt or PROMPT
    with_prompt = model
    if settings.writes_model and prompt != PROMPT:  # which an adapter stores
        with_prompt += f" --prompt {shlex.quote(prompt)}"

    # 2. its scores
    commands = []
    for source in settings.eval_data or settings.data:
        layout = source.partition(":")[0]
        if not settings.eval_data:
            source = f"{layout}:TEST"  # not what was trained on
        data = f"--data {shlex.quote(source)}"
        if layout == "embedded":
            commands += [f"eval.vqa {with_prompt}", f"eval.needle {model}"]
        elif f"{layout}:" in QUESTION_SOURCES:
            commands.append(f"eval.vqa {data} {with_prompt}")
        elif layout == "coco":
            commands.append(f"eval.detect {data} {model}")
        elif layout == "coco-masks":
            coder = shlex.quote(settings.masks_file)
            commands.append(f"eval.detect {data} --masks {coder} {model}")
        elif layout != "python":
            commands.append(f"eval.vqa {data} {model}")

    # 3. its answers, and its export
    question = "PROMPT"
    if settings.question_prompt:
        question = shlex.quote(fill_prompt(prompt, "Where is the dog?"))
    commands.append(f"eval.ask {model} --image FILE --prompt {question}")
    if settings.can_export:
        commands.append(f"weights.export {folder} FOLDER")
    return [f"python -m {command}" for command in commands]
