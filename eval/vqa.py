"""VQA: a model's answers, official results files, and the published scorers of VQAv2, TextVQA, VizWiz and GQA.

    python -m eval.vqa                          the last run, or the embedded base, on the embedded scenes
    python -m eval.vqa --model google/paligemma-3b-pt-224 --adapter RUN --questions Q --annotations A --images DIR
    python -m eval.vqa --data jsonl:test.jsonl --adapter RUN --adapter OTHER --blind
    python -m eval.vqa score --questions Q --annotations A --results R

In: questions and annotations (`eval/datasets.py`), and a model, or its answers. Out: a results file, and accuracy in
percent, overall and by type, beside that of the best guess without a picture. The scorers: `eval/vqa_scoring.py`.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from eval import scenes, vqa_data
from eval.command import Ask, Command, Report, add_flag, add_prompt_flag, make_asks
from eval.datasets import (
    PROMPT,
    TEXT,
    Annotation,
    Question,
    annotations_of,
    check_ids,
    check_unique,
    find_images,
    holds_answers,
    read_annotations,
    read_id,
    read_layout,
    read_questions,
    records_of,
)
from eval.entry import ask_model, main_of
from eval.records import ANNOTATIONS_FILE, QUESTIONS_FILE, Record, gray_picture, source_parts
from eval.statistics import blind_guesses
from eval.vqa_scoring import SCORERS, answerability, question_accuracies, summarize
from model.common import UserError, read_field, read_json, run_command, shown, write_text

# Results files


NAMES = {"gqa": ("questionId", "prediction"), "vizwiz": ("image", "answer")}  # in their servers' files


def write_results(
    path: str | Path, answers: Mapping[int | str, str | float], names: tuple[str, str] = ("question_id", "answer")
) -> None:
    """Write the official results file, [{"question_id", "answer"}, …], or with other names of the two."""
    results = [dict(zip(names, pair, strict=True)) for pair in answers.items()]
    write_text(path, json.dumps(results, ensure_ascii=False, indent=0) + "\n")


def read_results(
    path: str | Path, expected: Iterable[int | str] | None = None, against: str | Path = ""
) -> dict[int | str, str]:
    """Answer by question id, from [{"question_id", "answer"}, …]; GQA calls them "questionId" and "prediction", VizWiz
    calls the id "image".

    Raises UserError that names duplicate ids, and missing and extra ones: the file must hold exactly the `expected`
    ones, which are those of the file `against`; None: whichever.
    """
    rows = []
    for where, record in records_of(read_json(path, object), shown(path)):
        id_name = next((name for name in ("question_id", "questionId", "image") if name in record), "question_id")
        id_ = read_id(record, id_name, where)
        name = "prediction" if "prediction" in record else "answer"
        rows.append((id_, read_field(record, name, TEXT, f"{where} ({shown(id_)})")))
    check_unique((id_ for id_, _ in rows), path)
    if expected is not None:
        check_ids((id_ for id_, _ in rows), expected, path, against)
    return dict(rows)


# What is asked

TRAIN_QUESTIONS = 12_000  # embedded ones that the blind baseline knows


class Benchmark(NamedTuple):
    """Questions, their annotations in the same order (none: there is nothing to score), pictures by name, and the
    scoring that fits the annotations. asks: what is asked, where it is more than a question about one picture."""

    questions: list[Question]
    annotations: list[Annotation]
    pictures: dict[str, Path | Callable]
    scoring: str = "official"
    asks: Sequence[Ask] = ()


@cache
def embedded(limit: int = 1200, split: str = "test") -> Benchmark:
    """The first `limit` questions on the embedded scenes of a split."""
    pictures = -(-limit // len(scenes.QUESTIONS))
    return of_samples([s for number in range(pictures) for s in scenes.vqa_picture(split, number)][:limit], split)


def of_samples(samples: Sequence[scenes.Sample], split: str) -> Benchmark:
    """Questions on the embedded scenes as a benchmark."""
    return Benchmark(
        [Question(s.question_id, f"{split}/{s.image_id}", s.question) for s in samples],
        [
            Annotation(
                s.question_id,
                tuple({"answer": s.suffix, "answer_id": i} for i in range(1, 11)),
                s.suffix,
                s.answer_type,
                s.question_type,
            )
            for s in samples
        ],
        {f"{split}/{s.image_id}": s.scene.render for s in samples},
    )


def from_files(
    questions: str | Path,
    annotations: str | Path | None,
    images: str | Path,
    limit: int | None = None,
    only: Collection[str] | None = None,
    allow_outside: bool = False,
) -> Benchmark:
    """A benchmark from published files; of its questions those with an id (as text) in `only`, and the first `limit`.

    Raises UserError for malformed files, questions without annotation, and pictures that are not in `images`.
    """
    asked = [q for q in read_questions(questions) if only is None or str(q.question_id) in only][:limit]
    if not asked:
        raise UserError(f"{questions}: none of its questions is left to ask: check the limit and the split")
    scoring, annotated = read_layout(annotations) if annotations else ("official", [])
    joined = annotations_of(asked, annotated, questions, annotations) if annotations else []
    pictures = find_images((q.image for q in asked), images, questions, allow_outside)
    return Benchmark(asked, joined, pictures, scoring)


# Models


def answer(
    model, processor, benchmark: Benchmark, prompt: str = PROMPT, *, ask_all: Callable | None = None, **options
) -> dict[int | str, str]:
    """Greedy answers by question id, without the questions that were left out; arguments as for `ask_model`."""
    return by_id(benchmark, ask_model(model, processor, asks_of(benchmark, prompt), ask_all, **options))


def by_id(benchmark: Benchmark, answers: Iterable[str | None]) -> dict[int | str, str]:
    """The answers that are not None by question id."""
    return {q.question_id: text for q, text in zip(benchmark.questions, answers, strict=True) if text is not None}


def asks_of(benchmark: Benchmark, prompt: str = PROMPT) -> list[Ask]:
    return list(benchmark.asks) or make_asks(benchmark.questions, benchmark.pictures, prompt)


def score_answers(benchmark: Benchmark, answers: Mapping, scoring: str | None = None) -> dict:
    """`summarize` over the questions that have an answer; the default scoring is the benchmark's."""
    annotations = [a for a in benchmark.annotations if a.question_id in answers]
    return summarize(annotations, question_accuracies(annotations, answers, scoring or benchmark.scoring))


def check_scoring(scoring: str, annotations: list[Annotation], source: str | Path) -> None:
    """Raise UserError for a scoring by which no answer to these questions can be right, and warn if few can.

    Leave-one-out counts what other annotators said: with one answer per question there are none; official scoring
    leaves equal records out together, which without an answer_id are all equal answers.
    """
    some_of_them = [a for a in annotations if a.balanced or scoring != "gqa"][:1000]
    best = [max(SCORERS[scoring](a, given["answer"]) for given in a.answers) for a in some_of_them]
    if best and max(best) == 0:
        counts = sorted({len(a.answers) for a in some_of_them})
        raise UserError(
            f"{shown(source)}: {scoring} scoring cannot apply: it needs several answers per question, and an answer_id "
            f"each if they are equal (found {' or '.join(map(str, counts[:3]))}): take --scoring gqa, which is exact "
            "match, or leave it out"
        )
    if best and (mean := 100 * sum(best) / len(best)) < 50:
        print(f"{shown(source)}: with {scoring} scoring the best possible accuracy is {mean:.2f} %", file=sys.stderr)


def evaluate_embedded(
    model, processor, limit: int, progress: str | None = None, ask_all: Callable | None = None
) -> dict:
    """{"overall", "per_answer_type", "per_question_type"} on `limit` questions of the embedded test split."""
    benchmark = embedded(limit)
    return score_answers(benchmark, answer(model, processor, benchmark, ask_all=ask_all, progress=progress))


# Blind


def blind_answers(test: Benchmark, train: Benchmark | None = None) -> dict[int | str, str]:
    """`blind_guesses` by question id, from the same questions in `train`, or from those of the same type.

    Without `train`, the most frequent answer of each question type in `test` itself: the upper bound of constant ones.
    """

    def keys(question: Question, annotation: Annotation) -> list[tuple]:
        general = [("type", annotation.question_type), ()]
        return general if train is None else [("question", question.question), *general]

    known = [(keys(*pair), pair[1].answer) for pair in zip(*(train or test)[:2], strict=True)]
    guesses = blind_guesses(known, [keys(*pair) for pair in zip(*test[:2], strict=True)])
    return {question.question_id: guess for question, guess in zip(test.questions, guesses, strict=True)}


def blind_embedded(limit: int) -> dict[str, float]:
    """{"overall": percent, answer type: percent, …} of the best guess without a picture on the embedded questions."""
    test = embedded(limit)
    summary = score_answers(test, blind_answers(test, embedded(TRAIN_QUESTIONS, "train")))
    return {"overall": summary["overall"], **summary["per_answer_type"]}


# Commands


def table(title: str, columns: Mapping[str, dict]) -> list[str]:
    """Summaries side by side, each under its name."""
    first = next(iter(columns.values()))
    rows = [("overall", [summary["overall"] for summary in columns.values()])]
    for kind in ("per_answer_type", "per_question_type"):
        rows += [(f"  {name}", [summary[kind][name] for summary in columns.values()]) for name in first[kind]]
    width = max(len(name) for name, _ in rows)
    head = [" " * width + "".join(f"  {name:>6}" for name in columns)] if len(columns) > 1 else []
    return [
        title,
        *head,
        *(f"{name:{width}}" + "".join(f"  {value:6.2f}" for value in values) for name, values in rows),
    ]


def blind_of(args: argparse.Namespace, test: Benchmark) -> dict | None:
    """`blind_answers` if --blind asks for them."""
    if args.blind is None:
        return None
    if len(args.blind) not in (0, 2):
        raise UserError(f"--blind takes no file or two, the training questions and annotations, not {len(args.blind)}")
    train = None
    if args.blind:
        questions, annotations = read_questions(args.blind[0]), read_annotations(args.blind[1])
        train = Benchmark(questions, annotations_of(questions, annotations, *args.blind), {})
    return blind_answers(test, train)


def score(args: argparse.Namespace) -> Report:
    """`python -m eval.vqa score`: the accuracy of a results file."""
    source = args.annotations or args.questions
    fitting, annotations = read_layout(source)
    scoring, ids = args.scoring or fitting, [a.question_id for a in annotations]
    questions = {q.question_id: q for q in read_questions(args.questions)}
    annotations_of(questions.values(), annotations, args.questions, source)
    check_scoring(scoring, annotations, source)
    answers = read_results(args.results, ids, source)
    accuracies, blind = question_accuracies(annotations, answers, scoring), {}
    summary = summarize(annotations, accuracies)
    if args.blind is not None:
        check_ids(questions, ids, args.questions, source)
        test = Benchmark([questions[id_] for id_ in ids], annotations, {})
        blind = {"blind": score_answers(test, blind_of(args, test), scoring)}
    title = f"VQA accuracy (%), {scoring} scoring, {len(accuracies)} questions"
    return Report(summary | blind, table(title, {scoring: summary} | blind))


class Data(NamedTuple):
    """What `load` reads: the questions, the blind guesses to those that have annotations, and whether the questions are
    the embedded ones."""

    benchmark: Benchmark
    blind: dict | None
    is_embedded: bool


def load(args: argparse.Namespace) -> tuple[Data | list[Record], dict[str, list[Ask]]]:
    """The questions of the files, of --data, or of the embedded scenes, and what to ask."""
    if args.data is not None:
        if args.questions or args.annotations or args.scoring or args.answerability:
            flags = "--questions, --annotations, --scoring and --answerability"
            raise UserError(f"{flags} are of published files: leave --data out")
        kind, folder = source_parts(args.data)
        if kind in ("embedded", "vqav2"):
            files = vqav2_files(folder, args.images) if kind == "vqav2" else {}
            data, sets = load(argparse.Namespace(**{**vars(args), "data": None, **files}))
            if args.blind == []:
                sets["gray"] = [replace(ask, key="gray", picture=gray_picture) for ask in sets["vqa"]]
            return data, sets
        return vqa_data.load(args)
    if (args.questions is None) != (args.images is None) or args.annotations and args.questions is None:
        raise UserError(
            "--questions, --images and --annotations go together: give all of them, or none for the embedded scenes "
            "(--images goes with --data too)"
        )
    if args.questions is None:
        benchmark = embedded(1200 if args.limit is None else args.limit)
        blind = blind_answers(benchmark, embedded(TRAIN_QUESTIONS, "train"))
    else:
        source = args.annotations or (args.questions if holds_answers(args.questions) else None)
        benchmark = from_files(args.questions, source, args.images, args.limit, allow_outside=args.allow_outside)
        if source is None:
            print(f"{shown(args.questions)} has no answers: without --annotations nothing is scored", file=sys.stderr)
        else:
            check_scoring(args.scoring or benchmark.scoring, benchmark.annotations, source)
        blind = blind_of(args, benchmark) if benchmark.annotations else None
    sets = {"vqa": asks_of(benchmark, args.prompt)}
    if args.answerability:
        if not benchmark.annotations or any(a.answerable is None for a in benchmark.annotations):
            raise UserError("--answerability: the annotations do not say which questions are answerable: give VizWiz's")
        word = "Unanswerable" if "'Unanswerable'" in args.prompt else "unanswerable"  # as it is asked for
        sets["answerability"] = [replace(ask, choices=(word,), scored=True) for ask in sets["vqa"]]
    return Data(benchmark, blind, args.questions is None), sets


def vqav2_files(folder: Path, images: str | None) -> dict:
    """The flags for VQAv2's files in `folder`: those of val2014 if they are there, else of train2014."""
    names = {"questions": QUESTIONS_FILE, "annotations": ANNOTATIONS_FILE}
    held_out = {flag: folder / name.replace("train2014", "val2014") for flag, name in names.items()}
    found = held_out if held_out["questions"].is_file() else {flag: folder / name for flag, name in names.items()}
    return {**found, "images": images or folder}


def finish(args: argparse.Namespace, data: Data | list[Record], answers: dict, session) -> Report:
    """The results file, for embedded questions also the files that `score` takes, and the accuracies."""
    if isinstance(data, list):
        return vqa_data.finish(args, data, answers, session)
    benchmark, said, out = data.benchmark, by_id(data.benchmark, answers["vqa"]), session.out
    write_results(out / "results.json", said, NAMES.get(benchmark.scoring, ("question_id", "answer")))
    files = ["results.json", "answers.jsonl"]
    if data.is_embedded:
        for key, content in zip(
            ("questions", "annotations"), scenes.vqav2_files("test", len(benchmark.pictures)), strict=True
        ):
            content[key] = content[key][: len(benchmark.questions)]
            write_text(out / f"{key}.json", json.dumps(content) + "\n")
            files.append(f"{key}.json")
    if not benchmark.annotations:
        return Report({}, [], files)
    scoring = args.scoring or benchmark.scoring
    annotations = [a for a in benchmark.annotations if a.question_id in said]
    accuracies = {"model": question_accuracies(annotations, said, scoring)}
    if "gray" in answers:
        accuracies["gray"] = question_accuracies(annotations, by_id(benchmark, answers["gray"]), scoring)
    columns = {name: summarize(annotations, of_name) for name, of_name in accuracies.items()}
    if data.blind is not None:  # on the same questions as the model
        columns["blind"] = score_answers(benchmark, {id_: data.blind[id_] for id_ in said}, scoring)
    count = len(accuracies["model"])
    lines = table(f"VQA accuracy (%), {scoring} scoring, {count} questions, {session.title}", columns)
    if "answerability" in answers:
        unsure = {id_: math.exp(*json.loads(text)) for id_, text in by_id(benchmark, answers["answerability"]).items()}
        found = answerability([a.answerable == 0 for a in annotations], [unsure[a.question_id] for a in annotations])
        columns["answerability"] = found
        write_results(out / "answerability.json", {id_: 1 - p for id_, p in unsure.items()}, ("image", "answerable"))
        files.append("answerability.json")
        lines += [f"answerability: AP {found['ap']:.2f}, F1 {found['f1']:.2f}"]
    measure, pictures = f"VQA accuracy, {scoring} scoring", {str(q.question_id): q.image for q in benchmark.questions}
    scores = {name: {measure: {str(id_): value for id_, value in by.items()}} for name, by in accuracies.items()}
    return Report(columns.pop("model") | columns, lines, files, scores["model"], scores.get("gray", {}), pictures)


def add_data_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    questions = "questions file (VQAv2, GQA, TextVQA or VizWiz)"
    default = "" if required else " (default: the embedded scenes)"
    add_flag(parser, "--questions", questions + default, required=required)
    annotations = "annotations file (default: the questions file, which has the answers too in GQA, TextVQA and VizWiz)"
    add_flag(parser, "--annotations", annotations)
    add_flag(parser, "--scoring", "scorer (default: the one that fits the annotations)", choices=SCORERS)
    blind = (
        "score the best guess without a picture too: from training QUESTIONS ANNOTATIONS, or, without files, the best "
        "constant answer of each question type (default: only on the embedded scenes, from their train split); with "
        "--data, ask the same model about gray pictures"
    )
    add_flag(parser, "--blind", blind, nargs="*", metavar="FILE")


def add_flags(parser: argparse.ArgumentParser) -> None:
    data = (
        "examples with right answers, as train.finetune takes them: jsonl:FILE (of a conversation the last answer is "
        "asked, the turns before it are given), vqav2:DIR or embedded (default: embedded)"
    )
    add_flag(parser, "--data", data, metavar="SRC")
    add_data_flags(parser, required=False)
    images = "folder of the pictures of --questions, or of --data (default: the folder of its file)"
    add_flag(parser, "--images", images, metavar="DIR")
    answerable = "of VizWiz: also how likely the answer `unanswerable` is, scored by average precision and F1"
    add_flag(parser, "--answerability", answerable, False)
    add_prompt_flag(parser)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    add_data_flags(parser, required=True)
    add_flag(parser, "--results", 'results file, [{"question_id", "answer"}, …]', required=True)


LIMIT = "questions to ask, the first N (default: all of files, 1200 of the embedded scenes)", None
COMMAND = Command("vqa", __doc__, add_flags, add_score_flags, load, finish, score, LIMIT)
main = main_of(COMMAND)

if __name__ == "__main__":
    run_command(main)
