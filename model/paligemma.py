"""PaliGemma (Beyer et al. 2024): SigLIP, a linear projector, and Gemma over patches and text as one
sequence.

In: a batch of `model/processor.py`: input_ids (B, S) with I image tokens a picture, pixel_values
(pictures, 3, R, R), token_type_ids and attention_mask (B, S). Out: float32 logits (B, S, V).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import LayerCache, Positions
from model.common import UserError
from model.gemma import Adaptable, Gemma, RMSNorm
from model.linear import Linear
from model.siglip import Siglip

MAX_LOGITS = 1 << 25  # that the loss holds at a time: 130 positions of PaliGemma's vocabulary


class Projector(nn.Module):
    """One linear map from the vision tower's width to the decoder's."""

    def __init__(self, config: Any):
        super().__init__()
        self.linear = Linear(config.vision.hidden_size, config.text.hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


class PaliGemma(Adaptable):
    """The whole model. Its parameter names are those of transformers 5 without their leading
    `model.`."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.vision_tower = Siglip(config.vision)
        self.multi_modal_projector, self.language_model = self.build(config)

    @staticmethod
    def build(config: Any) -> tuple[nn.Module, nn.Module]:
        """The projector and the decoder, in which a kind of model may differ from PaliGemma."""
        return Projector(config), Gemma(config.text)

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None,
        token_type_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        positions_to_keep: Positions = None,
        image_features: Tensor | None = None,
        image_index: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """float32 logits (B, S, V), or those of the positions asked for; with `targets`, the loss.

        - token_type_ids (B, S): 0 for image, prefix and padding, which attend to each other, 1 for
          the causal suffix.
        - attention_mask (B, S): 0 at padding, on either side; None means no padding.
        - positions_to_keep: None for all; n for the last n (B, n, V); indices (T,) or (B, T) for
          (B, T, V). The last MLP and the head, the widest product of the model, run there alone.
        - image_features (pictures, I, H): from `encode_images`, in place of pixel_values.
        - image_index (slots,): the picture of each image slot of the batch, so that a picture is
          encoded once for many questions; None means one picture a slot, in order.
        - cache: then token_type_ids and attention_mask cover the cached positions too.
        - targets: the token that must follow each kept position, −100 for none; see
          `logits_or_loss`, also for label_smoothing.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(token_type_ids)
        if image_features is None and pixel_values is not None:
            image_features = self.encode_images(pixel_values)
        if image_index is not None and image_features is not None:
            image_features = image_features[image_index]
        x = self.merge(input_ids, image_features)
        valid = attention_mask.bool()
        hidden = self.language_model(x, valid, token_type_ids, cache, positions_to_keep)
        head, vocab_size = self.language_model.head, self.config.text.vocab_size
        return logits_or_loss(head, vocab_size, hidden, targets, label_smoothing)

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        """pixel_values (pictures, 3, R, R) in [-1, 1] to features (pictures, I, H) of the decoder's
        width."""
        side = self.config.vision.image_size
        if tuple(pixel_values.shape[1:]) != (3, side, side):
            raise UserError(
                f"pixel_values are {tuple(pixel_values.shape)}, expected (pictures, 3, {side}, {side}): "
                "prepare the pictures with this model's own processor"
            )
        if len(pixel_values) == 0:
            # text alone: an unused picture keeps the parameters in the graph, as distributed
            # training requires
            return self.encode_images(pixel_values.new_zeros(1, 3, side, side))[:0]
        return self.multi_modal_projector(self.vision_tower(pixel_values))

    def merge(self, input_ids: Tensor, image_features: Tensor | None) -> Tensor:
        """Embeddings (B, S, H): text scaled by √H, and at the image tokens, in order, the features
        unscaled.

        The slots may be anywhere in a row; the processor puts PaliGemma's before the text. Raises
        UserError for a slot without a picture and for pictures without a slot.
        """
        is_image = input_ids == self.config.image_token_id
        # some checkpoints have no embedding row for the image token; its value is overwritten
        # anyway
        ids = input_ids.masked_fill(is_image, self.config.pad_token_id)
        embeddings = self.language_model.embed(ids)
        # counting on a GPU would make the CPU wait
        if not input_ids.is_cuda and not torch.compiler.is_compiling():
            pictures = 0 if image_features is None else len(image_features)
            length = self.config.num_image_tokens
            tokens = is_image.sum(1).tolist()  # of each row
            if any(count % length for count in tokens) or sum(tokens) != pictures * length:
                raise UserError(
                    f"the rows have {tokens} image tokens for {pictures} pictures: give every row "
                    f"one picture for each block of {length} image tokens"
                )
        if image_features is None:
            return embeddings
        features = image_features.to(embeddings.dtype)
        return embeddings.masked_scatter(is_image[..., None], features)

    def adjusted(self, logits: Tensor, *read) -> Tensor:
        """Logits (B, V) from which the next token is chosen: never the image token, which is set to
        −∞ in place. read: not used by PaliGemma, see `model.generate.next_token`."""
        image = self.config.image_token_id
        if image < logits.shape[-1]:
            logits[:, image] = -math.inf
        return logits


def logits_or_loss(
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden: Tensor,
    targets: Tensor | None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`head` at hidden states (…, H); with targets (…), the sum of cross-entropies, in nats; −100
    means none.

    With label_smoothing s (big_vision, trainers/proj/paligemma/train.py) the target has the
    probability 1 − s, and every other token s / (V − 1). PyTorch's ε is shared by all V tokens, the
    target too: ε = s·V / (V − 1).

    More than MAX_LOGITS are computed in chunks, and again in the backward pass: one position of
    257,152 logits takes a megabyte in fp32, and cross-entropy keeps several copies.
    """
    if targets is None:
        return head(hidden)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head(hidden)
        size = logits.shape[-1]
        share = label_smoothing * size / (size - 1)
        return nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=share)

    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    rows = max(1, MAX_LOGITS // vocab_size)
    if len(hidden) <= rows:
        return loss_of(hidden, targets)
    loss = hidden.new_zeros(())
    for chunk in zip(hidden.split(rows), targets.split(rows), strict=True):
        loss = loss + checkpoint(loss_of, *chunk, use_reentrant=False, preserve_rng_state=False)
    return loss


@torch.no_grad()
def initialize(model: Any, seed: int = 0, position_std: float = 0.02) -> Any:
    """Fill a model with random weights: unit variance through every layer, norms as the identity.

    Embeddings have a standard deviation of H^-½: the factor √H makes it 1 at the input, and the
    logits of the tied head are near 1. Position embeddings have `position_std`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            normal(module.weight, module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            is_position = name.endswith("position_embedding")
            normal(module.weight, position_std if is_position else module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0 - module.offset)
    return model
