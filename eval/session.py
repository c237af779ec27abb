"""Open a model as a command's flags say, and run a benchmark on it.

In: `--model`, `--adapter` and the flags of asking. Out: a model in eval mode, its processor and its title; the report
and the files of a benchmark. `eval/run.py` asks the questions.
"""

import argparse
import errno
import json
import os
import stat
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from eval import figures
from eval.command import Command, Report, add_json_flag, positive, print_report, whole
from eval.datasets import PROMPT, TEXT, check_prompt
from eval.run import ask_all, compare_speed
from lora import adapter
from model.common import UserError, file_errors, read_field, read_json, shown, write_text
from model.device import DTYPES, choose_device, choose_dtype
from model.generate import CompiledStep
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import EMBEDDED
from weights.load import load_model


def check_out(path: Path | None) -> None:
    """Raise UserError if nothing can be written to the folder `path`; before a large model is read, not after it."""
    if path is None:
        return
    with file_errors(path):
        if path.is_symlink() and not path.exists():
            raise FileExistsError(errno.EEXIST, "is a link to nothing", str(path))
        existing = path.absolute()
        while not (mode := _mode(existing)):
            existing = existing.parent
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(existing))
        for part in path.absolute().relative_to(existing).parts:
            _mode(existing / part)  # raises OSError for a name that is too long
        tempfile.TemporaryDirectory(dir=existing, prefix=".check-").cleanup()


def _mode(path: Path) -> int | None:
    """The mode of a file or folder; None if it is not there."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_figure(path: Path | None) -> None:
    """Raise UserError if no figure can be written to the file `path`, as `check_out`."""
    if path is not None:
        figures.check_name(path)
        check_out(path.parent)
        with file_errors(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--model, --adapter, --device and --dtype."""
    parser.add_argument(
        "--model",
        metavar="SRC",
        help="a folder, a hub id, a preset, or `embedded` (default: the base of the adapter, else `embedded`)",
    )
    parser.add_argument(
        "--adapter",
        metavar="RUN",
        help="a run of train.finetune, or any folder with a PEFT adapter; `none` for the base alone "
        "(default: without --model, the last run in runs/ on the embedded base)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: bf16 on CUDA, else fp32)")
    parser.add_argument(
        "--max-length",
        type=positive,
        default=8192,
        metavar="N",
        help="limit of a prompt's tokens, its pictures' included, and of an answer's (default: %(default)s)",
    )


def add_answer_flags(parser: argparse.ArgumentParser, limit: str, default: int | None, max_new_tokens: int) -> None:
    """The model's flags; how many questions are asked and how; where the answers go. `limit` is the help of --limit."""
    add_model_flags(parser)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--limit", type=positive, default=default, metavar="N", help=limit)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of answers and figures (default: runs/eval/MODEL/COMMAND)"
    )
    parser.add_argument(
        "--resume",
        action=switch,
        default=True,
        help="keep the answers of an earlier call in answers.jsonl of --out, as far as model, picture and prompt are "
        "the same (default: --resume)",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="prompts at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=max_new_tokens,
        metavar="N",
        help="limit of an answer's tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-outside",
        action=switch,
        default=False,
        help="read pictures whose names in the files lead out of their folder (default: --no-allow-outside)",
    )
    parser.add_argument(
        "--compile",
        action=switch,
        default=False,
        help="decode full batches with torch.compile, on CUDA as a CUDA graph; the first batch takes up to a minute "
        "(default: --no-compile)",
    )
    parser.add_argument(
        "--one-by-one",
        type=whole(0),
        default=0,
        metavar="N",
        help="also ask the first N questions one at a time, and print by how much that is slower and whether the "
        "answers agree (default: %(default)s)",
    )
    add_json_flag(parser)


def model_of(args: argparse.Namespace) -> tuple[str, Path | None, str]:
    """(source, run or None, title) of the model that the flags name. Raises UserError for a folder without adapter."""
    if args.adapter is None and args.model is None:
        args.adapter = last_run() or "none"  # looked up once: another run may end between two calls
    run = None if args.adapter in (None, "none") else Path(args.adapter)
    if run is None:
        source = args.model or EMBEDDED
        return source, None, Path(source).name
    if (run / "model").is_dir():  # `--full` wrote a whole model
        return str(run / "model"), None, run.name
    return args.model or adapter.base_of(run) or EMBEDDED, run, run.name


def stored_prompt(args: argparse.Namespace) -> str:
    """The prompt template of the training of the model that the flags name; PROMPT if none is stored.

    It is in the run's config.json, where it counts for data that has questions: those of the embedded scenes and of
    JSONL files are complete prompts; else in adapter_config.json. Raises UserError for one without {question}.
    """
    source, run, _ = model_of(args)
    folder = run or (Path(source).parent if Path(source).name == "model" else None)
    for name in ("config.json", "adapter_config.json") if folder else ():
        path = folder / name
        stored = read_json(path) if path.is_file() else {}
        if "data" in stored and not str(stored["data"]).startswith(("vqav2:", "shards:")):
            return PROMPT
        if "prompt" in stored:
            return check_prompt(read_field(stored, "prompt", TEXT, shown(path)))
    return PROMPT


def open_model(args: argparse.Namespace) -> tuple[PaliGemma, Processor, str]:
    """The model that the flags name, its processor, and a title for tables and figures. Raises UserError."""
    new_tokens = getattr(args, "max_new_tokens", 1)
    if new_tokens > args.max_length:
        raise UserError(f"--max-new-tokens {new_tokens} is more than --max-length {args.max_length}: lower or raise it")
    source, run, title = model_of(args)
    device = choose_device(args.device)
    model = load_model(source, dtype=choose_dtype(args.dtype, device), device=device)
    if run is not None:
        adapter.load(model, run)
    return model.eval(), Processor.from_source(source, max_length=args.max_length), title


def last_run(folder: Path = Path("runs")) -> str | None:
    """The newest finished run on the embedded base, if there is one. Broken folders are named on stderr and skipped."""
    finished = []
    for summary in folder.glob("*/summary.json"):
        run = summary.parent
        try:
            with file_errors(summary):
                config = run / "config.json"
                if not config.exists() or read_json(config).get("base") != EMBEDDED:
                    continue
                if not (run / "model").is_dir():
                    adapter.base_of(run)
                finished.append((summary.stat().st_mtime, str(run)))
        except UserError as error:
            print(f"skipped {shown(run)}: {error}", file=sys.stderr)
    return max(finished)[1] if finished else None


@dataclass(frozen=True)
class Session:
    """A model and its title, the output folder, and the options of `ask_all`."""

    model: PaliGemma
    processor: Processor
    title: str
    out: Path
    options: dict

    @property
    def left_out(self) -> dict[str, str]:
        """By id, why a question could not be asked."""
        return self.options["left_out"]

    def report_left_out(self) -> None:
        """Name on stderr the questions that could not be asked, and write all of them to left_out.json."""
        path = self.out / "left_out.json"
        path.unlink(missing_ok=True)
        if not self.left_out:
            return
        write_text(path, json.dumps(self.left_out, indent=1, ensure_ascii=False) + "\n")
        print(
            f"left out {len(self.left_out)} questions (all: {path}); repair their files, and the same command asks "
            "them alone",
            file=sys.stderr,
        )
        for reason, count in Counter(self.left_out.values()).most_common(5):
            print(f"  {shown(reason, 500)} ({count} questions)", file=sys.stderr)


def open_session(args: argparse.Namespace, command: str) -> Session:
    """The session that the flags of `add_answer_flags` describe. Raises UserError."""
    model, processor, title = open_model(args)
    out = args.out or Path("runs", "eval", title, command)
    log = out / "answers.jsonl"
    if not args.resume:
        log.unlink(missing_ok=True)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "log": log,
        "left_out": {},
        "compiled": CompiledStep(model) if args.compile else None,
    }
    return Session(model, processor, title, out, options)


def run(command: Command, args: argparse.Namespace) -> None:
    """Ask a model all questions of a benchmark, print the report and write its files. Raises UserError."""
    if getattr(args, "prompt", "") is None:
        args.prompt = stored_prompt(args)
    check_out(args.out)
    data, sets = command.load(args)  # bad input is reported before a large model is read
    session = open_session(args, command.name)
    answers = {}
    for name, asks in sets.items():
        options = session.options | {"progress": f"{name}, {session.title}"}
        answers[name] = ask_all(session.model, session.processor, asks, **options)
    session.report_left_out()
    if all(answer is None for of_set in answers.values() for answer in of_set):
        count = sum(map(len, answers.values()))
        raise UserError(f"none of the {count} questions could be asked: repair what is named above")
    report = command.finish(args, data, answers, session.out, session.title)
    left_out = {"left_out": session.left_out} if session.left_out else {}
    print_report(Report({**report.values, **left_out}, report.lines), args.json)
    if args.one_by_one:
        print_speed(session, next(iter(sets.values()))[: args.one_by_one], args)
    if not args.json:
        print(f"in {session.out}: {', '.join(report.files)}")


def print_speed(session: Session, asks: list, args: argparse.Namespace) -> None:
    """How much faster batches are than single questions; on stderr with --json."""
    speed = compare_speed(session.model, session.processor, asks, args.max_new_tokens, args.batch_size)
    print(
        f"{speed['questions']} questions: {speed['one_by_one']:.1f} a second one by one, {speed['batched']:.1f} "
        f"batched, {speed['batched'] / speed['one_by_one']:.1f} times as fast; {100 * speed['agree']:.1f} % of the "
        "answers agree",
        file=sys.stderr if args.json else sys.stdout,
    )
