"""A benchmark is a class: its questions, how an answer is scored, and what of the scores is printed
and written.

In: a `Benchmark` and the command line. Out: a table of all models that the flags name, their
measures with 95 % intervals over pictures, and paired differences; of each model a folder with
results.json, scores.json, and the log from which an interrupted call goes on. A new benchmark is
one file like `eval/pope.py`.
"""

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.command import add_flag, add_limit, add_model_flags, command_parser, positive
from eval.data.files import LOOKED_FOR, check, check_unique, read, some
from eval.data.record import PROMPT, check_prompt
from eval.question import Answer, Question, read_certainty
from eval.report import calibration, interval_of, interval_text, markdown_table
from model.common import UserError, quoted, shown, write_text
from model.confidence import Certainty

PROMPT_FLAG = dict(
    help=f"prompt with {{question}} in it (default: that of the run's training, else {PROMPT!r})"
)
FLAGS = {
    "--results": dict(
        help="score this file instead of asking; again to compare", action="append", metavar="FILE"
    ),
    "--blind": dict(help="ask the same model about gray pictures too", default=False),
    "--out": dict(
        help="folder of the files (default: runs/eval/MODEL/COMMAND)", type=Path, metavar="DIR"
    ),
    "--resume": dict(
        help="keep earlier answers of the same model to the same questions", default=True
    ),
    "--batch-size": dict(help="prompts at a time", default=64, type=positive, metavar="N"),
    "--compile": dict(
        help="decode full batches with torch.compile, on CUDA as a CUDA graph", default=False
    ),
    "--json": dict(help="print JSON only (default: tables)", default=False),
}


class Row(NamedTuple):
    """A question, its answer (None: it could not be asked), and its scores, 0 to 1, by measure."""

    question: Question
    answer: Any
    scores: Mapping[str, float]
    sure: Sequence[Certainty] = ()  # of each answer that was decoded, where this is known


# in files of answers
ID_KEYS = ("question_id", "questionId", "index", "id", "image")
ANSWER = r"(^|_)(answer|text|pred(iction)?|response|output|generated)$"  # keys of an answer
UNKNOWN_ID = r"(^|_)([qu]?id|idx|[Ii]ndex|no)$|I[dD]$"
# lines of each table
AT_LIMIT = "ended at the limit of tokens"  # the share of answers without an end token
ECE = "expected calibration error"  # on own data, which are scored by exact match
BLIND = ", blind"  # the end of a title: the model, asked about gray pictures
Results = dict[str, list[Row]]  # by the title of a model
Summary = dict[str, dict[str, float | None]]  # the numbers of a table, by line and measure


class Benchmark:
    """name: of the command. flags: by name, the arguments of `add_flag`. limit: the help of
    --limit."""

    name = ""
    flags: Mapping[str, Mapping] = {}
    limit = "questions, the first N (default: all)"
    max_new_tokens = 32

    def __init__(self, **prompts: str):
        """prompts: by wording (see `eval.open.wording_of`), taken where a model's training stores
        none. With one for `text`, language models can be asked too."""
        self.prompts = prompts

    def questions(self, args: Namespace) -> list[Question]:
        """From the flags; args.template is the prompt of a model. Raises UserError."""
        raise NotImplementedError

    def score(self, question: Question, answer: Answer) -> Mapping[str, float]:
        """The scores of one answer, 0 to 1; empty where nothing is known to be right."""
        raise NotImplementedError

    def rows(
        self,
        questions: Sequence[Question],
        answers: Sequence[Answer | None],
        sure: Mapping[Any, Certainty] = {},
    ) -> list[Row]:
        """A row for each answer; overridden where several questions are scored together. sure: how
        sure the model was of answers, by the id of their question."""
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            if answer is not None:
                scores = self.score(question, answer)
                rows.append(Row(question, answer, scores, certainties_of(sure, question)))
        return rows

    def blind(self, question: Question) -> Question:
        """The same question with every picture gray."""
        return question.blind()

    def summary(self, rows: Sequence[Row]) -> Summary:
        """By default the mean of every measure in percent, over all rows and by kind."""
        kinds = by_kind(rows)
        kinds.pop("", None)
        lines = {"overall": means(rows)}
        for kind, of_kind in kinds.items():
            name = f"type {kind}" if kind in lines else kind
            lines[name] = means(of_kind)
        return lines

    def baselines(self, rows: Sequence[Row]) -> Results:
        """The rows of answers that need no model, by title, to the questions of `rows`."""
        return {}

    def read(self, file: str, args: Namespace) -> list[Row]:
        """The rows of a file of answers (--results), for which no pictures are looked for."""
        before = LOOKED_FOR.set(False)
        try:
            questions = self.questions(args)
        finally:
            LOOKED_FOR.reset(before)
        return self.rows(questions, *read_answers(file, questions))

    def write(self, rows: Sequence[Row], out: Path, subject: Any) -> None:
        """Write the files of one model, a `Subject`."""
        records = []
        for row in rows:
            record = {"question_id": row.question.id, "answer": row.answer}
            records.append(record | certainty_fields(row))
        write_json(out / "results.json", records, indent=0)


def check_no_images(args: Namespace) -> None:
    """Raise UserError for a folder of pictures where the embedded scenes are asked about."""
    if args.images:
        raise UserError("--images is of other data than the embedded scenes: give --data, too")


def certainties_of(sure: Mapping[Any, Certainty], *questions: Question) -> list[Certainty]:
    """The certainties of questions, of those that have one."""
    return [sure[question.id] for question in questions if question.id in sure]


def certainty_fields(row: Row) -> dict[str, Any]:
    """What an entry of results.json says of a row's only answer: how sure the model was of it, and
    whether it ended."""
    if not row.sure:
        return {}
    (certainty,) = row.sure
    return {"confidence": certainty.confidence, "ended": certainty.ended}


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Write a value as JSON; with an indent of 0 a list has an entry a line. Raises UserError."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def read_answers(
    file: str | Path, questions: Sequence[Question]
) -> tuple[list[Answer], dict[int | str, Certainty]]:
    """The answer to each question, from {"question_id", "answer"} objects, or GQA's {"questionId",
    "prediction"}, MMBench's {"index", "prediction"} or VizWiz's {"image", "answer"}; without ids,
    as in POPE's files, in the order of the questions. And by id a `Certainty` of each answer that
    was decoded; none, if the file lacks one of them. Raises UserError."""
    known = {str(question.id): question for question in questions}
    in_order = iter(known)
    answers = {}
    sure = {}

    def add(record: dict) -> None:
        # 1. its question, and the model's answer
        ids = [record[name] for name in ID_KEYS if name in record]
        are_one = len({*map(str, ids)} & known.keys()) < 2
        check(are_one, f"the ids {some(ids)} are of several questions")
        id_ = str(ids[0]) if ids else next(in_order, "one more")
        strange = [name for name in record if re.search(UNKNOWN_ID, name) and not ids]
        check(not strange, f"{some(strange)} is no id that is known here: name it question_id")
        said = {name: record[name] for name in record if re.search(ANSWER, name)}
        answer = next(iter(said.values()), None)
        is_clear = said == dict.fromkeys(said, answer)  # else one may be the truth, or the question
        check(is_clear, f"{some(list(said))} differ, and one alone is the model's")
        check(id_ in known and id_ not in answers, f"id {shown(id_)} is unknown, or occurs twice")
        check(known[id_].takes(answer), f"answer is {quoted(answer)}")
        # 2. whether the file is of these questions, and of these right answers
        prompt = known[id_].prefix
        text = str(record.get("question", ""))
        is_asked = text.strip().lower() in prompt.lower()
        check(is_asked, f"{quoted(text)} is not {quoted(prompt)}: see --prompt and --wording")
        right = record.get("right")  # what our own files of own data say
        truths = getattr(known[id_].truth, "truths", None)
        is_other = isinstance(right, list) and right != truths
        check(not is_other, "other answers were right: the data has changed since")
        # 3. what is kept
        answers[id_] = answer
        if certainty := read_certainty(record):
            sure[known[id_].id] = certainty

    read(file, add)
    if lost := [id_ for id_ in known if id_ not in answers]:
        problem = f"{len(lost)} questions have no answer ({some(lost)}): give an answer to each"
        raise UserError(f"{shown(file)}: {problem}")
    decoded = [question for question in questions if not question.choices]
    if len(sure) < len(decoded):
        sure = {}
    return [answers[id_] for id_ in known], sure


def read_rows(file: str, make: Callable) -> list[Row]:
    """The rows of a file that holds questions too. Raises UserError, also for an id that occurs
    twice."""
    rows = read(file, make)
    check_unique((row.question.id for row in rows), file)
    return rows


# The command


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    """`python -m eval.NAME`: ask the models, or read --results; print, and write. Raises
    UserError."""
    args = parser_of(benchmark).parse_args(argv)
    if not args.results:
        results = results_of_models(benchmark, args)
    elif args.model or args.adapter or args.blind or args.out:
        raise UserError(
            "--results scores what is there: leave --model, --adapter, --blind and --out out"
        )
    else:
        args.template = getattr(args, "prompt", None) or PROMPT
        results = {}
        for file in dict.fromkeys(args.results):
            results[file] = benchmark.read(file, args)
        results |= benchmark.baselines(results[args.results[0]])
    values = values_of(benchmark, results)
    if args.json:
        print(json.dumps(values))
    elif any(of_model["summary"] for of_model in values.values()):
        print("\n".join(["", *summary_table(values), "", *comparison_table(values)]))
    else:
        print("no right answers are known: nothing is scored")


def parser_of(benchmark: Benchmark) -> ArgumentParser:
    """The parser of a benchmark's command."""
    module = sys.modules[type(benchmark).__module__]
    parser = command_parser(module.__spec__.name, module.__doc__)
    flags = dict(benchmark.flags)
    flags.setdefault("--limit", dict(help=benchmark.limit, type=positive, metavar="N"))
    for name, options in flags.items():
        add_flag(parser, name, **options)
    add_limit(parser, benchmark.max_new_tokens)
    for name, options in FLAGS.items():
        add_flag(parser, name, **options)
    add_model_flags(parser, many=True)
    return parser


def flags_for(benchmark: Benchmark, args: Namespace, subject) -> Namespace:
    """The flags, with the wording and the prompt for one model. The prompt is that of the flags,
    else of its training, else of its wording."""
    from eval.open import stored_prompt, wording_of

    given = getattr(args, "wording", None)
    wording = given or "paligemma"
    if not given and (benchmark.prompts or "wording" in args):
        wording = wording_of(subject.source)
    prompt = getattr(args, "prompt", None)
    if not prompt:
        prompt = benchmark.prompts.get(wording, PROMPT)
        if not given:
            prompt = stored_prompt(subject, prompt)
    return Namespace(**vars(args) | {"template": check_prompt(prompt), "wording": wording})


def results_of_models(benchmark: Benchmark, args: Namespace) -> Results:
    """The rows of the models that the flags name, on gray pictures too with --blind, and of the
    baselines; writes the files of each model. Raises UserError."""
    from eval.open import out_folder, subjects_of  # here: a file is scored without torch

    subjects = subjects_of(args)
    talk = sys.stderr if args.json else sys.stdout
    for subject in subjects:
        note = ""
        if not args.model and not args.adapter and subject.name != "embedded":
            note = " (the newest run in ./runs; --adapter takes another)"
        print(f"{benchmark.name}: {shown(subject.name)}{note}", file=talk)
    results = {}
    for subject in subjects:
        # 1. its questions, and a folder of its own
        title = subject.title
        questions = benchmark.questions(flags_for(benchmark, args, subject))
        path = args.out
        if path and len(subjects) > 1:
            path /= title
        out = out_folder(path, title, benchmark.name)
        # 2. its answers
        left_out = {}
        of_model = results_of_model(benchmark, args, subject, questions, out, left_out)
        for reason, count in Counter(left_out.values()).most_common(5):
            problem = f"left out {count} of {len(questions)} questions: {shown(reason, 500)}"
            print(problem, file=sys.stderr)
        # 3. its files
        benchmark.write(of_model[title], out, subject)
        of_model |= benchmark.baselines(of_model[title])
        values = values_of(benchmark, of_model)
        scores = {"model": subject.name, "left_out": left_out, "results": values}
        write_json(out / "scores.json", scores)
        print(f"files: {shown(out)}", file=talk)
        results |= of_model
    return results


def results_of_model(
    benchmark: Benchmark, args: Namespace, subject, questions: Sequence[Question], out, left_out
) -> Results:
    """The rows of one model, with --blind also on gray pictures. The model is in memory during this
    call alone. left_out: gets, by id, why a question cannot be asked. Raises UserError where none
    can."""
    from eval.answer import ask_all, open_log
    from eval.open import open_subject
    from model.compiled import CompiledStep

    model, processor = open_subject(args, subject, text="text" in benchmark.prompts)
    log = out / "answers.jsonl"
    # without --resume the log begins empty
    with open_log(log, anew=not args.resume):
        pass
    compiled = CompiledStep(model) if args.compile else None
    by_title = {subject.title: questions}
    if args.blind:
        by_title[subject.title + BLIND] = [benchmark.blind(question) for question in questions]
    of_model = {}
    for title, of_title in by_title.items():
        sure = {}
        answers = ask_all(
            model,
            processor,
            of_title,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            progress=f"{benchmark.name}, {shown(title)}",
            log=log,
            left_out=left_out,
            compiled=compiled,
            sure=sure,
        )
        if answers.count(None) == len(answers):
            reason = next(iter(left_out.values()), "there are none")
            problem = f"none of {len(answers)} questions could be asked: {reason}"
            raise UserError(f"{benchmark.name}: {problem}")
        of_model[title] = benchmark.rows(questions, answers, sure)
    return of_model


# From scores to tables


def means(rows: Sequence[Row]) -> dict[str, float | None]:
    """The mean of every measure in percent, over the rows that have it."""
    scores = defaultdict(list)
    for row in rows:
        for measure, score in row.scores.items():
            scores[measure].append(score)
    return {measure: 100 * sum(of_rows) / len(of_rows) for measure, of_rows in scores.items()}


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by the kind of their questions."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[row.question.kind].append(row)
    return kinds


def mean_over(lines: Sequence[Mapping]) -> dict[str, float]:
    """The mean of every measure over the lines of a table; one that is not known counts as 0."""
    made = {}
    for name in lines[0]:
        made[name] = sum(line[name] or 0 for line in lines) / len(lines)
    return made


def values_of(benchmark: Benchmark, results: Results) -> dict[str, dict]:
    """What --json prints, by title. "summary": of the benchmark. "measures": the mean of each in
    percent, with its 95 % interval over groups of questions. "difference": the paired one to the
    first model, on the "paired" questions that both answered; a blind model is compared with its
    own. AT_LIMIT and ECE: where certainties are known."""

    def identity(row: Row) -> tuple:
        return row.question.id, row.question.choices

    def percent(rows: Sequence[Row], scores: Sequence[float]) -> dict[str, float]:
        groups = [row.question.group or row.question.key for row in rows]
        return interval_of([100 * score for score in scores], groups)

    values = {}
    for title, rows in results.items():
        # 1. the model that it is compared with
        reference = next(iter(results))
        if title.endswith(BLIND):
            reference = title.removesuffix(BLIND)
        other = {}
        if title != reference:
            other = {identity(row): row.scores for row in results[reference]}
        # 2. the measures, and their differences
        measures = {}
        for measure in dict.fromkeys(measure for row in rows for measure in row.scores):
            scored = [row for row in rows if measure in row.scores]
            found = percent(scored, [row.scores[measure] for row in scored])
            found["questions"] = len(scored)
            both = [row for row in scored if measure in other.get(identity(row), ())]
            if both:
                gaps = [row.scores[measure] - other[identity(row)][measure] for row in both]
                found["difference"] = percent(both, gaps)
                found["paired"] = len(both)
            measures[measure] = found
        values[title] = {"summary": benchmark.summary(rows), "measures": measures}
        # 3. how many answers did not end; on own data, how well confidence predicts a right answer
        ended = [certainty.ended for row in rows for certainty in row.sure]
        if ended:
            values[title][AT_LIMIT] = 100 * ended.count(False) / len(ended)
        pairs = []
        for row in rows:
            if row.sure and "exact_match" in row.scores:
                pairs.append((row.sure[0].confidence, row.scores["exact_match"]))
        if pairs:
            error, bins = calibration(pairs)
            values[title] |= {ECE: 100 * error, "calibration": bins}
    return values


def summary_table(values: Mapping[str, Mapping]) -> list[str]:
    """Of `values_of`: a column for each model, or with several measures a table for each model."""
    # 1. lines and measures of all models
    summaries = {title: of_model["summary"] for title, of_model in values.items()}
    lines = dict.fromkeys(line for summary in summaries.values() for line in summary)
    measures = {}
    for summary in summaries.values():
        for numbers in summary.values():
            measures |= dict.fromkeys(numbers)
    if len(measures) > 1 and len(values) > 1:
        tables = []
        for title, of_model in values.items():
            tables += [*summary_table({title: of_model}), ""]
        return tables
    # 2. one table
    cells = []
    for line in lines:
        row = [line]
        for summary in summaries.values():
            numbers = summary.get(line, {})
            row += [cell(numbers.get(measure)) for measure in measures]
        cells.append(row)
    for line in (AT_LIMIT, ECE):
        found = [of_model.get(line) for of_model in values.values()]
        if set(found) != {None}:
            cells.append([line, *map(cell, found), *[""] * (len(measures) - 1)])
    head = [*measures, *summaries]
    if len(summaries) == 1:
        head = [*summaries, *measures]
    return markdown_table([f"{head[0]}, %", *head[1:]], cells)


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def comparison_table(values: Mapping[str, Mapping]) -> list[str]:
    """Of `values_of`: a line for each model, its measures with intervals, and its differences."""
    compared = {title: of_model["measures"] for title, of_model in values.items()}
    measures = dict.fromkeys(measure for found in compared.values() for measure in found)
    if not measures:
        return []
    has_differences = len(compared) > 1
    counts = {}
    cells = []
    notes = []
    # 1. a line for each model
    for title, found in compared.items():
        scored = [of_measure["questions"] for of_measure in found.values()]
        counts[title] = max(scored, default=0)
        line = [title]
        for measure in measures:
            line.append(interval_text(found[measure]) if measure in found else "")
            if not has_differences:
                continue
            line.append("")
            if difference := found.get(measure, {}).get("difference"):
                verdict = "n.s." if difference["low"] <= 0 <= difference["high"] else "*"
                line[-1] = f"{interval_text(difference, signed=True)} {verdict}"
                paired, count = found[measure]["paired"], found[measure]["questions"]
                if paired < count:
                    notes.append(f"{title}: its difference is of {paired} of {count} questions")
                if title.endswith(BLIND) and difference["high"] >= 0:
                    notes.append(f"{title}: not shown to use the picture: {measure}")
        cells.append(line)
    # 2. what it counts, and the head
    most = max(counts.values())
    for title, count in counts.items():
        if count < most:
            notes.append(f"{title} has answered {count} of them")
    caption = f"{most} questions, 95 % intervals over pictures"
    if has_differences:
        caption += (
            "; differences to the first line, of blind ones to their model; * where the interval "
            "has no 0"
        )
    head = ["%"]
    for measure in measures:
        head += [measure, "difference"] if has_differences else [measure]
    return [caption, "", *markdown_table(head, cells), *map(shown, notes)]
