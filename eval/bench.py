"""A benchmark is a class: its questions, how an answer is scored, and what of the scores is printed
and written.

In: a `Benchmark` and the command line. Out: a table of all models that the flags name, their
measures with 95 % intervals over pictures, and paired differences; of each model a folder with
results.json, scores.json, and the log from which an interrupted call goes on. A new benchmark is
one file like `eval/pope.py`.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

from eval.command import add_flag, command_parser, positive
from eval.data.published import LOOKED_FOR, PROMPT, check, check_prompt, read, some
from eval.question import Answer, Question
from eval.report import bootstrap, interval_text, markdown_table
from model.common import UserError, quoted, shown, write_text

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


IDS = ("question_id", "questionId", "index", "id", "image")  # in files of answers
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
        """prompts: by `eval.open.kind_of`, where the training tells none; one for `text` if these
        can be asked."""
        self.prompts = prompts

    def questions(self, args: Namespace) -> list[Question]:
        """From the flags; args.template is the prompt of a model. Raises UserError."""
        raise NotImplementedError

    def score(self, question: Question, answer: Answer) -> Mapping[str, float]:
        """The scores of one answer, 0 to 1; empty where nothing is known to be right."""
        raise NotImplementedError

    def rows(self, questions: Sequence[Question], answers: Sequence[Answer | None]) -> list[Row]:
        """A row for each answer; overridden where several questions are scored together."""
        pairs = zip(questions, answers, strict=True)
        return [
            Row(question, answer, self.score(question, answer))
            for question, answer in pairs
            if answer is not None
        ]

    def blind(self, question: Question) -> Question:
        """The same question with every picture gray."""
        return question.blind()

    def summary(self, rows: Sequence[Row]) -> Summary:
        """By default the mean of every measure in percent, over all rows and by kind."""
        return {"overall": means(rows)} | {
            kind: means(of) for kind, of in by_kind(rows).items() if kind
        }

    def baselines(self, rows: Sequence[Row]) -> Results:
        """The rows of answers that need no model, by title, to the questions of `rows`."""
        return {}

    def read(self, file: str, args: Namespace) -> list[Row]:
        """The rows of a file of answers (--results), for which no pictures are looked for."""
        context = copy_context()
        context.run(LOOKED_FOR.set, False)
        questions = context.run(self.questions, args)
        return self.rows(questions, read_answers(file, questions))

    def write(self, rows: Sequence[Row], out: Path, subject: Any) -> None:
        """Write the files of one model, a `Subject`."""
        write_records(
            out / "results.json", [{"question_id": q.id, "answer": answer} for q, answer, _ in rows]
        )


def write_records(path: Path, records: Sequence[Mapping]) -> None:
    """Write a JSON list, an entry a line. Raises UserError."""
    write_text(path, json.dumps(records, ensure_ascii=False, indent=0) + "\n")


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[Answer]:
    """The answer to each question, from {"question_id", "answer"} objects, or GQA's {"questionId",
    "prediction"}, MMBench's {"index", "prediction"} or VizWiz's {"image", "answer"}; without ids,
    as in POPE's files, in the order of the questions. Raises UserError."""
    known, answers = {str(question.id): question for question in questions}, {}
    in_order = iter(known)

    def add(record: dict) -> None:
        names = [name for name in IDS if name in record]
        id_ = str(record[names[0]]) if names else next(in_order, "one more")
        answer = next(
            (record[name] for name in ("answer", "prediction", "text") if name in record), None
        )
        check(id_ in known and id_ not in answers, f"id {shown(id_)} is unknown, or occurs twice")
        check(known[id_].takes(answer), f"answer is {quoted(answer)}")
        asked, text = known[id_].prefix, str(record.get("question", ""))
        is_asked = text.strip().lower() in asked.lower()
        check(is_asked, f"{quoted(text)} is not {quoted(asked)}: see --prompt and --wording")
        answers[id_] = answer

    read(file, add)
    if lost := [id_ for id_ in known if id_ not in answers]:
        raise UserError(
            f"{shown(file)}: {len(lost)} questions have no answer ({some(lost)}): give an answer "
            "to each"
        )
    return [answers[id_] for id_ in known]


# The command


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    """`python -m eval.NAME`: ask the models, or read --results; print, and write. Raises
    UserError."""
    args = parser_of(benchmark).parse_args(argv)
    if not args.results:
        results = ask_models(benchmark, args)
    elif args.model or args.adapter or args.blind:
        raise UserError(
            "--results scores answers that are there: leave --model, --adapter and --blind out"
        )
    else:
        args.template = getattr(args, "prompt", None) or PROMPT
        results = {file: benchmark.read(file, args) for file in dict.fromkeys(args.results)}
        results |= benchmark.baselines(results[args.results[0]])
    values = values_of(benchmark, results)
    if args.json:
        print(json.dumps(values))
    elif any(of["summary"] for of in values.values()):
        print("\n".join(["", *summary_table(values), "", *comparison_table(values)]))
    else:
        print("no right answers are known: nothing is scored")


def parser_of(benchmark: Benchmark) -> ArgumentParser:
    """The parser of a benchmark's command."""
    from eval.open import add_model_flags  # here, since scoring a file starts without torch

    module = sys.modules[type(benchmark).__module__]
    parser = command_parser(module.__spec__.name, module.__doc__)
    limits = {
        "--limit": dict(help=benchmark.limit, type=positive, metavar="N"),
        "--max-new-tokens": dict(
            help="limit of an answer's tokens",
            default=benchmark.max_new_tokens,
            type=positive,
            metavar="N",
        ),
    }
    for name, options in {**benchmark.flags, **limits, **FLAGS}.items():
        add_flag(parser, name, **options)
    add_model_flags(parser, many=True)
    return parser


def flags_for(benchmark: Benchmark, args: Namespace, subject) -> Namespace:
    """The flags with the wording and the prompt of a model: that of the flags, of its training, or
    of its kind."""
    from eval.open import kind_of, stored_prompt

    wording = getattr(args, "wording", None)
    kind = wording or (
        kind_of(subject.source) if benchmark.prompts or "wording" in args else "paligemma"
    )
    prompt = benchmark.prompts.get(kind, PROMPT)
    prompt = getattr(args, "prompt", None) or (
        prompt if wording else stored_prompt(subject, prompt)
    )
    return Namespace(**vars(args) | {"template": check_prompt(prompt), "wording": kind})


def ask_models(benchmark: Benchmark, args: Namespace) -> Results:
    """The rows of the models that the flags name, on gray pictures too with --blind, and of the
    baselines; writes the files of each model. Raises UserError."""
    from eval.answer import ask_all, open_log
    from eval.open import models_of, open_model, out_folder
    from model.compiled import CompiledStep

    subjects, results, talk = models_of(args), {}, sys.stderr if args.json else sys.stdout
    newest = (
        "" if args.model or args.adapter else " (the newest run in ./runs; --adapter takes another)"
    )
    for subject in subjects:
        print(
            f"{benchmark.name}: {shown(subject.name)}{newest * (subject.name != 'embedded')}",
            file=talk,
        )
    for subject in subjects:
        title, asked = subject.title, benchmark.questions(flags_for(benchmark, args, subject))
        out = out_folder(
            args.out / title if args.out and len(subjects) > 1 else args.out, title, benchmark.name
        )
        opened = open_model(args, subject, text="text" in benchmark.prompts)
        with open_log(log := out / "answers.jsonl", anew=not args.resume):
            pass
        options = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size, "log": log}
        options["compiled"], left_out, rows = (
            CompiledStep(opened[0]) if args.compile else None,
            {},
            {},
        )
        for name in (title, f"{title}, blind")[: 1 + args.blind]:
            shown_to = asked if name == title else [benchmark.blind(question) for question in asked]
            answers = ask_all(
                *opened,
                shown_to,
                progress=f"{benchmark.name}, {shown(name)}",
                left_out=left_out,
                **options,
            )
            if answers.count(None) == len(asked):
                reason = next(iter(left_out.values()), "there are none")
                raise UserError(
                    f"{benchmark.name}: none of {len(asked)} questions could be asked: {reason}"
                )
            rows[name] = benchmark.rows(asked, answers)
        del opened  # before the next model is read
        for reason, count in Counter(left_out.values()).most_common(5):
            print(
                f"left out {count} of {len(asked)} questions: {shown(reason, 500)}", file=sys.stderr
            )
        benchmark.write(rows[title], out, subject)
        rows |= benchmark.baselines(rows[title])
        scores = {
            "model": subject.name,
            "left_out": left_out,
            "results": values_of(benchmark, rows),
        }
        write_text(out / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False) + "\n")
        print(f"files: {shown(out)}", file=talk)
        results |= rows
    return results


# From scores to tables


def means(rows: Sequence[Row]) -> dict[str, float | None]:
    """The mean of every measure in percent, over the rows that have it."""
    measures = dict.fromkeys(measure for row in rows for measure in row.scores)
    values = {
        measure: [row.scores[measure] for row in rows if measure in row.scores]
        for measure in measures
    }
    return {measure: 100 * sum(of) / len(of) for measure, of in values.items()}


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by the kind of their questions."""
    kinds = dict.fromkeys(row.question.kind for row in rows)
    return {kind: [row for row in rows if row.question.kind == kind] for kind in kinds}


def values_of(benchmark: Benchmark, results: Results) -> dict[str, dict]:
    """For JSON, by title: the summary; and by measure the mean in percent with its 95 % interval
    over groups of questions, and the paired difference on the questions that both have answered: of
    a model on gray pictures to the model, else to the first."""

    def percent(rows: Sequence[Row], scores: Sequence[float]) -> dict[str, float]:
        interval = bootstrap(scores, [row.question.group or row.question.key for row in rows])
        return {name: 100 * value for name, value in interval._asdict().items()}

    values = {}
    for title, rows in results.items():
        reference = (
            title.removesuffix(", blind") if title.endswith(", blind") else next(iter(results))
        )
        other, measures = (
            {row.question.id: row.scores for row in results[reference] if title != reference},
            {},
        )
        for measure in dict.fromkeys(measure for row in rows for measure in row.scores):
            scored = [row for row in rows if measure in row.scores]
            found = percent(scored, [row.scores[measure] for row in scored]) | {
                "questions": len(scored)
            }
            if both := [row for row in scored if measure in other.get(row.question.id, {})]:
                found["difference"] = percent(
                    both, [r.scores[measure] - other[r.question.id][measure] for r in both]
                )
            measures[measure] = found
        values[title] = {"summary": benchmark.summary(rows), "measures": measures}
    return values


def summary_table(values: Mapping[str, Mapping]) -> list[str]:
    """Of `values_of`: a column for each model, or with several measures a table for each model."""
    summaries = {title: of["summary"] for title, of in values.items()}
    measures = list(
        dict.fromkeys(
            m for summary in summaries.values() for line in summary.values() for m in line
        )
    )
    if len(measures) > 1 and len(values) > 1:
        return [text for title, of in values.items() for text in [*summary_table({title: of}), ""]]
    head = [*summaries, *measures] if len(summaries) == 1 else [*measures, *summaries]
    lines = dict.fromkeys(line for summary in summaries.values() for line in summary)
    cells = [
        [line, *(cell(of.get(line, {}).get(m)) for of in summaries.values() for m in measures)]
        for line in lines
    ]
    return markdown_table([f"{head[0]}, %", *head[1:]], cells)


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def comparison_table(values: Mapping[str, Mapping]) -> list[str]:
    """Of `values_of`: a line for each model, its measures with intervals, and its differences."""
    compared = {title: of["measures"] for title, of in values.items()}
    measures = list(dict.fromkeys(measure for of in compared.values() for measure in of))
    counts = {
        title: max((v["questions"] for v in of.values()), default=0)
        for title, of in compared.items()
    }
    most, many, cells, notes = max(counts.values()), len(compared) > 1, [], []
    for title, of in compared.items():
        cells.append([title])
        for measure in measures:
            cells[-1] += [interval_text(of[measure]) if measure in of else "", *[""] * many]
            if difference := of.get(measure, {}).get("difference"):
                verdict = "n.s." if difference["low"] <= 0 <= difference["high"] else "*"
                cells[-1][-1] = f"{interval_text(difference, signed=True)} {verdict}"
                if title.endswith(", blind") and difference["high"] >= 0:
                    notes.append(f"{title}: not shown to use the picture: {measure}")
    notes += [
        f"{title} has answered {count} of them" for title, count in counts.items() if count < most
    ]
    note = (
        "; differences to the first line, of blind ones to their model; * where the interval has "
        "no 0" * many
    )
    head = ["%", *(name for measure in measures for name in (measure, *["difference"] * many))]
    table = [
        f"{most} questions, 95 % intervals over pictures{note}",
        "",
        *markdown_table(head, cells),
        *map(shown, notes),
    ]
    return table if measures else []
