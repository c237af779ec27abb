"""Several benchmarks and models in one table: VQAv2, GQA, VizWiz, TextVQA, POPE, MMBench and
MMNeedle.

    python -m eval.suite --root DIR --tasks vqav2,gqa,vizwiz,textvqa,pope,mmbench,needle --model A
    --model B
    python -m eval.suite --root DIR --plan --model A

In: the official files below --root (FLAGS), and models. Out: suite.json, and what the benchmarks'
commands write; other flags are theirs (`python -m eval.vqa --help`). Models whose run tells no
prompt are asked as their authors ask: LLaVA's successors as LLaVA is, PaliGemma as in big_vision,
configs/proj/paligemma/transfers.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from eval.bench import ask_models, cell, comparison_table, flags_for, parser_of, values_of
from eval.command import add_flag, command_parser
from eval.mmbench import MMBench
from eval.needle import Needle
from eval.open import models_of
from eval.pope import Pope
from eval.report import markdown_table
from eval.vqa import Vqa
from model.common import UserError, quoted, run_command, shown, write_text

SHORT = "{question}\nAnswer the question using a single word or phrase."
UNSURE = SHORT.replace(
    "\n", "\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n"
)
FLAGS = {  # of each benchmark's command
    "vqav2": "--questions ROOT/vqav2/v2_OpenEnded_mscoco_val2014_questions.json --images ROOT/coco "
    "--annotations ROOT/vqav2/v2_mscoco_val2014_annotations.json",
    "gqa": "--questions ROOT/gqa/testdev_balanced_questions.json --images ROOT/gqa/images",
    "vizwiz": "--questions ROOT/vizwiz/val.json --images ROOT/vizwiz/val --answerability",
    "textvqa": "--questions ROOT/textvqa/TextVQA_0.5.1_val.json --images ROOT/textvqa/train_images",
    "pope": "--questions ROOT/pope/coco_pope_random.json ROOT/pope/coco_pope_popular.json "
    "ROOT/pope/coco_pope_adversarial.json --images ROOT/coco/val2014 --probability",
    "mmbench": "--tsv ROOT/mmbench/MMBench_DEV_EN.tsv",
    "needle": "--coco ROOT/coco --captions ROOT/needle/file_to_caption.json --metadata ROOT/needle",
}
BENCHMARKS = {name: Vqa(llava=SHORT) for name in ("vqav2", "gqa", "textvqa")} | {
    "vizwiz": Vqa(llava=UNSURE)
}
BENCHMARKS |= {
    "pope": Pope(llava=SHORT, paligemma="{question}"),
    "mmbench": MMBench(),
    "needle": Needle(),
}
OVERALL, UNSURE_OF = (
    ("overall", "VQA accuracy"),
    {f"unanswerable {of}": ("answerability", of) for of in ("AP", "F1")},
)
COLUMNS = {  # by title, the line and the measure of the benchmark's summary
    "vqav2": {"VQAv2": OVERALL},
    "gqa": {"GQA": OVERALL},
    "vizwiz": {"VizWiz": OVERALL} | UNSURE_OF,
    "textvqa": {"TextVQA": OVERALL},
    "pope": {
        "POPE": ("mean", "accuracy"),
        "POPE F1": ("mean", "F1"),
        "POPE P(yes)": ("mean", "P(yes)"),
    },
    "mmbench": {"MMBench": ("overall", "CircularEval")},
    "needle": {"MMNeedle": ("1_2_2", "exact")},
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.suite", __doc__)
    add_flag(
        parser, "--root", "folder of the official files", required=True, type=Path, metavar="DIR"
    )
    add_flag(parser, "--tasks", "benchmarks, with commas", ",".join(FLAGS), metavar="LIST")
    add_flag(
        parser,
        "--wording",
        "prompts of this kind of model (default: its own)",
        choices=["paligemma", "llava"],
    )
    add_flag(
        parser,
        "--prompt",
        "one prompt with {question} in it for all (default: --wording's)",
        metavar="TEMPLATE",
    )
    add_flag(parser, "--plan", "list what would be asked, and stop", False)
    args, others = parser.parse_known_args(argv)
    tasks = list(dict.fromkeys(args.tasks.split(",")))
    if unknown := [name for name in tasks if name not in FLAGS]:
        raise UserError(f"--tasks: {quoted(unknown[0])} is none of {', '.join(FLAGS)}")
    words = {
        name: [word.replace("ROOT", str(args.root)) for word in FLAGS[name].split()]
        for name in tasks
    }
    paths = dict.fromkeys(
        Path(word) for of in words.values() for word in of if word.startswith(f"{args.root}/")
    )
    if absent := [shown(path) for path in paths if not path.exists()]:
        raise UserError(
            f"{len(absent)} of {len(paths)} files and folders are missing: {', '.join(absent)}"
        )
    plan, values, comparisons = [], defaultdict(dict), []
    for name in tasks:
        benchmark, flags = (
            BENCHMARKS[name],
            parser_of(BENCHMARKS[name]).parse_args([*words[name], *others]),
        )
        if flags.results:
            raise UserError(
                "--results: give the file to the benchmark's own command, such as eval.vqa"
            )
        flags.prompt, flags.wording = args.prompt, args.wording
        flags.out = (flags.out or Path("runs/eval/suite")) / name
        if args.plan:
            for subject in models_of(flags):
                asked = benchmark.questions(flags_for(benchmark, flags, subject))
                pictures, prompt = (
                    {question.key for question in asked},
                    quoted(asked[0].prefix, 200),
                )
                plan.append([subject.title, name, f"{len(asked):,}", f"{len(pictures):,}", prompt])
            continue
        results = values_of(benchmark, ask_models(benchmark, flags))
        for title, of in results.items():
            values[title] |= {
                c: of["summary"].get(line, {}).get(m) for c, (line, m) in COLUMNS[name].items()
            }
        if len(results) > 1:
            comparisons += ["", f"{name}:", *comparison_table(results)]
    if args.plan:
        print(
            "\n".join(
                markdown_table(
                    ["model", "benchmark", "questions", "pictures", "the first prompt"], plan
                )
            )
        )
        return
    write_text(
        flags.out.parent / "suite.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    )
    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    lines = markdown_table(
        ["%", *columns], [[name, *map(cell, map(row.get, columns))] for name, row in values.items()]
    )
    print(json.dumps(values) if flags.json else "\n".join([*lines, *comparisons]))


if __name__ == "__main__":
    run_command(main)
