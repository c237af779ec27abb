"""A language model trained from scratch: the Differential Transformer (Ye et al. 2024), and its plain counterpart.

In: token ids (B, S), and the document of each token. Out: float32 logits (B, S, V), or the loss against targets.
Every part is used elsewhere, too: Gemma's layers with a silu gate (pre-norm, RMSNorm, SwiGLU of 8/3·H, a tied head),
and `split` of `model/differential.py` with fresh RoPE pairs, which is the published attention.

    attention       heads              maps of a head     per head                            weights of a layer
    plain           2h of width d      1                  A·V                                 4·H² + 8·H²
    differential    h of width 2d      2, of width d      norm((A₁ − λ·A₂)·V)·(1 − λ_init)    4·H² + 8·H² + 6d
"""

import torch

from model.common import UserError
from model.gemma import Gemma
from model.graft import Adaptable, graft
from model.paligemma import initialize, summed_loss
from model.system_configs import TEXT_PRESETS, TextModelConfig


class TextModel(Adaptable):
    """Gemma's decoder and head. `seed` is that of the λ vectors, which `initialize` does not change."""

    def __init__(self, config: TextModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.language_model = Gemma(config.text)
        if config.differential:
            graft(self, "split", rope_pairs="fresh", seed=seed)

    def forward(
        self,
        input_ids: torch.Tensor,
        documents: torch.Tensor | None = None,
        *,
        positions_to_keep: int | torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 logits (B, S, V), or those of the positions asked for; with `targets`, the loss against them.

        documents (B, S): the number of each token's document, where a row holds several; tokens see their own document
        only. None means one document per row. positions_to_keep as in `PaliGemma.forward`. targets: the token that must
        follow each kept position, −100 for none; the loss is the sum of cross-entropies, in nats.
        """
        valid = torch.ones_like(input_ids)
        embeddings = self.language_model.embed(input_ids)
        hidden = self.language_model(embeddings, valid.bool(), valid, None, positions_to_keep, documents)
        head = self.language_model.head
        return head(hidden) if targets is None else summed_loss(head, self.config.text.vocab_size, hidden, targets)


def new_model(preset: str, differential: bool, seed: int = 0) -> TextModel:
    """A model of random weights. For one seed, plain and differential models have equal embeddings, norms and MLPs.

    Raises UserError for an unknown preset.
    """
    if preset not in TEXT_PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose one of {', '.join(TEXT_PRESETS)}")
    model = TextModel(TextModelConfig.of(TEXT_PRESETS[preset], differential), seed)
    initialize(model, seed)
    return model
