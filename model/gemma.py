"""Gemma's decoder, generations 1 (Gemma Team 2024a) and 2 (2024b), over the embeddings of text and
pictures. With the `TextConfig` of another family it is that family's decoder.

In: embeddings (B, S, H), which positions are valid and of which type (B, Sk), a cache when
decoding. Out: hidden states (B, S, H) after the final norm; `head` computes logits from them.
`model/generate.py` decodes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention, LayerCache, Positions, Rope, attention_mask, keep_positions
from model.config import TextConfig
from model.linear import Embedding, Linear, activated, filled


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + weight), all in fp32: multiplying after the cast back would round
    differently.

    With `offset` 0 it is weight · (x / rms(x)), and the factor is applied after the
    cast back.
    """

    def __init__(self, width: int, eps: float, offset: int = 1):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = filled(width, 1.0 - offset)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if not self.offset:
            normal = nn.functional.rms_norm(wide, self.weight.shape, None, self.eps)
            return self.weight * normal.to(x.dtype)
        factor = 1.0 + self.weight.float()
        return nn.functional.rms_norm(wide, self.weight.shape, factor, self.eps).to(x.dtype)


def norm_of(config: TextConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)


class GemmaMLP(nn.Module):
    """down(act(gate x) · up x); `activation` is gelu (GeGLU, the published one) or silu
    (SwiGLU)."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.activation: str = config.hidden_activation
        inner, outer = config.intermediate_size, config.hidden_size
        bias = config.mlp_bias
        self.gate_proj = Linear(outer, inner, bias)
        self.up_proj = Linear(outer, inner, bias)
        self.down_proj = Linear(inner, outer, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = activated(self.gate_proj, x, self.activation)
        up = self.up_proj(x)
        gated = gate * up if torch.is_grad_enabled() else gate.mul_(up)
        return self.down_proj(gated)


class GemmaLayer(nn.Module):
    """Pre-norm layer. Gemma 2 also normalises the output of each branch before it is added.

    The name `post_attention_layernorm` is published for two things: in Gemma 1 it is the norm
    before the MLP, in Gemma 2 the norm of the attention's output.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        self.is_gemma2 = config.is_gemma2
        self.input_layernorm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)
        if config.is_gemma2:
            self.pre_feedforward_layernorm = norm_of(config)
            self.post_feedforward_layernorm = norm_of(config)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            softcap=config.attn_logit_softcapping,
            bias=config.qkv_bias,
            output_bias=config.attention_bias,
        )
        self.mlp = GemmaMLP(config)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor | None,
        cache: LayerCache | None = None,
        positions: Positions = None,
    ) -> Tensor:
        """x (B, S, H) to (B, S, H), or to the `positions` to keep: the others are keys and values
        only."""
        attended = self.self_attn(self.input_layernorm(x), rope, mask, cache, positions)
        x = keep_positions(x, positions)
        if self.is_gemma2:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma(nn.Module):
    """The decoder with its embedding, whose matrix is also the head's unless there is an
    `lm_head`."""

    def __init__(self, config: TextConfig, first_position: int = 1):
        """first_position: of the first token of a row; PaliGemma counts from 1, a language model
        from 0."""
        super().__init__()
        self.config, self.first_position = config, first_position
        # recompute each layer in the backward pass instead of keeping its activations
        self.checkpointing = False
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GemmaLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = norm_of(config)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, input_ids: Tensor) -> Tensor:
        """ids (B, S) to embeddings (B, S, H), in Gemma times √H; the factor is first cast to the
        weights' dtype."""
        embeddings = self.embed_tokens(input_ids)
        if not self.config.scales_embeddings:
            return embeddings
        # filled on the device: nothing waits
        return embeddings * embeddings.new_full((), self.config.hidden_size**0.5)

    def forward(
        self,
        x: Tensor,
        valid: Tensor,
        types: Tensor,
        cache: list[LayerCache] | None = None,
        positions_to_keep: Positions = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, H) to hidden states (B, S, H), or those of `positions_to_keep`, as in
        `keep_positions`.

        x holds the last S of the Sk positions that valid (B, Sk) and types (B, Sk) describe. With a
        `cache` whose `position` is set, x is one token, and no position after it is valid.
        `documents` (B, Sk) are separated by the mask alone: positions are counted through the whole
        row, because RoPE depends on differences only.
        """
        rope, full, sliding = self.geometry(x, valid, types, cache, documents)
        caches = cache or [None] * len(self.layers)
        is_checkpointed = self.checkpointing and torch.is_grad_enabled() and cache is None
        keep = None
        for index, layer in enumerate(self.layers):
            mask = full if self.config.window(index) is None else sliding
            # earlier layers keep all: the next one needs their keys and values
            if index + 1 == len(self.layers):
                keep = positions_to_keep
            given = x, rope, mask, caches[index], keep
            if is_checkpointed:
                x = checkpoint(layer, *given, use_reentrant=False)
            else:
                x = layer(*given)
        return self.norm(x)

    def geometry(
        self,
        x: Tensor,
        valid: Tensor,
        types: Tensor,
        cache: list[LayerCache] | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Rope, Tensor | None, Tensor | None]:
        """What all layers share, from the arguments of `forward`: rotations, the full and the
        sliding mask.

        A mask is None where every query sees every key: attention is faster without one.
        """
        queries = x.shape[1]
        # valid tokens are counted, wherever the padding is
        positions = valid.long().cumsum(-1)[:, -queries:] + (self.first_position - 1)
        rope = Rope(positions, self.config.rope_theta, self.config.stretch)
        if cache is not None and cache[0].position is not None:
            queries = cache[0].position
        # to look at a GPU's values, the CPU would have to wait
        may_read = x.device.type == "cpu" and not torch.compiler.is_compiling()

        def mask(window: int | None = None) -> Tensor | None:
            visible = attention_mask(valid, types, queries, window, documents=documents)
            return None if may_read and visible.all() else visible

        full = sliding = mask()
        window = self.config.sliding_window
        if window is not None and valid.shape[1] > window:
            sliding = mask(window)
        return rope, full, sliding

    def new_cache(self, capacity: int) -> list:
        """An empty cache of `capacity` positions for each layer."""
        return [LayerCache(capacity) for _ in self.layers]

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states (…, H) to float32 logits (…, V), soft-capped in Gemma 2."""
        logits = self.lm_head(hidden) if self.lm_head else self.embed_tokens.logits(hidden)
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


class Adaptable(nn.Module):
    """A model with a Gemma decoder, which grafts, LoRA and quantization change in place."""

    config: Any
    language_model: Gemma
    # {how our path of a module begins: how transformers' does}; the first that fits
    published: Mapping[str, str] = {"": "model."}
    # the arguments of each call of `model.differential.graft`, in order, as adapters store them
    grafts: tuple[dict[str, Any], ...] = ()
    # `lora.adapter.fingerprint` of the weights before they were quantized; None: not computed yet
    base_fingerprint: str | None = None
    # the kind in which frozen weights are packed, a key of `weights.quantize.KINDS`; None: plain
    quantized: str | None = None
    # that kind, after `lora.adapter.merge` has put plain weights back
    was_quantized: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def set_checkpointing(self, on: bool) -> None:
        """Let the layers of the decoder compute their activations again in the backward pass, to
        save memory."""
        self.language_model.checkpointing = on

    def new_cache(self, capacity: int) -> list:
        """An empty memory of `capacity` positions for each layer of the decoder."""
        return self.language_model.new_cache(capacity)
