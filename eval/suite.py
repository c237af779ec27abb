"""Several benchmarks and models in one table: the rows of Q-Mamba's Table 1, with MMBench and MMNeedle beside them.

    python -m eval.suite --root DIR --tasks vqav2,gqa,vizwiz,textvqa,pope,mmbench,needle --model A --model B
    python -m eval.suite --root DIR --plan --model A

In: the official files below --root, as TASKS names them, and models. Out: suite.json with all figures, a folder of each
model and benchmark with the files that the benchmark's own command writes, and paired differences of several models.
An interrupted run goes on where it was. Files, questions and pictures are looked up before a model is opened.

A model is asked in the prompt of its training where its run tells it. Else Q-Mamba and WINGS are asked as LLaVA was
trained, for short answers, and PaliGemma as its authors ask (big_vision, configs/proj/paligemma/transfers).
"""

import json
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eval.bench import Benchmark, Results, add_ask_flags, ask, compare, comparison_table, questions_for
from eval.command import add_flag, command_parser, positive
from eval.data import PROMPT, check_prompt
from eval.mmbench import MMBench
from eval.needle import Needle
from eval.open import Subject, add_model_flags, models_of, open_model, out_folder, stored_prompt
from eval.pope import Pope
from eval.report import markdown_table
from eval.vqa import Vqa
from model.common import UserError, quoted, run_command, shown, write_text
from model.source import preset_of, resolve
from model.system_configs import QMambaConfig, WingsConfig, read_config

SHORT = "{question}\nAnswer the question using a single word or phrase."
UNSURE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n"
OVERALL = "overall", "VQA accuracy"


class Task(NamedTuple):
    """A benchmark; the line and the measure of its summary for each column; its flags, in which ROOT/ begins the names
    below --root; the prompts of LLaVA's line and of PaliGemma."""

    benchmark: Benchmark
    columns: Mapping[str, tuple[str, str]]
    flags: str
    llava: str = SHORT
    paligemma: str = PROMPT


TASKS = {
    "vqav2": Task(
        Vqa(),
        {"VQAv2": OVERALL},
        "--questions ROOT/vqav2/v2_OpenEnded_mscoco_val2014_questions.json "
        "--annotations ROOT/vqav2/v2_mscoco_val2014_annotations.json --images ROOT/coco",
    ),
    "gqa": Task(
        Vqa(), {"GQA": OVERALL}, "--questions ROOT/gqa/testdev_balanced_questions.json --images ROOT/gqa/images"
    ),
    "vizwiz": Task(
        Vqa(),
        {"VizWiz": OVERALL, "unanswerable AP": ("answerability", "AP"), "unanswerable F1": ("answerability", "F1")},
        "--questions ROOT/vizwiz/val.json --images ROOT/vizwiz/val --answerability",
        SHORT.replace("\n", UNSURE),
    ),
    "textvqa": Task(
        Vqa(),
        {"TextVQA": OVERALL},
        "--questions ROOT/textvqa/TextVQA_0.5.1_val.json --images ROOT/textvqa/train_images",
    ),
    "pope": Task(
        Pope(),
        {"POPE": ("mean", "accuracy"), "POPE F1": ("mean", "F1"), "POPE P(yes)": ("mean", "P(yes)")},
        "--questions ROOT/pope/coco_pope_random.json ROOT/pope/coco_pope_popular.json "
        "ROOT/pope/coco_pope_adversarial.json --images ROOT/coco/val2014 --probability",
        paligemma="{question}",
    ),
    "mmbench": Task(MMBench(), {"MMBench": ("overall", "CircularEval")}, "--tsv ROOT/mmbench/MMBench_DEV_EN.tsv"),
    "needle": Task(
        Needle(),
        {"MMNeedle": ("1_2_2", "exact")},
        "--coco ROOT/coco --captions ROOT/needle/file_to_caption.json --metadata ROOT/needle",
    ),
}


def is_of_llava(subject: Subject) -> bool:
    """Whether the model is of a kind that is trained on LLaVA's data."""
    if preset_of(subject.source):
        return False
    config = read_config(resolve(subject.source, ["config.json"]) / "config.json")
    return isinstance(config, QMambaConfig | WingsConfig)


def flags_of(args: Namespace, task: Task, subject: Subject) -> Namespace:
    """The flags of a benchmark's own command, for one model. Raises UserError."""
    parser = ArgumentParser()
    for name, options in task.benchmark.flags.items():
        add_flag(parser, name, **options)
    words = [f"{args.root}/{w.removeprefix('ROOT/')}" if w.startswith("ROOT/") else w for w in task.flags.split()]
    own = vars(parser.parse_args(words))
    llava = args.wording == "llava" or args.wording is None and is_of_llava(subject)
    default = task.llava if llava else task.paligemma
    own["prompt"] = args.prompt or (stored_prompt(subject, default) if args.wording is None else default)
    own |= {"wording": "llava" if llava else "paligemma", "limit": args.limit or own.get("limit")}
    return Namespace(**vars(args) | own)


def check_files(root: Path, tasks: Sequence[str]) -> None:
    """Raise UserError that names all files and folders that are not below --root."""
    words = (word for name in tasks for word in TASKS[name].flags.split() if word.startswith("ROOT/"))
    paths = [root / word.removeprefix("ROOT/") for word in dict.fromkeys(words)]
    if absent := [shown(path) for path in paths if not path.exists()]:
        raise UserError(f"{len(absent)} of {len(paths)} files and folders are missing: {', '.join(absent)}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.suite", __doc__)
    add_flag(parser, "--root", "folder of the official files", required=True, type=Path, metavar="DIR")
    add_flag(parser, "--tasks", "benchmarks, with commas", ",".join(TASKS), metavar="LIST")
    wording = "prompts of this line of models (default: those of the run's training, else of its kind)"
    add_flag(parser, "--wording", wording, choices=["paligemma", "llava"])
    add_flag(parser, "--prompt", "one prompt with {question} in it for all (default: --wording's)", metavar="TEMPLATE")
    add_flag(parser, "--plan", "list what would be asked, and stop", False)
    add_flag(parser, "--limit", "questions of each benchmark, the first N (default: all)", type=positive, metavar="N")
    add_ask_flags(parser, 32)
    add_model_flags(parser, many=True)
    args = parser.parse_args(argv)
    tasks = list(dict.fromkeys(args.tasks.split(",")))
    if unknown := [name for name in tasks if name not in TASKS]:
        raise UserError(f"--tasks: {quoted(unknown[0])} is none of {', '.join(TASKS)}")
    check_prompt(args.prompt or PROMPT)
    check_files(args.root, tasks)
    subjects = models_of(args)
    flags = {(subject, name): flags_of(args, TASKS[name], subject) for subject in subjects for name in tasks}
    loaded = {}
    for (_, name), own in flags.items():
        key = name, own.prompt, own.wording
        loaded[key] = loaded.get(key) or questions_for(TASKS[name].benchmark, own)
    questions = {key: loaded[key[1], own.prompt, own.wording] for key, own in flags.items()}
    if args.plan:
        rows = [
            [s.title, name, f"{len(asked):,}", f"{len({q.key for q in asked}):,}", quoted(asked[0].prefix, 200)]
            for (s, name), asked in questions.items()
        ]
        print("\n".join(markdown_table(["model", "benchmark", "questions", "pictures", "the first prompt"], rows)))
        return
    out, results = out_folder(args.out, "suite"), defaultdict(dict)
    values: dict[str, dict[str, float | None]] = defaultdict(dict)
    for subject in subjects:
        opened = open_model(args, subject)
        for name in tasks:
            task, folder = TASKS[name], out_folder(out / subject.title / name)
            rows = ask(task.benchmark, questions[subject, name], opened, subject, folder, flags[subject, name])
            results[name] |= rows
            for title, of_title in rows.items():
                summary = task.benchmark.summary(of_title)
                for column, (line, measure) in task.columns.items():
                    values[title][column] = summary.get(line, {}).get(measure)
        del opened  # before the next model is read
    write_text(out / "suite.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(values, ensure_ascii=False) if args.json else "\n".join(lines_of(values, results)))


def lines_of(values: Mapping[str, Mapping[str, float | None]], results: Mapping[str, Results]) -> list[str]:
    """The table of all figures, and of several models the comparison by benchmark."""
    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    cells = [
        [title, *("-" if row.get(c) is None else f"{row[c]:.2f}" for c in columns)] for title, row in values.items()
    ]
    lines = markdown_table(["%", *columns], cells)
    for name, of_task in results.items() if len(values) > 1 else ():
        lines += ["", f"{name}:", *comparison_table(compare(of_task))]
    return lines


if __name__ == "__main__":
    run_command(main)
