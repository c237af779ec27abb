"""MMBench: multiple choice about pictures, right only if the answer holds when the options change places.

    python -m eval.mmbench --tsv mmbench_dev_en.tsv --model SRC --adapter RUN
    python -m eval.mmbench score --tsv mmbench_dev_en.tsv --results results.json

In: the official TSV, and a model, or its answers. Out: CircularEval's accuracy by split and category, results.json, and
submission.xlsx for the evaluation server.

The rows of equal index mod 1,000,000 are one question with its options rotated; it is right if all of them are. An
answer is read as VLMEvalKit does where no other model judges it; what is undecided is wrong:

1. One of REFUSALS in it: no option. FAILED in it: go on at 4.
2. The marks .()[],:;!*#{} become blanks. Exactly one option's letter among the words, a capital, first seen in the last
   four: that option. No letter but a word Z: no option.
3. Else the first "answer is X" or "answer is **X**", ignoring case, if X is an option's letter: that option.
4. Else, ignoring case: the one option whose text is in the answer, unless the answer has more than twice as many
   characters as all options together.

Sources: Liu et al., "MMBench: Is Your Multi-modal Model an All-around Player?", ECCV 2024; open-compass/VLMEvalKit.
"""

import argparse
import base64
import binascii
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from eval.command import Ask, Command, Report, add_flag
from eval.datasets import check_unique, read_table, some
from eval.entry import main_of
from eval.report import markdown_table
from eval.spreadsheet import write_xlsx
from eval.vqa import read_results, write_results
from model.common import UserError, quoted, run_command, shown

BASE = 1_000_000
FAILED = "Failed to obtain answer via API"
REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
NOT_SUBMITTED = ("hint", "category", "source", "image", "comment", "l2-category")


class Row(NamedTuple):
    """One row of the file: its values by column, "" where absent, and its options by letter."""

    where: str
    index: int
    values: dict[str, str]
    options: dict[str, str]


def read_rows(path: str) -> list[Row]:
    """The rows of MMBench's TSV. Raises UserError, also for a question that lacks one of its rotations."""
    (_, names), *lines = read_table(path, "\t") or [("", [])]
    missing = [name for name in ("index", "question", "A", "B", "image") if name not in names]
    if missing or not lines:
        raise UserError(f"{shown(path)}: has no {some(missing) or 'rows'}: give MMBench's TSV")
    rows = []
    for where, line in lines:
        if len(line) != len(names):
            raise UserError(f"{where}: {len(line)} values for {len(names)} columns: download the file again")
        values = {n: "" if v.strip().lower() in ("", "nan", "none") else v for n, v in zip(names, line, strict=True)}
        options = {letter: values[letter] for letter in "ABCD" if values.get(letter)}
        if not re.fullmatch("[0-9]{1,12}", values["index"]) or len(options) < 2 or not values["image"]:
            raise UserError(f"{where}: expected an index, two options and an image: correct the file")
        if values.get("answer") and values["answer"] not in options:
            raise UserError(f"{where}: answer is {quoted(values['answer'])}, not one of {', '.join(options)}")
        rows.append(Row(where, int(values["index"]), values, options))
    check_unique((row.index for row in rows), path)
    images = {str(row.index): row.values["image"] for row in rows}
    for row in rows:
        if len(row.values["image"]) <= 64:  # the index of a row with the same picture
            row.values["image"] = images.get(row.values["image"], row.values["image"])
    for base, group in groups_of(rows).items():
        turns = sorted(row.index // BASE for row in group)
        if turns != list(range(len(group[0].options))):
            raise UserError(
                f"{group[0].where}: question {base} has rotations {turns}, expected one for each of its "
                f"{len(group[0].options)} options, from 0: give the file for CircularEval"
            )
    return rows


def groups_of(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of each question by its base index, in their order."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.index % BASE].append(row)
    return groups


def key_of(row: Row) -> str:
    """Names the picture, which several questions may share."""
    return hashlib.sha256(row.values["image"].encode()).hexdigest()[:16]


def open_picture(text: str, where: str) -> io.BytesIO:
    """The file that a value in base64 holds. Raises UserError."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise UserError(f"{where}: image is no base64: download the file again") from None
    file.name = where
    return file


WORDINGS = ("llava", "paligemma", "vlmevalkit")


def prompt_of(wording: str, question: str, hint: str, options: Mapping[str, str]) -> str:
    """The prompt of a model's evaluation: LLaVA's, VLMEvalKit's, or as in big_vision's transfers/aokvqa_mc.py, where
    the answer is the option's text."""
    listed = "".join(f"{letter}. {text}\n" for letter, text in options.items())
    if wording == "paligemma":
        return f"answer en  {hint}{' ' * bool(hint)}{question} choose from: " + " \t ".join(options.values())
    if wording == "vlmevalkit":
        hint = f"Hint: {hint}\n" if hint else ""
        request = "Please select the correct answer from the options above. \n"
        return f"{hint}Question: {question}\nOptions:\n{listed}{request}"
    request = "Answer with the option's letter from the given choices directly."
    request = "请直接回答选项字母。" if re.search("[\u4e00-\u9fff]", question) else request
    return f"{hint}{chr(10) * bool(hint)}{question}\n{listed}{request}"


# Answers


def choose(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer names, by the rules above; Z for none of them, None if undecided."""
    if FAILED not in answer:
        if any(refusal in answer for refusal in REFUSALS):
            return "Z"
        words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
        named = [letter for letter in options if letter in words]
        if len(named) == 1 and words.index(named[0]) >= len(words) - 4:
            return named[0]
        if not named and "Z" in words:
            return "Z"
        said = re.search(r"(?:correct )?answer is (?:\*\*)?([A-D])(?:\*\*)?", answer, re.IGNORECASE)
        if said and said[1].upper() in options:
            return said[1].upper()
    if len(answer) > 2 * sum(map(len, options.values())):
        return None
    found = [letter for letter, text in options.items() if text.lower() in answer.lower()]
    return found[0] if len(found) == 1 else None


def report_of(rows: Sequence[Row], answers: Mapping[int, str]) -> Report:
    """CircularEval of the questions all of whose rows have an answer: percent by split and category."""
    chosen = {row.index: choose(answers[row.index], row.options) for row in rows if row.index in answers}
    scores: dict[str, bool] = {}
    hits: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for base, group in groups_of(rows).items():
        if all(row.index in chosen and row.values.get("answer") for row in group):
            hit = scores[str(base)] = all(chosen[row.index] == row.values["answer"] for row in group)
            values = min(group, key=lambda row: row.index).values
            names = dict.fromkeys(["overall", values.get("l2-category"), values.get("category")])
            for name in filter(None, names):
                hits[values.get("split") or "all"][name].append(hit)
    if not scores:
        return Report({}, ["no answers are given: the evaluation server scores submission.xlsx"])
    splits = {
        split: {name: round(100 * sum(of_name) / len(of_name), 2) for name, of_name in of_split.items()}
        for split, of_split in hits.items()
    }
    values = {
        "overall": round(100 * sum(scores.values()) / len(scores), 2),
        "questions": len(scores),
        "undecided": sum(letter is None for letter in chosen.values()),
    }
    lines = [
        "MMBench, CircularEval: {overall:.2f} % of {questions} questions, {undecided} answers undecided".format_map(
            values
        )
    ]
    for split, by_name in splits.items():
        cells = [[name, str(len(hits[split][name])), f"{value:.2f}"] for name, value in by_name.items()]
        lines += ["", *markdown_table([split, "questions", "%"], cells)]
    pictures = {str(base): key_of(group[0]) for base, group in groups_of(rows).items()}
    return Report(values | {"splits": splits}, lines, (), {"CircularEval": scores}, pictures=pictures)


# Commands


def load(args: argparse.Namespace) -> tuple[list[Row], dict[str, list[Ask]]]:
    """The rows of the first questions, and what to ask. Raises UserError."""
    if args.tsv is None:
        raise UserError("--tsv is missing: give MMBench's file for CircularEval")
    rows = [row for group in list(groups_of(read_rows(args.tsv)).values())[: args.limit] for row in group]
    asks = []
    for row in rows:
        prompt = prompt_of(args.wording, row.values["question"], row.values.get("hint", ""), row.options)
        picture = partial(open_picture, row.values["image"], row.where)
        asks.append(Ask(str(row.index), key_of(row), picture, prompt, choices_of(row, args) if args.likelihood else ()))
    return rows, {"mmbench": asks}


def choices_of(row: Row, args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(row.options.values() if args.wording == "paligemma" else row.options)


def finish(args: argparse.Namespace, rows: list[Row], answers: dict[str, list[str | None]], session) -> Report:
    """results.json, submission.xlsx and the accuracies."""
    said = {row.index: text for row, text in zip(rows, answers["mmbench"], strict=True) if text is not None}
    if args.likelihood:
        said = {r.index: list(r.options)[choices_of(r, args).index(said[r.index])] for r in rows if r.index in said}
    write_results(session.out / "results.json", said)
    names = [name for name in rows[0].values if name not in NOT_SUBMITTED]
    names.insert(6, "prediction")
    lines = [row.values | {"index": row.index, "prediction": said.get(row.index, "")} for row in rows]
    write_xlsx(session.out / "submission.xlsx", [names, *([line[name] for name in names] for line in lines)])
    return report_of(rows, said)._replace(files=["results.json", "submission.xlsx", "answers.jsonl"])


def score(args: argparse.Namespace) -> Report:
    """`python -m eval.mmbench score`: the accuracies of a results file."""
    rows = read_rows(args.tsv)
    return report_of(rows, read_results(args.results, [row.index for row in rows], args.tsv))


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--tsv", "MMBench's file for CircularEval, with the pictures in it", metavar="FILE")
    wordings = "prompt as in these models' evaluation; paligemma's asks for the option's text, not its letter"
    add_flag(parser, "--wording", wordings, "llava", choices=WORDINGS)
    add_flag(parser, "--likelihood", "the answer is the likeliest of the letters, or texts", False)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--tsv", "MMBench's file for CircularEval", required=True, metavar="FILE")
    add_flag(parser, "--results", 'results file, [{"question_id", "answer"}, …]', required=True)


LIMIT = "questions, the first N, all their rotations (default: all)", None
COMMAND = Command("mmbench", __doc__, add_flags, add_score_flags, load, finish, score, LIMIT)
main = main_of(COMMAND)

if __name__ == "__main__":
    run_command(main)
