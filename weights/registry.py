"""The model class of each configuration and the names in its files. A new model is a line here and one in
`model/system_configs.py`."""

from torch import nn

from model.config import PaliGemmaConfig, VisionConfig
from model.language import LanguageModel
from model.language_config import LanguageConfig
from model.mamba import MambaLM
from model.paligemma import PaliGemma
from model.qmamba import QMamba
from model.siglip import Siglip
from model.system_configs import LanguageWingsConfig, MambaConfig, QMambaConfig, TextModelConfig, WingsConfig
from model.text import TextModel
from model.wings import Wings
from weights.mapping import LANGUAGE_NAMES, MAMBA_NAMES, OWN_NAMES, PALIGEMMA_NAMES, SIGLIP_NAMES, Names

Config = PaliGemmaConfig | QMambaConfig | TextModelConfig | MambaConfig | VisionConfig | LanguageConfig

KINDS: dict[type, tuple[type[nn.Module], Names]] = {
    PaliGemmaConfig: (PaliGemma, PALIGEMMA_NAMES),
    QMambaConfig: (QMamba, OWN_NAMES),
    TextModelConfig: (TextModel, OWN_NAMES),
    LanguageConfig: (LanguageModel, LANGUAGE_NAMES),
    WingsConfig: (Wings, OWN_NAMES),
    LanguageWingsConfig: (Wings, OWN_NAMES),
    # parts of models, which load_mamba and load_siglip open
    MambaConfig: (MambaLM, MAMBA_NAMES),
    VisionConfig: (Siglip, SIGLIP_NAMES),
}


def build(config: Config) -> nn.Module:
    """The model of a configuration, its weights as its layers draw them."""
    return KINDS[type(config)][0](config)


def names_of(config: Config) -> Names:
    """The names in the files of such a model."""
    return KINDS[type(config)][1]


def is_published(config: Config) -> bool:
    """Whether transformers has PaliGemma's class for this model; the names of the other systems are our own."""
    return type(config) is PaliGemmaConfig
