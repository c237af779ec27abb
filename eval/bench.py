"""A benchmark is a class: its questions, how an answer is scored, and what of the scores is printed and written.

In: a `Benchmark` and the command line. Out: a table of all models that the flags name, their measures with 95 %
intervals over pictures, and paired differences; of each model a folder with results.json, scores.json, and the log
from which an interrupted call goes on. A new benchmark is one file like `eval/pope.py`.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.command import add_flag, command_parser, positive
from eval.data import PROMPT, check, check_prompt, read, some
from eval.question import Answer, Question
from eval.report import Results, Row, Summary, compare, comparison_table, means, summary_table
from model.common import UserError, quoted, shown, write_text

PROMPT_FLAG = dict(help=f"prompt with {{question}} in it (default: that of the run's training, else {PROMPT!r})")
FLAGS = {
    "--results": dict(help="score this file instead of asking; again to compare", action="append", metavar="FILE"),
    "--blind": dict(help="ask the same model about gray pictures too", default=False),
    "--out": dict(help="folder of the files (default: runs/eval/MODEL/COMMAND)", type=Path, metavar="DIR"),
    "--resume": dict(help="keep earlier answers of the same model to the same questions", default=True),
    "--batch-size": dict(help="prompts at a time", default=64, type=positive, metavar="N"),
    "--compile": dict(help="decode full batches with torch.compile, on CUDA as a CUDA graph", default=False),
    "--json": dict(help="print JSON only (default: tables)", default=False),
}


def limit_flag(help: str) -> dict:
    return dict(help=help, type=positive, metavar="N")


class Benchmark:
    """name: of the command. flags: by name, the arguments of `add_flag`."""

    name = ""
    flags: Mapping[str, Mapping] = {}
    max_new_tokens = 32

    def __init__(self, **prompts: str):
        """prompts: by `eval.open.kind_of`, where the training tells none; one for `text` if these can be asked."""
        self.prompts = prompts

    def questions(self, args: Namespace) -> list[Question]:
        """From the flags; args.template is the prompt of a model. Raises UserError."""
        raise NotImplementedError

    def score(self, question: Question, answer: Answer) -> Mapping[str, float]:
        """The scores of one answer, 0 to 1; empty where nothing is known to be right."""
        raise NotImplementedError

    def rows(self, questions: Sequence[Question], answers: Sequence[Answer | None]) -> list[Row]:
        """A row for each question; overridden where several questions are scored together."""
        return [Row(q, a, {} if a is None else self.score(q, a)) for q, a in zip(questions, answers, strict=True)]

    def blind(self, question: Question) -> Question:
        """The same question with every picture gray."""
        return question.blind()

    def summary(self, rows: Sequence[Row]) -> Summary:
        """By default the mean of every measure in percent, over all rows and by kind."""
        kinds = dict.fromkeys(row.question.kind for row in rows if row.question.kind)
        return {"overall": means(rows)} | {k: means([row for row in rows if row.question.kind == k]) for k in kinds}

    def baselines(self, rows: Sequence[Row]) -> Results:
        """The rows of answers that need no model, by title, to the questions of `rows`."""
        return {}

    def read(self, file: str, args: Namespace) -> list[Row]:
        """The rows of a file of answers (--results)."""
        questions = self.questions(args)
        return self.rows(questions, read_answers(file, questions))

    def write(self, rows: Sequence[Row], out: Path, subject: Any) -> None:
        """Write the files of one model, a `Subject`."""
        results = [{"question_id": row.question.id, "answer": row.answer} for row in rows if row.answer is not None]
        write_text(out / "results.json", json.dumps(results, ensure_ascii=False, indent=0) + "\n")


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[Answer]:
    """The answer to each question, from {"question_id", "answer"} objects, or GQA's {"questionId", "prediction"} or
    VizWiz's {"image", "answer"}; without ids, as in POPE's files, in the order of the questions. Raises UserError."""
    known, answers = {str(question.id): question for question in questions}, {}
    in_order = iter(known)

    def add(record: dict) -> None:
        names = [name for name in ("question_id", "questionId", "image") if name in record]
        id_ = str(record[names[0]]) if names else next(in_order, "one more")
        answer = next((record[name] for name in ("answer", "prediction", "text") if name in record), None)
        check(id_ in known and id_ not in answers, f"id {shown(id_)} is unknown, or occurs twice")
        check(isinstance(answer, list if known[id_].scored else str), f"answer is {quoted(answer)}")
        asked, text = known[id_].prefix, str(record.get("question", ""))
        check(text.strip().lower() in asked.lower(), f"answers {quoted(text)}, not {quoted(asked)}")
        answers[id_] = answer

    read(file, add)
    if lost := [id_ for id_ in known if id_ not in answers]:
        raise UserError(f"{shown(file)}: {len(lost)} questions have no answer ({some(lost)}): give an answer to each")
    return [answers[id_] for id_ in known]


def flags_for(benchmark: Benchmark, args: Namespace, subject) -> Namespace:
    """The flags with the wording and the prompt of a model: that of the flags, of its training, or of its kind."""
    from eval.open import kind_of, stored_prompt  # here, since scoring a file starts without torch

    wording = getattr(args, "wording", None)
    kind = wording or (kind_of(subject.source) if benchmark.prompts or "wording" in args else "paligemma")
    prompt = benchmark.prompts.get(kind, PROMPT)
    prompt = getattr(args, "prompt", None) or (prompt if wording else stored_prompt(subject, prompt))
    return Namespace(**vars(args) | {"template": check_prompt(prompt), "wording": kind})


def ask_models(benchmark: Benchmark, args: Namespace) -> Results:
    """The rows of the models that the flags name, on gray pictures too with --blind, and of the baselines; writes the
    files of each model. Raises UserError."""
    from eval.answer import ask_all, open_log
    from eval.open import models_of, open_model, out_folder
    from model.generate import CompiledStep

    subjects, questions, results, talk = models_of(args), {}, {}, sys.stderr if args.json else sys.stdout
    newest = "" if args.model or args.adapter else " (the newest run in ./runs; --adapter takes another)"
    for subject in subjects:
        print(f"{benchmark.name}: {shown(subject.name)}{newest * (subject.name != 'embedded')}", file=talk)
    for subject in subjects:
        flags, title = flags_for(benchmark, args, subject), subject.title
        key = flags.template, flags.wording  # models that are asked alike share their questions
        questions[key] = asked = questions.get(key) or benchmark.questions(flags)
        folder = args.out / title if args.out and len(subjects) > 1 else args.out
        out = out_folder(folder, title, benchmark.name)
        opened = open_model(args, subject, text="text" in benchmark.prompts)
        with open_log(out / "answers.jsonl", anew=not args.resume):
            pass
        options = {"batch_size": args.batch_size, "compiled": CompiledStep(opened[0]) if args.compile else None}
        options |= {"max_new_tokens": args.max_new_tokens, "log": out / "answers.jsonl", "left_out": {}}
        rows: Results = {}
        for name in (title, f"{title}, blind")[: 1 + args.blind]:
            shown_to = asked if name == title else [benchmark.blind(question) for question in asked]
            answers = ask_all(*opened, shown_to, progress=f"{benchmark.name}, {name}", **options)
            if answers.count(None) == len(asked):
                reason = next(iter(options["left_out"].values()), "there are none")
                raise UserError(f"{benchmark.name}: none of {len(asked)} questions could be asked: {reason}")
            rows[name] = benchmark.rows(asked, answers)
        del opened  # before the next model is read
        for reason, count in Counter(options["left_out"].values()).most_common(5):
            print(f"left out {count} of {len(asked)} questions: {shown(reason, 500)}", file=sys.stderr)
        benchmark.write(rows[title], out, subject)
        rows |= benchmark.baselines(rows[title])
        scores = {"model": subject.name, "left_out": options["left_out"], "results": values_of(benchmark, rows)}
        write_text(out / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False) + "\n")
        print(f"files: {shown(out)}", file=talk)
        results |= rows
    return results


def values_of(benchmark: Benchmark, results: Results) -> dict[str, dict]:
    """For JSON: by title the summary, and each measure with its interval and paired difference."""
    measures = compare(results)
    return {title: {"summary": benchmark.summary(rows), "measures": measures[title]} for title, rows in results.items()}


def parser_of(benchmark: Benchmark) -> ArgumentParser:
    """The parser of a benchmark's command."""
    from eval.open import add_model_flags

    parser = command_parser(f"eval.{benchmark.name}", sys.modules[type(benchmark).__module__].__doc__)
    tokens = dict(help="limit of an answer's tokens", default=benchmark.max_new_tokens, type=positive, metavar="N")
    for name, options in {**benchmark.flags, **FLAGS, "--max-new-tokens": tokens}.items():
        add_flag(parser, name, **options)
    add_model_flags(parser, many=True)
    return parser


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    """`python -m eval.NAME`: ask the models, or read --results; print, and write. Raises UserError."""
    args = parser_of(benchmark).parse_args(argv)
    if not args.results:
        results = ask_models(benchmark, args)
    elif args.model or args.adapter or args.blind:
        raise UserError("--results scores answers that are there: leave --model, --adapter and --blind out")
    else:
        args.template = getattr(args, "prompt", None) or PROMPT
        results = {file: benchmark.read(file, args) for file in dict.fromkeys(args.results)}
        results |= benchmark.baselines(results[args.results[0]])
    values = values_of(benchmark, results)
    if args.json:
        print(json.dumps(values, ensure_ascii=False))
    elif any(of["summary"] for of in values.values()):
        print("\n".join(["", *summary_table(values), "", *comparison_table(values)]))
    else:
        print("no right answers are known: nothing is scored")
