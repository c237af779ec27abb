"""The accuracies of a fine-tuning run before and after training, and what is printed at its end."""

import shlex
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

from eval import needle, scenes, vqa
from eval.datasets import PROMPT, fill_prompt
from eval.records import ANNOTATIONS_FILE, QUESTIONS_FILE
from model.paligemma import PaliGemma
from model.processor import Processor
from train.data.sources import read_records
from train.distributed import World, ask_together
from train.settings import Settings

NO_ACCURACY = {"vqa": None, "needle": None}
NEEDLE_TITLES = {
    "n2o1": "needle, 2×2, one object each",
    "n2o2": "needle, 2×2, two objects each",
    "n4o1": "needle, 4×4, one object each",
}


def evaluate(model: PaliGemma, processor: Processor, settings: Settings, title: str, world: World) -> dict:
    """Accuracies in percent on held-out data: "vqa", "needle", None where the data has no such questions, and details.

    The processes of `world` share the questions; all of them get the result.
    """
    was_training, ask_all = model.training, partial(ask_together, world)
    model.eval()
    result: dict = dict(NO_ACCURACY)
    if settings.is_embedded:
        limit = settings.eval_limit
        details = vqa.evaluate_embedded(model, processor, limit, f"VQA, {title}", ask_all=ask_all)
        tests = {
            kind: needle.evaluate_embedded(model, processor, kind, limit // 2, f"{kind}, {title}", ask_all=ask_all)
            for kind in dict.fromkeys(settings.tasks.split(","))
            if kind in scenes.NEEDLES
        }
        result |= {"vqa_details": details, "needle_details": tests}
        result |= {"vqa": details["overall"], "needle": tests.get("n2o1")}
    elif len(settings.data) == 1 and settings.data[0].startswith("vqav2:"):
        folder = Path(settings.data[0].partition(":")[2])
        result["vqa_details"] = vqa.evaluate_files(
            model,
            processor,
            folder / QUESTIONS_FILE,
            folder / ANNOTATIONS_FILE,
            settings.images or folder,
            settings.prompt,
            limit=settings.eval_limit,
            only=held_out(settings),
            progress=f"VQA, {title}",
            ask_all=ask_all,
            allow_outside=settings.allow_outside,
        )
        result["vqa"] = result["vqa_details"]["overall"]
    model.train(was_training)
    return result


@lru_cache(maxsize=1)  # a run evaluates two or three times on the same questions
def held_out(settings: Settings) -> frozenset[str]:
    """The names of the questions that training leaves out."""
    return frozenset(record.name for record in read_records(settings, "validation"))


def summarize(settings: Settings, progress: dict, after: dict | None, trainable_parameters: int) -> dict:
    """The content of summary.json."""
    summary = {
        "before": progress.get("before") or NO_ACCURACY,
        **({"start": progress["start"]} if progress.get("start") else {}),
        "after": after or NO_ACCURACY,
        "trainable_parameters": trainable_parameters,
        "seconds": round(progress["seconds"], 1),
        "samples": progress["samples"],
        "left_out": progress["bad"],
    }
    if settings.evaluate and settings.is_embedded:
        summary["blind"] = vqa.blind_embedded(settings.eval_limit)
    return summary


def print_summary(summary: dict, settings: Settings, run: Path) -> None:
    """Print the accuracies, the files of the run, and the commands that go on from it."""
    if settings.evaluate:
        print_accuracies(summary, settings)
    if summary["left_out"]:
        print(f"left out {len(summary['left_out'])} records: {summary['left_out'][0]} …")
    print(
        f"\n{summary['samples']:,} samples in {summary['seconds']:.0f} s; in {run}: "
        + ("model/" if settings.writes_model else "adapter_model.safetensors, adapter_config.json")
        + ", metrics.jsonl, loss.png, summary.json, checkpoints/"
    )
    what = f"--model {run / 'model'}" if settings.writes_model else f"--adapter {run}"
    prompt = settings.question_prompt or PROMPT
    # an adapter stores its prompt, a model does not
    template = f" --prompt {shlex.quote(prompt)}" if settings.writes_model and prompt != PROMPT else ""
    question = shlex.quote(fill_prompt(prompt, "Where is the dog?"))
    print(
        f"next: python -m eval.vqa {what}{template}; python -m eval.needle {what}; "
        f"python -m eval.ask {what} --image FILE --prompt {question}"
    )


def print_accuracies(summary: dict, settings: Settings) -> None:
    """The table of accuracies: of the base, of the grafted model that training starts from, after it, of guessing."""
    columns = {name: summary[name] for name in ("before", "start", "after") if name in summary}

    def row(name: str, values: Sequence[float | None], chance: float | None) -> None:
        print(f"{name:<34}" + "".join(f"{'-' if value is None else f'{value:.1f}':>9}" for value in [*values, chance]))

    print(f"\n{'accuracy, %':<34}" + "".join(f"{name:>9}" for name in [*columns, "chance"]))
    results, after = list(columns.values()), summary["after"]
    if not settings.is_embedded:
        row("VQA", [result["vqa"] for result in results], None)
        return
    blind = summary["blind"]
    row("VQA (chance: blind, no picture)", [result["vqa"] for result in results], blind["overall"])
    for kind in after["vqa_details"]["per_answer_type"]:
        row(f"  {kind}", [result["vqa_details"]["per_answer_type"][kind] for result in results], blind.get(kind))
    for kind in after["needle_details"]:
        chance = 100 / scenes.NEEDLES[kind][0] ** 2
        row(NEEDLE_TITLES[kind], [result["needle_details"][kind] for result in results], chance)
    needle_before = summary["before"]["needle"]
    if needle_before is not None and needle_before < 25:
        print("A needle score below chance before training mostly means that its question was never seen.")
