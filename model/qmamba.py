"""Q-Mamba: learned queries summarise the features of a picture, and a Mamba language model reads them.

In: a batch of `model/processor.py`, as for PaliGemma, with Q image tokens per picture. Out: float32 logits (B, S, V).
A connector scans SigLIP's features in both directions; in the blocks of the projector Q queries attend to them; a
linear map brings the queries to the width of the language model (`model/mamba.py`).

Follows "Query-based Cross-Modal Projector Bolstering Mamba Multimodal LLM" (anonymous ACL submission). The authors
released no weights, so this was not compared with their model. Three choices are uncertain:
- The feed-forward network is on, as in the paper. An early version of the authors' code has it off by default. Its
  width, which the paper does not give, is that of the block. As in that code, no residual connection spans a block.
- There are 24 blocks, as in the paper; a later version of the code has one block of the language model's width.
- The connector is that of the authors' code, trained from scratch; the paper has better results with the connector of
  a trained VL-Mamba (Qiao et al. 2024), whose weights are not read here.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention
from model.config import require
from model.linear import Linear
from model.mamba import Mamba, MambaMixer, initialize_mamba, initialize_mixer
from model.paligemma import PaliGemma, Projector, initialize
from model.system_configs import ProjectorConfig, QMambaConfig


def local_mask(queries: int, keys: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Boolean mask (Q, K): query i sees the i-th span of K/Q neighbouring keys; the first K mod Q spans are one longer.

        Q = 3, K = 8    x x x . . . . .
                        . . . x x x . .
                        . . . . . . x x

    There is at least one key for each query: a softmax over none is NaN.
    """
    assert 1 <= queries <= keys, f"{queries} queries cannot share {keys} keys"
    span, longer = divmod(keys, queries)
    query, key = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    start = query * span + query.clamp(max=longer)
    return (key >= start) & (key < start + span + (query < longer))


class CrossAttention(Attention):
    """Attention whose keys and values come from a second sequence."""

    def forward(self, x: torch.Tensor, features: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, Q, W) and features (B, K, W) to (B, Q, W); mask (B or 1, 1, Q, K), or None for none."""
        q, k, v = (
            self.split_heads(projection(source))
            for projection, source in ((self.q_proj, x), (self.k_proj, features), (self.v_proj, features))
        )
        heads = self.softmax_attention(q, k, v, mask)  # (B, N, Q, D)
        return self.get_submodule(self.output_name)(heads.transpose(1, 2).flatten(2))


class Connector(nn.Module):
    """f + M→(f) + flip(M←(flip f)), after VL-Mamba (Qiao et al. 2024).

    Both mixers always exist. `order` selects which are used and may be changed after training, as in the paper's
    Table 4, which evaluates one direction of a model trained with both.
    """

    def __init__(self, config: ProjectorConfig):
        super().__init__()
        self.order = config.scan_order
        self.forward_mixer = MambaMixer(config.mixers)
        self.backward_mixer = MambaMixer(config.mixers)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out = features
        if self.order != "backward":
            out = out + self.forward_mixer(features)
        if self.order != "forward":
            out = out + self.backward_mixer(features.flip(1)).flip(1)
        return out


class QMambaBlock(nn.Module):
    """A Mamba layer over the queries, cross-attention to the features, and a feed-forward network.

    x = LN(x);  x = x + Mamba(x);  x = W_c [x; MHA(x, f, f)];  x = LN(x);  x = x + W₂ GELU(W₁ x)
    """

    def __init__(self, config: ProjectorConfig):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.feed_forward = config.feed_forward
        self.mixer_norm = nn.LayerNorm(width)
        self.mixer = MambaMixer(config.mixers)
        self.cross_attn = CrossAttention(
            width, heads, heads, width // heads, scale=(width // heads) ** -0.5, bias=True, output_name="out_proj"
        )
        self.fuse = Linear(2 * width, width)
        if config.feed_forward:
            self.mlp_norm = nn.LayerNorm(width)
            self.fc1 = Linear(width, width)
            self.fc2 = Linear(width, width)

    def forward(self, x: torch.Tensor, features: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.mixer_norm(x)
        x = x + self.mixer(x)
        x = self.fuse(torch.cat((x, self.cross_attn(x, features, mask)), dim=-1))
        if not self.feed_forward:
            return x
        x = self.mlp_norm(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


class QMambaProjector(nn.Module):
    """From K features of the vision tower to Q vectors of the language model's width.

    The kind "connector" has no queries and no blocks: all K features become vectors, as in VL-Mamba.
    """

    def __init__(self, config: QMambaConfig):
        super().__init__()
        self.config, width = config.projector, config.projector.hidden_size
        self.checkpointing = False  # recompute each block in the backward pass instead of keeping its activations
        self.vision_proj = Linear(config.vision.hidden_size, width)
        self.vision_norm = nn.LayerNorm(width)
        self.connector = Connector(self.config) if self.config.connector else nn.Identity()
        if self.config.projector == "qmamba":
            self.queries = nn.Parameter(torch.randn(self.config.queries, width) * 0.02)
            self.blocks = nn.ModuleList(QMambaBlock(self.config) for _ in range(self.config.num_blocks))
        self.output = Linear(width, config.text.hidden_size)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """features (pictures, K, H of the vision tower) to (pictures, Q, H of the language model)."""
        features = self.connector(self.vision_norm(self.vision_proj(features)))
        if self.config.projector == "connector":
            return self.output(features)
        mask = None
        if self.config.local_attention:
            mask = local_mask(len(self.queries), features.shape[1], features.device)[None, None]
        x = self.queries.expand(len(features), -1, -1)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, features, mask, use_reentrant=False)
            else:
                x = block(x, features, mask)
        return self.output(x)


class QMamba(PaliGemma):
    """PaliGemma with this projector and Mamba as the decoder: the same parts, names and `forward`.

    token_type_ids are ignored: the recurrence is causal for image and prefix, too.
    """

    language_model: Any  # Mamba in place of Gemma
    multi_modal_projector: Any  # Projector or QMambaProjector

    @staticmethod
    def build(config: QMambaConfig) -> tuple[nn.Module, Mamba]:
        is_linear = config.projector.projector == "linear"
        return Projector(config) if is_linear else QMambaProjector(config), Mamba(config.text)

    def set_checkpointing(self, on: bool) -> None:
        """For the blocks of the projector, too."""
        super().set_checkpointing(on)
        self.multi_modal_projector.checkpointing = on


@torch.no_grad()
def fill_from_mamba(projector: QMambaProjector, source: Mamba) -> None:
    """Copy the mixers of a language model (`MambaLM.backbone`) into the projector's blocks, layer by layer.

    Raises UserError unless all sizes agree; mamba-130m fits the default projector.
    """
    for name in ("num_hidden_layers", "hidden_size", "state_size", "expand", "conv_kernel", "rank"):
        mine, theirs = getattr(projector.config.mixers, name), getattr(source.config, name)
        remedy = "take weights of its geometry, or size it after the weights"
        require(mine == theirs, f"the Mamba weights have {name} {theirs}, the projector {mine}: {remedy}")
    for block, layer in zip(projector.blocks, source.layers, strict=True):
        block.get_submodule("mixer").load_state_dict(layer.get_submodule("mixer").state_dict())


def fresh_projector(config: QMambaConfig, seed: int = 0) -> nn.Module:
    """A projector with random weights; kinds with a connector have the same weights in all the parts they share."""
    if config.projector.projector == "linear":
        return initialize(Projector(config), seed)
    whole = QMambaProjector(replace(config, projector=replace(config.projector, projector="qmamba")))
    initialize_projector(whole, seed)
    if config.projector.projector == "qmamba":
        return whole
    plain = QMambaProjector(config)
    plain.load_state_dict({name: whole.get_parameter(name) for name in plain.state_dict()})
    return plain


@torch.no_grad()
def initialize_projector(projector: QMambaProjector, seed: int = 0) -> None:
    """Fill a projector with random weights: mixers by `initialize_mixer`, queries with std 0.02, else `initialize`."""
    initialize(projector, seed)
    generator = torch.Generator().manual_seed(seed)
    for part, depth in ((projector.blocks, len(projector.blocks)), (projector.connector, 1)):
        for mixer in (module for module in part.modules() if isinstance(module, MambaMixer)):
            initialize_mixer(mixer, depth, generator)
    # last, so that projectors with different numbers of queries have the same other weights
    projector.queries.copy_(torch.randn(projector.queries.shape, generator=generator) * 0.02)


def initialize_qmamba(model: QMamba, seed: int = 0) -> QMamba:
    """Fill a whole model with random weights."""
    initialize(model, seed)
    initialize_mamba(model.language_model, seed)
    initialize_projector(model.multi_modal_projector, seed)
    return model
