"""The settings of a fine-tuning run: the flags of `train.finetune`, and which recipe they take."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.command import MASKS_HELP
from eval.data.record import PROMPT, QUESTION_SOURCES, check_prompt
from eval.data.records import EMBEDDED_TASKS, SOURCES
from lora.adapter import DECODER_TARGETS
from model.common import UserError
from model.config import PRESETS
from model.device import DTYPES
from model.differential import FEED_FORWARDS, KINDS
from model.registry import read_config
from model.source import local_path, preset_of
from train.flags import RunArguments, flag, read_run
from train.loop import LoopSettings
from train.optim import OPTIMIZERS
from train.recipes import HELP, RECIPES, TASKS, recipe_of
from weights.quantize import KINDS as QUANTIZED

EMBEDDED_DATA = ("embedded",)

# Dense bf16 FLOP/s (the data sheets' figures with sparsity are twice as high), and GB of memory; a
# T4 has fp16 alone
GPUS = {
    "T4": (65e12, 16),
    "A10": (125e12, 24),
    "RTX3090": (71e12, 24),
    "A100": (312e12, 80),
    "H100": (989e12, 80),
    "H200": (989e12, 141),
    "B200": (2250e12, 180),
    "L4": (121e12, 24),
    "L40S": (362e12, 48),
    "RTX4090": (165e12, 24),
}

TAKEN = {name: RECIPES[name] for name in ("own", "one-gpu")}  # without a flag
BOXES = ("coco:", "coco-masks:")  # sources that ask for boxes
PUBLISHED_WIDTH = 2048  # of the smallest published decoder, Gemma 2B
# Flags that ask for another way of training than the recipe "own", which own pictures take on the
# embedded base
_NOT_OWN = {
    *"recipe attention diff_in feed_forward option full targets r alpha dropout".split(),
    *"quantize shard dtype".split(),
}


@dataclass(frozen=True)
class Settings(LoopSettings):
    """All settings of a run. Each is a flag of the same name; see `train.flags.flag`."""

    recipe: str = flag(
        "",
        "other defaults: the paper's Table 1, PaliGemma's authors', `one-gpu`, which a base of "
        "published size takes "
        "(with --full `paligemma`), or `own`, which own pictures on the embedded base take unless "
        "a flag, such as "
        "--recipe lora, asks for LoRA or a graft; `help` prints those of PaliGemma's authors by TASK",
        choices=["", *RECIPES, *TASKS, "help"],
        metavar="|".join([*RECIPES, "paligemma:TASK", "help"]),
    )
    base: str = flag(
        "embedded",
        f"model: a folder, a hub id, `embedded`, or random weights of a preset "
        f"({', '.join(PRESETS)})",
    )
    data: tuple[str, ...] = flag(
        EMBEDDED_DATA,
        f"{SOURCES}. May be given several times; "
        "SOURCE@WEIGHT then gives WEIGHT / (sum of weights) of an epoch's samples (default: "
        "embedded)",
        metavar="SOURCE[@WEIGHT]",
    )
    eval_data: tuple[str, ...] = flag(
        (),
        "held-out data, also given several times (default: the share --validation of --data)",
        metavar="SOURCE",
    )
    attention: str = flag("dex", "differential attention to graft", choices=list(KINDS))
    diff_in: str = flag("decoder", "where to graft it", choices=["decoder", "vision", "both"])
    feed_forward: str = flag("mlp", "feed-forward of the decoder", choices=list(FEED_FORWARDS))
    option: tuple[str, ...] = flag(
        (),
        "of the variant, in JSON, e.g. rope_pairs='\"fresh\"'; may be given several times",
        metavar="NAME=VALUE",
    )
    full: bool = flag(False, "train every weight instead of LoRA (softmax attention only)")
    targets: str = flag(DECODER_TARGETS, "LoRA: regular expression for whole module paths")
    r: int = flag(16, "LoRA rank, also of a variant's second branch", least=1, most=65536)
    alpha: float = flag(32.0, "LoRA alpha: updates are scaled by alpha / r", least=1e-6, most=1e6)
    dropout: float = flag(0.0, "LoRA dropout", least=0, most=0.9999)
    align: int = flag(
        0,
        "with --full: steps in which the vision tower learns alone, first (train/align.py)",
        least=0,
    )
    shift: bool = flag(
        False,
        "move the pictures of training by up to a sixteenth of their side, at random: of --align "
        "always, of batches with boxes never",
    )
    new_tower: bool = flag(
        False, "with --align: the small tower beside the embedded base, for pictures of 64 pixels"
    )
    lr: float = flag(1.5e-3, "peak learning rate", least=0, most=1e6)
    scalar_lr: float | None = flag(
        None,
        "of λ, μ and norms of a graft, not with --full (default: --lr); with muon of all but "
        "matrices (default: --lr / 10)",
        least=0,
        most=1e6,
    )
    optimizer: str = flag(
        "adamw", "muon: AdamW, but Muon for the layers' matrices", choices=[*OPTIMIZERS, "muon"]
    )
    weight_decay: float = flag(
        1e-9, "AdamW weight decay; none on λ, μ and norms of a graft", least=0, most=1e6
    )
    beta2: float = flag(0.98, "AdamW's second momentum", least=0, most=0.9999999)
    label_smoothing: float = flag(
        0.0,
        "probability that training gives to all wrong tokens together; held-out losses have none",
        least=0,
        most=0.9,
    )
    batch_size: int = flag(32, "rows of a micro-batch, at most", least=1)
    step_batch: int | None = flag(
        None, "rows of a step over all processes (default: --batch-size on each)", least=1
    )
    epochs: int | None = flag(
        None,
        "passes over the data (default: 1; of other data than the scenes as many as take 320 "
        "steps, at most 32)",
        least=1,
    )
    steps: int | None = flag(
        None, "take so many steps, whatever --epochs (default: all epochs)", least=1
    )
    samples: int = flag(16000, "size of an epoch of the embedded data", least=1, most=10**8)
    tasks: str = flag(
        ",".join(EMBEDDED_TASKS), "tasks of the embedded data, in turn, see eval/data/scenes.py"
    )
    fraction: float = flag(
        1.0, "share of the training pictures of files (the paper's Part 1: 0.4)", least=0, most=1
    )
    validation: float = flag(
        0.02, "share of the pictures of files held out, without --eval-data", least=0, most=1
    )
    prompt: str = flag("answer {question}", "prompt of a question of vqav2: or vqa:")
    answers: str = flag(
        "common",
        "a question's most frequent answer, or one of all, drawn each epoch",
        choices=["common", "sampled"],
    )
    per_picture: int = flag(
        1, "questions of one picture that may share a batch, and its encoding", least=1
    )
    images: str | None = flag(
        None, "folder of the pictures (default: vqav2:DIR itself, or where the FILE is)"
    )
    masks: str | None = flag(
        None,
        f"coder of coco-masks: {MASKS_HELP} (default: embedded on the embedded base)",
        metavar="FILE",
    )
    max_length: int = flag(
        8192, "tokens of an example, its picture's included; longer ones are left out", least=1
    )
    dtype: str = flag(
        "auto",
        "of the base (default: bf16 on CUDA if frozen, else fp32)",
        choices=["auto", *DTYPES],
    )
    quantize: str | None = flag(
        None, "frozen weights in 8 or 4 bits (default: as --dtype)", choices=list(QUANTIZED)
    )
    evaluate: bool = flag(True, "evaluate on held-out examples, before, during and after training")
    eval_limit: int = flag(
        400, "held-out examples of each evaluation, of scenes a quarter", least=4
    )
    eval_every: int | None = flag(
        None, "steps between evaluations; 0 none (default: ten times a run)", least=0
    )
    keep_best: bool = flag(True, "keep the weights with the best held-out score in RUN/best")
    patience: int = flag(0, "stop after so many evaluations without a gain; 0 never", least=0)

    @property
    def options(self) -> dict[str, object]:
        """The values of `option`, which are JSON or else texts, by name."""
        options = {}
        for name, _, value in (text.partition("=") for text in self.option):
            options[name] = value
            with contextlib.suppress(json.JSONDecodeError, RecursionError):
                options[name] = json.loads(value)
        return options

    @property
    def is_embedded(self) -> bool:
        """Whether the embedded scenes are all the data."""
        return self.data == EMBEDDED_DATA

    @property
    def is_beyond_base(self) -> bool:
        """Whether the data ask for boxes or masks, which the embedded base does not learn."""
        return self.base == "embedded" and any(source.startswith(BOXES) for source in self.data)

    @property
    def masks_file(self) -> str | None:
        """The coder where data ask for masks, by default that of the embedded base: published ones
        have another."""
        sources = (*self.data, *self.eval_data)
        if not any(source.startswith("coco-masks:") for source in sources):
            return None
        if self.masks is None and self.base == "embedded":
            return "embedded"
        return self.masks

    @property
    def question_prompt(self) -> str | None:
        """The template of the VQA questions in training; None where the data has its own
        prompts."""
        if self.is_embedded:
            return PROMPT
        has_questions = any(source.startswith(QUESTION_SOURCES) for source in self.data)
        return self.prompt if has_questions else None

    @property
    def is_grafted(self) -> bool:
        """Whether the attention or the feed-forward of the base is replaced."""
        return (self.attention, self.feed_forward) != ("softmax", "mlp")

    @property
    def writes_model(self) -> bool:
        """Whether the run writes a whole model instead of an adapter."""
        return self.full

    @property
    def can_export(self) -> bool:
        """Whether plain weights can say what the run learns."""
        return KINDS[self.attention].foldable and self.feed_forward != "swiglu-new"

    @property
    def program(self) -> str:
        """The module of the command."""
        return "train.finetune"

    @property
    def command(self) -> list[str]:
        """The words that begin a call of the same kind."""
        return ["python", "-m", self.program]

    @property
    def stem(self) -> str:
        """The name of the run's folder, before its number."""
        return f"{Path(self.base).name}-{self.attention}"

    @property
    def subject(self) -> str:
        """What is trained, in words."""
        return f"attention {self.attention}"

    def tokenizer_source(self) -> str:
        """The source of the tokenizer."""
        return self.base

    def check(self) -> None:
        """Raise UserError for settings that exclude each other."""
        check_prompt(self.prompt)
        problems = {
            f"--dtype {self.dtype} loses updates of weights: use --autocast": (
                self.writes_model and self.dtype not in ("auto", "fp32")
            ),
            "--new-tower has not seen your pictures: add --full and --align N": (
                self.new_tower and not self.full
            ),
            f"--align {self.align} trains the vision tower, which no adapter holds: add --full": (
                self.align and not self.full
            ),
            "--full trains plain weights: add --attention softmax, leave --feed-forward at mlp": (
                self.full and self.is_grafted
            ),
            f"--patience {self.patience} needs evaluations": (
                self.patience and (self.eval_every == 0 or not self.evaluate)
            ),
            "--quantize is for frozen weights: leave --full and --shard out": (
                self.quantize and (self.writes_model or self.shard)
            ),
            "--optimizer muon needs whole matrices: leave --shard out": (
                self.optimizer == "muon" and self.shard
            ),
        }
        for problem, has_it in problems.items():
            if has_it:
                raise UserError(problem)


@dataclass(frozen=True)
class Arguments(RunArguments):
    """The flags of `train.finetune` that are no settings."""

    show_batch: Path | None = flag(
        None,
        "print a batch, and draw it (default: batch.png)",
        nargs="?",
        const=Path("batch.png"),
        metavar="FILE",
    )
    plan: bool = flag(
        False,
        "train nothing: print what the run takes (memory, disk, hours), and on which GPU it fits",
    )
    gpu: str | None = flag(
        None, "GPU of --plan (default: what fits on 16, 24, 48 and 80 GB)", choices=list(GPUS)
    )
    gpus: int = flag(1, "with --plan: number of them; training takes torchrun", least=1)


# The flags of --help by subject; those of the run itself come first
GROUPS = {
    "data": "data eval_data validation images masks samples tasks fraction prompt answers per_picture shift",
    "model": "base attention diff_in feed_forward option full new_tower align dtype quantize max_length",
    "LoRA, without --full": "targets r alpha dropout",
    "schedule": "lr scalar_lr optimizer weight_decay beta2 label_smoothing schedule warmup clip "
    "batch_size step_batch epochs steps",
    "evaluation": "evaluate eval_limit eval_every keep_best patience",
    "machine": "device threads autocast checkpointing shard compile workers checkpoint_every keep seed max_bad",
}


def is_published_size(base: str) -> bool:
    """Whether a base is as large as a published one, by its name or config.json. Raises UserError
    for a damaged one."""
    if base.startswith("embedded"):
        return False
    config = preset_of(base)
    file = local_path(base) / "config.json"
    if config is None and file.is_file():
        config = read_config(file)
    if config is None:  # of the hub
        return True
    return getattr(config, "text", config).hidden_size >= PUBLISHED_WIDTH


def recipe_defaults(given: dict) -> dict:
    """The defaults of the recipe that the flags, the base or the data choose."""
    base = given.get("base", "embedded")
    data = tuple(given.get("data", EMBEDDED_DATA))
    has_boxes = any(source.startswith(BOXES) for source in data)
    if "recipe" in given:
        recipe = given["recipe"]
    elif is_published_size(base):
        recipe = "paligemma" if given.get("full") else "one-gpu"
    elif (
        base == "embedded"
        and data != EMBEDDED_DATA
        and not has_boxes
        and not _NOT_OWN & given.keys()
    ):
        recipe = "own"
    else:
        recipe = ""
    return recipe_values(recipe, given)


def recipe_values(recipe: str, given: dict) -> dict:
    """The values of a recipe beside the given flags; `help` prints the recipes and exits."""
    if recipe == "help":
        print(HELP)
        raise SystemExit
    values = {**recipe_of(recipe, given.get("base", "embedded")), "recipe": recipe}
    if given.get("evaluate") is False or given.get("eval_every") == 0:
        values["patience"] = 0
    return values


def parse(
    argv: Sequence[str] | Mapping[str, object] | None,
    description: str = "",
    kind: type[Settings] = Settings,
    program: str = "train.finetune",
    defaults: Callable[[dict], dict] = recipe_defaults,
    **shown_by_help: Any,
) -> tuple[Any, Arguments]:
    """The settings and the run folder of the flags of `train.finetune`, in words or by name, or of
    a command with settings of another `kind`.

    defaults(given flags): in place of the fields'; flags override them. shown_by_help: of
    `given_flags`. Raises UserError.
    """
    settings, arguments = read_run(
        program,
        description,
        kind,
        Arguments,
        argv,
        defaults,
        **({"groups": GROUPS, "recipes": TAKEN} | shown_by_help),
    )
    if arguments.resume is None:
        settings.check()
    if isinstance(settings, Settings) and settings.attention == "v2":
        # a run stores its form of v2; earlier commits stored none, and had the published one
        form = "exact=true" if arguments.resume is None else "exact=false"
        if "exact" not in settings.options:
            settings = replace(settings, option=(*settings.option, form))
    return settings, arguments


def step_layout(settings: Settings, processes: int) -> tuple[int, int]:
    """Rows of a micro-batch, and micro-batches of a step over all processes. Raises UserError where
    they cannot make up the rows of `step_batch`."""
    wanted = settings.step_batch or settings.batch_size * processes
    rows = max(1, min(settings.batch_size, wanted // processes))
    if wanted % (rows * processes):
        raise UserError(
            f"--step-batch {wanted} is no multiple of {rows} rows of a micro-batch × {processes} "
            "processes: change one of them, see --batch-size"
        )
    return rows, wanted // rows
