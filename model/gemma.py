"""Gemma's decoder, generations 1 (Gemma Team 2024a) and 2 (2024b), over embeddings that text and picture share.

In: embeddings (B, S, H), who is valid and of which type (B, Sk), a cache when decoding.
Out: hidden states (B, S, H) after the final norm; `head` turns those asked for into logits. Next: `model/generate.py`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention, LayerCache, Rope, attention_mask, keep_positions
from model.config import TextConfig
from model.linear import Linear, activated, linear


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + weight), wholly in fp32: multiplying after the cast back would round differently."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class GemmaMLP(nn.Module):
    """down(act(gate x) · up x); `activation` is gelu (GeGLU, the published one) or silu (SwiGLU)."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str):
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(activated(self.gate_proj, x, self.activation) * self.up_proj(x))


class GemmaLayer(nn.Module):
    """Pre-norm layer. Gemma 2 also normalises each branch before it is added, and reuses a name for that.

    `post_attention_layernorm` is the MLP's pre-norm in Gemma 1, and the attention branch's post-norm in Gemma 2.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config.is_gemma2:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.is_gemma2 = config.is_gemma2
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            scale=config.attention_scale,
            softcap=config.attn_logit_softcapping,
        )
        self.mlp = GemmaMLP(config.hidden_size, config.intermediate_size, config.hidden_activation)

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope,
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
        positions: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, S, H) to (B, S, H), or to the `positions` to keep: no other asks, or reaches the MLP."""
        attended = self.self_attn(self.input_layernorm(x), rope, mask, cache, positions)
        x = keep_positions(x, positions)
        if self.is_gemma2:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma(nn.Module):
    """The decoder with its embedding, which is the head too."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False  # recompute each layer in the backward pass instead of keeping its activations
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GemmaLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids (B, S) to embeddings (B, S, H) times √H; the factor is first cast to the weights' dtype."""
        embeddings = self.embed_tokens(input_ids)
        return embeddings * embeddings.new_full((), self.config.hidden_size**0.5)  # a GPU need not wait for it

    def forward(
        self,
        x: torch.Tensor,
        valid: torch.Tensor,
        types: torch.Tensor,
        cache: list[LayerCache] | None = None,
        positions_to_keep: int | torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, S, H), the last S of the Sk positions that valid (B, Sk) and types (B, Sk) describe, to (B, S, H).

        Or to the positions asked for, as in `keep_positions`: in the last layer the others are only keys and values.
        With a `cache` whose `position` is set, x is one token, and nothing after it is valid. `documents` (B, Sk) are
        kept apart by the mask alone: positions count on through a row, since RoPE knows differences only.
        """
        rope, full, sliding = self.geometry(x, valid, types, cache, documents)
        for index, layer in enumerate(self.layers):
            mask = full if self.config.window(index) is None else sliding
            keep = positions_to_keep if index + 1 == len(self.layers) else None
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, rope, mask, None, keep, use_reentrant=False)
            else:
                x = layer(x, rope, mask, None if cache is None else cache[index], keep)
        return self.norm(x)

    def geometry(
        self,
        x: torch.Tensor,
        valid: torch.Tensor,
        types: torch.Tensor,
        cache: list[LayerCache] | None = None,
        documents: torch.Tensor | None = None,
    ) -> tuple[Rope, torch.Tensor | None, torch.Tensor | None]:
        """What all layers share, from the arguments of `forward`: positions, and the full and the sliding mask."""
        queries = x.shape[1]
        # valid tokens count from 1, wherever the padding is
        positions = valid.sum(-1, keepdim=True) if queries == 1 else valid.long().cumsum(-1)[:, -queries:]
        rope = Rope(positions, self.config.rope_theta)
        if cache is not None and cache[0].position is not None:
            queries = cache[0].position
        may_look = x.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would have to be waited for

        def mask(window: int | None = None) -> torch.Tensor | None:
            seen = attention_mask(valid, types, queries, window, documents=documents)
            return None if may_look and bool(seen.all()) else seen

        full = sliding = mask()
        if self.config.sliding_window is not None and valid.shape[1] > self.config.sliding_window:
            sliding = mask(self.config.sliding_window)
        return rope, full, sliding

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (…, H) to float32 logits (…, V), soft-capped in Gemma 2."""
        logits = linear(hidden, self.embed_tokens.weight)
        if self.config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping
        return logits.float()
