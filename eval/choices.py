"""Multiple choice by likelihood, as lm-evaluation-harness measures it: MMLU, CMMLU, RACE, ARC, or your own questions.

    python -m eval.choices                          the last run, or the embedded base, on the embedded scenes
    python -m eval.choices --task mmlu --data DIR --model A --model B --blind
    python -m eval.choices --task jsonl --data FILE --model SRC
    python -m eval.choices score --results R

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
from pathlib import Path

from eval.choices_files import EMBEDDED, EXAMS, TASKS, Item, texts
from eval.command import Ask, Command, Report, add_flag, add_prompt_flag, whole
from eval.compare import compare
from eval.datasets import LIST, TEXT, check_prompt, check_unique, records_of
from eval.entry import main_of
from eval.records import gray_picture
from eval.report import markdown_table
from model.common import Expected, UserError, read_field, read_json, run_command, shown, write_text

SHARED = 512  # questions without a picture that are encoded together
WRITTEN = ("id", "subject", "picture", "choices", "answer")
MEASURES = ("accuracy", "normalised")


def load(args: argparse.Namespace) -> tuple[list[Item], dict[str, list[Ask]]]:
    """The questions of the task, and what to ask. Raises UserError."""
    if (args.data is None) != (args.task in EMBEDDED):
        raise UserError(f"--task {args.task} {'takes no --data' if args.data else 'needs --data: its official files'}")
    if args.shots is not None and args.task not in EXAMS:
        raise UserError(f"--shots {args.shots}: only {' and '.join(EXAMS)} have a dev file of examples: leave it out")
    args.shots = 5 if args.shots is None else args.shots
    check_prompt(args.prompt)
    items = list(TASKS[args.task](args))
    check_unique((item.id for item in items), args.data or args.task)
    sets = {"choices": [ask_of(item, item.pictures, number) for number, item in enumerate(items)]}
    if args.blind:
        sets["blind"] = [ask_of(item, (gray_picture,), number) for number, item in enumerate(items)]
    return items, sets


def ask_of(item: Item, pictures: tuple, number: int) -> Ask:
    key = item.picture if pictures is item.pictures and item.picture else f"{len(pictures)} gray, {number // SHARED}"
    return Ask(item.id, key, pictures, item.prompt, item.choices, scored=True)


def finish(args: argparse.Namespace, items: list[Item], answers: dict[str, list[str | None]], session) -> Report:
    """results.json, and the accuracies of one model."""
    rows = {
        name: [
            {name: getattr(item, name) for name in WRITTEN} | {"log_likelihoods": json.loads(text)}
            for item, text in zip(items, texts, strict=True)
            if text is not None
        ]
        for name, texts in answers.items()
    }
    if not rows["choices"]:
        raise UserError(f"none of the {len(items)} questions could be asked: repair what is named above")
    write_text(session.out / "results.json", json.dumps(rows["choices"], ensure_ascii=False, indent=0) + "\n")
    report = report_of(rows["choices"], rows.get("blind", []))
    lines = compare_models({session.title: report})[1]
    return report._replace(lines=lines, files=["results.json", "answers.jsonl"])


def hits(row: Mapping) -> dict[str, bool]:
    """Whether a question is answered rightly, by measure."""
    totals = row["log_likelihoods"]
    by_character = [total / len(choice) for total, choice in zip(totals, row["choices"], strict=True)]
    scores = zip(MEASURES, (totals, by_character), strict=True)
    return {measure: values.index(max(values)) == row["answer"] for measure, values in scores}


def report_of(rows: Sequence[Mapping], blind: Sequence[Mapping] = ()) -> Report:
    """The accuracies in percent, over all questions and by subject, and the mean over subjects."""
    right, by_subject = [hits(row) for row in rows], defaultdict(list)
    for row, of_row in zip(rows, right, strict=True):
        by_subject[row["subject"]].append(of_row)

    def percent(some: Sequence[Mapping[str, float]], scale: int = 100) -> dict[str, float]:
        return {measure: round(scale * sum(one[measure] for one in some) / len(some), 2) for measure in MEASURES}

    subjects = {name: percent(of_subject) for name, of_subject in by_subject.items()}
    subjects = {"mean over subjects": percent(list(subjects.values()), 1)} | subjects
    scores, of_blind = (
        {measure: {row["id"]: hits(row)[measure] for row in of_set} for measure in MEASURES} if of_set else {}
        for of_set in (rows, blind)
    )
    pictures = {row["id"]: row["picture"] or row["id"] for row in (*rows, *blind)}
    return Report(percent(right) | {"questions": len(rows), "subjects": subjects}, [], [], scores, of_blind, pictures)


def compare_models(reports: Mapping[str, Report]) -> tuple[dict, list[str]]:
    """The table of all questions, and one of the subjects if there are several."""
    values, lines = compare(reports)
    subjects = dict.fromkeys(name for report in reports.values() for name in report.values["subjects"])
    if len(subjects) > 2:
        cells = [
            [name, *(f"{report.values['subjects'][name]['accuracy']:.2f}" for report in reports.values())]
            for name in subjects
        ]
        lines += ["", *markdown_table(["accuracy, %", *reports], cells)]
    return values, lines


def score(args: argparse.Namespace) -> Report:
    """`python -m eval.choices score`: the accuracies of a results file."""
    rows = []
    for where, record in records_of(read_json(args.results, object), shown(args.results)):
        row = {name: read_field(record, name, TEXT, where) for name in ("id", "subject", "picture")}
        row["choices"] = texts(read_field(record, "choices", LIST, where), where)
        count = len(row["choices"])
        row["answer"] = read_field(record, "answer", Expected(int, 0, count - 1), where)
        row["log_likelihoods"] = read_field(record, "log_likelihoods", Expected(list, count, count), where)
        for value in row["log_likelihoods"]:
            read_field({"log_likelihoods": value}, "log_likelihoods", Expected(float), where)
        rows.append(row)
    check_unique((row["id"] for row in rows), args.results)
    report = report_of(rows)
    return report._replace(lines=compare_models({Path(args.results).stem: report})[1])


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--task", "scenes and sentences are embedded", "scenes", choices=TASKS)
    add_flag(parser, "--data", "folder of mmlu, cmmlu or race, file of arc or jsonl (default: none)", metavar="PATH")
    add_flag(parser, "--images", "folder of the pictures of a jsonl file (default: its own)", metavar="DIR")
    shots = "examples from the dev file before a question of mmlu or cmmlu (default: 5)"
    add_flag(parser, "--shots", shots, type=whole(0, 100), metavar="K")
    add_flag(parser, "--blind", "ask the same model about a gray picture too", False)
    add_prompt_flag(parser)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--results", "results.json of an earlier call", required=True)


LIMIT = "questions, the first N, of each subject where there are several (default: all, 600 embedded ones)", None
COMMAND = Command(
    "choices", __doc__, add_flags, add_score_flags, load, finish, score, LIMIT, compare=compare_models, reads_text=True
)
main = main_of(COMMAND)

if __name__ == "__main__":
    run_command(main)
