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
from eval.data.published import PROMPT, fill_prompt
from eval.data.scenes import NEEDLE_TITLES, NEEDLES
from eval.detect import draw_row
from eval.vqa import embedded, guess_accuracy
from model.common import write_text
from model.images import load_image
from train.checkpoint import Progress, Result
from train.estimates import estimate
from train.run import read_metrics
from train.settings import Settings
from train.validation import HeldOut, draw_numbers, is_better, rows_of_boxes

SCORES = {
    "loss": "loss, nats a token",
    "exact_match": "exact match, %",
    "vqa_accuracy": "VQA accuracy, %",
}
SCORES |= {"AP": "boxes: AP, %"}
SHOWN = 12  # examples of answers.png
Results = Mapping[str, Result]


def trained(results: Results) -> Result:
    """Of the weights that the run recommends: the best or the last, by all held-out examples."""
    after, best = results["after"], results.get("best")
    asked = sum(match is not None for match in after.matches)
    return best if best is not None and is_better(best.scores, after.scores, asked) else after


def summarize(
    settings: Settings, progress: Progress, results: Results, size: int, held_out: HeldOut | None
) -> dict:
    """The content of summary.json. size: the number of trained parameters."""
    summary = dict.fromkeys(("before", "after"), {"vqa": None, "needle": None})
    summary |= {name: result.tests for name, result in results.items() if result.tests}
    summary |= {
        "trainable_parameters": size,
        "seconds": round(progress.seconds, 1),
        "samples": progress.samples,
    }
    summary |= {"left_out": progress.bad, "empty_steps": progress.empty_steps}
    if held_out and settings.is_embedded:
        summary["text_only_guess"] = guess_accuracy(embedded(settings.eval_limit))
    if held_out is not None:
        scores = {"examples": len(held_out.records)} | {
            name: result.scores for name, result in results.items()
        }
        scores |= {"best_step": progress.best and progress.best.step, "stopped": progress.stopped}
        summary["held_out"] = scores | {"over_blind": gain_over_blind(held_out, results)}
    return summary


def gain_over_blind(held_out: HeldOut, results: Results) -> dict | None:
    """How much better the trained model is with pictures than with gray ones, paired, over
    pictures: "measure", "mean", "low" and "high". The measure is the loss where nothing is matched.
    None for data without pictures."""
    ours, blind = trained(results), results["blind"]
    better, worse, factor, measure = ours.matches, blind.matches, 100, "% exact match"
    if not any([*better, *worse]):
        better, worse, factor, measure = blind.losses, ours.losses, 1, "nats an answer"
    triples = zip(better, worse, held_out.records, strict=True)
    pairs = [(factor * (a - b), r.key) for a, b, r in triples if r.pictures and None not in (a, b)]
    if not pairs:
        return None
    gain = estimate(*zip(*pairs, strict=True))
    return {"measure": measure, "mean": gain.mean, "low": gain.low, "high": gain.high}


def write_answers(run: Path, held_out: HeldOut, results: Results) -> None:
    """Write answers.jsonl and answers.png; none where nothing was asked."""
    if not held_out.asked:
        return
    records, right, lines = held_out.records, trained(results).matches, ""
    for n in held_out.asked:
        record, is_right = records[n], None if right[n] is None else bool(right[n])
        line = {
            "name": record.name,
            "question": record.prefix,
            "truth": list(record.answers) or record.suffix,
            "images": [str(path) for path in record.pictures if isinstance(path, Path)],
        }
        line |= {name: result.answers[n] for name, result in results.items()} | {"right": is_right}
        lines += json.dumps(line, ensure_ascii=False) + "\n"
    write_text(run / "answers.jsonl", lines)
    shown = draw_numbers(
        [n for n in held_out.asked if right[n] is not None and records[n].pictures], SHOWN
    )
    if not shown:
        return
    cells = []
    for n in shown:
        before, after = results["before"].answers[n], trained(results).answers[n]
        caption = (
            f"{records[n].prefix}\ntruth: {records[n].suffix}\nbefore: {before}\nafter: {after}"
        )
        boxes = rows_of_boxes([(records[n], after)])
        cells.append(
            draw_row(boxes[0])
            if boxes
            else (load_image(records[n].pictures[0]), caption, bool(right[n]))
        )
    title = f"{run.name}: held-out examples" + (
        "; true boxes green, found ones orange" if records[n].detection else ""
    )
    sheet = figures.contact_sheet(*zip(*cells, strict=True), title=title, lines=7)
    figures.save(sheet, run / "answers.png")


def print_summary(summary: dict, results: Results, settings: Settings, run: Path) -> None:
    """Print the accuracies, the best step, whether the pictures were used, the files, and the
    commands that go on."""
    if results:
        print_accuracies(summary, results, settings)
    held_out = summary.get("held_out", {})
    if step := held_out.get("stopped"):
        print(
            f"stopped early, after step {step}: {settings.patience} evaluations without a better "
            "score"
        )
    if step := held_out.get("best_step"):
        by = (
            "loss"
            if held_out["after"]["exact_match"] is None
            else "exact match, or within its noise by loss"
        )
        print(
            f"best, by {by}: after step {step}"
            + (f", in {run / 'best'}" if settings.keep_best else "")
        )
    if (gain := held_out.get("over_blind")) and gain["low"] <= 0:
        lost = f"{gain['mean']:.2f} {gain['measure']} (±{(gain['high'] - gain['low']) / 2:.2f}, a 95 % interval)"
        print(
            f"not shown to use the picture: with every picture gray the trained model loses {lost}"
        )
    losses = [record["held_out_loss"] for record in read_metrics(run) if "held_out_loss" in record]
    # the second half of the evaluations lowered the loss by a tenth, to its least value
    is_rising = len(losses) > 2 and losses[-1] == min(losses) < 0.9 * losses[(len(losses) - 1) // 2]
    is_solved = (held_out.get("after", {}).get("exact_match") or 0) >= 95
    is_own = not settings.is_embedded and not settings.is_beyond_base
    if is_own and not is_solved and (is_rising or gain and gain["low"] <= 0):
        print("still learning, or not enough: " * is_rising + "try", longer(settings, run))
    if left_out := summary["left_out"]:
        print(f"left out {len(left_out)} records: {left_out[0]} …")
    if steps := summary["empty_steps"]:
        print(
            f"{steps} {'steps' if steps > 1 else 'step'} had no usable record, and changed nothing"
        )
    names = sorted(path.name + "/" * path.is_dir() for path in run.iterdir() if path.name[0] != ".")
    print(
        f"\n{summary['samples']:,} samples in {summary['seconds']:.0f} s; in {run}: "
        f"{', '.join(names)}"
    )
    takes_best = bool(results) and trained(results) is results.get("best")
    print("next:", "\n      ".join(next_commands(settings, run, takes_best)))


def longer(settings: Settings, run: Path) -> str:
    """The command of a run of twice as many steps; of LoRA on the embedded base and own data, with
    the recipe `own`."""
    s, is_toy = settings, settings.base == "embedded" and not settings.writes_model
    given = [("--base", s.base), ("--images", s.images)] + [("--data", source) for source in s.data]
    given += [("--eval-data", source) for source in s.eval_data] + [
        ("--recipe", "own" if is_toy else s.recipe)
    ]
    given += [("--steps", f"{2 * len(read_metrics(run))}")] * (not is_toy)
    return shlex.join([*s.command, *(word for pair in given if pair[1] for word in pair)])


def print_accuracies(summary: dict, results: Results, settings: Settings) -> None:
    """The table of accuracies, and of guessing."""
    columns = {name: lines_of(result.scores, result.tests) for name, result in results.items()}
    if settings.is_embedded:
        guess, needles = (
            summary["text_only_guess"],
            {kind: 100 / side**2 for kind, (side, *_) in NEEDLES.items()},
        )
        guessed = {
            "vqa": guess["overall"],
            "vqa_details": {"per_answer_type": guess},
            "needle_details": needles,
        }
        columns["chance"] = lines_of({}, guessed)
    print(f"\n{'':<34}" + "".join(f"{name:>9}" for name in columns))
    if "held_out" in summary:
        print(f"held-out, {summary['held_out']['examples']} examples")
    for title in columns["after"]:
        values, is_given = (
            [lines.get(title) for lines in columns.values()],
            title.strip() in results["after"].scores,
        )
        decimals = 3 if is_given or "loss" in title else 1
        print(
            f"{title:<34}"
            + "".join(f"{'-' if v is None else f'{v:.{decimals}f}':>9}" for v in values)
        )
    if (before := summary["before"]["needle"]) is not None and before < 25:
        print(
            "A needle score below chance before training mostly means that its question was never "
            "seen."
        )


def lines_of(scores: Mapping, tests: Mapping) -> dict[str, float]:
    """The cells of a column by the titles of their lines: held-out scores, then accuracies on the
    embedded scenes."""
    lines = {
        f"  {SCORES.get(name, name)}": value for name, value in scores.items() if value is not None
    }
    if "vqa_details" not in tests:
        return lines
    lines["VQA, % (chance: without a picture)"] = tests["vqa"]
    lines |= {f"  {kind}": value for kind, value in tests["vqa_details"]["per_answer_type"].items()}
    return lines | {
        f"needle, {NEEDLE_TITLES[kind]}, %": value
        for kind, value in tests["needle_details"].items()
    }


def next_commands(settings: Settings, run: Path, takes_best: bool) -> list[str]:
    """The commands that go on from a run. Of the embedded data they ask the last weights, as the
    table has done."""
    s, last = settings, "model" if settings.writes_model else ""
    folder = shlex.quote(str(run / ("best" if takes_best and not s.is_embedded else last)))
    model, prompt, commands = f"--{last or 'adapter'} {folder}", s.question_prompt or PROMPT, []
    # an adapter stores its prompt, a model does not
    vqa = f"{model} --prompt {shlex.quote(prompt)}" if last and prompt != PROMPT else model
    for source in s.eval_data or s.data:
        kind = source.partition(":")[0]
        data = shlex.quote(source if s.eval_data else f"{kind}:TEST")  # not what was trained on
        if kind == "embedded":
            commands += [f"eval.vqa {vqa}", f"eval.needle {model}"]
        elif kind != "python":
            command = "eval.detect" if kind == "coco" else "eval.vqa"
            commands.append(f"{command} --data {data} {vqa if kind == 'vqav2' else model}")
    question = (
        shlex.quote(fill_prompt(prompt, "Where is the dog?")) if s.question_prompt else "PROMPT"
    )
    commands.append(f"eval.ask {model} --image FILE --prompt {question}")
    if s.can_export:
        commands.append(f"weights.export {folder} FOLDER")
    return [f"python -m {command}" for command in commands]
