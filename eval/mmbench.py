"""MMBench: multiple choice about pictures, right only if the answer holds when the options change
places.

    python -m eval.mmbench --tsv mmbench_dev_en.tsv --model SRC --adapter RUN
    python -m eval.mmbench --tsv mmbench_dev_en.tsv --results results.json

In: the official TSV, and a model, or its answers. Out: CircularEval's accuracy by split and
category, results.json, and submission.tsv for the evaluation server, which takes it as .xlsx from
any spreadsheet. Rows of equal index mod 1,000,000 are one question with its options rotated; it is
right if all are. An answer is an option's letter or its text, by how the model is asked; undecided
ones are wrong. In the wording `llava`, or a file's of unknown wording, it is read as VLMEvalKit
does where no other model judges it:

1. One of REFUSALS in it: no option. FAILED in it: go on at 4.
2. The marks .()[],:;!*#{} become blanks. Exactly one option's letter among the words, a capital,
   first seen in the last four: that option. No letter but a word Z: no option.
3. Else the first "answer is X", ignoring case, if X is an option's letter: that option. Blanks,
   then asterisks may stand before X.
4. Else, ignoring case: the one option whose text is in the answer, unless the answer has more than
   twice as many characters as all options together.

In the wording `paligemma` options have no letters. There the answer is the one option whose text is
in it as whole words, ignoring case and blanks: "upper left" is not "left", nor is "woman" "man".

Sources: Liu et al., "MMBench: Is Your Multi-modal Model an All-around Player?", ECCV 2024;
open-compass/VLMEvalKit.
"""

import base64
import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from eval.bench import Benchmark, Row, certainties_of, certainty_fields, means, run, write_json
from eval.data.files import check, check_unique, read, rows_in
from eval.question import Question
from model.common import UserError, quoted, run_command, short_hash, shown, write_text

BASE = 1_000_000
FAILED = "Failed to obtain answer via API"
REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
NOT_SUBMITTED = ("hint", "category", "source", "image", "comment", "l2-category")
# What pandas, with which the official scripts read, takes for no value. "None", which pandas 2 adds
# by accident (pandas-dev/pandas issue 52493), and "none" are the texts of options.
NO_VALUE = (
    "#N/A #NA -1.#IND -1.#QNAN -NaN -nan 1.#IND 1.#QNAN <NA> N/A NA NULL NaN n/a nan null".split()
)
NO_VALUE += ["", "#N/A N/A"]
# One of the texts {}, as whole words: none of the "shirt" in "t-shirt", of the 5 in "-5" or "1.5".
# Chinese has no blanks between words.
AS_WORDS = "(?<![^\\W\u4e00-\u9fff])(?<![-−])(?<!\\d[.,])({})(?![^\\W\u4e00-\u9fff]|-\\w|[.,]\\d)"


class MMBench(Benchmark):
    name = "mmbench"
    flags = {
        "--tsv": dict(
            help="MMBench's file for CircularEval, with the pictures in it", metavar="FILE"
        ),
        "--wording": dict(
            help="as these models are asked (default: as the model's kind; of --results llava)",
            choices=("llava", "paligemma"),
        ),
    }
    limit = "questions, the first N, all their rotations (default: all)"

    def questions(self, args):
        if args.tsv is None:
            raise UserError("--tsv is missing: give MMBench's file for CircularEval")
        questions = []
        for lines in read_lines(args.tsv)[: args.limit]:
            keys = [short_hash(line["image"]) for line in lines]
            for line, key in zip(lines, keys, strict=True):
                questions.append(
                    Question(
                        int(line["index"]),
                        key,
                        partial(open_picture, line),
                        prompt_of(args.wording, line),
                        truth=line,
                        kind=args.wording,
                        group=keys[0],
                    )
                )
        return questions

    def rows(self, questions, answers, sure: Mapping = {}):
        """A row for each rotation; the first of a question has the score, if all rotations have an
        answer."""
        rows = []
        groups = defaultdict(list)
        for question, answer in zip(questions, answers, strict=True):
            rows.append(Row(question, answer, {}, certainties_of(sure, question)))
            groups[question.id % BASE].append(rows[-1])
        for group in groups.values():
            if all(row.answer is not None and row.question.truth.get("answer") for row in group):
                hits = [chosen(row) == row.question.truth["answer"] for row in group]
                group[0].scores["CircularEval"] = float(all(hits))
        return rows

    def summary(self, rows):
        lines = defaultdict(list)
        for row in rows:
            if not row.scores:
                continue
            line = row.question.truth
            split = line.get("split") or "all"
            names = ["overall", split.rstrip()]
            for column in ("l2-category", "category"):
                names.append(f"{split} {line.get(column, '')}".rstrip())
            for name in dict.fromkeys(names):
                lines[name].append(row)
        summary = {}
        for name, of_line in lines.items():
            summary[name] = {"CircularEval": round(means(of_line)["CircularEval"], 2)}
        letters = [chosen(row) for row in rows if row.answer is not None]
        if summary:  # in percent of the rotations
            summary["overall"]["undecided"] = round(100 * letters.count(None) / len(letters), 2)
        return summary

    def write(self, rows, out, subject):
        results = []
        for row in rows:
            q = row.question
            if row.answer is not None:  # with the prompt, since an answer is read by its wording
                result = {"question_id": q.id, "question": q.prefix, "answer": row.answer}
                results.append(result | certainty_fields(row))
        write_json(out / "results.json", results, indent=0)
        names = [name for name in rows[0].question.truth if name not in NOT_SUBMITTED]
        names.insert(6, "prediction")
        file = io.StringIO(newline="")
        table = csv.DictWriter(file, names, extrasaction="ignore", delimiter="\t")
        table.writeheader()
        for question, answer, *_ in rows:
            table.writerow(question.truth | {"prediction": answer or ""})
        write_text(out / "submission.tsv", file.getvalue())


def read_lines(path: str) -> list[list[dict[str, str]]]:
    """The rows of MMBench's TSV by question, its rotations in order: values by column, "" where
    absent. Raises UserError, also for a question that lacks a rotation."""
    (_, names), *table = rows_in(path, "\t") or [("", [])]
    check_unique(names, path)

    def values_of(row: list[str]) -> dict[str, str]:
        check(len(row) == len(names), f"{len(row)} values for {len(names)} columns")
        cells = ["" if cell.strip() in NO_VALUE else cell for cell in row]
        values = dict(zip(names, cells, strict=True))
        options = options_in(values)
        is_numbered = values["index"].isdecimal()
        is_whole = is_numbered and values["question"] and values["image"] and len(options) > 1
        check(is_whole, "expected an index, a question, two options and an image")
        answer = values.get("answer")
        problem = f"answer is {quoted(answer)}, not one of {', '.join(options)}"
        check(not answer or answer in options, problem)
        return values

    # 1. the rows, each with its picture
    lines = read(path, values_of, table)
    check_unique((line["index"] for line in lines), path)
    images = {line["index"]: line["image"] for line in lines}
    groups = defaultdict(list)
    for line in lines:
        # the index of a row with the same picture may stand for it
        line["image"] = images.get(line["image"], line["image"])
        groups[int(line["index"]) % BASE].append(line)
    # 2. their rotations
    for base, group in groups.items():
        group.sort(key=lambda line: int(line["index"]))
        count = len(options_in(group[0]))
        if [int(line["index"]) // BASE for line in group] != list(range(count)):
            raise UserError(
                f"{shown(path)}: question {base} lacks some of its {count} rotations: give the file "
                "for CircularEval"
            )
    return list(groups.values())


def options_in(line: Mapping[str, str]) -> dict[str, str]:
    """The options of a row by letter."""
    return {letter: line[letter] for letter in "ABCD" if line.get(letter)}


def open_picture(line: Mapping[str, str]) -> io.BytesIO:
    """The picture of a row, a file in base64. Raises UserError."""
    try:
        return io.BytesIO(base64.b64decode(line["image"], validate=True))
    except ValueError:
        raise UserError(
            f"index {line['index']}: image is no base64: download the file again"
        ) from None


def prompt_of(wording: str, line: Mapping[str, str]) -> str:
    """LLaVA's prompt, or as in big_vision's transfers/aokvqa_mc.py, where the answer is the
    option's text."""
    options = options_in(line)
    parts = [line["question"]]
    if line.get("hint"):
        parts.insert(0, line["hint"])
    if wording == "paligemma":
        listed = " \t ".join(options.values())
        return f"answer en  {' '.join(parts)} choose from: {listed}"
    parts += [f"{letter}. {option}" for letter, option in options.items()]
    request = "Answer with the option's letter from the given choices directly."
    if re.search("[\u4e00-\u9fff]", line["question"]):
        request = "请直接回答选项字母。"
    return "\n".join([*parts, request])


def chosen(row: Row) -> str | None:
    """The letter that a row's answer names."""
    return letter_of(row.answer, options_in(row.question.truth), row.question.kind)


def letter_of(
    answer: str,
    options: Mapping[str, str],
    wording="llava",
) -> str | None:
    """The letter of the option that an answer names, by the rules of a wording above; Z for none of
    them, None if undecided."""
    if wording == "paligemma":
        said, *texts = (" ".join(text.lower().split()) for text in (answer, *options.values()))
        # the longer one first, so that the shorter ones in it are not found
        patterns = map(re.escape, sorted(texts, key=len, reverse=True))
        named = re.findall(AS_WORDS.format("|".join(patterns)), said)
        found = [letter for letter, text in zip(options, texts, strict=True) if text in named]
        return found[0] if len(found) == 1 else None
    if FAILED not in answer:
        if any(refusal in answer for refusal in REFUSALS):
            return "Z"
        words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
        named = [letter for letter in options if letter in words]
        if len(named) == 1 and words.index(named[0]) >= len(words) - 4:
            return named[0]
        if not named and "Z" in words:
            return "Z"
        said = re.search(r"(?i)answer\s+is\s+\**([A-D])", answer)
        if said and said[1].upper() in options:
            return said[1].upper()
    if len(answer) > 2 * sum(map(len, options.values())):
        return None
    found = [letter for letter, text in options.items() if text.lower() in answer.lower()]
    return found[0] if len(found) == 1 else None


main = partial(run, MMBench())

if __name__ == "__main__":
    run_command(main)
