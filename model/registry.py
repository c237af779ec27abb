"""The one table of the models beside PaliGemma: config.json's model_type, and the module that has it.

In: a model_type, the name of a preset, or a config.json. Out: the `System` of that kind, or its
configuration. A module of the table has `SYSTEMS`, a `System` for each of its kinds. Without these
lines and the folders `systems/`, PaliGemma stands alone.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model.common import read_json
from model.config import PRESETS, PaliGemmaConfig, read_generation

MODULES = {
    "wings": "model.systems.wings",
    "wings-language": "model.systems.wings",
    "qmamba": "model.systems.qmamba",
    "mamba": "model.systems.mamba",
    "diff-transformer": "model.systems.language",
    "language": "model.systems.language",
    "gemma": "model.systems.language",
    "gemma2": "model.systems.language",
    "llama": "model.systems.language",
    "qwen2": "model.systems.language",
}
# presets of these models, by name: their kind
SYSTEM_PRESETS = {
    "qmamba-2.8b": "qmamba",
}


class System(NamedTuple):
    """What a kind of model brings, beside PaliGemma.

    config: reads its config.json. model: its class. processor: the class that makes its batches;
    None where it reads text alone. asked_as: "paligemma", "llava" (as LLaVA's authors ask) or
    "text" (as a language model). prefixes: {ours: the files'} of its tensors' names. aliases:
    further names in files, and ours. reader: opens what a processor is for a model of text.
    initialize: fills a model with random weights. presets: sizes by name.
    """

    config: Any
    model: Any
    processor: Any = None
    asked_as: str = "paligemma"
    prefixes: Mapping[str, str] = {"": ""}
    aliases: Mapping[str, str] = {}
    reader: Callable[..., Any] | None = None
    initialize: Callable[[Any], Any] | None = None
    presets: Mapping[str, Any] = {}


def system_of(kind: str) -> System | None:
    """The system of a model_type; None for a PaliGemma and for what is not known here."""
    if kind not in MODULES:
        return None
    return importlib.import_module(MODULES[kind]).SYSTEMS[kind]


def preset_of_name(name: str) -> Any:
    """The sizes that a preset's name stands for; None for any other name."""
    if name in SYSTEM_PRESETS:
        system = system_of(SYSTEM_PRESETS[name])
        return system and system.presets[name]
    return PRESETS.get(name)


def read_config(path: str | Path) -> Any:
    """The configuration in the config.json at `path`. Raises UserError for a file that is no model
    of this project."""
    system = system_of(str(read_json(path).get("model_type")))
    config = PaliGemmaConfig.from_file(path) if system is None else system.config.from_file(path)
    if system is None:
        ours = {"suppress_tokens": config.image_token_id, "eos_token_id": config.eos_token_id}
        read_generation(path, **ours)
    elif system.processor is not None:
        read_generation(path, suppress_tokens=config.image_token_id)
    return config
