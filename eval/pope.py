"""POPE: does a model say that an object is in the picture when it is not?

    python -m eval.pope                         the last run, or the embedded base, on the embedded scenes
    python -m eval.pope --questions coco_pope_random.json --images DIR --model SRC --adapter RUN
    python -m eval.pope score --questions Q --answers A

In: POPE questions (`eval/datasets.py`), and a model, or its free-text answers. Out: accuracy, precision, recall, F1 and
the share of yes. Next: `eval/figures.py` draws what the evaluations found.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", EMNLP 2023.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eval import scenes
from eval.datasets import PopeQuestion, check_ids, check_images, check_unique, field, find_image, read_jsonl, read_pope
from model.common import UserError, run_command, write_text

PROMPT = "answer en {question}"  # as PaliGemma's authors ask


def parse_answer(text: str) -> str:
    """ "no" if the first sentence has the word No, not or no, else "yes", as the published script decides."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def score_answers(labels: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """{"accuracy", "precision", "recall", "f1", "yes_ratio"} as fractions; positive is yes, and 0/0 counts as 0.

    `labels` and `answers` are "yes" or "no", in the same order.
    """
    pairs = list(zip(labels, answers, strict=True))
    true_yes = pairs.count(("yes", "yes"))
    said_yes, are_yes = answers.count("yes"), labels.count("yes")
    return {
        "accuracy": _ratio(true_yes + pairs.count(("no", "no")), len(pairs)),
        "precision": _ratio(true_yes, said_yes),
        "recall": _ratio(true_yes, are_yes),
        "f1": _ratio(2 * true_yes, said_yes + are_yes),  # the harmonic mean of the two above
        "yes_ratio": _ratio(said_yes, len(pairs)),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def write_answers(path: str | Path, answers: dict[int | str, str]) -> None:
    """Write an answers file: JSON lines of {"question_id", "answer"}."""
    lines = (json.dumps({"question_id": id_, "answer": text}, ensure_ascii=False) for id_, text in answers.items())
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_answers(path: str | Path, questions: Sequence[PopeQuestion], against: str | Path) -> list[str]:
    """Free-text answers in the order of `questions`, from JSON lines of {"question_id", "answer"} (or "text").

    The published script's own files have no ids, only the order: then there must be one answer a question, and what
    they repeat of the "question" must agree. Raises UserError that names missing, extra or duplicate ids.
    """
    records = read_jsonl(path)
    texts = [field(r, "text" if "text" in r and "answer" not in r else "answer", str, where) for where, r in records]
    if any("question_id" in record for _, record in records):
        ids = [field(record, "question_id", (int, str), where) for where, record in records]
        check_unique(ids, path)
        check_ids(ids, [question.question_id for question in questions], path, against)
        by_id = dict(zip(ids, texts, strict=True))
        return [by_id[question.question_id] for question in questions]
    if len(records) != len(questions):
        raise UserError(
            f"{path}: {len(records)} answers without question_id to the {len(questions)} questions of {against}: one "
            "answer a question, in the same order, or give the ids"
        )
    for (where, record), question in zip(records, questions, strict=True):
        asked = record.get("question", question.text)
        if asked.strip().lower() != question.text.strip().lower():
            raise UserError(f"{where}: answers {asked!r} where {against} asks {question.text!r}: keep the order")
    return texts


def embedded(strategy: str, limit: int = 600) -> tuple[list[PopeQuestion], dict[str, Callable]]:
    """The first `limit` questions of a strategy on the embedded test scenes, and the pictures by name."""
    samples = scenes.pope(strategy, images=-(-limit // 6))[:limit]
    questions = [PopeQuestion(s.question_id, f"pope/{s.image_id}", s.question, s.suffix) for s in samples]
    return questions, {f"pope/{s.image_id}": s.scene.render for s in samples}


def score(args: argparse.Namespace) -> None:
    """`python -m eval.pope score`: the measures of an answers file."""
    questions = read_pope(args.questions)
    answers = [parse_answer(text) for text in read_answers(args.answers, questions, args.questions)]
    summary = score_answers([question.label for question in questions], answers)
    if args.json:
        print(json.dumps(summary))
        return
    print(f"POPE (%), {len(questions)} questions")
    for name, value in summary.items():
        print(f"{name:10}{100 * value:6.2f}")


def run(args: argparse.Namespace) -> None:
    """`python -m eval.pope`: answers, an answers file for each set of questions, and their measures."""
    from eval.run import ask_all, make_asks, open_session  # only here: scoring needs no torch

    if (args.questions is None) != (args.images is None):
        raise UserError("--questions and --images go together: give both, or neither for the embedded scenes")
    if args.questions is None:
        sets = {
            strategy: embedded(strategy, 600 if args.limit is None else args.limit) for strategy in scenes.STRATEGIES
        }
    else:
        questions = read_pope(args.questions)[: args.limit]
        check_images((q.image for q in questions), args.images, args.questions)
        sets = {Path(args.questions).stem: (questions, {q.image: find_image(args.images, q.image) for q in questions})}
    session = open_session(args, "pope")
    results = {}
    for name, (questions, pictures) in sets.items():
        asks = make_asks(((q.question_id, q.image, q.text) for q in questions), pictures, args.prompt)
        options = session.options | {"progress": f"{name}, {session.title}"}
        said = ask_all(session.model, session.processor, asks, **options)
        answered = [(q, text) for q, text in zip(questions, said, strict=True) if text is not None]
        write_answers(session.out / f"answers-{name}.jsonl", {q.question_id: text for q, text in answered})
        results[name] = {"questions": len(answered)} | score_answers(
            [q.label for q, _ in answered], [parse_answer(text) for _, text in answered]
        )
    session.report_left_out()
    if args.json:
        print(json.dumps(results | ({"left_out": session.left_out} if session.left_out else {})))
        return
    print_table(f"POPE (%), {session.title}", results)
    print(f"in {session.out}: {', '.join(f'answers-{name}.jsonl' for name in results)}")


def print_table(title: str, results: Mapping[str, dict]) -> None:
    """A row for each set of questions."""
    width = max(map(len, results))
    names = list(next(iter(results.values())))
    print(f"{title}\n{'':{width}}" + "".join(f"{name:>11}" for name in names))
    for name, result in results.items():
        count, *measures = result.values()
        print(f"{name:{width}}{count:11}" + "".join(f"{100 * value:11.2f}" for value in measures))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.pope", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--questions", metavar="FILE", help="POPE's JSONL (default: all three sets of the embedded scenes)"
    )
    parser.add_argument("--images", metavar="DIR", help="folder of the pictures of --questions")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEMPLATE", help="(default: %(default)r)")
    commands = parser.add_subparsers(dest="command")
    scorer = commands.add_parser("score", help="score an answers file", description="Score an answers file.")
    scorer.add_argument("--questions", required=True, help="POPE's JSONL of questions with labels")
    scorer.add_argument("--answers", required=True, help='JSON lines of {"question_id", "answer"}')
    scorer.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON only (default: a table)"
    )
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["score"]:
        from eval.run import add_answer_flags

        add_answer_flags(parser, "questions of each set, the first N (default: all of a file, 600 of the embedded)")
    args = parser.parse_args(argv)
    score(args) if args.command == "score" else run(args)


if __name__ == "__main__":
    run_command(main)
