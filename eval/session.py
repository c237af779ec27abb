"""Open the models that a command's flags name, and run a benchmark on each.

In: `--model`, `--adapter` and the flags of asking. Out: a model in eval mode, its processor and its title; the report
and the files of a benchmark, or the comparison of several models. `eval/run.py` asks the questions.
"""

import argparse
import errno
import json
import os
import stat
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval import figures
from eval.command import Ask, Command, Report, add_flag, add_json_flag, positive, print_report, whole
from eval.compare import compare
from eval.datasets import PROMPT, TEXT, check_prompt
from eval.run import ask_all, compare_speed
from eval.text import reader
from lora import adapter
from lora.quantize import BF16_KINDS, KINDS
from model.chat import TextTokenizer, load_text_tokenizer
from model.common import UserError, file_errors, read_field, read_json, shown, write_text
from model.device import DTYPES, choose_device, choose_dtype
from model.generate import CompiledStep
from model.language import LanguageModel
from model.mamba import KERNELS, choose_kernel
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import EMBEDDED
from model.system_configs import LanguageConfig
from weights.load import load_model


def out_folder(path: Path | None, *parts: str) -> Path:
    """The folder of a command's files: `path`, by default runs/eval/PARTS.

    Raises UserError if nothing can be written there; before a large model is read, not after it.
    """
    path = path or Path("runs", "eval", *parts)
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
    return path


def _mode(path: Path) -> int | None:
    """The mode of a file or folder; None if it is not there."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_figure(path: Path | None) -> None:
    """Raise UserError if no figure can be written to the file `path`, as `out_folder`."""
    if path is not None:
        figures.check_name(path)
        out_folder(path.parent)
        with file_errors(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))


def add_model_flags(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """--model, --adapter and how they compute. many: several models, adapters and kinds of bits may be given."""
    several = {"action": "append"} if many else {}
    again = "; give it again to compare" if many else ""
    source = f"a folder, a hub id, a preset, or `embedded`{again} (default: the base of the adapter, else `embedded`)"
    add_flag(parser, "--model", source, metavar="SRC", **several)
    run = (
        f"a run of train.finetune, or any folder with a PEFT adapter; `none` for the base alone{again} (default: "
        "without --model, the last run in runs/ on the embedded base)"
    )
    add_flag(parser, "--adapter", run, metavar="RUN", **several)
    add_flag(parser, "--device", "cpu, cuda, mps, … (default: cuda or mps if there is one)", "auto")
    dtype = "of the weights (default: bf16 on CUDA and with --quantize int8 or int4, else fp32)"
    add_flag(parser, "--dtype", dtype, choices=list(DTYPES))
    bits = f"hold the weights in 8 or 4 bits, for memory and decoding on a CPU{again} (default: as --dtype)"
    add_flag(parser, "--quantize", bits, choices=["none", *KINDS], **several)
    add_flag(parser, "--kernel", "for the scan of Mamba, on CUDA (default: PyTorch alone)", choices=KERNELS)
    length = "limit of a prompt's tokens, its pictures' included, and of an answer's"
    add_flag(parser, "--max-length", length, 8192, type=positive, metavar="N")


def add_answer_flags(parser: argparse.ArgumentParser, limit: str, default: int | None, max_new_tokens: int) -> None:
    """The models' flags; how many questions are asked and how; where the answers go. `limit` is the help of --limit."""
    add_model_flags(parser, many=True)
    add_flag(parser, "--limit", limit, default, type=positive, metavar="N")
    out = (
        "folder of answers and figures, of each model in it where there are several (default: runs/eval/MODEL/COMMAND)"
    )
    add_flag(parser, "--out", out, type=Path, metavar="DIR")
    resume = "keep earlier answers in answers.jsonl of --out, as far as model, picture and prompt are the same"
    add_flag(parser, "--resume", resume, True)
    add_flag(parser, "--batch-size", "prompts at a time", 64, type=positive, metavar="N")
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", max_new_tokens, type=positive, metavar="N")
    compiled = "decode full batches with torch.compile, on CUDA as a CUDA graph; the first batch takes up to a minute"
    add_flag(parser, "--compile", compiled, False)
    single = "also ask the first N questions one at a time: how much slower is that, and do the answers agree?"
    add_flag(parser, "--one-by-one", single, 0, type=whole(0), metavar="N")
    add_json_flag(parser)


class Subject(NamedTuple):
    """A model that is asked: its source, the run with its adapter, its title for tables and figures, and how its
    weights are held, None for whole."""

    source: str
    run: Path | None
    title: str
    quantize: str | None = None

    @property
    def ways(self) -> list[str]:
        """What distinguishes it from others of its source and run."""
        return [] if self.quantize is None else [self.quantize]

    @property
    def name(self) -> str:
        """What a user reads about where the answers come from."""
        return self.source if self.run is None else f"{self.run} on {self.source}"

    @property
    def folder(self) -> Path | None:
        """The folder of the run that made it, if it has one: `--full` writes RUN/model."""
        return self.run or (Path(self.source).parent if Path(self.source).name == "model" else None)


def model_of(args: Namespace) -> Subject:
    """The model that the flags name; the last run is named on stderr. Raises UserError for a folder without adapter."""
    if args.adapter is None and args.model is None:
        args.adapter = last_run() or "none"  # looked up once: another run may end between two calls
        if args.adapter != "none":
            print(f"the last run is asked: {shown(args.adapter)}; --adapter takes another one", file=sys.stderr)
    quantize = None if args.quantize == "none" else args.quantize
    if quantize:
        subject = model_of(Namespace(model=args.model, adapter=args.adapter, quantize=None))
        subject = subject._replace(quantize=quantize)
        return subject._replace(title="-".join((subject.title, *subject.ways)))
    run = None if args.adapter in (None, "none") else Path(args.adapter)
    if run is None:
        source = args.model or EMBEDDED
        return Subject(source, None, title_of(Path(source)))
    if (run / "model").is_dir():  # `--full` wrote a whole model
        return Subject(str(run / "model"), None, run.name)
    return Subject(args.model or adapter.base_of(run) or EMBEDDED, run, title_of(run))


def title_of(folder: Path) -> str:
    """The name of a folder; RUN/best is named after its run."""
    return f"{folder.absolute().parent.name}-best" if folder.name == "best" else folder.name


def models_of(args: Namespace) -> list[Subject]:
    """The models that repeated flags name: each --model, or each --adapter on the one --model. Raises UserError."""
    models, adapters, kinds = (given or [None] for given in (args.model, args.adapter, args.quantize))
    if len(models) > 1 and args.adapter:
        raise UserError("--adapter with several --model: give one base, or none for the adapters' own")
    subjects = [
        model_of(Namespace(model=model, adapter=run, quantize=kind))
        for model in models
        for run in adapters
        for kind in kinds
    ]
    titles = Counter(subject.title for subject in subjects)
    if repeated := [s.name for s, count in Counter(subjects).items() if count > 1]:
        raise UserError(f"{shown(repeated[0])} is named twice: give each model once")
    return [s if titles[s.title] == 1 else s._replace(title=long_title(s)) for s in subjects]


def long_title(subject: Subject) -> str:
    """A title by the whole path, for models of one name."""
    path = str(subject.run or subject.source).replace(os.sep, "_").strip("_")
    return "-".join((path, *subject.ways))


def stored_prompt(subject: Subject, default: str = PROMPT) -> str:
    """The prompt template of the training of a model; PROMPT for the embedded scenes, `default` if none is stored.

    It is in the run's config.json, where it counts for data that has questions: those of the embedded scenes and of
    JSONL files are complete prompts; else in adapter_config.json. Raises UserError for one without {question}.
    """
    folder = subject.folder
    for name in ("config.json", "adapter_config.json") if folder else ():
        path = folder / name
        stored = read_json(path) if path.is_file() else {}
        sources = data_of(stored) if "data" in stored else ["vqav2:"]
        if not any(one.startswith(("vqav2:", "shards:")) for one in sources):
            return PROMPT if any(one.startswith(EMBEDDED) for one in sources) else default
        if "prompt" in stored:
            return check_prompt(read_field(stored, "prompt", TEXT, shown(path)))
    return default


def data_of(stored: Mapping[str, Any]) -> list[str]:
    """The sources in a run's config.json, which older runs wrote as one text."""
    data = stored.get("data") or []
    return [str(source) for source in (data if isinstance(data, list) else [data])]


def open_model(args: Namespace, subject: Subject) -> tuple[PaliGemma, Processor]:
    """A model and its processor, as the flags say. Raises UserError."""
    processor = Processor.from_source(subject.source, max_length=args.max_length)
    model = _load(args, subject)
    if subject.run is not None:
        adapter.load(model, subject.run)
    return model.eval(), processor


def open_language_model(args: Namespace, subject: Subject) -> tuple[LanguageModel, TextTokenizer]:
    """A language model for text alone and its tokenizer, as the flags say. Raises UserError."""
    tokenizer = load_text_tokenizer(subject.source, max_length=args.max_length)
    return _load(args, subject), tokenizer


def is_language_model(source: str) -> bool:
    """Whether `source` is a published language model for text alone."""
    return isinstance(reader.config_of(source), LanguageConfig)


def open_any(args: Namespace, subject: Subject) -> tuple[Any, Any]:
    """As `open_model`; a language model for text alone has a `TextReader` for a processor."""
    if reader.config_of(subject.source) is None:
        return open_model(args, subject)
    model = _load(args, subject)
    if subject.run is not None:
        adapter.load(model, subject.run)
    return model.eval(), reader.open_reader(subject.source, args.max_length)


def _load(args: Namespace, subject: Subject) -> Any:
    new_tokens = getattr(args, "max_new_tokens", 1)
    if new_tokens > args.max_length:
        raise UserError(f"--max-new-tokens {new_tokens} is more than --max-length {args.max_length}: lower or raise it")
    device = choose_device(args.device)
    dtype = args.dtype
    if dtype is None and device.type == "cpu" and subject.quantize in BF16_KINDS:
        dtype = "bf16"
    model = load_model(subject.source, dtype=choose_dtype(dtype, device), device=device, quantize=subject.quantize)
    choose_kernel(model, args.kernel, device)
    return model


def open_plain(subject: Subject, weight: torch.Tensor) -> PaliGemma:
    """The base of `subject` alone, in dtype and on the device of `weight`."""
    return load_model(subject.source, dtype=weight.dtype, device=weight.device, quantize=subject.quantize)


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
    """An open model, its title, the folder of its files, and the model's names."""

    model: PaliGemma
    processor: Processor
    title: str
    out: Path
    subject: Subject

    def trained_tasks(self) -> set[str] | None:
        """The tasks of the embedded scenes that the model was fine-tuned on; None where that is not known."""
        folder = self.subject.folder
        if folder is None:
            return set() if self.subject.source == EMBEDDED else None
        files = [path / "config.json" for path in (folder, folder.parent)]
        stored = next((read_json(file) for file in files if file.is_file()), {})
        if stored.get("base") != EMBEDDED or not isinstance(stored.get("tasks"), str):
            return None
        is_embedded = any(source.startswith(EMBEDDED) for source in data_of(stored))
        return set(stored["tasks"].split(",")) if is_embedded else set()


def run(command: Command, args: Namespace) -> None:
    """Ask all questions of a benchmark, print the report and write its files; of several models, the comparison.

    Bad input is reported before a large model is read. Raises UserError.
    """
    subjects, reports = models_of(args), {}
    several = len(subjects) > 1
    folders = [
        out_folder(args.out / subject.title if args.out and several else args.out, subject.title, command.name)
        for subject in subjects
    ]
    own = getattr(args, "prompt", "") is None  # each model is asked in the prompt of its training
    texts = [command.reads_text and reader.config_of(subject.source) is not None for subject in subjects]
    prompts = [
        stored_prompt(subject, reader.PROMPT if text else PROMPT) if own else getattr(args, "prompt", None)
        for subject, text in zip(subjects, texts, strict=True)
    ]
    flags = vars(args) | {"prompt_given": not own}
    loaded = {prompt: command.load(Namespace(**(flags | {"prompt": prompt}))) for prompt in dict.fromkeys(prompts)}
    for subject, out, prompt in zip(subjects, folders, prompts, strict=True):
        open_it = open_any if command.reads_text else open_model
        session = Session(*open_it(args, subject), subject.title, out, subject)
        data, sets = loaded[prompt]
        report = reports[subject.title] = answer(command, args, session, data, sets)
        if not several:
            print_report(report, args.json)
        if args.one_by_one:
            print_speed(session, next(iter(sets.values()))[: args.one_by_one], args)
        if not args.json:
            print(f"in {out}: {', '.join(report.files)}")
        del session  # before the next model is read
    if several:
        values, lines = (command.compare or compare)(reports)
        models = {title: report.values for title, report in reports.items()}
        print_report(Report({"models": models, "comparison": values}, lines), args.json)


def answer(command: Command, args: Namespace, session: Session, data: Any, sets: Mapping[str, list[Ask]]) -> Report:
    """The report of one model. Questions that could not be asked are named on stderr and in left_out.json."""
    left_out: dict[str, str] = {}
    log = session.out / "answers.jsonl"
    if not args.resume:
        log.unlink(missing_ok=True)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "log": log,
        "left_out": left_out,
        "compiled": CompiledStep(session.model) if args.compile else None,
    }
    answers = {
        name: ask_all(session.model, session.processor, asks, **options, progress=f"{name}, {session.title}")
        for name, asks in sets.items()
    }
    report_left_out(left_out, session.out / "left_out.json")
    for name, of_set in answers.items():  # no accuracy is known of such a set, not one of 0
        if all(text is None for text in of_set):
            raise UserError(f"{name}: none of the {len(of_set)} questions could be asked: repair what is named above")
    report = command.finish(args, data, answers, session)
    return report._replace(values={**report.values, "left_out": left_out}) if left_out else report


def report_left_out(left_out: Mapping[str, str], path: Path) -> None:
    """Name on stderr the questions that could not be asked, and write all of them to the file `path`."""
    path.unlink(missing_ok=True)
    if not left_out:
        return
    write_text(path, json.dumps(left_out, indent=1, ensure_ascii=False) + "\n")
    print(
        f"left out {len(left_out)} questions (all: {path}); repair their files, and the same command asks them alone",
        file=sys.stderr,
    )
    for reason, count in Counter(left_out.values()).most_common(5):
        print(f"  {shown(reason, 500)} ({count} questions)", file=sys.stderr)


def print_speed(session: Session, asks: list[Ask], args: Namespace) -> None:
    """How much faster batches are than single questions; on stderr with --json."""
    speed = compare_speed(session.model, session.processor, asks, args.max_new_tokens, args.batch_size)
    print(
        f"{speed['questions']} questions: {speed['one_by_one']:.1f} a second one by one, {speed['batched']:.1f} "
        f"batched, {speed['batched'] / speed['one_by_one']:.1f} times as fast; {100 * speed['agree']:.1f} % of the "
        "answers agree",
        file=sys.stderr if args.json else sys.stdout,
    )
