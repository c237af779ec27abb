"""Which model a folder holds: config.json names its type, and this table the classes.

In: a config.json. Out: its configuration; and the class of a configuration. A new model is a line here.
Next: `model/processor.py` and `weights/load.py` open folders by it.
"""

from pathlib import Path

from model.config import PaliGemmaConfig, read_json
from model.paligemma import PaliGemma
from model.qmamba import QMamba, QMambaConfig
from model.text import TextModel, TextModelConfig
from model.wings import Wings, WingsConfig

# by config.json's model_type; each configuration has `from_dict`, `to_dict` and what `PaliGemma` reads of one
MODEL_TYPES = {
    "paligemma": (PaliGemmaConfig, PaliGemma),
    "qmamba": (QMambaConfig, QMamba),
    "diff-transformer": (TextModelConfig, TextModel),
    "wings": (WingsConfig, Wings),
}


def read_config(path: str | Path) -> PaliGemmaConfig | QMambaConfig:
    """Read config.json at `path`. Raises UserError if it is absent, not JSON, or of no model here."""
    raw = read_json(path)
    # PaliGemma's own reader says best what is wrong with a type that is not in the table
    return MODEL_TYPES.get(raw.get("model_type"), MODEL_TYPES["paligemma"])[0].from_dict(raw, str(path))


def is_published(config) -> bool:
    """Whether transformers has this model; of the others the names of the parameters are our own."""
    return type(config) is PaliGemmaConfig


def build(config) -> PaliGemma:
    """The model of a configuration, its weights as its layers draw them."""
    return next(model for kind, model in MODEL_TYPES.values() if type(config) is kind)(config)
