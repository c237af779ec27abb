"""Q-Mamba: learned queries summarise the features of a picture, and a Mamba language model reads
them.

In: a batch of `model/processor.py`, as for PaliGemma, with Q image tokens per picture. Out: float32
logits (B, S, V).
A connector scans SigLIP's features in both directions; in the blocks of the projector Q queries
attend to them; a linear map brings the queries to the width of the language model
(`model/systems/mamba.py`). Follows "Query-based Cross-Modal Projector Bolstering Mamba Multimodal LLM"
(Eom et al., Findings of EMNLP 2024). The authors released no weights, so this was not compared with their
model. Uncertain are the feed-forward network, which an early version of their code has off, and its
width, here the block's; the 24 blocks of the paper, where later code has one; and the connector
from scratch, where the paper also takes that of a trained VL-Mamba (Qiao et al. 2024). As in their
code, no residual connection spans a block.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention
from model.config import require
from model.linear import Linear
from model.paligemma import PaliGemma, Projector, initialize
from model.registry import System
from model.systems.configs import QMAMBA_PRESETS, ProjectorConfig, QMambaConfig
from model.systems.mamba import Mamba, MambaMixer, initialize_mamba, initialize_mixer
from model.systems.processors import SlotProcessor


def local_mask(queries: int, keys: int, device=None) -> Tensor:
    """Boolean mask (Q, K): query i sees the i-th span of K/Q neighbouring keys; the first K mod Q
    spans are one longer.

    Q = 3, K = 8    x x x . . . . .
                    . . . x x x . .
                    . . . . . . x x
    """
    span, longer = divmod(keys, queries)
    number = torch.arange(queries + 1, device=device)[:, None]
    edge = number * span + number.clamp(max=longer)
    key = torch.arange(keys, device=device)
    return (key >= edge[:-1]) & (key < edge[1:])


class CrossAttention(Attention):
    """Attention whose keys and values come from a second sequence."""

    def forward(self, x: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, Q, W) and features (B, K, W) to (B, Q, W); mask (Q, K), or None for none."""
        q = self.split_heads(self.q_proj(x))
        k = self.split_heads(self.k_proj(features))
        v = self.split_heads(self.v_proj(features))
        return self.join_heads(self.softmax_attention(q, k, v, mask))


class Connector(nn.Module):
    """f + M→(f) + flip(M←(flip f)), after VL-Mamba; `order`, which may be changed later, selects
    the mixers."""

    def __init__(self, config: ProjectorConfig):
        super().__init__()
        self.order = config.scan_order
        self.forward_mixer = MambaMixer(config.mixers)
        self.backward_mixer = MambaMixer(config.mixers)

    def forward(self, features: Tensor) -> Tensor:
        out = features
        if self.order != "backward":
            out = out + self.forward_mixer(features)
        if self.order != "forward":
            out = out + self.backward_mixer(features.flip(1)).flip(1)
        return out


class QMambaBlock(nn.Module):
    """x = LN(x);  x = x + Mamba(x);  x = W_c [x; MHA(x, f, f)];  x = LN(x);  x = x + W₂ GELU(W₁ x),
    x the queries."""

    def __init__(self, config: ProjectorConfig):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.mixer_norm = nn.LayerNorm(width)
        self.mixer = MambaMixer(config.mixers)
        self.cross_attn = CrossAttention(
            width,
            heads,
            heads,
            width // heads,
            bias=True,
            output_name="out_proj",
        )
        self.fuse = Linear(2 * width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.fc1 = Linear(width, width)
        self.fc2 = Linear(width, width)

    def forward(self, x: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
        x = self.mixer_norm(x)
        x = x + self.mixer(x)
        x = self.fuse(torch.cat((x, self.cross_attn(x, features, mask)), dim=-1))
        x = self.mlp_norm(x)
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class QMambaProjector(nn.Module):
    """From K features of the vision tower to Q vectors of the language model's width; "connector"
    keeps all K."""

    def __init__(self, config: QMambaConfig):
        super().__init__()
        self.config, width = config.projector, config.projector.hidden_size
        # recompute each block in the backward pass instead of keeping its activations
        self.checkpointing = False
        self.vision_proj = Linear(config.vision.hidden_size, width)
        self.vision_norm = nn.LayerNorm(width)
        self.connector = Connector(self.config)
        if self.config.projector == "qmamba":
            self.queries = nn.Parameter(torch.empty(self.config.queries, width))
            self.blocks = nn.ModuleList(
                QMambaBlock(self.config) for _ in range(self.config.num_blocks)
            )
        self.output = Linear(width, config.text.hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """features (pictures, K, H of the vision tower) to (pictures, Q, H of the language
        model)."""
        features = self.connector(self.vision_norm(self.vision_proj(features)))
        if self.config.projector == "connector":
            return self.output(features)
        mask = None
        if self.config.local_attention:
            mask = local_mask(len(self.queries), features.shape[1], features.device)
        x = self.queries.expand(len(features), -1, -1)
        is_checkpointed = self.checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            if is_checkpointed:
                x = checkpoint(block, x, features, mask, use_reentrant=False)
            else:
                x = block(x, features, mask)
        return self.output(x)


class QMamba(PaliGemma):
    """PaliGemma with this projector and Mamba as the decoder, which is causal for image and prefix,
    too."""

    language_model: Any  # Mamba in place of Gemma
    multi_modal_projector: Any  # Projector or QMambaProjector

    @staticmethod
    def build(config: QMambaConfig) -> tuple[nn.Module, Mamba]:
        projector = Projector if config.projector.projector == "linear" else QMambaProjector
        return projector(config), Mamba(config.text)

    def set_checkpointing(self, on: bool) -> None:
        """For the blocks of the projector, too."""
        super().set_checkpointing(on)
        self.multi_modal_projector.checkpointing = on


def fill_from_mamba(projector: QMambaProjector, source: Mamba) -> None:
    """Copy the mixers of a language model into the projector's blocks. Raises UserError unless all
    sizes agree."""
    for name in ("num_hidden_layers", "hidden_size", "state_size", "expand", "conv_kernel", "rank"):
        mine, theirs = getattr(projector.config.mixers, name), getattr(source.config, name)
        problem = f"the Mamba weights have {name} {theirs}, the projector {mine}: take others"
        require(mine == theirs, problem)
    for block, layer in zip(projector.blocks, source.layers, strict=True):
        block.mixer.load_state_dict(layer.mixer.state_dict())


@torch.no_grad()
def fresh_projector(config: QMambaConfig, seed: int) -> nn.Module:
    """A projector with random weights; kinds with a connector have the same weights in all the
    parts they share."""
    kind = config.projector.projector
    if kind == "linear":
        return initialize(Projector(config), seed)
    with_queries = replace(config, projector=replace(config.projector, projector="qmamba"))
    projector = initialize(QMambaProjector(with_queries), seed)
    generator = torch.Generator().manual_seed(seed)
    for part, depth in ((projector.blocks, len(projector.blocks)), (projector.connector, 1)):
        for mixer in part.modules():
            if isinstance(mixer, MambaMixer):
                initialize_mixer(mixer, depth, generator)
    # last, so that projectors with different numbers of queries have the same other weights
    projector.queries.copy_(torch.randn(projector.queries.shape, generator=generator) * 0.02)
    if kind == "connector":
        del projector.queries, projector.blocks
        projector.config = config.projector
    return projector


def initialize_qmamba(model: QMamba, seed: int = 0) -> QMamba:
    """Fill a whole model with random weights."""
    initialize(model, seed)
    initialize_mamba(model.language_model, seed)
    model.multi_modal_projector.load_state_dict(fresh_projector(model.config, seed).state_dict())
    return model


SYSTEMS = {
    QMambaConfig.kind: System(
        QMambaConfig,
        QMamba,
        SlotProcessor,
        asked_as="llava",
        initialize=initialize_qmamba,
        presets=QMAMBA_PRESETS,
    )
}
