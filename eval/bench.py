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
from typing import Any

from eval.command import add_flag, command_parser, positive
from eval.data import PROMPT, check, check_prompt, read, some
from eval.question import Answer, Question
from eval.report import Results, Row, Summary, compare, comparison_table, means, summary_table
from model.common import UserError, quoted, shown, write_text

PROMPT_FLAG = dict(help=f"prompt with {{question}} in it (default: that of the run's training, else {PROMPT!r})")


def limit_flag(help: str) -> dict:
    return dict(help=help, type=positive, metavar="N")


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

    def blind(self, question: Question) -> Question:
        """The same question with every picture gray."""
        return question.blind()

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


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[Answer]:
    """The answer to each question, from {"question_id", "answer"} objects, or GQA's {"questionId", "prediction"} or
    VizWiz's {"image", "answer"}; without ids, as in POPE's files, in the order of the questions.

    Raises UserError for another question than was asked, and for missing, extra and double ids.
    """
    known, in_order, said = {str(question.id): question for question in questions}, iter(questions), {}

    def add(record: dict) -> None:
        names = [name for name in ("question_id", "questionId", "image") if name in record]
        id_ = str(record[names[0]] if names else getattr(next(in_order, None), "id", "one more"))
        answer = next((record[name] for name in ("answer", "prediction", "text") if name in record), None)
        check(id_ in known and id_ not in said, f"id {shown(id_)} " + ("occurs twice" if id_ in said else "is unknown"))
        check(isinstance(answer, list if known[id_].scored else str), f"answer is {quoted(answer)}")
        asked, text = known[id_].prefix, str(record.get("question", ""))
        check(text.strip().lower() in asked.lower(), f"answers {quoted(text)}, not {quoted(asked)}")
        said[id_] = answer

    read(file, add)
    if lost := [id_ for id_ in known if id_ not in said]:
        raise UserError(f"{shown(file)}: {len(lost)} questions have no answer ({some(lost)}): give an answer to each")
    return [said[id_] for id_ in known]


# Asking


def questions_for(benchmark: Benchmark, args: Namespace, default: str = PROMPT) -> list[Question]:
    """The questions in the prompt --prompt, or else in `default`. Raises UserError."""
    template = check_prompt(getattr(args, "prompt", None) or default)
    questions = benchmark.questions(Namespace(**vars(args) | {"template": template}))
    if not questions:
        raise UserError(f"{benchmark.name}: there are no questions: check the data and --limit")
    return questions


def ask_models(benchmark: Benchmark, args: Namespace) -> Results:
    """The rows of all models that the flags name. Questions are read before the first model is. Raises UserError."""
    # here, since scoring a file needs no model and starts without torch
    from eval.open import models_of, open_model, out_folder, stored_prompt
    from eval.text import reader

    subjects, results = models_of(args), {}
    texts = [benchmark.reads_text and reader.config_of(subject.source) is not None for subject in subjects]
    prompts = [stored_prompt(s, reader.PROMPT if t else PROMPT) for s, t in zip(subjects, texts, strict=True)]
    questions = {prompt: questions_for(benchmark, args, prompt) for prompt in dict.fromkeys(prompts)}
    newest = " (the newest run in ./runs; --adapter takes another)" if not args.model and not args.adapter else ""
    for subject in subjects:
        tell(f"{benchmark.name}: {subject.name}{newest * (subject.run is not None)}", args)
    for subject, prompt in zip(subjects, prompts, strict=True):
        folder = args.out / subject.title if args.out and len(subjects) > 1 else args.out
        out = out_folder(folder, subject.title, benchmark.name)
        opened = open_model(args, subject, text=benchmark.reads_text)
        results |= ask(benchmark, questions[prompt], opened, subject, out, args)
        tell(f"files: {out}", args)
        del opened  # before the next model is read
    return results


def ask(benchmark: Benchmark, questions: Sequence[Question], opened: tuple, subject, out: Path, args) -> Results:
    """The rows of an opened model, of the same model on gray pictures, and of the baselines; writes its files."""
    from eval.answer import ask_all, open_log
    from model.generate import CompiledStep

    sets = {subject.title: list(questions)}
    if args.blind:
        sets[f"{subject.title}, blind"] = [benchmark.blind(question) for question in questions]
    log, compiled = out / "answers.jsonl", CompiledStep(opened[0]) if args.compile else None
    if not args.resume:
        with open_log(log) as file:
            file.truncate(0)
    options = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size, "log": log, "compiled": compiled}
    results: Results = {}
    left_out: dict[Any, str] = {}
    for title, asked in sets.items():
        problems: dict[Any, str] = {}
        answers = ask_all(*opened, asked, **options, left_out=problems, progress=f"{benchmark.name}, {title}")
        if len(problems) == len(asked):
            reason = next(iter(problems.values()))
            raise UserError(f"{benchmark.name}: none of {len(asked)} questions could be asked: {reason}")
        results[title] = benchmark.rows(questions, benchmark.refine(*opened, asked, answers, args))
        left_out = problems | left_out
    for reason, count in Counter(left_out.values()).most_common(5):
        print(f"left out {count} of {len(questions)} questions: {shown(reason, 500)}", file=sys.stderr)
    benchmark.write(results[subject.title], out, subject)
    results |= baselines_of(benchmark, results[subject.title])
    scores = {"model": subject.name, "left_out": left_out, "results": values_of(benchmark, results)}
    write_text(out / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False) + "\n")
    return results


def values_of(benchmark: Benchmark, results: Results) -> dict[str, dict]:
    """For JSON: by title the summary, and each measure with its interval and paired difference."""
    compared = compare(results)
    return {title: {"summary": benchmark.summary(rows), "measures": compared[title]} for title, rows in results.items()}


def baselines_of(benchmark: Benchmark, rows: Sequence[Row]) -> Results:
    """The baselines on the questions that have an answer."""
    questions = [row.question for row in rows if row.answer is not None]
    return {title: benchmark.rows(questions, answers) for title, answers in benchmark.baselines(questions).items()}


# The command


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    """`python -m eval.NAME`: ask the models, or read --results; print, and write. Raises UserError."""
    from eval.open import add_model_flags

    parser = command_parser(f"eval.{benchmark.name}", sys.modules[type(benchmark).__module__].__doc__ or "")
    for name, options in benchmark.flags.items():
        add_flag(parser, name, **options)
    files = "score this file of answers instead of asking; give it again to compare"
    add_flag(parser, "--results", files, action="append", metavar="FILE")
    add_ask_flags(parser, benchmark.max_new_tokens)
    add_model_flags(parser, many=True)
    args = parser.parse_args(argv)
    if args.results:
        if args.model or args.adapter or args.blind:
            raise UserError("--results scores answers that are there: leave --model, --adapter and --blind out")
        args.template = getattr(args, "prompt", None) or PROMPT
        results = {file: benchmark.read(file, args) for file in dict.fromkeys(args.results)}
        results |= baselines_of(benchmark, results[args.results[0]])
    else:
        results = ask_models(benchmark, args)
    summaries = {title: benchmark.summary(rows) for title, rows in results.items()}
    if args.json:
        print(json.dumps(values_of(benchmark, results), ensure_ascii=False))
    elif any(summaries.values()):
        print("\n".join(["", *summary_table(summaries), "", *comparison_table(compare(results))]))
    else:
        print("no right answers are known: nothing is scored")


def tell(line: str, args: Namespace) -> None:
    """Print a line that is no result: with --json on stderr."""
    print(shown(line, 10_000), file=sys.stderr if args.json else sys.stdout)


def add_ask_flags(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How questions are asked, and where the answers go."""
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
