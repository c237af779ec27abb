"""Multiple choice by likelihood, as lm-evaluation-harness measures it: MMLU, CMMLU, RACE, ARC, or your own questions.

    python -m eval.choices                          the last run, or the embedded base, on the embedded scenes
    python -m eval.choices --task mmlu --data DIR --model A --model B --blind
    python -m eval.choices --task jsonl --data FILE --model SRC

In: questions with choices (`eval/choices_files.py`), and models. Out: results.json with the log-probabilities, accuracy
by question and by subject, with intervals, and the differences of several models on the same questions.

The likelihood of a choice is the sum of the log-probabilities of its tokens after the prompt, without an end token.
accuracy: the likeliest choice is right. normalised: the likeliest by character, likelihood / characters, is right; of
equal ones the first counts. A model of text reads the prompt, a space and the choice: blanks at the prompt's end are
read with the choice, whose tokens are those of both together less the prompt's. A model of pictures reads its own turn:
the prompt, which ends in a newline, then the choice without a space. The choices of a question share its prompt.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from eval.choices_files import EMBEDDED, EXAMS, TASKS, Item
from eval.command import Ask, Command, Report, add_flag, add_prompt_flag, whole
from eval.compare import compare
from eval.data import check_prompt, check_unique
from eval.entry import main_of
from eval.records import gray_picture
from eval.report import markdown_table
from model.common import UserError, run_command, write_text

SHARED = 512  # questions without a picture that are encoded together
WRITTEN = ("id", "subject", "picture", "choices", "answer")
Scored = tuple[Item, Sequence[float]]  # a question, and the log-probability of each of its choices


def load(args: argparse.Namespace) -> tuple[list[Item], dict[str, list[Ask]]]:
    """The questions of the task, and what to ask. Raises UserError."""
    if (args.data is None) != (args.task in EMBEDDED):
        without = "takes no --data: leave it out, or name its task, such as --task jsonl"
        raise UserError(f"--task {args.task} {without if args.data else 'needs --data: its official files'}")
    if args.shots is not None and args.task not in EXAMS:
        raise UserError(f"--shots {args.shots}: only {' and '.join(EXAMS)} have a dev file of examples: leave it out")
    args.shots = 5 if args.shots is None else args.shots
    check_prompt(args.prompt)
    items = list(TASKS[args.task](args))
    check_unique((item.id for item in items), args.data or args.task)
    sets = {"choices": [ask_of(item, item.pictures, number) for number, item in enumerate(items)]}
    if args.blind:
        gray = [(gray_picture,) * max(1, len(item.pictures)) for item in items]
        sets["blind"] = [ask_of(item, gray[number], number) for number, item in enumerate(items)]
    return items, sets


def ask_of(item: Item, pictures: tuple, number: int) -> Ask:
    key = item.picture if pictures is item.pictures and item.picture else f"{len(pictures)} gray, {number // SHARED}"
    return Ask(item.id, key, pictures, item.prompt, item.choices, scored=True)


def finish(args: argparse.Namespace, items: list[Item], answers: dict[str, list[str | None]], session) -> Report:
    """results.json, and the accuracies of one model."""
    scored = {
        name: [(item, json.loads(text)) for item, text in zip(items, texts, strict=True) if text is not None]
        for name, texts in answers.items()
    }
    results = [
        {name: getattr(item, name) for name in WRITTEN} | {"log_likelihoods": totals}
        for item, totals in scored["choices"]
    ]
    write_text(session.out / "results.json", json.dumps(results, ensure_ascii=False, indent=0) + "\n")
    report = report_of(**scored)
    lines = compare_models({session.title: report})[1]
    return report._replace(lines=lines, files=["results.json", "answers.jsonl"])


def hits(item: Item, totals: Sequence[float]) -> dict[str, bool]:
    """Whether a question is answered rightly, by measure; totals: the log-probability of each choice."""
    by_character = [total / len(choice) for total, choice in zip(totals, item.choices, strict=True)]
    scores = {"accuracy": totals, "normalised": by_character}
    return {measure: values.index(max(values)) == item.answer for measure, values in scores.items()}


def report_of(choices: Sequence[Scored], blind: Sequence[Scored] = ()) -> Report:
    """The accuracies in percent, over all questions and by subject, and the mean over subjects."""
    right, by_subject = [hits(*one) for one in choices], defaultdict(list)
    for (item, _), of_item in zip(choices, right, strict=True):
        by_subject[item.subject].append(of_item)

    def mean(some: Sequence[Mapping[str, float]], scale: int = 100) -> dict[str, float]:
        return {measure: round(scale * sum(one[measure] for one in some) / len(some), 2) for measure in some[0]}

    subjects = {name: mean(of_subject) for name, of_subject in by_subject.items()}
    values = mean(right) | {"questions": len(right), "mean over subjects": mean(list(subjects.values()), 1)}
    scores, of_blind = (
        {measure: {item.id: hits(item, totals)[measure] for item, totals in some} for measure in right[0] if some}
        for some in (choices, blind)
    )
    pictures = {item.id: item.picture or item.id for item, _ in (*choices, *blind)}
    return Report(values | {"subjects": subjects}, [], [], scores, of_blind, pictures)


def compare_models(reports: Mapping[str, Report]) -> tuple[dict, list[str]]:
    """The table of all questions, and one of the subjects if there are several."""
    values, lines = compare(reports)
    found = [{"mean": r.values["mean over subjects"]} | r.values["subjects"] for r in reports.values()]
    subjects = dict.fromkeys(name for of_model in found for name in of_model)
    if len(subjects) > 2:
        cells = [
            [name, *(f"{one[name]['accuracy']:.2f}" if name in one else "-" for one in found)] for name in subjects
        ]
        lines += ["", *markdown_table(["accuracy, %", *reports], cells)]
    return values, lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--task", "scenes and sentences are embedded", "scenes", choices=TASKS)
    add_flag(parser, "--data", "folder of mmlu, cmmlu or race, file of arc or jsonl (default: none)", metavar="PATH")
    add_flag(parser, "--images", "folder of the pictures of a jsonl file (default: its own)", metavar="DIR")
    shots = "examples from the dev file before a question of mmlu or cmmlu (default: 5)"
    add_flag(parser, "--shots", shots, type=whole(0, 100), metavar="K")
    add_flag(parser, "--blind", "ask the same model about a gray picture too", False)
    add_prompt_flag(parser)


LIMIT = "questions, the first N, of each subject where there are several (default: all, 600 embedded ones)", None
main = main_of(Command("choices", __doc__, add_flags, None, load, finish, None, LIMIT, 32, compare_models, True))

if __name__ == "__main__":
    run_command(main)
