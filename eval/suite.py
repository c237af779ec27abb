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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eval.bench import Benchmark, add_ask_flags, ask, questions_for
from eval.command import add_flag, command_parser, positive
from eval.data import PROMPT, check_prompt
from eval.mmbench import MMBench
from eval.needle import Needle
from eval.open import Subject, add_model_flags, models_of, open_model, out_folder, stored_prompt
from eval.pope import Pope
from eval.report import cell, compare, comparison_table, markdown_table
from eval.vqa import Vqa
from model.common import UserError, quoted, run_command, shown, write_text
from model.source import preset_of, resolve
from model.system_configs import QMambaConfig, WingsConfig, read_config

SHORT = "{question}\nAnswer the question using a single word or phrase."
UNSURE = SHORT.replace("\n", "\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n")
OVERALL = "overall", "VQA accuracy"
UNANSWERABLE = {f"unanswerable {name}": ("answerability", name) for name in ("AP", "F1")}
POPE = {"POPE": ("mean", "accuracy"), "POPE F1": ("mean", "F1"), "POPE P(yes)": ("mean", "P(yes)")}
# Flags of each benchmark's command; ROOT is --root.
VQAV2_FLAGS = "--questions ROOT/vqav2/v2_OpenEnded_mscoco_val2014_questions.json --images ROOT/coco"
VQAV2_FLAGS += " --annotations ROOT/vqav2/v2_mscoco_val2014_annotations.json"
GQA_FLAGS = "--questions ROOT/gqa/testdev_balanced_questions.json --images ROOT/gqa/images"
VIZWIZ_FLAGS = "--questions ROOT/vizwiz/val.json --images ROOT/vizwiz/val --answerability"
TEXTVQA_FLAGS = "--questions ROOT/textvqa/TextVQA_0.5.1_val.json --images ROOT/textvqa/train_images"
POPE_FILES = " ".join(f"ROOT/pope/coco_pope_{name}.json" for name in ("random", "popular", "adversarial"))
POPE_FLAGS = f"--questions {POPE_FILES} --images ROOT/coco/val2014 --probability"
MMBENCH_FLAGS = "--tsv ROOT/mmbench/MMBench_DEV_EN.tsv"
NEEDLE_FLAGS = "--coco ROOT/coco --captions ROOT/needle/file_to_caption.json --metadata ROOT/needle"


class Task(NamedTuple):
    """columns: by title, the line and the measure of the benchmark's summary. llava, paligemma: prompts."""

    benchmark: Benchmark
    flags: str
    columns: dict[str, tuple[str, str]]
    llava: str = SHORT
    paligemma: str = PROMPT


TASKS = {
    "vqav2": Task(Vqa(), VQAV2_FLAGS, {"VQAv2": OVERALL}),
    "gqa": Task(Vqa(), GQA_FLAGS, {"GQA": OVERALL}),
    "vizwiz": Task(Vqa(), VIZWIZ_FLAGS, {"VizWiz": OVERALL} | UNANSWERABLE, UNSURE),
    "textvqa": Task(Vqa(), TEXTVQA_FLAGS, {"TextVQA": OVERALL}),
    "pope": Task(Pope(), POPE_FLAGS, POPE, paligemma="{question}"),
    "mmbench": Task(MMBench(), MMBENCH_FLAGS, {"MMBench": ("overall", "CircularEval")}),
    "needle": Task(Needle(), NEEDLE_FLAGS, {"MMNeedle": ("1_2_2", "exact")}),
}


def words_of(task: Task, root: Path) -> list[str]:
    """The task's flags as the words of a command line."""
    return [f"{root}/{w.removeprefix('ROOT/')}" if w.startswith("ROOT/") else w for w in task.flags.split()]


def flags_of(args: Namespace, task: Task, subject: Subject) -> Namespace:
    """The flags of a benchmark's own command, for one model. Raises UserError."""
    parser = ArgumentParser()
    for name, options in task.benchmark.flags.items():
        add_flag(parser, name, **options)
    flags = vars(args) | vars(parser.parse_args(words_of(task, args.root)))
    wording = args.wording or ("llava" if is_of_llava(subject) else "paligemma")
    prompt = task.llava if wording == "llava" else task.paligemma
    prompt = args.prompt or (prompt if args.wording else stored_prompt(subject, prompt))
    return Namespace(**flags | {"prompt": prompt, "wording": wording, "limit": args.limit})


def is_of_llava(subject: Subject) -> bool:
    """Whether the model is of a kind that is trained on LLaVA's data."""
    if preset_of(subject.source):
        return False
    config = read_config(resolve(subject.source, ["config.json"]) / "config.json")
    return isinstance(config, QMambaConfig | WingsConfig)


def check_files(root: Path, tasks: Sequence[str]) -> None:
    """Raise UserError that names all files and folders that are not below --root."""
    words = dict.fromkeys(word for name in tasks for word in words_of(TASKS[name], root))
    paths = [Path(word) for word in words if word.startswith(f"{root}/")]
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
    subjects, flags, questions, plan = models_of(args), {}, {}, []
    for subject in subjects:
        for name in tasks:
            flags[subject, name] = own = flags_of(args, TASKS[name], subject)
            key = name, own.prompt, own.wording  # models that are asked alike share their questions
            questions[key] = asked = questions.get(key) or questions_for(TASKS[name].benchmark, own)
            pictures, prompt = {question.key for question in asked}, quoted(asked[0].prefix, 200)
            plan.append([subject.title, name, f"{len(asked):,}", f"{len(pictures):,}", prompt])
    if args.plan:
        print("\n".join(markdown_table(["model", "benchmark", "questions", "pictures", "the first prompt"], plan)))
        return
    out, values, results = out_folder(args.out, "suite"), defaultdict(dict), defaultdict(dict)
    for subject in subjects:
        opened = open_model(args, subject)
        for name in tasks:
            own, task, folder = flags[subject, name], TASKS[name], out_folder(out / subject.title / name)
            rows = ask(task.benchmark, questions[name, own.prompt, own.wording], opened, subject, folder, own)
            results[name] |= rows
            for title, of_title in rows.items():
                summary = task.benchmark.summary(of_title)
                values[title] |= {c: summary.get(line, {}).get(of) for c, (line, of) in task.columns.items()}
        del opened  # before the next model is read
    write_text(out / "suite.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    lines = markdown_table(
        ["%", *columns], [[title, *map(cell, map(row.get, columns))] for title, row in values.items()]
    )
    for name, of_task in results.items() if len(values) > 1 else ():
        lines += ["", f"{name}:", *comparison_table(compare(of_task))]
    print(json.dumps(values, ensure_ascii=False) if args.json else "\n".join(lines))


if __name__ == "__main__":
    run_command(main)
