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
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from eval import mmbench, needle, pope, vqa
from eval.command import Ask, Command, Report, add_flag, command_parser, print_report
from eval.compare import compare
from eval.datasets import PROMPT, check_prompt
from eval.entry import parser_of
from eval.report import markdown_table
from eval.session import Session, Subject, add_answer_flags, answer, models_of, open_model, out_folder, stored_prompt
from model.common import UserError, quoted, run_command, shown, write_text
from model.source import preset_of, resolve
from model.system_configs import QMambaConfig, WingsConfig, read_config

SHORT = "{question}\nAnswer the question using a single word or phrase."
UNSURE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n"


class Task(NamedTuple):
    """A benchmark: its command; for each column a factor and the place of its figure in the report's values; the
    command's flags, in which ROOT/ begins the names below --root; the prompts of LLaVA's line and of PaliGemma."""

    command: Command
    columns: Mapping[str, tuple]
    flags: str
    llava: str = SHORT
    paligemma: str = PROMPT


TASKS = {
    "vqav2": Task(
        vqa.COMMAND,
        {"VQAv2": (1, "overall")},
        "--questions ROOT/vqav2/v2_OpenEnded_mscoco_val2014_questions.json "
        "--annotations ROOT/vqav2/v2_mscoco_val2014_annotations.json --images ROOT/coco",
    ),
    "gqa": Task(
        vqa.COMMAND,
        {"GQA": (1, "overall")},
        "--questions ROOT/gqa/testdev_balanced_questions.json --images ROOT/gqa/images",
    ),
    "vizwiz": Task(
        vqa.COMMAND,
        {
            "VizWiz": (1, "overall"),
            "unanswerable AP": (1, "answerability", "ap"),
            "unanswerable F1": (1, "answerability", "f1"),
        },
        "--questions ROOT/vizwiz/val.json --images ROOT/vizwiz/val --answerability",
        SHORT.replace("\n", UNSURE),
    ),
    "textvqa": Task(
        vqa.COMMAND,
        {"TextVQA": (1, "overall")},
        "--questions ROOT/textvqa/TextVQA_0.5.1_val.json --images ROOT/textvqa/train_images",
    ),
    "pope": Task(
        pope.COMMAND,
        {"POPE": (100, "mean", "accuracy"), "POPE F1": (100, "mean", "f1"), "POPE P(yes)": (100, "mean", "P(yes)")},
        "--questions ROOT/pope/coco_pope_random.json ROOT/pope/coco_pope_popular.json "
        "ROOT/pope/coco_pope_adversarial.json --images ROOT/coco/val2014 --probability",
        paligemma="{question}",
    ),
    "mmbench": Task(mmbench.COMMAND, {"MMBench": (1, "overall")}, "--tsv ROOT/mmbench/MMBench_DEV_EN.tsv"),
    "needle": Task(
        needle.COMMAND,
        {"MMNeedle": (100, "1_2_2", "exact_accuracy")},
        "--coco ROOT/coco --captions ROOT/needle/file_to_caption.json --metadata ROOT/needle",
    ),
}


def is_of_llava(subject: Subject) -> bool:
    """Whether the model is of a kind that is trained on LLaVA's data."""
    if preset_of(subject.source):
        return False
    config = read_config(resolve(subject.source, ["config.json"]) / "config.json")
    return isinstance(config, QMambaConfig | WingsConfig)


def arguments(args: Namespace, task: Task, subject: Subject) -> Namespace:
    """The flags of a benchmark's own command, for one model. Raises UserError."""
    llava = args.wording == "llava" or args.wording is None and is_of_llava(subject)
    words = [
        word.replace("ROOT", str(args.root), 1) if word.startswith("ROOT/") else word for word in task.flags.split()
    ]
    own = vars(parser_of(task.command).parse_args(words))
    default = task.llava if llava else task.paligemma
    given = {
        "prompt": args.prompt or (stored_prompt(subject, default) if args.wording is None else default),
        "wording": "llava" if llava else "paligemma",
        "limit": args.limit or task.command.limit[1],
    }
    return Namespace(**{**vars(args), **own, **given})


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
    add_answer_flags(parser, "questions of each benchmark, the first N (default: all; 200 of needle)", None, 32)
    args = parser.parse_args(argv)
    tasks = list(dict.fromkeys(args.tasks.split(",")))
    if unknown := [name for name in tasks if name not in TASKS]:
        raise UserError(f"--tasks: {quoted(unknown[0])} is none of {', '.join(TASKS)}")
    if args.one_by_one:
        raise UserError("--one-by-one: give it to a benchmark's own command")
    check_prompt(args.prompt or PROMPT)
    check_files(args.root, tasks)
    subjects, loaded = models_of(args), {}
    needed = {(subject, name): arguments(args, TASKS[name], subject) for subject in subjects for name in tasks}
    for (_, name), own in needed.items():
        key = name, own.prompt, own.wording
        loaded[key] = loaded.get(key) or TASKS[name].command.load(own)
    if args.plan:
        print("\n".join(plan_lines(needed, loaded)))
        return
    out = out_folder(args.out, "suite")
    run(needed, loaded, out, args)


def plan_lines(needed: Mapping[tuple[Subject, str], Namespace], loaded: Mapping) -> list[str]:
    """What would be asked of each model."""
    rows = []
    for (subject, name), own in needed.items():
        sets: dict[str, list[Ask]] = loaded[name, own.prompt, own.wording][1]
        asks = [ask for of_set in sets.values() for ask in of_set]
        pictures, first = len({ask.key for ask in asks}), quoted(asks[0].prefix, 200)
        rows.append([subject.title, name, f"{len(asks):,}", f"{pictures:,}", first])
    return markdown_table(["model", "benchmark", "questions", "pictures", "the first prompt"], rows)


def run(needed: Mapping[tuple[Subject, str], Namespace], loaded: Mapping, out: Path, args: Namespace) -> None:
    """Ask each model all questions; print and write the table."""
    reports: dict[str, dict[str, Report]] = {name: {} for _, name in needed}
    values: dict[str, dict[str, float | None]] = {}
    for subject in dict.fromkeys(subject for subject, _ in needed):
        opened = open_model(args, subject)
        values[subject.title] = {}
        for name in reports:
            own, folder = needed[subject, name], out_folder(out / subject.title / name)
            session = Session(*opened, subject.title, folder, subject)
            report = reports[name][subject.title] = answer(
                TASKS[name].command, own, session, *loaded[name, own.prompt, own.wording]
            )
            for column, (factor, *place) in TASKS[name].columns.items():
                figure = reduce(lambda found, key: found.get(key, {}), place, report.values)
                values[subject.title][column] = factor * figure if figure != {} else None
        del opened, session  # before the next model is read
    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    cells = [[t, *("-" if row[c] is None else f"{row[c]:.2f}" for c in columns)] for t, row in values.items()]
    lines = markdown_table(["%", *columns], cells)
    if len(values) > 1:
        for name, of_task in reports.items():
            first, *rest = compare(of_task)[1] or ["no right answers are given"]
            lines += ["", f"{name}: {first}", *rest]
    write_text(out / "suite.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    print_report(Report(values, [*lines, f"in {out}: suite.json"]), args.json)


if __name__ == "__main__":
    run_command(main)
