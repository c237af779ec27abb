"""A language model trained from nothing: the Differential Transformer (Ye et al. 2024), and its plain twin.

In: token ids (B, S), and which document each belongs to. Out: float32 logits (B, S, V), or the loss against targets.
Everything in it is shared: Gemma's blocks with a silu gate (pre-norm, RMSNorm, SwiGLU of 8/3·H, a tied head), and
`split` of `model/differential.py` with fresh RoPE pairs, which is the published attention. Next: `train/text.py`.

    attention       heads              maps of a head     per head                            a layer has
    plain           2h of width d      1                  A·V                                 4·H² + 8·H² weights
    differential    h of width 2d      2, of width d      norm((A₁ − λ·A₂)·V)·(1 − λ_init)    as many, 4d + 2d more
"""

import torch

from model.common import UserError
from model.gemma import Gemma
from model.graft import Adaptable, graft
from model.paligemma import initialize, summed_loss
from model.system_configs import TEXT_PRESETS, TextModelConfig


class TextModel(Adaptable):
    """Gemma's decoder and head alone. `seed` draws the λ vectors, which no later initialisation touches."""

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

        documents (B, S): a number for each token's document, where several are packed into a row: each sees its own
        alone. None means one a row. positions_to_keep as in `PaliGemma.forward`. targets: the token that must follow
        each kept position, −100 for none; the loss is the sum of cross-entropies, in nats.
        """
        valid = torch.ones_like(input_ids)
        embeddings = self.language_model.embed(input_ids)
        hidden = self.language_model(embeddings, valid.bool(), valid, None, positions_to_keep, documents)
        head = self.language_model.head
        return head(hidden) if targets is None else summed_loss(head, self.config.text.vocab_size, hidden, targets)


def new_model(preset: str, differential: bool, seed: int = 0) -> TextModel:
    """A model of random weights, drawn from `seed`: with one seed, the twins' embeddings, norms and MLPs are equal.

    Raises UserError for an unknown preset.
    """
    if preset not in TEXT_PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose one of {', '.join(TEXT_PRESETS)}")
    return initialize(TextModel(TextModelConfig.of(TEXT_PRESETS[preset], differential), seed), seed)
