"""A benchmark is a class: its questions, how an answer is scored, and what of the scores is printed and written.

In: a `Benchmark` and the command line. Out: a table of all models that the flags name, their measures with 95 %
intervals over pictures, and paired differences; of each model a folder with results.json, scores.json, and the log
from which an interrupted call goes on. `--results FILE` scores answers instead of asking, `--blind` asks about gray
pictures too. A new benchmark is one file like `eval/pope.py`.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
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

    def __init__(self, **prompts: str):
        """prompts: by kind of model (`eval.open.kind_of`), for those whose training tells none."""
        self.prompts = {"text": "Question: {question}\nAnswer:"} | prompts

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


# Asking


def flags_for(benchmark: Benchmark, args: Namespace, subject) -> Namespace:
    """The flags, with a model's wording, and its prompt: --prompt, or else that of its training, or of its kind."""
    from eval.open import kind_of, stored_prompt  # here, since scoring a file starts without torch

    given = getattr(args, "wording", None)
    default = benchmark.prompts.get(given or kind_of(subject.source), PROMPT)
    prompt = getattr(args, "prompt", None) or (default if given else stored_prompt(subject, default))
    return Namespace(**vars(args) | {"template": check_prompt(prompt), "wording": given or kind_of(subject.source)})


def questions_for(benchmark: Benchmark, args: Namespace) -> list[Question]:
    """The questions that the flags of `flags_for` name. Raises UserError."""
    if questions := benchmark.questions(args):
        return questions
    raise UserError(f"{benchmark.name}: there are no questions: check the data and --limit")


def ask_models(benchmark: Benchmark, args: Namespace) -> Results:
    """The rows of all models that the flags name. Raises UserError."""
    from eval.open import models_of, open_model, out_folder

    subjects, questions, results = models_of(args), {}, {}
    for subject in subjects:
        tell(f"{benchmark.name}: {subject.introduction}", args)
    for subject in subjects:
        own = flags_for(benchmark, args, subject)
        key = own.template, own.wording  # models that are asked alike share their questions
        questions[key] = questions.get(key) or questions_for(benchmark, own)
        folder = args.out / subject.title if args.out and len(subjects) > 1 else args.out
        out = out_folder(folder, subject.title, benchmark.name)
        opened = open_model(args, subject, text=benchmark.reads_text)
        results |= ask_model(benchmark, questions[key], opened, subject, out, args)
        tell(f"files: {out}", args)
        del opened  # before the next model is read
    return results


def ask_model(benchmark: Benchmark, questions: list[Question], opened: tuple, subject, out: Path, args) -> Results:
    """The rows of an opened model, of the same model on gray pictures, and of the baselines; writes its files."""
    from eval.answer import ask_all, open_log
    from model.generate import CompiledStep

    log, compiled = out / "answers.jsonl", CompiledStep(opened[0]) if args.compile else None
    if not args.resume:
        with open_log(log) as file:
            file.truncate(0)
    options = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size, "log": log, "compiled": compiled}
    sets, results, left_out = {subject.title: questions}, {}, {}
    if args.blind:
        sets[f"{subject.title}, blind"] = [benchmark.blind(question) for question in questions]
    for title, asked in sets.items():
        answers = ask_all(*opened, asked, **options, left_out=left_out, progress=f"{benchmark.name}, {title}")
        if answers.count(None) == len(asked):
            reason = next(iter(left_out.values()))
            raise UserError(f"{benchmark.name}: none of {len(asked)} questions could be asked: {reason}")
        results[title] = benchmark.rows(questions, benchmark.refine(*opened, asked, answers, args))
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
    args = parser_of(benchmark).parse_args(argv)
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


def parser_of(benchmark: Benchmark) -> ArgumentParser:
    """The parser of a benchmark's command: its own flags, how questions are asked, where answers go, and the models."""
    from eval.open import add_model_flags

    parser = command_parser(f"eval.{benchmark.name}", sys.modules[type(benchmark).__module__].__doc__ or "")
    for name, options in benchmark.flags.items():
        add_flag(parser, name, **options)
    files = "score this file of answers instead of asking; give it again to compare"
    add_flag(parser, "--results", files, action="append", metavar="FILE")
    add_flag(parser, "--blind", "ask the same model about gray pictures too", False)
    out = "folder of the files, of each model in it where there are several (default: runs/eval/MODEL/COMMAND)"
    add_flag(parser, "--out", out, type=Path, metavar="DIR")
    resume = "keep earlier answers in answers.jsonl of --out, as far as model, picture and prompt are the same"
    add_flag(parser, "--resume", resume, True)
    add_flag(parser, "--batch-size", "prompts at a time", 64, type=positive, metavar="N")
    tokens = dict(type=positive, metavar="N")
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", benchmark.max_new_tokens, **tokens)
    compiled = "decode full batches with torch.compile, on CUDA as a CUDA graph; the first batch takes up to a minute"
    add_flag(parser, "--compile", compiled, False)
    add_flag(parser, "--json", "print JSON only (default: tables)", False)
    add_model_flags(parser, many=True)
    return parser
