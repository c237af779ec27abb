"""WINGS as it is trained: a base with visual learners, then with textual learners and routers.

In: the settings of a run with `--arch wings`; in stage 1 `--option NAME=VALUE` sets a field of
`Parts`. Out: the model of a stage, see `model/systems/wings.py`. The base is a PaliGemma or, with a
language model, the vision tower beside it:

    python -m train.finetune --arch wings --stage 1 --base google/siglip-so400m-patch14-384 --data
        jsonl:FILE \\ --option language_model=Qwen/Qwen1.5-7B

On the embedded scenes it is `embedded-text`, whose decoder knows text alone: `python -m
train.embedded.text` makes it.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from model.common import UserError
from model.source import EMBEDDED
from model.systems.chat import load_text_tokenizer
from model.systems.configs import LanguageWingsConfig
from model.systems.wings import Wings, attach, join, route
from train.settings import Settings
from weights.load import load_model, load_siglip, load_text

TEXT_BASE, TEXT_FOLDER = (
    "embedded-text",
    Path("runs", "embedded-text"),
)  # as a --base, and where it lies


@dataclass(frozen=True)
class Parts:
    """What stage 1 is made of.

    language_model: a folder or hub id; "" is the base's own decoder. feature_layer: of the vision
    tower beside it, see `VisionConfig`. chat: train and ask in turns of a conversation, if the
    model's configuration ends answers by the mark of a turn's end; else, and for other models, in
    plain text.
    """

    language_model: str = ""
    feature_layer: int = -2
    chat: bool = True


def parts_of(settings: Settings) -> Parts:
    """Raises UserError for an unknown option, and one of another type."""
    return Parts(**settings.options_of(asdict(Parts())))


def tokenizer_source(settings: Settings) -> str:
    """The source of the tokenizer. The embedded models share one."""
    return parts_of(settings).language_model or (
        EMBEDDED if settings.base == TEXT_BASE else settings.base
    )


def open_stage(settings: Settings, dtype: torch.dtype, device: torch.device) -> Wings:
    """Stage 1: a base with visual learners. Stage 2: the model of stage 1 with textual learners and
    routers.

    Raises UserError for another base than the stage starts from.
    """
    parts, is_text_base = parts_of(settings), settings.base == TEXT_BASE
    if parts.language_model:
        tower = load_siglip(EMBEDDED if is_text_base else settings.base, dtype, device)
        text = load_text(parts.language_model, dtype, device)
        ends, marks = (
            text.config.eos_token_id,
            load_text_tokenizer(parts.language_model).end_of_turn,
        )
        turn_ends = [mark for mark in marks if parts.chat and mark in ends]
        config = LanguageWingsConfig(
            vision=replace(tower.config, feature_layer=parts.feature_layer),
            text=text.config.text,
            # no text has it: it is no row of the embedding
            image_token_id=text.config.text.vocab_size,
            pad_token_id=text.config.pad_token_id or 0,
            eos_token_id=(turn_ends or ends)[0],
            bos_token_id=text.config.bos_token_id,
            chat=bool(turn_ends),
            rank=settings.r,
            routed=False,
        )
        return join(config, tower, text, settings.seed)
    if is_text_base and not TEXT_FOLDER.is_dir():
        raise UserError(
            f"--base {TEXT_BASE}: {TEXT_FOLDER} is not there: make it with python -m "
            "train.embedded.text"
        )
    base = load_model(TEXT_FOLDER if is_text_base else settings.base, dtype=dtype, device=device)
    if settings.stage == 1:
        return attach(base, settings.r, seed=settings.seed)
    if type(base) is not Wings or base.config.routed:
        remedy = "train one with --arch wings --stage 1, and give --base RUN/model"
        raise UserError(f"--stage 2: {settings.base} is no model of stage 1: {remedy}")
    return route(base, settings.seed)
