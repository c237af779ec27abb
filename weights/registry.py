"""The model class of each configuration. A new model is a line here and one in `model/system_configs.py`."""

from model.config import PaliGemmaConfig
from model.paligemma import PaliGemma
from model.qmamba import QMamba
from model.system_configs import QMambaConfig, TextModelConfig, WingsConfig
from model.text import TextModel
from model.wings import Wings

MODELS = {PaliGemmaConfig: PaliGemma, QMambaConfig: QMamba, TextModelConfig: TextModel, WingsConfig: Wings}


def build(config: PaliGemmaConfig | QMambaConfig | TextModelConfig) -> PaliGemma | TextModel:
    """The model of a configuration, its weights as its layers draw them."""
    return MODELS[type(config)](config)


def is_published(config: PaliGemmaConfig | QMambaConfig | TextModelConfig) -> bool:
    """Whether transformers has this model; the parameter names of the others are our own."""
    return type(config) is PaliGemmaConfig
