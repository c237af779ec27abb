"""MMBench: multiple choice about pictures, right only if the answer holds when the options change places.

    python -m eval.mmbench --tsv mmbench_dev_en.tsv --model SRC --adapter RUN
    python -m eval.mmbench --tsv mmbench_dev_en.tsv --results results.json

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

import base64
import binascii
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from eval.bench import Benchmark, Row, limit_flag, means, run
from eval.data import check_unique, read_table, some
from eval.question import Question
from eval.spreadsheet import write_xlsx
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
WORDINGS = ("llava", "paligemma", "vlmevalkit")
# What pandas, with which the official scripts read, takes for no value. "None", which pandas 2 adds by accident
# (pandas-dev/pandas issue 52493), and "none" are the texts of options.
ABSENT = set(
    "#N/A #NA -1.#IND -1.#QNAN -NaN -nan 1.#IND 1.#QNAN <NA> N/A NA NULL NaN n/a nan null".split() + ["", "#N/A N/A"]
)


class Line(NamedTuple):
    """One row of the file: its values by column, "" where absent, and its options by letter."""

    where: str
    index: int
    values: dict[str, str]
    options: dict[str, str]


class MMBench(Benchmark):
    name = "mmbench"
    flags = {
        "--tsv": dict(help="MMBench's file for CircularEval, with the pictures in it", metavar="FILE"),
        "--wording": dict(help="prompt as in these models' evaluation", default="llava", choices=WORDINGS),
        "--likelihood": dict(help="the answer is the likeliest of the letters, or texts", default=False),
        "--limit": limit_flag("questions, the first N, all their rotations (default: all)"),
    }

    def questions(self, args):
        if args.tsv is None:
            raise UserError("--tsv is missing: give MMBench's file for CircularEval")
        questions = []
        for lines in list(groups_of(read_lines(args.tsv)).values())[: args.limit]:
            for line in lines:
                choices = line.options.values() if args.wording == "paligemma" else line.options
                questions.append(
                    Question(
                        line.index,
                        hashlib.sha256(line.values["image"].encode()).hexdigest()[:16],
                        partial(open_picture, line.values["image"], line.where),
                        prompt_of(args.wording, line.values["question"], line.values.get("hint", ""), line.options),
                        tuple(choices) if args.likelihood else (),
                        truth=line,
                        group=hashlib.sha256(lines[0].values["image"].encode()).hexdigest()[:16],
                    )
                )
        return questions

    def rows(self, questions, answers):
        """A row for each rotation; the first of a question has the score, if all rotations have an answer."""
        said = {}
        for question, answer in zip(questions, answers, strict=True):
            if answer in question.choices:
                answer = list(question.truth.options)[question.choices.index(answer)]
            said[question.id] = answer
        scores = {}
        for lines in groups_of(question.truth for question in questions).values():
            if all(line.values.get("answer") and said[line.index] is not None for line in lines):
                hits = [choose(said[line.index], line.options) == line.values["answer"] for line in lines]
                scores[lines[0].index] = {"CircularEval": float(all(hits))}
        return [Row(question, said[question.id], scores.get(question.id, {})) for question in questions]

    def summary(self, rows):
        lines = defaultdict(list, {"overall": []})
        for row in rows:
            if row.scores:
                values = row.question.truth.values
                lines["overall"].append(row)
                split = values.get("split") or "all"
                for name in dict.fromkeys(["", values.get("l2-category"), values.get("category")]):
                    if name is not None:
                        lines[f"{split} {name}".rstrip()].append(row)
        summary = {name: {k: round(v, 2) for k, v in means(of).items()} for name, of in lines.items() if of}
        letters = [choose(row.answer, row.question.truth.options) for row in rows if row.answer is not None]
        if summary:  # in percent of the rotations
            summary["overall"]["undecided"] = round(100 * letters.count(None) / len(letters), 2)
        return summary

    def write(self, rows, out, subject):
        super().write(rows, out, subject)
        names = [name for name in rows[0].question.truth.values if name not in NOT_SUBMITTED]
        names.insert(6, "prediction")
        lines = [{**r.question.truth.values, "index": r.question.id, "prediction": r.answer or ""} for r in rows]
        write_xlsx(out / "submission.xlsx", [names, *([line[name] for name in names] for line in lines)])


# The file


def read_lines(path: str) -> list[Line]:
    """The rows of MMBench's TSV. Raises UserError, also for a question that lacks one of its rotations."""
    (_, names), *table = read_table(path, "\t") or [("", [])]
    missing = [name for name in ("index", "question", "A", "B", "image") if name not in names]
    if missing or not table:
        raise UserError(f"{shown(path)}: has no {some(missing) or 'rows'}: give MMBench's TSV")
    lines = []
    for where, row in table:
        if len(row) != len(names):
            raise UserError(f"{where}: {len(row)} values for {len(names)} columns: download the file again")
        values = {name: "" if value.strip() in ABSENT else value for name, value in zip(names, row, strict=True)}
        options = {letter: values[letter] for letter in "ABCD" if values.get(letter)}
        if not re.fullmatch("[0-9]{1,12}", values["index"]) or len(options) < 2 or not values["image"]:
            raise UserError(f"{where}: expected an index, two options and an image: correct the file")
        if values.get("answer") and values["answer"] not in options:
            raise UserError(f"{where}: answer is {quoted(values['answer'])}, not one of {', '.join(options)}")
        lines.append(Line(where, int(values["index"]), values, options))
    check_unique((line.index for line in lines), path)
    images = {str(line.index): line.values["image"] for line in lines}
    for line in lines:
        if len(line.values["image"]) <= 64:  # the index of a row with the same picture
            line.values["image"] = images.get(line.values["image"], line.values["image"])
    for base, group in groups_of(lines).items():
        turns = sorted(line.index // BASE for line in group)
        if turns != list(range(len(group[0].options))):
            raise UserError(
                f"{group[0].where}: question {base} has rotations {turns}, expected one for each of its "
                f"{len(group[0].options)} options, from 0: give the file for CircularEval"
            )
    return lines


def groups_of(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """The rows of each question by its base index, by rotation."""
    groups = defaultdict(list)
    for line in lines:
        groups[line.index % BASE].append(line)
    return {base: sorted(group, key=lambda line: line.index) for base, group in groups.items()}


def open_picture(text: str, where: str) -> io.BytesIO:
    """The file that a value in base64 holds. Raises UserError."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise UserError(f"{where}: image is no base64: download the file again") from None
    file.name = where
    return file


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


main = partial(run, MMBench())

if __name__ == "__main__":
    run_command(main)
