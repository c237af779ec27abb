"""The settings of a fine-tuning run: flags, recipes, and the file that a run is resumed from.

In: a command line. Out: `Settings`, frozen, and the run's folder. Next: `train/finetune.py`.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora.adapter import DECODER_TARGETS
from model.common import UserError, write_text
from model.device import DTYPES
from model.differential import FEED_FORWARDS, KINDS
from train.data.batches import EMBEDDED_TASKS
from train.systems.stages import ARCHITECTURES, stage_defaults

# λ, μ and the norms of a graft: scalars and gains, which decay would pull towards values that mean nothing
SCALARS = r".*\.(lambda_\w+|lambda_proj\.\w+|mu|subln\.weight)"


def flag(default, help: str, choices: Sequence[str] | None = None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """All that decides a run. Each is a flag of the same name; the help text is its metadata."""

    base: str = flag("embedded", "model: a folder, a hub id, or `embedded`")
    data: str = flag(
        "embedded",
        "embedded, vqav2:DIR (official files), jsonl:FILE (image, prefix, suffix), or tar "
        "shards of train.shard, shards:'NAME-{000..127}.tar'",
    )
    arch: str = flag("paligemma", f"what to train: paligemma, or a system with stages ({', '.join(ARCHITECTURES)})")
    stage: int | None = flag(
        None,
        "its stage; a later one starts from the model that the one before has written, "
        "--base RUN/model (default: none)",
    )
    attention: str = flag("twin", "differential attention to graft", choices=list(KINDS))
    diff_in: str = flag("decoder", "where to graft it", choices=["decoder", "vision", "both"])
    feed_forward: str = flag("mlp", "feed-forward of the decoder", choices=list(FEED_FORWARDS))
    option: tuple[str, ...] = flag((), "an option of the variant, NAME=VALUE (JSON), e.g. rope_pairs='\"fresh\"'")
    full: bool = flag(False, "train every weight instead of LoRA (softmax attention only)")
    targets: str = flag(DECODER_TARGETS, "LoRA: regular expression for whole module paths")
    r: int = flag(16, "LoRA rank, also of a variant's second branch")
    alpha: float = flag(32.0, "LoRA alpha: updates are scaled by alpha / r")
    dropout: float = flag(0.0, "LoRA dropout")
    lr: float = flag(1.5e-3, "peak learning rate")
    scalar_lr: float | None = flag(None, "peak rate of λ, μ and norms (default: as --lr)")
    optimizer: str = flag("adamw", "how the gradient is followed", choices=["adamw", "radam"])
    weight_decay: float = flag(1e-9, "AdamW weight decay; none on λ, μ and norms")
    beta2: float = flag(0.98, "AdamW's second momentum")
    schedule: str = flag("cosine", "decay after warm-up", choices=["linear", "cosine", "constant"])
    warmup: float = flag(20, "warm-up steps; below 1, a share of all steps")
    clip: float = flag(1.0, "largest gradient norm; 0 does not clip")
    batch_size: int = flag(32, "rows of a micro-batch")
    accumulate: int = flag(1, "micro-batches of a step, on each process")
    epochs: int = flag(1, "passes over the data")
    steps: int | None = flag(None, "stop after so many steps (default: all epochs)")
    samples: int = flag(16000, "size of an epoch of the embedded data")
    tasks: str = flag(",".join(EMBEDDED_TASKS), "tasks of the embedded data, in turn, see eval/scenes.py")
    fraction: float = flag(1.0, "share of the training pictures to use (the paper's Part 1: 0.4)")
    validation: float = flag(0.02, "share of the pictures held out, for data on disk")
    prompt: str = flag("answer {question}", "prompt of a VQAv2 question")
    answers: str = flag(
        "common",
        "VQAv2's answer to learn: the common one, or one of the ten, drawn anew each epoch",
        choices=["common", "sampled"],
    )
    per_picture: int = flag(1, "questions of one picture that may share a batch, and its encoding")
    shuffle_buffer: int = flag(10000, "records of tar shards that are shuffled together")
    max_bad: int = flag(20, "unusable records to leave out before the run stops")
    workers: int = flag(0, "processes that decode pictures")
    cache_features: str | None = flag(
        None, "folder to keep the features of a frozen vision tower in, for later epochs and runs (default: none)"
    )
    dtype: str = flag("auto", "dtype of the base (default: bf16 on CUDA, else fp32)", choices=["auto", *DTYPES])
    autocast: str = flag(
        "auto", "autocast dtype (default: bf16 on CUDA, else none)", choices=["auto", "none", "bf16", "fp16"]
    )
    device: str = flag("auto", "cuda, cpu, … (default: cuda if there is one)")
    quantize: str | None = flag(
        None, "hold the frozen weights in 8 bits, for memory (default: as --dtype)", choices=["int8"]
    )
    checkpointing: bool = flag(False, "recompute the decoder's activations in the backward pass, for memory")
    shard: bool = flag(False, "with torchrun: FSDP2 instead of DDP")
    compile: bool = flag(False, "torch.compile the model")
    evaluate: bool = flag(True, "measure VQA and needle accuracy before and after")
    eval_limit: int = flag(400, "questions of each evaluation")
    measure_every: int = flag(50, "steps between measurements of the distance between the two maps; 0 never")
    checkpoint_every: int = flag(200, "steps between checkpoints")
    keep: int = flag(2, "checkpoints to keep")
    seed: int = flag(0, "of initialisation, order and dropout")

    @property
    def options(self) -> dict[str, object]:
        """What `option` holds, by name. Raises UserError for what is no NAME=VALUE."""
        return dict(map(read_option, self.option))

    @property
    def writes_model(self) -> bool:
        """Whether the run writes a whole model instead of an adapter."""
        return self.full or self.stage is not None


# The paper's Table 1 (its section 4) and the transfer recipe of PaliGemma's authors (Beyer et al. 2024, appendix J)
_PAPER = {
    "batch_size": 4,
    "accumulate": 4,
    "warmup": 50,
    "schedule": "linear",
    "dropout": 0.1,
    "epochs": 1,
    "fraction": 0.4,
    "prompt": "answer {question}",
    "r": 32,
    "alpha": 64.0,
}
_FAST, _SLOW = {"lr": 4e-4, "weight_decay": 1e-9}, {"lr": 2e-5, "weight_decay": 1e-8}
RECIPES: dict[str, dict] = {
    "paper-1": _PAPER | _FAST | {"attention": "softmax", "feed_forward": "mlp"},
    "paper-2": _PAPER | _FAST | {"attention": "shared", "feed_forward": "swiglu-new"},
    "paper-3": _PAPER | _SLOW | {"attention": "softmax", "feed_forward": "mlp", "r": 16, "alpha": 32.0},
    "paper-4": _PAPER | _SLOW | {"attention": "shared", "feed_forward": "mlp"},
    "paper-5": _PAPER | _SLOW | {"attention": "split", "feed_forward": "swiglu-new", "option": ('rope_pairs="fresh"',)},
    "paligemma": {
        "attention": "softmax",
        "full": True,
        "lr": 1e-5,
        "weight_decay": 0.0,
        "beta2": 0.999,
        "epochs": 10,
        "batch_size": 16,
        "accumulate": 16,
        "schedule": "cosine",
        "warmup": 0.05,
        "clip": 1.0,
        "answers": "sampled",
        "prompt": "answer en {question}",
    },
}


def parse(argv: Sequence[str] | None, description: str = "") -> tuple[Settings, Path | None, Path | None]:
    """Settings, --out and --resume from the command line; a recipe changes defaults, a flag changes both."""
    parser = argparse.ArgumentParser(
        prog="python -m train.finetune", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="run folder to make (default: runs/BASE-ATTENTION-1 or runs/ARCH-stageN-1, or the next number)",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with an interrupted run, with its own settings"
    )
    parser.add_argument(
        "--recipe", choices=list(RECIPES), help="settings of the paper's Table 1, or of PaliGemma's authors"
    )
    for setting in dataclasses.fields(Settings):
        name, kind = "--" + setting.name.replace("_", "-"), type(setting.default)
        default = "" if "default" in setting.metadata["help"] else f" (default: {setting.default})"
        text = (setting.metadata["help"] + default).replace("%", "%%")
        common = {"default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **common)
        elif kind is tuple:
            parser.add_argument(name, action="append", metavar="NAME=VALUE", **common)
        else:
            kind = {"scalar_lr": float, "steps": int, "stage": int, "warmup": float}.get(setting.name, kind)
            kind = str if kind is type(None) else kind
            parser.add_argument(name, type=kind, choices=setting.metadata["choices"], **common)
    parser.add_argument(
        "--wings",
        dest="arch",
        action="store_const",
        const="wings",
        default=argparse.SUPPRESS,
        help="the same as --arch wings",
    )
    given = vars(parser.parse_args(argv))
    out, resume, recipe = (given.pop(name) for name in ("out", "resume", "recipe"))
    if resume is not None:
        if given or out or recipe:
            raise UserError("--resume goes on with the run's own settings: leave the other flags out")
        return read_settings(resume), None, resume
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    defaults = stage_defaults(given.get("arch"), given.get("stage"), given.get("data", Settings.data))
    settings = Settings(**(defaults | RECIPES.get(recipe, {}) | given))
    check(settings)
    return settings, out, None


def read_option(text: str) -> tuple[str, object]:
    """NAME=VALUE with a JSON value; what is not JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--option {text}: expected NAME=VALUE")
    with contextlib.suppress(json.JSONDecodeError):
        return name, json.loads(value)
    return name, value


def check(settings: Settings) -> None:
    """Raise UserError for numbers that make no run."""
    least = {
        "r": 1,
        "lr": 0,
        "batch_size": 1,
        "accumulate": 1,
        "epochs": 1,
        "samples": 1,
        "per_picture": 1,
        "checkpoint_every": 1,
        "keep": 1,
        "eval_limit": 4,
        "max_bad": 0,
        "workers": 0,
        "warmup": 0,
        "clip": 0,
        "measure_every": 0,
        "seed": 0,
        "shuffle_buffer": 1,
    }
    for name, bound in least.items():
        if not getattr(settings, name) >= bound:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(settings, name)}, expected at least {bound}")
    for name in ("fraction", "validation", "dropout"):
        if not 0 <= getattr(settings, name) <= 1:
            raise UserError(f"--{name} is {getattr(settings, name)}, expected a share from 0 to 1")
    if settings.arch not in ("paligemma", *ARCHITECTURES):
        raise UserError(f"--arch {settings.arch}: expected one of paligemma, {', '.join(ARCHITECTURES)}")
    if (settings.arch == "paligemma") != (settings.stage is None):
        raise UserError(
            f"--arch {settings.arch} --stage {settings.stage}: a system with stages needs one, PaliGemma has none"
        )
    if settings.steps is not None and settings.steps < 1:
        raise UserError(f"--steps is {settings.steps}, expected at least 1")


def read_settings(run: Path) -> Settings:
    """The settings of a run folder. Raises UserError if it is none, or of another version of this program."""
    try:
        raw = json.loads((run / "config.json").read_text())
        return Settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()})
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise UserError(
            f"--resume {run}: no run folder of this program ({error}): give the one to go on with"
        ) from None


def run_stem(settings: Settings) -> str:
    """What the folders of such runs are called, before their number."""
    if settings.stage is not None:
        return f"{settings.arch}-stage{settings.stage}"
    return f"{Path(settings.base).name}-{settings.attention}"


def new_run(settings, out: Path | None, stem: str) -> Path:
    """Make the run folder, `out` or the next runs/STEM-NUMBER, with the settings, a dataclass, in it.

    Raises UserError if `out` holds something already.
    """
    if out is None:
        out = next(path for n in itertools.count(1) if not (path := Path("runs", f"{stem}-{n}")).exists())
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: not empty: choose another folder, or --resume it")
    write_text(out / "config.json", json.dumps(dataclasses.asdict(settings), indent=1) + "\n")
    return out
