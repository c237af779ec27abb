"""Several benchmarks and models in one table: VQAv2, GQA, VizWiz, TextVQA, POPE, MMBench and
MMNeedle.

    python -m eval.suite --root DIR --tasks vqav2,pope,needle --model A --model B
    python -m eval.suite --root DIR --plan --model A

In: the official files below --root (TASKS), and models. Out: suite.json, and what the benchmarks'
commands write; other flags are theirs (`python -m eval.vqa --help`). Models whose run tells no
prompt are asked as their authors ask: LLaVA's successors as LLaVA is, PaliGemma as in big_vision,
configs/proj/paligemma/transfers.
"""

import json
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from eval.bench import (
    cell,
    comparison_table,
    flags_for,
    parser_of,
    results_of_models,
    values_of,
    write_json,
)
from eval.command import add_flag, command_parser
from eval.mmbench import MMBench
from eval.needle import Needle
from eval.open import subjects_of
from eval.pope import Pope
from eval.report import markdown_table
from eval.vqa import Vqa
from model.common import UserError, quoted, run_command, shown

SHORT = "{question}\nAnswer the question using a single word or phrase."
UNSURE = (
    "{question}\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n"
    "Answer the question using a single word or phrase."
)
OVERALL = ("overall", "VQA accuracy")
# by name: the benchmark, the flags of its command, and its columns: by title, the line and the
# measure of its summary
TASKS = {
    "vqav2": (
        Vqa(llava=SHORT),
        "--questions ROOT/vqav2/v2_OpenEnded_mscoco_val2014_questions.json --images ROOT/coco "
        "--annotations ROOT/vqav2/v2_mscoco_val2014_annotations.json",
        {"VQAv2": OVERALL},
    ),
    "gqa": (
        Vqa(llava=SHORT),
        "--questions ROOT/gqa/testdev_balanced_questions.json --images ROOT/gqa/images",
        {"GQA": OVERALL},
    ),
    "vizwiz": (
        Vqa(llava=UNSURE),
        "--questions ROOT/vizwiz/val.json --images ROOT/vizwiz/val --answerability",
        {
            "VizWiz": OVERALL,
            "unanswerable AP": ("answerability", "AP"),
            "unanswerable F1": ("answerability", "F1"),
        },
    ),
    "textvqa": (
        Vqa(llava=SHORT),
        "--questions ROOT/textvqa/TextVQA_0.5.1_val.json --images ROOT/textvqa/train_images",
        {"TextVQA": OVERALL},
    ),
    "pope": (
        Pope(llava=SHORT, paligemma="{question}"),
        "--questions ROOT/pope/coco_pope_random.json ROOT/pope/coco_pope_popular.json "
        "ROOT/pope/coco_pope_adversarial.json --images ROOT/coco/val2014 --probability",
        {
            "POPE": ("mean", "accuracy"),
            "POPE F1": ("mean", "F1"),
            "POPE P(yes)": ("mean", "P(yes)"),
        },
    ),
    "mmbench": (
        MMBench(),
        "--tsv ROOT/mmbench/MMBench_DEV_EN.tsv",
        {"MMBench": ("overall", "CircularEval")},
    ),
    "needle": (
        Needle(),
        "--coco ROOT/coco --captions ROOT/needle/file_to_caption.json --metadata ROOT/needle",
        {"MMNeedle": ("1_2_2", "exact")},
    ),
}


def suite_parser() -> ArgumentParser:
    parser = command_parser("eval.suite", __doc__)
    root = "folder of the official files"
    add_flag(parser, "--root", root, required=True, type=Path, metavar="DIR")
    add_flag(parser, "--tasks", "benchmarks, with commas", ",".join(TASKS), metavar="LIST")
    wording = "prompts of this kind of model (default: its own)"
    add_flag(parser, "--wording", wording, choices=["paligemma", "llava"])
    prompt = (
        "one prompt with {question} in it for all but mmbench and needle (default: --wording's)"
    )
    add_flag(parser, "--prompt", prompt, metavar="TEMPLATE")
    add_flag(parser, "--plan", "list what would be asked, and stop", False)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args, others = suite_parser().parse_known_args(argv)
    plan = []
    values = defaultdict(dict)
    comparisons = []
    # 1. one benchmark after the other
    for name, words in task_flags(args).items():
        benchmark, _, named = TASKS[name]
        flags = parser_of(benchmark).parse_args([*words, *others])
        if flags.results:
            raise UserError(
                "--results: give the file to the benchmark's own command, such as eval.vqa"
            )
        flags.prompt = args.prompt
        flags.wording = args.wording
        flags.out = (flags.out or Path("runs/eval/suite")) / name
        if args.plan:
            plan += planned(name, flags)
            continue
        results = values_of(benchmark, results_of_models(benchmark, flags))
        for title, result in results.items():
            for column, (line, measure) in named.items():
                values[title][column] = result["summary"].get(line, {}).get(measure)
        if len(results) > 1:
            comparisons += ["", f"{name}:", *comparison_table(results)]
    # 2. their table
    if args.plan:
        head = ["model", "benchmark", "questions", "pictures", "the first prompt"]
        print("\n".join(markdown_table(head, plan)))
        return
    write_json(flags.out.parent / "suite.json", values)
    if flags.json:
        print(json.dumps(values, ensure_ascii=False))
        return
    columns = dict.fromkeys(column for row in values.values() for column in row)
    rows = []
    for title, row in values.items():
        rows.append([title, *(cell(row.get(column)) for column in columns)])
    print("\n".join([*markdown_table(["%", *columns], rows), *comparisons]))


def task_flags(args: Namespace) -> dict[str, list[str]]:
    """The flags of each task's command. Raises UserError for an unknown task, or files that are
    missing."""
    tasks = args.tasks.split(",")
    if unknown := [name for name in tasks if name not in TASKS]:
        raise UserError(f"--tasks: {quoted(unknown[0])} is none of {', '.join(TASKS)}")
    words = {}
    paths = {}
    for name in tasks:
        _, flags, _ = TASKS[name]
        words[name] = [word.replace("ROOT", str(args.root)) for word in flags.split()]
        official = [word for word in words[name] if word.startswith(f"{args.root}/")]
        paths |= dict.fromkeys(map(Path, official))
    if absent := [shown(path) for path in paths if not path.exists()]:
        raise UserError(
            f"{len(absent)} of {len(paths)} files and folders are missing: {', '.join(absent)}"
        )
    return words


def planned(name: str, flags: Namespace) -> list[list[str]]:
    """A row for each model: how many questions it would be asked. Raises UserError."""
    rows = []
    for subject in subjects_of(flags):
        benchmark, *_ = TASKS[name]
        asked = benchmark.questions(flags_for(benchmark, flags, subject))
        pictures = {question.key for question in asked}
        counts = f"{len(asked):,}", f"{len(pictures):,}"
        rows.append([subject.title, name, *counts, quoted(asked[0].prefix, 200)])
    return rows


if __name__ == "__main__":
    run_command(main)
