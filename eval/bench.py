"""A benchmark is a class: its questions, how an answer is scored, and what of the scores is printed and written.

In: a `Benchmark` and the command line. Out: a table of all models that the flags name, their measures with 95 %
intervals over pictures, and paired differences; of each model a folder with results.json, scores.json, and the log
from which an interrupted call goes on. `--results FILE` scores answers instead of asking, `--blind` asks about gray
pictures too. A new benchmark is one file like `eval/pope.py`.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.command import add_flag, command_parser, positive
from eval.datasets import PROMPT, check_prompt
from eval.question import Answer, Question
from eval.report import difference_text, interval_text, markdown_table
from eval.statistics import Interval, bootstrap
from model.common import UserError, quoted, read_bytes, read_json, read_jsonl, shown, write_text

Summary = dict[str, dict[str, float | None]]  # the numbers of a table, by line and measure
PROMPT_FLAG = {
    "help": f"prompt with {{question}} in it (default: that of the run's training, else {PROMPT!r})",
    "metavar": "TEMPLATE",
}


class Row(NamedTuple):
    """A question, its answer (None: it could not be asked), and its scores, 0 to 1, by measure."""

    question: Question
    answer: Any
    scores: Mapping[str, float]


Results = dict[str, list[Row]]  # by the title of a model


class Benchmark:
    """name: of the command. flags: by name, the arguments of `add_flag`. reads_text: language models for text alone can
    be asked, since all questions have choices that are `scored`."""

    name = ""
    flags: Mapping[str, Mapping] = {}
    max_new_tokens = 32
    reads_text = False

    def questions(self, args: Namespace) -> list[Question]:
        """From the flags; args.template is the prompt of a model. Raises UserError."""
        raise NotImplementedError

    def score(self, question: Question, answer: Answer) -> Mapping[str, float]:
        """The scores of one answer, 0 to 1; empty where nothing is known to be right."""
        raise NotImplementedError

    def rows(self, questions: Sequence[Question], answers: Sequence[Answer | None]) -> list[Row]:
        """A row for each question; overridden where several questions are scored together."""
        pairs = zip(questions, answers, strict=True)
        return [Row(question, a, {} if a is None else self.score(question, a)) for question, a in pairs]

    def summary(self, rows: Sequence[Row]) -> Summary:
        """By default the mean of every measure in percent, over all rows and by kind."""
        kinds: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            kinds[row.question.kind].append(row)
        return {"overall": means(rows)} | {kind: means(of_kind) for kind, of_kind in kinds.items() if kind}

    def baselines(self, questions: Sequence[Question]) -> dict[str, list[Answer | None]]:
        """Answers that need no model, by title."""
        return {}

    def refine(self, model, processor, questions: Sequence[Question], answers: list, args: Namespace) -> list:
        """The answers with what else is to be known of the open model."""
        return answers

    def read(self, file: str, args: Namespace) -> list[Row]:
        """The rows of a file of answers (--results)."""
        questions = self.questions(args)
        return self.rows(questions, read_answers(file, questions))

    def write(self, rows: Sequence[Row], out: Path, subject: Any) -> None:
        """Write the files of one model, a `Subject`."""
        results = [{"question_id": row.question.id, "answer": row.answer} for row in rows if row.answer is not None]
        write_text(out / "results.json", json.dumps(results, ensure_ascii=False, indent=0) + "\n")


def means(rows: Sequence[Row]) -> dict[str, float | None]:
    """The mean of every measure in percent, over the rows that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for measure, value in row.scores.items():
            values[measure].append(value)
    return {measure: 100 * sum(of) / len(of) for measure, of in values.items()}


# Files of answers


def records_of(file: str | Path) -> list[tuple[str, dict]]:
    """The objects of a JSON list or of JSON lines, each with its place. Raises UserError."""
    if read_bytes(file).lstrip()[:1] != b"[":
        return list(read_jsonl(file))
    records = [(f"{shown(file)}[{number}]", record) for number, record in enumerate(read_json(file, list))]
    if bad := [where for where, record in records if not isinstance(record, dict)]:
        raise UserError(f"{bad[0]}: expected an object: correct the record")
    return records


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[Answer]:
    """The answer to each question, from {"question_id", "answer"} objects, or GQA's {"questionId", "prediction"} or
    VizWiz's {"image", "answer"}; without ids, as in POPE's files, in the order of the questions.

    A "question" that is repeated must be the one that was asked. Raises UserError that names missing, extra and double
    ids.
    """
    said: dict[str, tuple] = {}
    for number, (where, record) in enumerate(records_of(file)):
        id_ = next((record[key] for key in ("question_id", "questionId", "image") if key in record), None)
        answer = next((record[key] for key in ("answer", "prediction", "text") if key in record), None)
        if id_ is None and number < len(questions):
            id_ = questions[number].id
        if str(id_) in said:
            raise UserError(f"{where}: id {quoted(id_)} occurs twice: keep one record of each")
        said[str(id_)] = where, answer, str(record.get("question", ""))
    known = {str(question.id) for question in questions}
    lost, extra = [id_ for id_ in known if id_ not in said], [id_ for id_ in said if id_ not in known]
    if lost or extra:
        wrong = [
            f"{len(ids)} {word} ({shown(ids[0])}, …)" for word, ids in (("missing", lost), ("extra", extra)) if ids
        ]
        raise UserError(f"{shown(file)}: ids are {' and '.join(wrong)}: give the answers to these questions")
    for question in questions:
        where, answer, text = said[str(question.id)]
        if not isinstance(answer, list if question.scored else str):
            raise UserError(f"{where}: answer is {quoted(answer)}: write what the model says")
        if text.strip().lower() not in question.prefix.lower():
            raise UserError(f"{where}: answers {quoted(text)}, not {quoted(question.prefix)}: give the file of these")
    return [said[str(question.id)][1] for question in questions]


def baselines_of(benchmark: Benchmark, rows: Sequence[Row]) -> Results:
    """The baselines on the questions that have an answer."""
    questions = [row.question for row in rows if row.answer is not None]
    return {title: benchmark.rows(questions, answers) for title, answers in benchmark.baselines(questions).items()}


# Asking


def ask(benchmark: Benchmark, questions: Sequence[Question], opened: tuple, subject, out: Path, args) -> Results:
    """The rows of one model, of the same model on gray pictures, and of the baselines; writes the model's files."""
    from eval.answer import ask_all
    from model.generate import CompiledStep

    model, processor = opened
    sets = {subject.title: list(questions)}
    if args.blind:
        sets[f"{subject.title}, blind"] = [question.blind() for question in questions]
    if not args.resume:
        (out / "answers.jsonl").unlink(missing_ok=True)
    options = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size, "log": out / "answers.jsonl"}
    compiled = CompiledStep(model) if args.compile else None
    results: Results = {}
    left_out: dict[Any, str] = {}
    for title, asked in sets.items():
        progress = f"{benchmark.name}, {title}"
        problems: dict[Any, str] = {}
        answers = ask_all(model, processor, asked, **options, left_out=problems, compiled=compiled, progress=progress)
        left_out = problems | left_out
        if all(answer is None for answer in answers):
            reason = next(iter(left_out.values()), "there are none")
            raise UserError(f"{benchmark.name}: none of {len(asked)} questions could be asked: {reason}")
        results[title] = benchmark.rows(questions, benchmark.refine(model, processor, asked, answers, args))
    for reason, count in Counter(left_out.values()).most_common(5):
        print(f"left out {count} of {len(questions)} questions: {shown(reason, 500)}", file=sys.stderr)
    benchmark.write(results[subject.title], out, subject)
    results |= baselines_of(benchmark, results[subject.title])
    printed = {"model": subject.name, "left_out": left_out, "results": values_of(benchmark, results)}
    write_text(out / "scores.json", json.dumps(printed, indent=1, ensure_ascii=False) + "\n")
    return results


def questions_for(benchmark: Benchmark, args: Namespace, default: str = PROMPT) -> list[Question]:
    """The questions in the prompt --prompt, or else in `default`. Raises UserError."""
    template = check_prompt(getattr(args, "prompt", None) or default)
    questions = benchmark.questions(Namespace(**vars(args) | {"template": template}))
    if not questions:
        raise UserError(f"{benchmark.name}: there are no questions: check the data and --limit")
    ids = Counter(str(question.id) for question in questions)
    if twice := [id_ for id_, count in ids.items() if count > 1]:
        raise UserError(
            f"{benchmark.name}: {len(twice)} ids occur twice ({shown(twice[0])}, …): keep one question of each"
        )
    return questions


def ask_models(benchmark: Benchmark, args: Namespace) -> Results:
    """The rows of all models that the flags name. Questions are read before the first model is. Raises UserError."""
    from eval.open import models_of, open_any, open_model, out_folder, stored_prompt
    from eval.text import reader

    subjects = models_of(args)
    defaults = [
        stored_prompt(s, reader.PROMPT if benchmark.reads_text and reader.config_of(s.source) else PROMPT)
        for s in subjects
    ]
    questions = {default: questions_for(benchmark, args, default) for default in dict.fromkeys(defaults)}
    newest = " (the newest run in ./runs; --adapter takes another)" if not args.model and not args.adapter else ""
    for subject in subjects:
        show(f"{benchmark.name}: {subject.name}{newest * (subject.run is not None)}", args)
    results: Results = {}
    for subject, default in zip(subjects, defaults, strict=True):
        folder = args.out / subject.title if args.out and len(subjects) > 1 else args.out
        out = out_folder(folder, subject.title, benchmark.name)
        opened = (open_any if benchmark.reads_text else open_model)(args, subject)
        results |= ask(benchmark, questions[default], opened, subject, out, args)
        show(f"files: {out}", args)
        del opened  # before the next model is read
    return results


# Tables


def values_of(benchmark: Benchmark, results: Results) -> dict[str, dict]:
    """For JSON: by title the summary, and each measure with its interval and paired difference."""
    compared = compare(results)
    return {title: {"summary": benchmark.summary(rows), "measures": compared[title]} for title, rows in results.items()}


def compare(results: Results) -> dict[str, dict[str, dict]]:
    """Each measure in percent with its 95 % interval over groups of questions, and its paired difference, on the
    questions that both have answered: of a model on gray pictures to the model, of others to the first."""
    scores = {title: {row.question.id: row for row in rows} for title, rows in results.items()}
    first, values = next(iter(scores)), {}
    for title, by_id in scores.items():
        reference = title.removesuffix(", blind")
        reference = first if reference == title or reference not in scores else reference
        values[title] = {}
        for measure in dict.fromkeys(measure for row in by_id.values() for measure in row.scores):
            own = {id_: row.scores[measure] for id_, row in by_id.items() if measure in row.scores}
            values[title][measure] = percent(own, by_id)._asdict() | {"questions": len(own)}
            other = {id_: row.scores[measure] for id_, row in scores[reference].items() if measure in row.scores}
            both = {id_: own[id_] - other[id_] for id_ in own if id_ in other}
            if title != reference and both:
                values[title][measure]["difference"] = percent(both, by_id)._asdict()
    return values


def percent(scores: Mapping[Any, float], rows: Mapping[Any, Row]) -> Interval:
    groups = [rows[id_].question.group or rows[id_].question.key for id_ in scores]
    return Interval(*(100 * value for value in bootstrap(list(scores.values()), groups)))


def summary_table(summaries: Mapping[str, Summary]) -> list[str]:
    """The lines of the summaries; several measures of several models have a table each."""
    columns = {(title, measure): "" for title, of in summaries.items() for line in of.values() for measure in line}
    if len({measure for _, measure in columns}) > 1 and len(summaries) > 1:
        return [text for title, of in summaries.items() for text in [*summary_table({title: of}), ""]]
    lines = list(dict.fromkeys(line for of in summaries.values() for line in of))
    values = [[summaries[title].get(line, {}).get(measure) for title, measure in columns] for line in lines]
    cells = [[line, *("-" if v is None else f"{v:.2f}" for v in row)] for line, row in zip(lines, values, strict=True)]
    alone = len(summaries) == 1
    title = next(iter(summaries)) if alone else next((measure for _, measure in columns), "")
    return markdown_table([f"{title}, %", *(measure if alone else title for title, measure in columns)], cells)


def comparison_table(compared: Mapping[str, Mapping[str, Mapping]]) -> list[str]:
    """A line for each model: its measures with intervals, and its differences."""
    measures = list(dict.fromkeys(measure for of in compared.values() for measure in of))
    if not measures:
        return []
    cells, notes, many = [], [], len(compared) > 1
    for title, of in compared.items():
        cells.append([title])
        for measure in measures:
            value = of.get(measure)
            cells[-1].append(interval_text(value) if value else "")
            difference = Interval(**value["difference"]) if value and "difference" in value else None
            if many:
                cells[-1].append(difference_text(difference, difference.significant) if difference else "")
            if difference and title.endswith(", blind") and measure == measures[0] and difference.high >= 0:
                notes.append(f"{title}: the picture was not used, answers are not worse by more than chance")
    counts = {title: max((value["questions"] for value in of.values()), default=0) for title, of in compared.items()}
    most = max(counts.values())
    notes += [f"{title} has answered {count} of them" for title, count in counts.items() if count < most]
    of_what = "differences to the first line, of blind ones to their model; * where the interval has no 0"
    head = f"{most} questions, 95 % intervals over pictures" + f"; {of_what}" * many
    columns = [name for measure in measures for name in ((measure, "difference") if many else (measure,))]
    return [head, "", *markdown_table(["%", *columns], cells), *notes]


# The command


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    """`python -m eval.NAME`: ask the models, or read --results; print, and write. Raises UserError."""
    parser = command_parser(f"eval.{benchmark.name}", sys.modules[type(benchmark).__module__].__doc__ or "")
    add_flags(parser, benchmark)
    args = parser.parse_args(argv)
    if args.results:
        args.template = getattr(args, "prompt", None) or PROMPT
        results = {file: benchmark.read(file, args) for file in dict.fromkeys(args.results)}
        results |= baselines_of(benchmark, results[args.results[0]])
    else:
        results = ask_models(benchmark, args)
    if args.json:
        print(json.dumps(values_of(benchmark, results), ensure_ascii=False))
        return
    summaries = {title: benchmark.summary(rows) for title, rows in results.items()}
    if any(summaries.values()):
        print("\n".join(["", *summary_table(summaries), "", *comparison_table(compare(results))]))
    else:
        print("no right answers are known: nothing is scored")


def show(line: str, args: Namespace) -> None:
    """Print a line that is no result: with --json on stderr."""
    print(shown(line, 10_000), file=sys.stderr if args.json else sys.stdout)


def add_flags(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """The flags of a benchmark, of all benchmarks, and of the models."""
    from eval.open import add_model_flags

    for name, options in benchmark.flags.items():
        add_flag(parser, name, **options)
    results = "score this file of answers instead of asking; give it again to compare"
    add_flag(parser, "--results", results, action="append", metavar="FILE")
    add_ask_flags(parser, benchmark.max_new_tokens, "--limit" not in benchmark.flags)
    add_model_flags(parser, many=True)


def add_ask_flags(parser: argparse.ArgumentParser, max_new_tokens: int, limit: bool = True) -> None:
    """How many questions are asked and how, and where the answers go."""
    if limit:
        add_flag(parser, "--limit", "questions, the first N (default: all)", type=positive, metavar="N")
    add_flag(parser, "--blind", "ask the same model about gray pictures too", False)
    out = "folder of the files, of each model in it where there are several (default: runs/eval/MODEL/COMMAND)"
    add_flag(parser, "--out", out, type=Path, metavar="DIR")
    resume = "keep earlier answers in answers.jsonl of --out, as far as model, picture and prompt are the same"
    add_flag(parser, "--resume", resume, True)
    add_flag(parser, "--batch-size", "prompts at a time", 64, type=positive, metavar="N")
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", max_new_tokens, type=positive, metavar="N")
    compiled = "decode full batches with torch.compile, on CUDA as a CUDA graph; the first batch takes up to a minute"
    add_flag(parser, "--compile", compiled, False)
    add_flag(parser, "--json", "print JSON only (default: tables)", False)
