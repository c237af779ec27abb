"""Multiple choice by likelihood, as lm-evaluation-harness measures it: MMLU, CMMLU, RACE, ARC, or your own questions.

    python -m eval.choices                          the newest run, or the embedded base, on the embedded scenes
    python -m eval.choices --task mmlu --data DIR --model A --model B --blind
    python -m eval.choices --task jsonl --data FILE --model SRC
    python -m eval.choices --results results.json

In: questions with choices (`eval/choices_files.py`), and models, or an earlier results.json. Out: results.json with the
log-probabilities, and accuracy by subject.

The likelihood of a choice is the sum of the log-probabilities of its tokens after the prompt, without an end token.
accuracy: the likeliest choice is right. normalised: the likeliest by character, likelihood / characters, is right; of
equal ones the first counts. A model of text reads the prompt, a space and the choice. Trailing spaces move to the
choice: its tokens are encode(prompt + choice) minus encode(prompt). A model of pictures reads its own turn: the prompt,
which ends in a newline, then the choice without a space. The choices of a question share its prompt.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from eval.bench import PROMPT_FLAG, Benchmark, limit_flag, run
from eval.choices_files import EMBEDDED, EXAMS, TASKS
from eval.command import whole
from eval.data import check, check_unique, read
from eval.question import Question
from eval.records import gray_picture
from eval.report import Row
from model.common import UserError, run_command, write_text


class Choices(Benchmark):
    name = "choices"
    flags = {
        "--task": dict(help="scenes and sentences are embedded", default="scenes", choices=TASKS),
        "--data": dict(help="folder of mmlu, cmmlu or race, file of arc or jsonl (default: none)", metavar="PATH"),
        "--images": dict(help="folder of the pictures of a jsonl file (default: its own)", metavar="DIR"),
        "--shots": dict(
            help="examples from the dev file before a question of mmlu or cmmlu (default: 5)",
            type=whole(0, 100),
            metavar="K",
        ),
        "--prompt": PROMPT_FLAG,
        "--limit": limit_flag("questions, the first N, of each subject of an exam (default: all, 600 embedded ones)"),
    }

    def questions(self, args):
        if (args.data is None) != (args.task in EMBEDDED):
            without = "takes no --data: leave it out, or name its task, such as --task jsonl"
            raise UserError(f"--task {args.task} {without if args.data else 'needs --data: its official files'}")
        if args.shots is not None and args.task not in EXAMS:
            raise UserError(f"--shots: only {' and '.join(EXAMS)} have a dev file of examples: leave it out")
        args = Namespace(**vars(args) | {"shots": 5 if args.shots is None else args.shots})
        questions = TASKS[args.task](args)
        check_unique((question.id for question in questions), args.data or args.task)
        return questions

    def blind(self, question):
        """A question about text alone gets a gray picture, too."""
        return replace(question, picture=(gray_picture,) * max(1, len(question.pictures)), key="gray").blind()

    def score(self, question, answer):
        return hits(question, answer)

    def summary(self, rows):
        lines = super().summary(rows)
        subjects = [values for line, values in lines.items() if line != "overall"]
        if len(subjects) > 1:
            means = {name: sum(of[name] for of in subjects) / len(subjects) for name in subjects[0]}
            lines["mean over subjects"] = means
        return lines

    def write(self, rows, out, subject):
        results = []
        for question, likelihoods, _ in rows:
            if likelihoods is not None:
                name = question.key if question.picture else ""
                written = {"id": question.id, "subject": question.kind, "picture": name, "choices": question.choices}
                results.append(written | {"answer": question.truth, "log_likelihoods": likelihoods})
        write_text(out / "results.json", json.dumps(results, ensure_ascii=False, indent=0) + "\n")

    def read(self, file, args):
        def row(record: dict) -> Row:
            choices, likelihoods, key = record["choices"], record["log_likelihoods"], record["picture"] or record["id"]
            question = Question(
                record["id"], key, (), "", tuple(choices), truth=record["answer"], kind=record["subject"]
            )
            check(
                len(choices) == len(likelihoods) > record["answer"] >= 0, "choices and log_likelihoods differ in number"
            )
            return Row(question, likelihoods, hits(question, likelihoods))

        return read(file, row)


def hits(question: Question, likelihoods: Sequence[float]) -> Mapping[str, float]:
    """Whether a question is answered rightly, by measure; likelihoods: the log-probability of each choice."""
    by_character = [total / len(choice) for total, choice in zip(likelihoods, question.choices, strict=True)]
    measures = {"accuracy": likelihoods, "normalised": by_character}
    return {name: float(values.index(max(values)) == question.truth) for name, values in measures.items()}


main = partial(run, Choices(text="Question: {question}\nAnswer:"))

if __name__ == "__main__":
    run_command(main)
