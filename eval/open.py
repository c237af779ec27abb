"""The models that a command's flags name, opened in eval mode, their processors, and the prompts of
their training."""

from argparse import Namespace
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from eval.data.record import PROMPT, QUESTION_SOURCES, check_prompt
from lora import adapter
from model.common import UserError, file_errors, read_json, read_json_if, shown
from model.device import choose_device, choose_dtype, use_threads
from model.processor import Processor
from model.registry import System, system_of
from model.source import EMBEDDED, local_path, preset_of, resolve
from weights.load import load_model
from weights.quantize import BF16_KINDS

TOY = (
    ", a toy that knows forty emoji, and prompts such as 'answer en Where is the dog?', "
    "'detect dog' and 'caption en'"
)


class Subject(NamedTuple):
    """A model that is asked: how to open it, and its title."""

    source: str  # of its weights, or of its adapter's base
    run: Path | None  # the folder of its adapter
    title: str  # in tables
    quantize: str | None = None  # the kind of its weights; None: as --dtype
    whole: bool = False  # the base stays plain, even if the adapter was trained on a packed one

    @property
    def name(self) -> str:
        return self.source if self.run is None else f"{self.run} on {self.source}"


def subject_of(args: Namespace, on_scenes: bool = False) -> Subject:
    """The model that the flags name; without flags the newest run, or else the embedded base.
    on_scenes: it is asked about the embedded scenes, see `last_run`. Raises UserError."""
    # 1. the run, and its title
    source = args.model
    run = args.adapter
    if run is None and source is None:
        run = last_run(on_scenes=on_scenes)
    if run == "none":
        run = None
    path = Path(run or source or EMBEDDED).absolute()
    title = path.name
    if title == "best":
        title = f"{path.parent.name}-best"
    elif title == "model":
        title = path.parent.name
    kind = args.quantize
    if kind == "none":
        kind = None
    if kind:
        title += f"-{kind}"
    # 2. its source: the model that was trained whole, or the base
    if run is not None and Path(run, "model").is_dir():
        if source is not None:
            raise UserError(
                f"--adapter {shown(run)} is a whole model, written by --full: leave --model out"
            )
        return Subject(f"{run}/model", None, title, kind)
    if run and not source:
        source = adapter.read_config(run).get("base_model_name_or_path")
    run = Path(run) if run else None
    return Subject(source or EMBEDDED, run, title, kind, args.quantize == "none")


def subjects_of(args: Namespace) -> list[Subject]:
    """The models that repeated flags name, each with each. Raises UserError."""
    flags = product(args.model or [None], args.adapter or [None], args.quantize or [None])
    given = [
        vars(args).get(name)
        for name in ("data", "questions", "images", "image", "task", "coco", "tsv")
    ]
    on_scenes = all(value in (None, EMBEDDED, "scenes") for value in given)
    subjects = []
    for model, run, kind in flags:
        subjects.append(subject_of(Namespace(model=model, adapter=run, quantize=kind), on_scenes))
    titles = [subject.title for subject in subjects]
    if twice := [title for title in titles if titles.count(title) > 1]:
        raise UserError(
            f"two models are named {shown(twice[0])}: give each once, or --results of two calls, each "
            "with an --out"
        )
    return subjects


def last_run(on_scenes: bool = False) -> str | None:
    """The newest finished run on the embedded base, if there is one; a toy has learned from the
    embedded scenes alone."""
    finished = Path("runs").glob("*/summary.json")
    for file in sorted(finished, key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(UserError):  # a broken one is skipped
            made = read_json(file.with_name("config.json"))
            if made.get("base") == EMBEDDED and (not on_scenes or made.get("data") == [EMBEDDED]):
                return str(file.parent)
    return None


def run_file(subject: Subject, name: str) -> Path:
    """A file of the run that a model is of, if it is of one."""
    folder = subject.run or Path(subject.source)
    beside = folder.parent / name  # of RUN/best and RUN/model
    return beside if beside.is_file() else folder / name


def system_at(source: str) -> System | None:
    """The system of a source, see `model/registry.py`; None for a PaliGemma."""
    if local_path(source).is_file():
        return None
    preset = preset_of(source)
    if preset:
        return system_of(preset.kind)
    model_type = read_json(resolve(source, ["config.json"]) / "config.json").get("model_type")
    return system_of(str(model_type))


def wording_of(source: str) -> str:
    """How a model is asked: `text`, as a language model; `llava`, as LLaVA's authors do; or
    `paligemma`."""
    system = None if preset_of(source) else system_at(source)
    return "paligemma" if system is None else system.asked_as


def stored_prompt(subject: Subject, default: str = PROMPT) -> str:
    """The prompt template of a model's training; `default` where none is stored. A run on the
    embedded scenes has PROMPT. A stored one counts only if the data ask questions: other data are
    complete prompts. Raises UserError."""
    folder = subject.run
    source = Path(subject.source)
    if folder is None and source.name in ("model", "best"):
        folder = source.parent
    if folder is None:
        return default
    for file in ("config.json", "adapter_config.json"):
        stored = read_json_if(folder / file)
        data = stored.get("data", [])
        asks = any(name.startswith(QUESTION_SOURCES) for name in data)
        if "data" in stored and not asks:
            is_embedded = any(name.startswith(EMBEDDED) for name in data)
            return PROMPT if is_embedded else default
        if "prompt" in stored:
            return check_prompt(str(stored["prompt"]))
    return default


def toy_note(subject: Subject) -> str:
    """TOY for the embedded base and its runs on the embedded scenes alone, "" for other models.
    Raises UserError."""
    made = read_json_if(run_file(subject, "config.json"))
    is_toy = made.get("base") == EMBEDDED and made.get("data") == [EMBEDDED]
    is_base = subject.run is None and subject.source == EMBEDDED
    return TOY if is_toy or is_base else ""


def open_subject(
    args: Namespace,
    subject: Subject,
    text: bool = False,
) -> tuple[Any, Any]:
    """A model and its processor. text: a language model may be opened, with the reader of its
    system. Raises UserError."""
    system = system_at(subject.source) if text else None
    make = system.reader if system and system.reader else Processor.from_source
    processor = make(subject.source, max_length=args.max_length)
    return load_subject(args, subject), processor


def load_subject(args: Namespace, subject: Subject) -> Any:
    """The model of a subject with its adapter, in eval mode. Raises UserError."""
    device = choose_device(args.device)
    dtype = args.dtype
    if dtype is None and device.type == "cpu" and subject.quantize in BF16_KINDS:
        dtype = "bf16"
    model = load_model(
        subject.source,
        dtype=choose_dtype(dtype, device),
        device=device,
        quantize=subject.quantize,
    )
    use_threads(args.threads, model)
    if subject.run is not None:
        adapter.load(model, subject.run, whole=subject.whole)
    return model.eval()


def out_folder(path: Path | None, *parts: str) -> Path:
    """The folder of a command's files: `path`, or else runs/eval/PARTS. Raises UserError where it
    cannot be made."""
    path = path or Path("runs", "eval", *parts)
    with file_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path
