"""A language model for text alone: Gemma, Gemma 2, Qwen1.5 or Qwen2, as `weights.load.load_text` opens it.

In: token ids (B, S) of `model/chat.py`. Out: float32 logits (B, S, V). Every position is causal. `embed` and `decode`
are its two halves, between which `model/wings.py` puts the features of pictures.
"""

from typing import Any

import torch

from model.attention import LayerCache
from model.common import UserError
from model.gemma import Gemma
from model.graft import Adaptable
from model.paligemma import summed_loss


class LanguageModel(Adaptable):
    """A decoder with its head. `config.text` has its sizes."""

    first_position = 0

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.language_model = Gemma(config.text, self.first_position)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: list[LayerCache] | None = None,
        positions_to_keep: int | torch.Tensor | None = None,
        *,
        documents: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **pictures: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32 logits (B, S, V), or those of the positions asked for; with `targets`, the loss against them.

        attention_mask (B, Sk): 0 at padding, on either side; with a `cache` it covers the cached positions too. None
        means no padding. positions_to_keep and targets as in `PaliGemma.forward`. documents (B, Sk): the number of each
        token's document, where a row holds several; tokens see their own document only. token_type_ids are ignored.
        pictures: the arguments of `PaliGemma.forward` for pictures, which `generate` passes as None; others raise
        UserError.
        """
        if any(value is not None for value in pictures.values()):
            raise UserError(f"a language model takes no {', '.join(pictures)}: use a model that reads pictures")
        hidden = self.decode(self.embed(input_ids), attention_mask, cache, positions_to_keep, documents)
        head = self.language_model.head
        return head(hidden) if targets is None else summed_loss(head, self.config.text.vocab_size, hidden, targets)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids (B, S) to embeddings (B, S, H), scaled as the decoder expects them."""
        return self.language_model.embed(input_ids)

    def decode(
        self,
        embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: list[LayerCache] | None = None,
        positions_to_keep: int | torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings (B, S, H) to hidden states (B, S, H) after the final norm, which `language_model.head` reads."""
        if attention_mask is None:
            length = embeddings.shape[1] + (cache[0].length if cache else 0)
            attention_mask = torch.ones(len(embeddings), length, dtype=torch.int64, device=embeddings.device)
        causal = torch.ones_like(attention_mask)
        return self.language_model(embeddings, attention_mask.bool(), causal, cache, positions_to_keep, documents)
