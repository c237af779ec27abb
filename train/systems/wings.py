"""WINGS as it is trained: a base with visual learners, then with textual learners and routers.

In: the settings of a run with `--arch wings`. Out: the model of a stage, see `model/wings.py`.
"""

import torch

from model.common import UserError
from model.source import EMBEDDED
from model.wings import Wings, attach, route
from train.embedded.text import TEXT_BASE, open_text_base
from train.settings import Settings
from weights.load import load_model


def text_source(settings: Settings) -> str:
    """The source of the tokenizer."""
    return EMBEDDED if settings.base == TEXT_BASE else settings.base


def open_wings(settings: Settings, dtype: torch.dtype, device: torch.device) -> Wings:
    """Stage 1: a base with visual learners. Stage 2: the model of stage 1 with textual learners and routers.

    Raises UserError if the base is not the one that the stage starts from.
    """
    if settings.base == TEXT_BASE:
        base = open_text_base(settings.seed, dtype, device)
    else:
        base = load_model(settings.base, dtype=dtype, device=device)
    if settings.stage == 1:
        return attach(base, settings.r, seed=settings.seed)
    if type(base) is not Wings or base.config.routed:
        raise UserError(
            f"--stage 2: {settings.base} is no model of stage 1: train one with --wings --stage 1, and give --base "
            "RUN/model"
        )
    return route(base, settings.seed)
