"""POPE: does a model say that an object is in the picture when it is not?

    python -m eval.pope                         the last run, or the embedded base, on the embedded scenes
    python -m eval.pope --questions coco_pope_{random,popular,adversarial}.json --images DIR --model SRC --adapter RUN
    python -m eval.pope score --questions Q --answers A

In: POPE questions (`eval/datasets.py`), and a model, or its free-text answers. Out: accuracy, precision, recall, F1 and
the share of yes, for each file and their mean; with --probability also the accuracy where yes is the answer if
P(yes) / (P(yes) + P(no)) at the start of the answer is at least ½.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", EMNLP 2023.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eval import scenes
from eval.command import Ask, Command, Report, add_flag, add_prompt_flag, make_asks
from eval.datasets import TEXT, PopeQuestion, check_ids, check_unique, find_images, lines_of, read_id, read_pope
from eval.entry import main_of
from model.common import UserError, quoted, read_field, run_command, shown, write_text


def parse_answer(text: str) -> str:
    """ "no" if the first sentence has the word No, not or no, else "yes", as in the published script."""
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


def write_answers(path: str | Path, answers: Iterable[tuple[PopeQuestion, str]]) -> None:
    """Write an answers file, JSON lines of {"question_id", "question", "answer"}."""
    lines = [{"question_id": q.question_id, "question": q.question, "answer": text} for q, text in answers]
    write_text(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))


def read_answers(path: str | Path, questions: Sequence[PopeQuestion], against: str | Path) -> list[str]:
    """Free-text answers in the order of `questions`, from JSON lines of {"question_id", "answer"} (or "text").

    The published script's own files have no ids, only the order: then there must be one answer per question. A repeated
    "question" must agree: POPE's files share their ids. Raises UserError that names missing, extra or duplicate ids.
    """
    records = lines_of(path)
    name = {where: "text" if "text" in record and "answer" not in record else "answer" for where, record in records}
    texts = [read_field(record, name[where], TEXT, where) for where, record in records]
    if any("question_id" in record for _, record in records):
        ids = [read_id(record, "question_id", where) for where, record in records]
        check_unique(ids, path)
        check_ids(ids, [question.question_id for question in questions], path, against)
        by_id = dict(zip(ids, zip(records, texts, strict=True), strict=True))
        records, texts = zip(*(by_id[question.question_id] for question in questions), strict=True)
    elif len(records) != len(questions):
        raise UserError(
            f"{path}: {len(records)} answers without question_id to the {len(questions)} questions of {against}: one "
            "answer a question, in the same order, or give the ids"
        )
    for (where, record), question in zip(records, questions, strict=True):
        asked = read_field(record, "question", TEXT, where, default=question.question)
        if asked.strip().lower() != question.question.strip().lower():
            raise UserError(
                f"{where}: answers {quoted(asked)} where {against} asks {quoted(question.question)}: give the "
                "answers to that file, in its order where they have no ids"
            )
    return list(texts)


def embedded(strategy: str, limit: int = 600) -> tuple[list[PopeQuestion], dict[str, Callable]]:
    """The first `limit` questions of a strategy on the embedded test scenes, and the pictures by name."""
    samples = scenes.pope(strategy, images=-(-limit // 6))[:limit]
    questions = [PopeQuestion(s.question_id, f"pope/{s.image_id}", s.question, s.suffix) for s in samples]
    return questions, {f"pope/{s.image_id}": s.scene.render for s in samples}


def score(args: argparse.Namespace) -> Report:
    """`python -m eval.pope score`: the measures of an answers file."""
    questions = read_pope(args.questions)
    answers = [parse_answer(text) for text in read_answers(args.answers, questions, args.questions)]
    summary = score_answers([question.label for question in questions], answers)
    lines = [f"{name:10}{100 * value:6.2f}" for name, value in summary.items()]
    return Report(summary, [f"POPE (%), {len(questions)} questions", *lines])


def load(args: argparse.Namespace) -> tuple[dict[str, list[PopeQuestion]], dict[str, list[Ask]]]:
    """The questions of each set, from the file or of the embedded scenes, and what to ask."""
    if (args.questions is None) != (args.images is None):
        raise UserError("--questions and --images go together: give both, or neither for the embedded scenes")
    if args.questions is None:
        limit = 600 if args.limit is None else args.limit
        sets = {strategy: embedded(strategy, limit) for strategy in scenes.STRATEGIES}
    else:
        sets = {}
        for file in args.questions:
            if Path(file).stem in (*sets, "mean"):
                raise UserError(f"{shown(file)}: results are named after their file, and this one is taken: rename it")
            questions = read_pope(file)[: args.limit]
            pictures = find_images((q.image for q in questions), args.images, file, args.allow_outside)
            sets[Path(file).stem] = questions, pictures
    asks = {name: make_asks(questions, pictures, args.prompt) for name, (questions, pictures) in sets.items()}
    for name in list(asks) if args.probability else ():
        asks[f"{name}, P(yes)"] = [replace(ask, choices=("yes", "no"), scored=True) for ask in asks[name]]
    return {name: questions for name, (questions, _) in sets.items()}, asks


def finish(args, sets: dict[str, list[PopeQuestion]], answers: dict, session) -> Report:
    """An answers file for each set, and the measures."""
    results, scores, pictures = {}, {}, {}
    for name, questions in sets.items():
        answered = [(q, text) for q, text in zip(questions, answers[name], strict=True) if text is not None]
        write_answers(session.out / f"answers-{name}.jsonl", answered)
        labels, parsed = [q.label for q, _ in answered], [parse_answer(text) for _, text in answered]
        results[name] = {"questions": len(answered)} | score_answers(labels, parsed)
        pairs = [(f"{name}/{q.question_id}", q, said) for (q, _), said in zip(answered, parsed, strict=True)]
        scores[f"accuracy, {name}"] = {id_: q.label == said for id_, q, said in pairs}
        pictures |= {id_: q.image for id_, q, _ in pairs}
        if args.probability:
            texts = zip(questions, answers[f"{name}, P(yes)"], strict=True)
            likely = [(q, *json.loads(text)) for q, text in texts if text is not None]
            hits = {f"{name}/{q.question_id}": (q.label == "yes") == (yes >= no) for q, yes, no in likely}
            scores[f"P(yes), {name}"], results[name]["P(yes)"] = hits, _ratio(sum(hits.values()), len(hits))
    if args.questions is not None and len(results) > 1:
        means = {key: sum(result[key] for result in results.values()) / len(results) for key in results[name]}
        results["mean"] = means | {"questions": sum(result["questions"] for result in results.values())}
    files = [f"answers-{name}.jsonl" for name in sets]
    return Report(results, table(f"POPE (%), {session.title}", results), files, scores, pictures=pictures)


def table(title: str, results: Mapping[str, dict]) -> list[str]:
    """A row for each set of questions."""
    width = max(map(len, results))
    lines = [title, " " * width + "".join(f"{name:>11}" for name in next(iter(results.values())))]
    for name, result in results.items():
        count, *measures = result.values()
        lines.append(f"{name:{width}}{count:11}" + "".join(f"{100 * value:11.2f}" for value in measures))
    return lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    questions = "POPE's JSONL, one file or several (default: all three sets of the embedded scenes)"
    add_flag(parser, "--questions", questions, nargs="+", metavar="FILE")
    add_flag(parser, "--images", "folder of the pictures of --questions", metavar="DIR")
    add_flag(parser, "--probability", "compare P(yes) with P(no) too, in one more pass", False)
    add_prompt_flag(parser)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--questions", "POPE's JSONL of questions with labels", required=True)
    add_flag(parser, "--answers", 'JSON lines of {"question_id", "answer"}', required=True)


LIMIT = "questions of each set, the first N (default: all of a file, 600 of the embedded)", None
COMMAND = Command("pope", __doc__, add_flags, add_score_flags, load, finish, score, LIMIT)
main = main_of(COMMAND)

if __name__ == "__main__":
    run_command(main)
