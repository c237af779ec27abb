"""Language models for text alone: Gemma 1 and 2, Llama, Qwen 1.5 and 2, and the Differential Transformer.

In: token ids (B, S), and the document of each token where rows are packed. Out: float32 logits (B, S, V), or the loss
against targets. Every position is causal.

`TextModel` is trained from nothing: the Differential Transformer (Ye et al. 2024) or its plain counterpart. Both are
Gemma's layers with a silu gate (pre-norm, RMSNorm, SwiGLU of 8/3·H, a tied head); the variant `split` with fresh RoPE
pairs is the published attention:

    attention       heads              maps of a head     per head                            weights of a layer
    plain           2h of width d      1                  A·V                                 4·H² + 8·H²
    differential    h of width 2d      2, of width d      norm((A₁ − λ·A₂)·V)·(1 − λ_init)    4·H² + 8·H² + 6d
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import LayerCache, Positions
from model.config import require
from model.differential import graft
from model.gemma import Adaptable, Gemma
from model.paligemma import initialize, logits_or_loss
from model.registry import System
from model.systems.configs import FAMILIES, TEXT_PRESETS, LanguageConfig, TextModelConfig
from model.systems.reader import open_reader


class LanguageModel(Adaptable):
    """A decoder with its head. `config.text` has its sizes."""

    first_position = 0
    published = {"language_model.lm_head": "lm_head", "language_model": "model"}

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.language_model = Gemma(config.text, self.first_position)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        positions_to_keep: Positions = None,
        *,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        **unused: Tensor | None,
    ) -> Tensor:
        """float32 logits (B, S, V), or those to keep; with `targets`, the loss; as
        `PaliGemma.forward`.

        documents (B, Sk): the number of each token's document, where a row holds several; tokens
        see their own document only. unused: token_type_ids, and what `generate` passes as None to a
        model without pictures.
        """
        assert unused.get("pixel_values") is None, "a language model takes no pictures"
        x = self.language_model.embed(input_ids)
        if attention_mask is None:
            length = cache[0].length if cache else 0
            attention_mask = F.pad(torch.ones_like(input_ids), (length, 0), value=1)
        causal, valid = torch.ones_like(attention_mask), attention_mask.bool()
        hidden = self.language_model(x, valid, causal, cache, positions_to_keep, documents)
        head, vocab_size = self.language_model.head, self.config.text.vocab_size
        return logits_or_loss(head, vocab_size, hidden, targets)

    def adjusted(
        self,
        logits: Tensor,
        prompt: Tensor,
        tokens: Sequence[Tensor],
        valid: Tensor,
    ) -> Tensor:
        """Logits (B, V) after the repetition penalty (Keskar et al. 2019, section 4.1) of what was
        read or said; padding was not."""
        penalty = getattr(self.config, "repetition_penalty", 1.0)
        if penalty == 1:
            return logits
        ids = torch.cat((prompt, *(token[:, None] for token in tokens)), dim=1)
        counts = torch.zeros_like(logits).scatter_add(1, ids, valid[:, : ids.shape[1]].to(logits))
        lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(counts > 0, lowered, logits)


class TextModel(LanguageModel):
    """Gemma's decoder and head. `seed` is that of the λ vectors, which `initialize` does not
    change."""

    first_position = 1

    def __init__(self, config: TextModelConfig, seed: int = 0):
        super().__init__(config)
        if config.differential:
            graft(self, "split", rope_pairs="fresh", seed=seed)


def new_model(
    preset: str,
    differential: bool,
    seed: int = 0,
    wide: bool = False,
) -> TextModel:
    """A model of random weights. For one seed, plain and differential models have equal embeddings,
    norms and MLPs.

    Raises UserError for an unknown preset.
    """
    require(
        preset in TEXT_PRESETS,
        f"unknown preset {preset!r}: choose one of {', '.join(TEXT_PRESETS)}",
    )
    model = TextModel(TextModelConfig.of(TEXT_PRESETS[preset], differential, wide), seed)
    initialize(model, seed)
    return model


# as transformers names its tensors; a tied head may be stored, too
LANGUAGE = System(
    LanguageConfig,
    LanguageModel,
    asked_as="text",
    reader=open_reader,
    prefixes=LanguageModel.published,
    aliases={"lm_head.weight": "language_model.embed_tokens.weight"},
)
SYSTEMS = dict.fromkeys([LanguageConfig.kind, *FAMILIES], LANGUAGE) | {
    TextModelConfig.kind: System(TextModelConfig, TextModel, asked_as="text", reader=open_reader),
}
