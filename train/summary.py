"""What a fine-tuning run is measured by, and what it leaves behind: its tables, summary.json, and answers to look at.

In: a model before, during and after training, and the held-out examples. Out: accuracies; summary.json, answers.jsonl
and answers.png in the run folder, and the commands that go on from it.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import numpy as np

from eval import figures, needle, scenes, vqa
from eval.command import Ask
from eval.datasets import PROMPT, fill_prompt
from eval.statistics import estimate
from eval.text import sentences
from model.common import write_text
from model.differential import KINDS
from model.images import load_image
from model.paligemma import PaliGemma
from model.processor import Processor
from train.checkpoint import Progress
from train.data.sources import WEIGHT
from train.distributed import World, ask_together
from train.settings import Settings, command_of
from train.validation import HeldOut, Result, choose, evaluating

NO_ACCURACY = {"vqa": None, "needle": None}
SCORES = {"loss": "  loss, nats a token", "exact_match": "  exact match, %", "vqa_accuracy": "  VQA accuracy, %"}
SHOWN = 12  # examples of answers.png


def evaluate(
    model: PaliGemma, processor: Processor, settings: Settings, title: str, world: World, held_out: HeldOut | None
) -> dict:
    """Accuracies in percent, "vqa" and "needle", None where the data has no such questions; and details: "held_out",
    the scores of `HeldOut.scores`, and "records", the fields of `Result`.

    The processes of `world` share the questions; all of them get the result.
    """
    result: dict = dict(NO_ACCURACY)
    if held_out is not None:
        result |= held_out.measure(model, f"held-out, {title}")
        result["vqa"] = result["held_out"]["vqa_accuracy"]
    if settings.is_embedded:
        limit, ask_all = settings.eval_limit, partial(ask_together, world)
        with evaluating(model, world.device):
            details = vqa.evaluate_embedded(model, processor, limit, f"VQA, {title}", ask_all=ask_all)
            tests = {
                kind: needle.evaluate_embedded(model, processor, kind, limit // 2, f"{kind}, {title}", ask_all=ask_all)
                for kind in dict.fromkeys(settings.tasks.split(","))
                if kind in scenes.NEEDLES
            }
            if settings.arch == "wings":
                result["text"] = grade_text(model, processor, limit // 4, f"text, {title}", ask_all)
        result |= {"vqa_details": details, "needle_details": tests}
        result |= {"vqa": details["overall"], "needle": tests.get("n2o1")}
    return result


def grade_text(
    model: PaliGemma, processor: Processor, limit: int, title: str, ask_all: Callable[..., list]
) -> dict[str, float]:
    """Percent right of `limit` sentences of each task of `eval/text/sentences.py`, which have no picture."""
    asked = [sentences.sentence(task, "test", number) for task in sentences.TASKS for number in range(limit)]
    asks = [Ask(f"{number}", f"text {number}", (), s.prefix) for number, s in enumerate(asked)]
    right = [a == s.suffix for a, s in zip(ask_all(model, processor, asks, progress=title), asked, strict=True)]
    return {task: 100 * float(np.mean(right[n * limit : (n + 1) * limit])) for n, task in enumerate(sentences.TASKS)}


def summarize(
    settings: Settings, progress: Progress, results: Mapping[str, dict], trainable: int, held_out: HeldOut | None
) -> dict:
    """The content of summary.json.

    results: by column of the tables, of `evaluate`; "best" and "blind", the trained model on gray pictures, have
    "held_out" and "records" alone.
    """
    scores = {
        name: {key: value for key, value in result.items() if key not in ("held_out", "records")}
        for name, result in results.items()
        if name not in ("best", "blind")
    }
    summary = {
        **{"before": NO_ACCURACY, "after": NO_ACCURACY, **scores},
        "command": command_of(settings),
        "trainable_parameters": trainable,
        "seconds": round(progress.seconds, 1),
        "samples": progress.samples,
        "left_out": progress.bad,
        "empty_steps": progress.empty_steps,
    }
    if settings.evaluate and settings.is_embedded:
        summary["blind"] = vqa.blind_embedded(settings.eval_limit)
    if held_out is not None:
        summary["held_out"] = {
            "examples": len(held_out.records),
            **{name: result["held_out"] for name, result in results.items()},
            "best_step": progress.best and progress.best.step,
            "stopped": progress.stopped,
            "over_blind": gain_over_blind(held_out, results),
        }
    return summary


def gain_over_blind(held_out: HeldOut, results: Mapping[str, dict]) -> dict | None:
    """By how much the trained model is better with pictures than with gray ones, paired, over pictures: "measure",
    "mean", "low" and "high". It is the loss where nothing is matched. None for data without pictures."""
    trained, blind = (Result(**results[name]["records"]) for name in (trained_column(results), "blind"))
    scores, factor, measure = (held_out.matches(trained), held_out.matches(blind)), 100, "% exact match"
    if not any(score for of_model in scores for score in of_model):
        scores, factor, measure = (blind.losses, trained.losses), 1, "nats an answer"
    pairs = [
        (after - before, record.key)
        for after, before, record in zip(*scores, held_out.records, strict=True)
        if after is not None and before is not None and record.pictures
    ]
    if not pairs:
        return None
    differences, keys = zip(*pairs, strict=True)
    gain = estimate(factor * np.array(differences), keys)
    return {"measure": measure, "mean": gain.mean, "low": gain.low, "high": gain.high}


def trained_column(results: Mapping[str, dict]) -> str:
    """The column of the model that a run is for."""
    return "best" if "best" in results else "after"


def write_answers(run: Path, held_out: HeldOut, results: Mapping[str, dict]) -> list[str]:
    """Write answers.jsonl and answers.png; returns their names. There are none where nothing was asked."""
    if not held_out.asked:
        return []
    said = {name: result["records"]["answers"] for name, result in results.items()}
    trained = trained_column(results)
    right = held_out.matches(Result(**results[trained]["records"]))
    lines = [
        {
            "name": record.name,
            "question": record.prefix,
            "truth": list(record.answers) or record.suffix,
            **{name: answers[number] for name, answers in said.items()},
            "right": None if right[number] is None else bool(right[number]),
        }
        for number, record in enumerate(held_out.records)
        if number in set(held_out.asked)
    ]
    write_text(run / "answers.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    scored = [number for number in held_out.asked if right[number] is not None and held_out.records[number].pictures]
    numbers = choose(scored, SHOWN)
    if not numbers:
        return ["answers.jsonl"]
    shown = [(held_out.records[number], said.get("before", said[trained])[number]) for number in numbers]
    captions = [
        f"{record.prefix}\ntruth: {record.suffix}\nbefore: {before}\nafter: {said[trained][number]}"
        for number, (record, before) in zip(numbers, shown, strict=True)
    ]
    pictures = [load_image(held_out.records[number].pictures[0]) for number in numbers]
    hits = [bool(right[number]) for number in numbers]
    sheet = figures.contact_sheet(pictures, captions, hits, title=f"{run.name}: held-out examples", lines=7)
    figures.save(sheet, run / "answers.png")
    return ["answers.jsonl", "answers.png"]


def print_summary(summary: dict, results: Mapping[str, dict], settings: Settings, run: Path, files: list[str]) -> None:
    """Print the accuracies, the best step, whether the pictures were used, the files, and the commands that go on."""
    if results:
        print_accuracies(summary, results, settings)
    held_out = summary.get("held_out", {})
    if step := held_out.get("stopped"):
        print(f"stopped early, after step {step}: {settings.patience} evaluations without a better score")
    if step := held_out.get("best_step"):
        by = "loss" if held_out["after"]["exact_match"] is None else "exact match, then loss"
        print(f"best, by {by}: after step {step}" + (f", in {run / 'best'}" if settings.keep_best else ""))
    if (gain := held_out.get("over_blind")) and gain["low"] <= 0:
        print(
            "not shown to use the picture: with every picture gray the trained model loses "
            f"{gain['mean']:.2f} {gain['measure']} (±{(gain['high'] - gain['low']) / 2:.2f}, a 95 % interval)"
        )
    if left_out := summary["left_out"]:
        print(f"left out {len(left_out)} records: {left_out[0]} …")
    if steps := summary["empty_steps"]:
        print(f"{steps} {'steps' if steps > 1 else 'step'} had no usable record, and changed nothing")
    names = ["model/"] if settings.writes_model else ["adapter_model.safetensors", "adapter_config.json"]
    names += ["metrics.jsonl", "loss.png", "summary.json", *files, "checkpoints/"]
    names += ["best/"] if (run / "best").is_dir() else []
    print(f"\n{summary['samples']:,} samples in {summary['seconds']:.0f} s; in {run}: {', '.join(names)}")
    print("next:", "\n      ".join(next_commands(settings, run, trained_column(results) == "best")))


def next_commands(settings: Settings, run: Path, is_best_kept: bool) -> list[str]:
    """The commands that go on from a run, for the data that it was trained on.

    Of the embedded data the table has the scores of the last weights, so the commands ask these.
    """
    best = is_best_kept and not settings.is_embedded
    folder = shlex.quote(str(run / "best" if best else run / "model" if settings.writes_model else run))
    model, prompt = f"--{'model' if settings.writes_model else 'adapter'} {folder}", settings.question_prompt or PROMPT
    # an adapter stores its prompt, a model does not
    template = f" --prompt {shlex.quote(prompt)}" if settings.writes_model and prompt != PROMPT else ""
    images = f" --images {shlex.quote(settings.images)}" if settings.images else ""
    commands = []
    for source in settings.eval_data or dict.fromkeys(WEIGHT.sub(r"\1", source) for source in settings.data):
        kind, _, path = source.partition(":")
        if kind == "embedded":
            commands += [f"eval.vqa {model}{template}", f"eval.needle {model}"]
        elif kind in ("vqav2", "jsonl", "coco"):
            if kind != "vqav2" and not settings.eval_data:  # a file that was trained on says little
                source = f"{kind}:TEST{Path(path).suffix}"
            scorer = "eval.detect" if kind == "coco" else "eval.vqa"
            commands.append(
                f"{scorer} --data {shlex.quote(source)}{images} {model}{template if kind == 'vqav2' else ''}"
            )
    question = shlex.quote(fill_prompt(prompt, "Where is the dog?")) if settings.question_prompt else "PROMPT"
    commands.append(f"eval.ask {model} --image FILE --prompt {question}")
    if can_export(settings):
        commands.append(f"weights.export {folder} FOLDER")
    return [f"python -m {command}" for command in commands]


def can_export(settings: Settings) -> bool:
    """Whether `weights.export` can make plain weights of a run."""
    return settings.stage is None and KINDS[settings.attention].foldable and settings.feed_forward != "swiglu-new"


def print_accuracies(summary: dict, results: Mapping[str, dict], settings: Settings) -> None:
    """The table of accuracies: of the base, of the grafted model that training starts from, after it, of the best step,
    of the trained model on gray pictures, of guessing."""
    names = [*results, *(["chance"] if settings.is_embedded else [])]

    def row(name: str, values: Mapping[str, float | None], decimals: int = 1) -> None:
        cells = ("-" if values.get(column) is None else f"{values[column]:.{decimals}f}" for column in names)
        print(f"{name:<34}" + "".join(f"{cell:>9}" for cell in cells))

    def rows(name: str, *path: str, chance: float | None = None) -> None:
        """What each column's result has at `path`."""
        found = {column: reduce(getitem, path, result) for column, result in results.items() if "vqa" in result}
        row(name, found | {"chance": chance})

    print(f"\n{'':<34}" + "".join(f"{name:>9}" for name in names))
    if "held_out" in summary:
        print(f"held-out, {summary['held_out']['examples']} examples")
        for score, title in SCORES.items():
            found = {name: result["held_out"][score] for name, result in results.items()}
            if any(value is not None for value in found.values()):
                row(title, found, 3 if score == "loss" else 1)
    if not settings.is_embedded:
        return
    blind, after = summary["blind"], summary["after"]
    if "text" in after:  # of a run of WINGS
        of_text = {name: result["text"].values() for name, result in results.items() if "text" in result}
        row("text alone, %", {name: sum(values) / len(values) for name, values in of_text.items()})
        for task in after["text"]:
            rows(f"  {task}", "text", task)
    rows("VQA, % (chance: without a picture)", "vqa", chance=blind["overall"])
    for kind in after["vqa_details"]["per_answer_type"]:
        rows(f"  {kind}", "vqa_details", "per_answer_type", kind, chance=blind.get(kind))
    for kind in after["needle_details"]:
        chance = 100 / scenes.NEEDLES[kind][0] ** 2
        rows(f"needle, {scenes.NEEDLE_TITLES[kind]}, %", "needle_details", kind, chance=chance)
    needle_before = summary["before"]["needle"]
    if needle_before is not None and needle_before < 25:
        print("A needle score below chance before training mostly means that its question was never seen.")
