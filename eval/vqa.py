"""VQA: a model's answers, official results files, and the published scorers of VQAv2, TextVQA, VizWiz and GQA.

    python -m eval.vqa                          the last run, or the embedded base, on the embedded scenes
    python -m eval.vqa --model google/paligemma-3b-pt-224 --adapter RUN --questions Q --annotations A --images DIR
    python -m eval.vqa score --questions Q --annotations A --results R

In: questions and annotations (`eval/datasets.py`), and a model, or its answers. Out: a results file, and accuracy in
percent, overall and by type, beside that of the best guess without a picture. Next: `eval/needle.py`, the other half of
the paper's evaluation.

The VQAv2 scorer follows the official one, its oddities included, since every published number has them
(https://visualqa.org/evaluation.html; Antol et al., "VQA: Visual Question Answering", ICCV 2015).
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from eval import scenes
from eval.datasets import (
    Annotation,
    Question,
    check_ids,
    check_images,
    check_unique,
    field,
    find_image,
    read_annotations,
    read_json,
    read_question_ids,
    read_questions,
    records_of,
    some,
)
from eval.statistics import blind_guesses
from model.common import UserError, run_command, write_text

# ---------------------------------------------------------------------------------------------------------------------
# Normalisation of answers
# ---------------------------------------------------------------------------------------------------------------------

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # kept by the official scorer: ' : & % $ # *
DIGIT_COMMA_DIGIT = re.compile(r"\d,\d")
LONE_PERIOD = re.compile(r"\.(?!\d)")
NUMBERS = {"none": "0"} | {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
ARTICLES = {"a", "an", "the"}
_CONTRACTED = """
    'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
    he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't
    needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're
    what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've""".split()
# A word that lost one of its apostrophes gets it back; the official list has one entry the other way round.
CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTED for at, letter in enumerate(word) if letter == "'"
} | {"somebody'd": "somebodyd"}


def clean_space(text: str) -> str:
    """Newlines and tabs as spaces, none at the ends."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def clean_punctuation(text: str) -> str:
    """Punctuation deleted, or made a space where it joins two words; periods deleted unless a digit follows."""
    result, number = text, DIGIT_COMMA_DIGIT.search(text)
    for mark in PUNCTUATION:
        # decided on the original text: "1,000 (approx)" loses its comma, "red/blue" becomes two words
        apart = mark + " " in text or " " + mark in text
        result = result.replace(mark, "" if apart or number else " ")
    return LONE_PERIOD.sub("", result, count=32)  # the official call passes re.UNICODE, 32, where the count goes


def clean_words(text: str) -> str:
    """Lower case; numbers up to ten as digits; no articles; contractions with their apostrophe."""
    words = (NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


@lru_cache(maxsize=1 << 18)  # a few thousand answers make up most of VQAv2
def clean(text: str) -> str:
    """Punctuation, then words."""
    return clean_words(clean_punctuation(text))


def clean_textvqa(text: str) -> str:
    """The normaliser of TextVQA's scorer (EvalAI): tokens first, then as `clean`."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return clean(clean_space(text))


# ---------------------------------------------------------------------------------------------------------------------
# Scorers: one annotation and one prediction to an accuracy in 0..1
# ---------------------------------------------------------------------------------------------------------------------


def leave_one_out(records: list, prediction: str) -> float:
    """Mean over the annotators of min(1, matches among the *other* records / 3).

    "Other" means unequal: records that are equal (answers without ids) are all left out together, as upstream.
    """
    matching = [record for record in records if record["answer"] == prediction]
    accuracies = [min(1, (len(matching) - matching.count(record)) / 3) for record in records]
    return sum(accuracies) / len(accuracies)


def official(annotation: Annotation, prediction: str) -> float:
    """VQAv2's scorer (2021 and later): answers are normalised only where the annotators do not all agree."""
    prediction = clean_space(prediction)
    records = [given | {"answer": clean_space(given["answer"])} for given in annotation.answers]
    if len({record["answer"] for record in records}) > 1:
        prediction = clean(prediction)
        records = [record | {"answer": clean(record["answer"])} for record in records]
    return leave_one_out(records, prediction)


def paper(annotation: Annotation, prediction: str) -> float:
    """The script of the differential PaliGemma paper: min(1, matches / 3) on lower-cased raw strings."""
    return min(1, sum(given["answer"].lower() == prediction.lower() for given in annotation.answers) / 3)


def textvqa(annotation: Annotation, prediction: str) -> float:
    """TextVQA's scorer: its own normaliser on both sides, annotators left out by position."""
    return leave_one_out(_by_position(annotation, clean_textvqa), clean_textvqa(prediction))


def vizwiz(annotation: Annotation, prediction: str) -> float:
    """VizWiz's scorer: only the prediction is normalised, annotators left out by position."""
    return leave_one_out(_by_position(annotation, str), clean(clean_space(prediction)))


def gqa(annotation: Annotation, prediction: str) -> float:
    """GQA's exact match, without periods at the ends and without case."""
    return float(prediction.strip(".").lower() == annotation.answer.strip(".").lower())


def _by_position(annotation: Annotation, normalize: Callable[[str], str]) -> list[dict]:
    return [{"answer": normalize(given["answer"]), "at": at} for at, given in enumerate(annotation.answers)]


SCORERS = {"official": official, "paper": paper, "textvqa": textvqa, "vizwiz": vizwiz, "gqa": gqa}


def question_accuracies(
    annotations: Iterable[Annotation], answers: Mapping, scoring: str = "official"
) -> dict[int | str, float]:
    """Accuracy (0..1) by question id, in the order of `annotations`; GQA's unbalanced questions are not scored."""
    scorer = SCORERS[scoring]
    return {a.question_id: scorer(a, answers[a.question_id]) for a in annotations if a.balanced or scoring != "gqa"}


def summarize(annotations: Iterable[Annotation], accuracies: Mapping) -> dict:
    """{"overall", "per_answer_type", "per_question_type"} in percent, rounded to two decimals as the official scorer.

    Raises UserError if there is nothing to average.
    """
    if not accuracies:
        raise UserError("no scored questions: the annotations hold none (GQA scores those with isBalanced true)")
    scored = [a for a in annotations if a.question_id in accuracies]

    def percent(group: list[Annotation]) -> float:
        return round(100 * sum(accuracies[a.question_id] for a in group) / len(group), 2)

    def by(kind: str) -> dict[str, float]:
        groups: dict[str, list[Annotation]] = {}
        for annotation in scored:
            if getattr(annotation, kind) is not None:
                groups.setdefault(getattr(annotation, kind), []).append(annotation)
        return {name: percent(group) for name, group in groups.items()}

    return {"overall": percent(scored), "per_answer_type": by("answer_type"), "per_question_type": by("question_type")}


# ---------------------------------------------------------------------------------------------------------------------
# Results files
# ---------------------------------------------------------------------------------------------------------------------


def write_results(path: str | Path, answers: Mapping[int | str, str]) -> None:
    """Write the official results file, [{"question_id", "answer"}, …]."""
    results = [{"question_id": id_, "answer": answer} for id_, answer in answers.items()]
    write_text(path, json.dumps(results, ensure_ascii=False, indent=0) + "\n")


def read_results(path: str | Path, expected: Iterable[int | str], against: str | Path) -> dict[int | str, str]:
    """Answer by question id, from [{"question_id", "answer"}, …]; GQA calls them "questionId" and "prediction", VizWiz
    calls the id "image".

    Raises UserError that names missing, extra or duplicate ids: the file must hold exactly the `expected` ones, which
    are those of the file `against`.
    """
    rows = []
    for where, record in records_of(read_json(path), str(path)):
        id_name = next((name for name in ("question_id", "questionId", "image") if name in record), "question_id")
        id_ = field(record, id_name, (int, str), where)
        rows.append((id_, field(record, "prediction" if "prediction" in record else "answer", str, f"{where} ({id_})")))
    check_unique((id_ for id_, _ in rows), path)
    check_ids((id_ for id_, _ in rows), expected, path, against)
    return dict(rows)


# ---------------------------------------------------------------------------------------------------------------------
# What is asked
# ---------------------------------------------------------------------------------------------------------------------

PROMPT = "answer en {question}"  # as PaliGemma's authors ask
TRAIN_QUESTIONS = 12_000  # embedded ones that the blind baseline knows
IN_ONE_FILE = ("textvqa", "vizwiz", "gqa")  # benchmarks whose questions file holds the answers


class Benchmark(NamedTuple):
    """Questions, their annotations in the same order (none: there is nothing to score), and pictures by name."""

    questions: list[Question]
    annotations: list[Annotation]
    pictures: dict[str, Path | Callable]


@cache
def embedded(limit: int = 1200, split: str = "test") -> Benchmark:
    """The first `limit` questions on the embedded scenes of a split."""
    pictures = -(-limit // len(scenes.QUESTIONS))
    samples = [s for number in range(pictures) for s in scenes.vqa_picture(split, number)][:limit]
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
) -> Benchmark:
    """A benchmark from published files; of its questions those with an id (as text) in `only`, and the first `limit`.

    Raises UserError for malformed files, questions without annotation, and pictures that are not in `images`.
    """
    asked = [q for q in read_questions(questions) if only is None or str(q.question_id) in only][:limit]
    if not asked:
        raise UserError(f"{questions}: none of its questions is left to ask: check the limit and the split")
    by_id = {a.question_id: a for a in read_annotations(annotations)} if annotations else {}
    if annotations:
        check_annotated((q.question_id for q in asked), by_id, questions, annotations)
    check_images((q.image for q in asked), images, questions)
    pictures = {q.image: find_image(images, q.image) for q in asked}
    return Benchmark(asked, [by_id[q.question_id] for q in asked if by_id], pictures)


def check_annotated(ids: Iterable, annotated: Collection, questions: str | Path, annotations: str | Path) -> None:
    """Raise UserError that names the questions without annotation."""
    bare = [id_ for id_ in ids if id_ not in annotated]
    if bare:
        raise UserError(
            f"{annotations}: {len(bare)} question(s) of {questions} have no annotation ({some(bare)}): take the "
            "annotations of the same split"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def answer(
    model, processor, benchmark: Benchmark, prompt: str = PROMPT, *, ask_all: Callable | None = None, **options
) -> dict[int | str, str]:
    """Greedy answers by question id; `options` are those of `eval.run.ask_all`, or of what is given in its place. What
    it left out is absent."""
    if ask_all is None:
        from eval.run import ask_all  # only here: scoring needs no torch

    answers = ask_all(model, processor, asks_of(benchmark, prompt), **options)
    ids = (q.question_id for q in benchmark.questions)
    return {id_: text for id_, text in zip(ids, answers, strict=True) if text is not None}


def asks_of(benchmark: Benchmark, prompt: str = PROMPT) -> list:
    """The `eval.run.Ask`s of a benchmark."""
    from eval.run import make_asks

    asked = ((q.question_id, q.image, q.question) for q in benchmark.questions)
    return make_asks(asked, benchmark.pictures, prompt)


def score_answers(benchmark: Benchmark, answers: Mapping, scoring: str = "official") -> dict:
    """`summarize` over the questions that have an answer."""
    annotations = [a for a in benchmark.annotations if a.question_id in answers]
    return summarize(annotations, question_accuracies(annotations, answers, scoring))


def evaluate_embedded(
    model, processor, limit: int, progress: str | None = None, ask_all: Callable | None = None
) -> dict:
    """{"overall", "per_answer_type", "per_question_type"} on `limit` questions of the embedded test split."""
    benchmark = embedded(limit)
    return score_answers(benchmark, answer(model, processor, benchmark, ask_all=ask_all, progress=progress))


def evaluate_files(
    model,
    processor,
    questions_file: str | Path,
    annotations_file: str | Path,
    images_folder: str | Path,
    prompt_template: str,
    limit: int | None = None,
    only: Collection[str] | None = None,
    progress: str | None = None,
    log: Path | None = None,
    ask_all: Callable | None = None,
) -> dict:
    """As `evaluate_embedded` on files in VQAv2's format; arguments as for `from_files` and `eval.run.ask_all`.

    Questions on unreadable pictures are left out, and named under "left_out" if there are any.
    """
    benchmark, left_out = from_files(questions_file, annotations_file, images_folder, limit, only), {}
    options = {"progress": progress, "log": log, "left_out": left_out}
    answers = answer(model, processor, benchmark, prompt_template, ask_all=ask_all, **options)
    return score_answers(benchmark, answers) | ({"left_out": left_out} if left_out else {})


# ---------------------------------------------------------------------------------------------------------------------
# Blind
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


def print_table(title: str, columns: Mapping[str, dict]) -> None:
    """Summaries side by side, each under its name."""
    first = next(iter(columns.values()))
    rows = [("overall", [summary["overall"] for summary in columns.values()])]
    for kind in ("per_answer_type", "per_question_type"):
        rows += [(f"  {name}", [summary[kind][name] for summary in columns.values()]) for name in first[kind]]
    width = max(len(name) for name, _ in rows)
    print(title)
    if len(columns) > 1:
        print(" " * width + "".join(f"  {name:>6}" for name in columns))
    for name, values in rows:
        print(f"{name:{width}}" + "".join(f"  {value:6.2f}" for value in values))


def blind_of(args: argparse.Namespace, test: Benchmark) -> dict | None:
    """`blind_answers` if --blind asks for them."""
    if args.blind is None:
        return None
    if len(args.blind) not in (0, 2):
        raise UserError(f"--blind takes no file or two, the training questions and annotations, not {len(args.blind)}")
    train = None
    if args.blind:
        questions, annotations = read_questions(args.blind[0]), read_annotations(args.blind[1])
        by_id = {a.question_id: a for a in annotations}
        check_annotated((q.question_id for q in questions), by_id, *args.blind)
        train = Benchmark(questions, [by_id[q.question_id] for q in questions], {})
    return blind_answers(test, train)


def score(args: argparse.Namespace) -> None:
    """`python -m eval.vqa score`: the accuracy of a results file."""
    source = args.annotations or args.questions
    annotations = read_annotations(source)
    check_annotated(read_question_ids(args.questions), {a.question_id for a in annotations}, args.questions, source)
    answers = read_results(args.results, [a.question_id for a in annotations], source)
    summary = summarize(annotations, question_accuracies(annotations, answers, args.scoring))
    blind = {}
    if args.blind is not None:
        by_id, ids = {q.question_id: q for q in read_questions(args.questions)}, [a.question_id for a in annotations]
        check_ids(by_id, ids, args.questions, source)
        test = Benchmark([by_id[id_] for id_ in ids], annotations, {})
        blind = {"blind": score_answers(test, blind_of(args, test), args.scoring)}
    if args.json:
        print(json.dumps(summary | blind))
        return
    print_table(
        f"VQA accuracy (%), {args.scoring} scoring, {len(annotations)} questions", {args.scoring: summary} | blind
    )


def run(args: argparse.Namespace) -> None:
    """`python -m eval.vqa`: answers, the results file, and their accuracy."""
    from eval.run import compare_speed, open_session  # only here: scoring needs no torch

    if (args.questions is None) != (args.images is None) or args.annotations and args.questions is None:
        raise UserError(
            "--questions, --images and --annotations go together: give all of them, or none for the embedded scenes"
        )
    if args.questions is None:
        benchmark = embedded(1200 if args.limit is None else args.limit)
        blind = blind_answers(benchmark, embedded(TRAIN_QUESTIONS, "train"))
    else:
        source = args.annotations or (args.questions if args.scoring in IN_ONE_FILE else None)
        benchmark = from_files(args.questions, source, args.images, args.limit)
        blind = blind_of(args, benchmark) if benchmark.annotations else None
    session = open_session(args, "vqa")
    answers = answer(session.model, session.processor, benchmark, args.prompt, **session.options)
    session.report_left_out()
    if not answers:
        raise UserError(f"none of the {len(benchmark.questions)} questions could be asked: repair what is named above")
    write_results(session.out / "results.json", answers)
    files = ["results.json", "answers.jsonl"] + ["questions.json", "annotations.json"] * (args.questions is None)
    if args.questions is None:  # the files that `score` wants
        for name, content in zip(files[2:], scenes.vqav2_files("test", len(benchmark.pictures)), strict=True):
            key = name.removesuffix(".json")
            content[key] = content[key][: len(benchmark.questions)]
            write_text(session.out / name, json.dumps(content) + "\n")
    summary = score_answers(benchmark, answers, args.scoring) if benchmark.annotations else {}
    columns = {}
    if blind is not None:  # on the same questions as the model
        columns["blind"] = score_answers(benchmark, {id_: blind[id_] for id_ in answers}, args.scoring)
    if args.json:
        print(json.dumps(summary | columns | ({"left_out": session.left_out} if session.left_out else {})))
    elif summary:
        print_table(
            f"VQA accuracy (%), {args.scoring} scoring, {len(answers)} questions, {session.title}",
            {"model": summary} | columns,
        )
    if args.one_by_one:
        asks = asks_of(benchmark, args.prompt)[: args.one_by_one]
        speed = compare_speed(session.model, session.processor, asks, args.max_new_tokens, args.batch_size)
        print(
            "{questions} questions: {one_by_one:.1f} a second one by one, {batched:.1f} batched, {factor:.1f} times as "
            "fast; {same:.1f} % of the answers agree".format(
                **speed, factor=speed["batched"] / speed["one_by_one"], same=100 * speed["agree"]
            ),
            file=sys.stderr if args.json else sys.stdout,
        )
    if not args.json:
        print(f"in {session.out}: {', '.join(files)}")


def add_data_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--questions",
        required=required,
        help="questions file (VQAv2, GQA, TextVQA or VizWiz)" + ("" if required else " (default: the embedded scenes)"),
    )
    parser.add_argument(
        "--annotations",
        help="annotations file (default: the questions file, which holds the answers too in GQA, TextVQA and VizWiz)",
    )
    parser.add_argument("--scoring", choices=SCORERS, default="official", help="scorer (default: %(default)s)")
    parser.add_argument(
        "--blind",
        nargs="*",
        metavar="FILE",
        help="score the best guess without a picture too: from training QUESTIONS ANNOTATIONS, or, "
        "without files, the best constant answer of each question type (default: only on the "
        "embedded scenes, from their train split)",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.vqa", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data_flags(parser, required=False)
    parser.add_argument("--images", metavar="DIR", help="folder of the pictures of --questions")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEMPLATE", help="(default: %(default)r)")
    parser.add_argument(
        "--one-by-one",
        type=int,
        default=0,
        metavar="N",
        help="also ask the first N questions one at a time, and print by how much that is slower and "
        "whether the answers agree (default: %(default)s)",
    )
    commands = parser.add_subparsers(dest="command")
    scorer = commands.add_parser("score", help="score a results file", description="Score a results file.")
    add_data_flags(scorer, required=True)
    scorer.add_argument("--results", required=True, help='results file, [{"question_id", "answer"}, …]')
    scorer.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON only (default: a table)"
    )
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["score"]:
        from eval.run import add_answer_flags

        add_answer_flags(parser, "questions to ask, the first N (default: all of files, 1200 of the embedded scenes)")
    args = parser.parse_args(argv)
    score(args) if args.command == "score" else run(args)


if __name__ == "__main__":
    run_command(main)
