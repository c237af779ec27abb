"""A language model trained from scratch: the Differential Transformer (Ye et al. 2024), and its plain counterpart.

In: token ids (B, S), and the document of each token. Out: float32 logits (B, S, V), or the loss against targets.
Every part is used elsewhere, too: Gemma's layers with a silu gate (pre-norm, RMSNorm, SwiGLU of 8/3·H, a tied head),
and `split` of `model/differential.py` with fresh RoPE pairs, which is the published attention.

    attention       heads              maps of a head     per head                            weights of a layer
    plain           2h of width d      1                  A·V                                 4·H² + 8·H²
    differential    h of width 2d      2, of width d      norm((A₁ − λ·A₂)·V)·(1 − λ_init)    4·H² + 8·H² + 6d
"""

from model.common import UserError
from model.graft import graft
from model.language import LanguageModel
from model.paligemma import initialize
from model.system_configs import TEXT_PRESETS, TextModelConfig


class TextModel(LanguageModel):
    """Gemma's decoder and head. `seed` is that of the λ vectors, which `initialize` does not change."""

    first_position = 1

    def __init__(self, config: TextModelConfig, seed: int = 0):
        super().__init__(config)
        if config.differential:
            graft(self, "split", rope_pairs="fresh", seed=seed)


def new_model(preset: str, differential: bool, seed: int = 0) -> TextModel:
    """A model of random weights. For one seed, plain and differential models have equal embeddings, norms and MLPs.

    Raises UserError for an unknown preset.
    """
    if preset not in TEXT_PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose one of {', '.join(TEXT_PRESETS)}")
    model = TextModel(TextModelConfig.of(TEXT_PRESETS[preset], differential), seed)
    initialize(model, seed)
    return model
