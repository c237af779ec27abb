"""Multiple choice by likelihood, as lm-evaluation-harness measures it: MMLU, CMMLU, RACE, ARC, or
your own questions.

    python -m eval.systems.choices --task mmlu --data DIR --model A --model B --blind
    python -m eval.systems.choices --results results.json

In: official files, worded as in the harness, or your own; and models, or an earlier results.json.
Out: results.json with log-probabilities, and accuracy by subject.

The likelihood of a choice is the sum of the log-probabilities of its tokens after the prompt,
without an end token. accuracy: the likeliest choice is right. normalised: the likeliest by
character, likelihood / characters, is right; of equal ones the first counts. A model of text reads
the prompt, a space and the choice. Trailing spaces move to the choice: its tokens are encode(prompt
+ choice) minus encode(prompt). A model of pictures reads its own turn: the prompt, which ends in a
newline, then the choice without a space.

Sources: EleutherAI/lm-evaluation-harness, lm_eval/tasks; Hendrycks et al. 2021 (MMLU), Li et al.
2023 (CMMLU), Lai et al. 2017 (RACE), Clark et al. 2018 (ARC).
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from string import ascii_uppercase

from eval import vqa
from eval.bench import PROMPT_FLAG, Benchmark, Row, mean_over, read_rows, run, write_json
from eval.command import whole
from eval.data.files import check, check_unique, find_picture, read, records_in, rows_in, text_at
from eval.data.pictures import Dice
from eval.data.record import fill_prompt, gray_picture
from eval.data.records import picture_names
from eval.question import Question
from model.common import UserError, quoted, read_json, run_command, shown

LETTERS = tuple("ABCD")
TEXT_PROMPT = "Question: {question}\nAnswer:"
BY_DEFAULT = 600  # questions, by default


def question(
    id_,
    subject: str,
    prompt: str,
    choices: Sequence[str],
    right: int,
    pictures=(),
    picture="",
) -> Question:
    """right: number of the right choice. picture: names the pictures; questions about text alone
    are independent. Raises TypeError and ValueError."""
    is_listed = isinstance(choices, list | tuple) and type(right) is int
    is_right = is_listed and 0 <= right < len(choices) > 1
    check(is_right, f"answer {quoted(right)} is none of two choices")
    choices = tuple(choices)
    is_whole = all(text_at({"choice": choice}, "choice").strip() for choice in choices)
    check(is_whole, f"choices {quoted(choices)}: one is empty")
    return Question(
        str(id_),
        picture or "text",
        pictures,
        prompt,
        choices,
        wants_log_probs=True,
        truth=right,
        kind=subject,
        group=picture or str(id_),
    )


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern. Raises UserError if there are none."""
    if paths := sorted(folder.glob(pattern)):
        return paths
    remedy = "give the folder of the official files (--data DIR)"
    raise UserError(f"{shown(folder)}: holds no {pattern}: {remedy}")


def exam(
    args: Namespace,
    head: str,
    ending: str,
    names: Mapping[str, str],
    columns: int = 6,
) -> list[Question]:
    """MMLU or CMMLU: test/SUBJECT.csv, and dev/, from which examples come. A row is a question,
    four options and the right letter; of 7 `columns` the first is a number, and the first line has
    their names. names: of the subjects."""

    def worded(row: list[str]) -> tuple[str, str]:
        is_right = len(row) == columns and row[-1] in LETTERS
        check(is_right, "expected a question, four options and the right letter")
        lettered = zip(LETTERS, row[-5:-1], strict=True)
        options = "\n".join(f"{letter}. {option}" for letter, option in lettered)
        return f"{row[-6].strip()}\n{options}\n{ending}", row[-1]

    def rows_of(path: Path) -> list[tuple[str, str]]:
        rows = rows_in(path)
        if columns == 7 and rows and rows.pop(0)[1][-1] in LETTERS:
            problem = "is a question, not the names of the columns"
            raise UserError(f"{shown(path)}:1: {problem}: take the official file")
        return read(path, worded, rows)

    questions = []
    for path in files_in(Path(args.data, "test"), "*.csv"):
        subject = path.stem.removesuffix("_test")
        dev = Path(args.data, "dev", path.name.replace("_test.", "_dev."))
        shots = rows_of(dev)[: args.shots] if args.shots else []
        if len(shots) < args.shots:
            remedy = f"lower --shots {args.shots}"
            raise UserError(f"{shown(dev)}: holds {len(shots)} questions: {remedy}")
        prompt = head.format(names.get(subject, subject.replace("_", " ")))
        prompt += "".join(f"{asked} {right}\n\n" for asked, right in shots)
        for number, (asked, letter) in enumerate(rows_of(path)[: args.limit]):
            right = LETTERS.index(letter)
            name = f"{subject}/{number}"
            questions.append(question(name, subject, prompt + asked, LETTERS, right))
    return questions


MMLU_HEAD = "The following are multiple choice questions (with answers) about {}.\n\n"
CMMLU_NAMES = read_json(Path(__file__).with_name("cmmlu.json"))
CMMLU_HEAD = "以下是关于{}的单项选择题，请直接给出正确答案的选项。\n\n"

# Other files


def race(args: Namespace) -> list[Question]:
    """The last question on each passage of `test/high`, or of the folder itself; the others stand
    before it. Of a question that ends in a blank, the harness shows the blank and the answer alone,
    and so does this."""

    def of_passage(name: str, record: dict) -> Question:
        prompt = f"Article: {text_at(record, 'article')}\n\n"
        columns = zip(record["questions"], record["options"], record["answers"], strict=True)
        made = []
        for asked, options, letter in columns:
            check(len(options) == len(LETTERS), f"options {quoted(options)}: expected four")
            right = LETTERS.index(letter)
            made.append(question(name, "race", prompt + asked, options, right))
            is_blank = asked.endswith("  _  .")
            prompt += asked[-5:] if is_blank else f"Question: {asked}\nAnswer: "
            prompt += f"{options[right]}\n"
        return made[-1]

    folder = Path(args.data, "test", "high")
    if not folder.is_dir():
        folder = Path(args.data)
    questions = []
    for path in files_in(folder, "*.txt")[: args.limit]:
        questions += read(path, partial(of_passage, path.stem), [("", read_json(path))])
    return questions


def arc(args: Namespace) -> list[Question]:
    """The questions of ARC's JSON lines; options are lettered or numbered."""

    def of_record(record: dict) -> Question:
        asked = record["question"]
        labels = [option["label"] for option in asked["choices"]]
        options = [option["text"] for option in asked["choices"]]
        check(len({*labels}) == len(labels), f"labels {quoted(labels)}: one is there twice")
        prompt = f"Question: {text_at(asked, 'stem')}\nAnswer:"
        return question(
            record["id"],
            "arc",
            prompt,
            options,
            labels.index(record["answerKey"]),
        )

    return read(args.data, of_record, records_in(args.data)[: args.limit])


def own(args: Namespace) -> list[Question]:
    """{"question", "choices", "answer"}, JSON lines: the answer is a choice's number, from 0, its
    text or its letter. "subject" and "image", the name of a picture or a list of them, may be
    given."""
    folder, numbers = Path(args.images or Path(args.data).parent), count(1)

    def of_record(record: dict) -> Question:
        choices = record["choices"]
        right = record["answer"]
        names = picture_names(record)
        if isinstance(right, str):
            named = choices if choices.count(right) == 1 else list(ascii_uppercase)
            right = named.index(right)
        prompt = fill_prompt(args.template, text_at(record, "question"))
        pictures = tuple(find_picture(folder, name) for name in names)
        subject = str(record.get("subject", "own"))
        made = question(
            next(numbers),
            subject,
            prompt,
            choices,
            right,
            pictures,
            "\n".join(names),
        )
        # the first of equally likely ones counts, which may be the other
        is_single = choices.count(choices[right]) == 1
        check(is_single, f"choices has {quoted(choices[right])}, the right one, twice")
        return made

    return read(args.data, of_record, records_in(args.data)[: args.limit])


def embedded_scenes(args: Namespace) -> list[Question]:
    """Questions on the embedded pictures, as in `eval.vqa`, with up to three answers to others of
    their kind."""
    answers = defaultdict(set)
    for q in vqa.embedded(BY_DEFAULT):
        answers[q.truth.question_type].add(q.truth.answer)
    asked = vqa.embedded(args.limit or BY_DEFAULT, "test", args.template)
    questions = []
    for number, q in enumerate(asked):
        right = q.truth.answer
        others = sorted(answers[q.truth.question_type] - {right})
        dice = Dice(f"choices/scene/{number}")
        choices = [right, *dice.draw(others, min(3, len(others)))]
        choices = dice.draw(choices, len(choices))
        about = q.truth.answer_type, q.prefix, choices, choices.index(right)
        questions.append(question(f"scene/{number}", *about, q.picture, q.key))
    return questions


TASKS = {
    "scenes": embedded_scenes,
    "race": race,
    "arc": arc,
    "jsonl": own,
    "mmlu": partial(exam, head=MMLU_HEAD, ending="Answer:", names={}),
    "cmmlu": partial(exam, head=CMMLU_HEAD, ending="答案：", names=CMMLU_NAMES, columns=7),
}


class Choices(Benchmark):
    name = "choices"
    flags = {
        "--task": dict(help="scenes are embedded", default="scenes", choices=TASKS),
        "--data": dict(
            help="folder of mmlu, cmmlu or race, file of arc or jsonl (default: none)",
            metavar="PATH",
        ),
        "--images": dict(
            help="folder of the pictures of a jsonl file (default: its own)", metavar="DIR"
        ),
        "--shots": dict(
            help="examples before a question of an exam", default=5, type=whole(0, 100), metavar="K"
        ),
        "--prompt": dict(
            help=f"{PROMPT_FLAG['help'][:-1]}, of scenes and jsonl; of language models {TEXT_PROMPT!r})"
        ),
    }
    limit = (
        f"questions, the first N, of each subject of an exam (default: all, {BY_DEFAULT} embedded)"
    )

    def questions(self, args):
        if (args.data is None) != (args.task == "scenes"):
            raise UserError(
                f"--task {args.task}: scenes take no --data, all other tasks need it: their "
                "official files"
            )
        questions = TASKS[args.task](args)
        check_unique((question.id for question in questions), args.data or args.task)
        return questions

    def blind(self, question):
        """A question about text alone gets a gray picture, too."""
        return replace(question, picture=question.pictures or gray_picture).blind()

    def score(self, question, answer):
        pairs = zip(answer, question.choices, strict=True)
        by_character = [total / len(choice) for total, choice in pairs]
        scores = {}
        for name, values in (("accuracy", answer), ("normalised", by_character)):
            scores[name] = float(values.index(max(values)) == question.truth)
        return scores

    def summary(self, rows):
        lines = super().summary(rows)
        subjects = list(lines.values())[1:]
        if len(subjects) > 1:
            lines["mean over subjects"] = mean_over(subjects)
        return lines

    def write(self, rows, out, subject):
        results = []
        for q, likelihoods, *_ in rows:
            written = {
                "id": q.id,
                "subject": q.kind,
                "picture": q.key if q.picture else "",
                "choices": q.choices,
                "answer": q.truth,
                "log_likelihoods": likelihoods,
            }
            results.append(written)
        write_json(out / "results.json", results, indent=0)

    def read(self, file, args):
        def row(record: dict) -> Row:
            asked = question(
                record["id"],
                text_at(record, "subject"),
                "",
                record["choices"],
                record["answer"],
                picture=text_at(record, "picture"),
            )
            likely = record["log_likelihoods"]
            check(abs(sum(likely)) < 1e30, "a log-likelihood is no finite number")
            return Row(asked, likely, self.score(asked, likely))

        return read_rows(file, row)


main = partial(run, Choices(text=TEXT_PROMPT))

if __name__ == "__main__":
    run_command(main)
