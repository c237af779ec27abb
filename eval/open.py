"""The models that a command's flags name, opened in eval mode.

In: `--model`, `--adapter` and how they compute. Out: `Subject`s, each with a title; of each a model and its processor,
and the prompt of its training.
"""

import argparse
import os
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval.command import add_flag, positive
from eval.data import PROMPT, check_prompt
from eval.text import reader
from lora import adapter
from lora.quantize import BF16_KINDS, KINDS
from model.chat import TextTokenizer, load_text_tokenizer
from model.common import UserError, file_errors, read_json, shown
from model.device import DTYPES, choose_device, choose_dtype
from model.language import LanguageModel
from model.mamba import KERNELS, choose_kernel
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import EMBEDDED
from model.system_configs import LanguageConfig
from weights.load import load_model


class Subject(NamedTuple):
    """A model that is asked: its source, the run with its adapter, its title in tables and figures, and how its weights
    are held (None: as --dtype)."""

    source: str
    run: Path | None
    title: str
    quantize: str | None = None

    @property
    def name(self) -> str:
        return self.source if self.run is None else f"{self.run} on {self.source}"

    @property
    def folder(self) -> Path | None:
        """The folder of the run that made it, if it has one: `--full` writes RUN/model."""
        return self.run or (Path(self.source).parent if Path(self.source).name == "model" else None)

    def trained_tasks(self) -> set[str] | None:
        """The tasks of the embedded scenes that the model was fine-tuned on; None where that is not known."""
        if self.folder is None:
            return set() if self.source == EMBEDDED else None
        files = [path / "config.json" for path in (self.folder, self.folder.parent)]  # RUN/best has none
        stored = next((read_json(file) for file in files if file.is_file()), {})
        if stored.get("base") != EMBEDDED or "tasks" not in stored:
            return None
        is_embedded = any(source.startswith(EMBEDDED) for source in stored["data"])
        return set(stored["tasks"].split(",")) if is_embedded else set()


def add_model_flags(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """--model, --adapter and how they compute. many: several models and adapters may be given."""
    add, repeated = partial(add_flag, parser), {"action": "append"} if many else {}
    again = "; give it again to compare" if many else ""
    source = f"a folder, a hub id, a preset, or `embedded`{again} (default: the base of the adapter, else `embedded`)"
    add("--model", source, metavar="SRC", **repeated)
    run = f"a run of train.finetune, or any folder with a PEFT adapter; `none` for the base alone{again} "
    run += "(default: without --model, the newest run in runs/ on the embedded base)"
    add("--adapter", run, metavar="RUN", **repeated)
    add("--device", "cpu, cuda, mps, … (default: cuda or mps if there is one)", "auto")
    dtype = "of the weights (default: bf16 on CUDA and with --quantize int8 or int4, else fp32)"
    add("--dtype", dtype, choices=list(DTYPES))
    bits = f"hold the weights in 8 or 4 bits, for memory and decoding on a CPU{again} (default: as --dtype)"
    add("--quantize", bits, choices=["none", *KINDS], **repeated)
    add("--kernel", "for the scan of Mamba, on CUDA (default: PyTorch alone)", choices=KERNELS)
    add("--max-length", "limit of a prompt's tokens, its pictures' included", 8192, type=positive, metavar="N")


# Which models


def model_of(args: Namespace) -> Subject:
    """The model that the flags name. Without flags the newest run, which is named on stderr. Raises UserError."""
    run, source = args.adapter, args.model
    if run is None and source is None and (run := last_run()):
        print(f"the newest run is asked: {shown(run)}; --adapter takes another one", file=sys.stderr)
    kind = None if args.quantize == "none" else args.quantize
    suffix = f"-{kind}" if kind else ""
    if run in (None, "none"):
        source = source or EMBEDDED
        return Subject(source, None, title_of(Path(source)) + suffix, kind)
    if (Path(run) / "model").is_dir():
        if source is not None:
            raise UserError(f"--adapter {shown(run)} is a whole model, written by --full: leave --model out")
        return Subject(str(Path(run) / "model"), None, Path(run).name + suffix, kind)
    return Subject(source or adapter.base_of(run) or EMBEDDED, Path(run), title_of(Path(run)) + suffix, kind)


def title_of(folder: Path) -> str:
    """The name of a folder; RUN/best is named after its run."""
    return f"{folder.absolute().parent.name}-best" if folder.name == "best" else folder.name


def models_of(args: Namespace) -> list[Subject]:
    """The models that repeated flags name: each --model, or each --adapter on the one --model. Raises UserError."""
    if len(args.model or ()) > 1 and args.adapter:
        raise UserError("--adapter with several --model: give one base, or none for the adapters' own")
    names = "model", "adapter", "quantize"
    choices = product(*(getattr(args, name) or [None] for name in names))
    subjects = [model_of(Namespace(**dict(zip(names, choice, strict=True)))) for choice in choices]
    for subject in subjects:
        if subjects.count(subject) > 1:
            raise UserError(f"{shown(subject.name)} is named twice: give each model once")
    titles = Counter(subject.title for subject in subjects)
    for place, subject in enumerate(subjects):
        if titles[subject.title] > 1:  # by the whole path
            path = str(subject.run or subject.source).replace(os.sep, "_").strip("_")
            subjects[place] = subject._replace(title="-".join(filter(None, (path, subject.quantize))))
    return subjects


def last_run(folder: Path = Path("runs")) -> str | None:
    """The newest finished run on the embedded base, if there is one. Broken folders are skipped."""
    finished = []
    for summary in folder.glob("*/summary.json"):
        run = summary.parent
        try:
            config = run / "config.json"
            if config.is_file() and read_json(config).get("base") == EMBEDDED:
                if not (run / "model").is_dir():
                    adapter.base_of(run)  # raises for a broken adapter
                finished.append((summary.stat().st_mtime, str(run)))
        except UserError as error:
            print(f"skipped {shown(run)}: {error}", file=sys.stderr)
    return max(finished)[1] if finished else None


def stored_prompt(subject: Subject, default: str = PROMPT) -> str:
    """The prompt template of the training of a model; PROMPT for the embedded scenes, `default` if none is stored.

    It is in the run's config.json, where it counts for data that has questions: those of the embedded scenes and of
    JSONL files are complete prompts; else in adapter_config.json. Raises UserError for one without {question}.
    """
    for name in ("config.json", "adapter_config.json") if subject.folder else ():
        path = subject.folder / name
        stored = read_json(path) if path.is_file() else {}
        sources = stored.get("data", ["vqav2:"])
        if not any(source.startswith(("vqav2:", "shards:")) for source in sources):
            return PROMPT if any(source.startswith(EMBEDDED) for source in sources) else default
        if "prompt" in stored:
            return check_prompt(str(stored["prompt"]))
    return default


# Opening


def open_model(args: Namespace, subject: Subject, text: bool = False) -> tuple[Any, Any]:
    """A model and its processor. text: a language model for text alone may be opened, with a `TextReader` for a
    processor. Raises UserError."""
    if text and reader.config_of(subject.source) is not None:
        processor = reader.open_reader(subject.source, args.max_length)
    else:
        processor = Processor.from_source(subject.source, max_length=args.max_length)
    return load(args, subject), processor


def open_language_model(args: Namespace, subject: Subject) -> tuple[LanguageModel, TextTokenizer]:
    """A language model for text alone and its tokenizer. Raises UserError."""
    tokenizer = load_text_tokenizer(subject.source, max_length=args.max_length)
    return load(args, subject), tokenizer


def is_language_model(source: str) -> bool:
    """Whether `source` is a published language model for text alone."""
    return isinstance(reader.config_of(source), LanguageConfig)


def load(args: Namespace, subject: Subject) -> Any:
    """The model of a subject with its adapter, in eval mode."""
    device = choose_device(args.device)
    dtype = args.dtype or ("bf16" if device.type == "cpu" and subject.quantize in BF16_KINDS else None)
    model = load_model(subject.source, dtype=choose_dtype(dtype, device), device=device, quantize=subject.quantize)
    choose_kernel(model, args.kernel, device)
    if subject.run is not None:
        adapter.load(model, subject.run)
    return model.eval()


def open_plain(subject: Subject, weight: torch.Tensor) -> PaliGemma:
    """The base of `subject` alone, in dtype and on the device of `weight`."""
    return load_model(subject.source, dtype=weight.dtype, device=weight.device, quantize=subject.quantize)


# Folders of results


def out_folder(path: Path | None, *parts: str) -> Path:
    """The folder of a command's files: `path`, by default runs/eval/PARTS. It is made, so that a folder that cannot be
    written to is known before a model is read. Raises UserError."""
    path = path or Path("runs", "eval", *parts)
    with file_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path
