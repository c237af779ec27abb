"""The equivalence gate rejects each known mistake, made on purpose: it proves something.

The gate is a relative error of 1e-6 in fp32 on the valid logits, or, for mistakes of a cast,
equality to the bit in bf16. An absolute tolerance of 1e-4, as is common, would let most of the
small ones pass.
"""

import pytest
import torch
import torch.nn.functional as F

from model import attention, cpu, gemma, linear, siglip
from model.config import TextConfig
from model.paligemma import PaliGemma
from tests.reference import batch, error, hf_forward, hf_model, is_valid, ours, reload_hf, twins

GATE = 1e-6
ROWS = ((5, 4), (3, 9), (1, 1))


def changed(kind, **changes):
    """A mutant that sets fields of every module of a kind."""
    return lambda patch, model: [
        vars(m).update(changes) for m in model.modules() if isinstance(m, kind)
    ]


def configured(**changes):
    """A mutant that sets fields of the decoder's configuration."""
    return lambda patch, model: vars(model.language_model.config).update(changes)


def replaced(owner, name, make):
    """A mutant that puts `make(original)` in place of a function or method."""
    return lambda patch, model: patch.setattr(owner, name, make(getattr(owner, name)))


def with_mask(change):
    """A mutant of the decoder's mask: `change` receives `attention_mask` and its arguments."""
    return replaced(
        gemma,
        "attention_mask",
        lambda original: lambda *args, documents=None: change(original, *args),
    )


def vision_gelu_erf(self, x):
    return self.fc2(F.gelu(self.fc1(x)))


def norm_without_one(patch, model):
    for module in model.modules():
        if isinstance(module, gemma.RMSNorm):
            module.weight.data -= 1.0


def interleaved_rope(self, x):
    cos, sin = self._table(x.shape[-1], x.dtype)
    half = x.shape[-1] // 2
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., half:], sin[..., half:]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rope_other_way_round(self, x):
    cos, sin = self._table(x.shape[-1], x.dtype)
    return x * cos - x.roll(x.shape[-1] // 2, dims=-1) * sin


def rope_frequencies_in_bf16(self, width, dtype):
    even = torch.arange(0, width, 2, dtype=torch.float32)
    frequencies = (1.0 / self.theta ** (even / width)).bfloat16().float()
    angles = self.positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def position_embedding_shifted(patch, model):
    weight = model.vision_tower.embeddings.position_embedding.weight
    weight.data = weight.data.roll(1, dims=0)


def patches_column_major(self, pixel_values):
    patches = self.patch_embedding(pixel_values).transpose(2, 3)
    return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


def attention_scale(patch, model):
    for layer in model.language_model.layers:
        layer.self_attn.scale *= 1.01


def post_norms_swapped(patch, model):
    for layer in model.language_model.layers:
        first, second = layer.post_attention_layernorm, layer.post_feedforward_layernorm
        layer.post_attention_layernorm, layer.post_feedforward_layernorm = second, first


def no_post_norms(patch, model):
    for layer in model.language_model.layers:
        layer.post_attention_layernorm = layer.post_feedforward_layernorm = torch.nn.Identity()


def image_only_prefix(original, valid, types, queries, window=None):
    text = (torch.arange(types.shape[1]) - (valid == 0).sum(1, keepdim=True)) >= 16
    return original(valid, (text | types.bool()).long(), queries, window)


def window_cuts_the_prefix(original, valid, types, queries, window=None):
    seen, index = original(valid, types, queries, window), torch.arange(valid.shape[1])
    return seen if window is None else seen & ((index[:, None] - index[None, :]).abs() < window)


BOTH = {
    "gelu with erf": lambda patch, model: patch.setitem(
        linear.ACTIVATIONS, "gelu_pytorch_tanh", F.gelu
    ),
    "vision gelu with erf": replaced(siglip.SiglipMLP, "forward", lambda _: vision_gelu_erf),
    "RMSNorm eps 1e-5": changed(gemma.RMSNorm, eps=1e-5),
    "vision LayerNorm eps 1e-5": changed(torch.nn.LayerNorm, eps=1e-5),
    "RMSNorm weight without 1 +": norm_without_one,
    "RoPE interleaved": replaced(attention.Rope, "__call__", lambda _: interleaved_rope),
    "RoPE turned the other way": replaced(
        attention.Rope, "__call__", lambda _: rope_other_way_round
    ),
    "RoPE theta 10001": configured(rope_theta=10001.0),
    "RoPE frequencies in bf16": replaced(
        attention.Rope, "_table", lambda _: rope_frequencies_in_bf16
    ),
    "fully causal": with_mask(
        lambda mask, valid, types, *rest: mask(valid, torch.ones_like(types), *rest)
    ),
    "suffix bidirectional": with_mask(
        lambda mask, valid, types, *rest: mask(valid, torch.zeros_like(types), *rest)
    ),
    "padding visible": with_mask(lambda mask, valid, *rest: mask(torch.ones_like(valid), *rest)),
    "prefix text causal": with_mask(image_only_prefix),
    "vision positions shifted": position_embedding_shifted,
    "patches column-major": replaced(
        siglip.SiglipEmbeddings, "forward", lambda _: patches_column_major
    ),
    "no post_layernorm": lambda patch, model: setattr(
        model.vision_tower, "post_layernorm", torch.nn.Identity()
    ),
    "embeddings unscaled": replaced(
        gemma.Gemma, "embed", lambda _: lambda self, ids: self.embed_tokens(ids)
    ),
    "picture scaled": replaced(
        PaliGemma, "encode_images", lambda f: lambda self, pixels: f(self, pixels) * 72**0.5
    ),
    "picture divided": replaced(
        PaliGemma, "encode_images", lambda f: lambda self, pixels: f(self, pixels) / 72**0.5
    ),
    "attention scale 1 % off": attention_scale,
    "head untied": replaced(
        gemma.Gemma, "head", lambda _: lambda self, h: h @ self.embed_tokens.weight.roll(1, 0).T
    ),
}
GEMMA2 = {
    # query head i reads key head i mod K instead of i // (N/K): the order that `repeat` gives
    # instead of expand
    "key heads tiled": replaced(
        torch.Tensor,
        "repeat_interleave",
        lambda _: lambda self, n, dim: torch.cat([self] * n, dim=dim),
    ),
    "no attention soft-cap": changed(attention.Attention, softcap=None),
    "no final soft-cap": configured(final_logit_softcapping=None),
    "scale from head_dim": changed(attention.Attention, scale=0.25),
    "no sliding window": configured(sliding_window=None),
    "window one wider": configured(sliding_window=7),
    "odd layers slide": replaced(
        TextConfig, "window", lambda _: lambda self, i: self.sliding_window if i % 2 else None
    ),
    "window cuts the prefix": with_mask(window_cuts_the_prefix),
    "post-norms swapped": post_norms_swapped,
    "no post-norms": no_post_norms,
}
CASES = [(1, name) for name in BOTH] + [(2, name) for name in BOTH | GEMMA2]


@pytest.mark.long
@pytest.mark.parametrize(("generation", "name"), CASES)
@cpu.using("torch")  # a processor's own products round otherwise, by about as much as GATE
def test_the_gate_rejects(generation, name, monkeypatch):
    """Breaks when a known mistake would pass the gate: then the gate proves nothing about it."""
    hf, model, inputs = twins(generation, ROWS)
    assert error(model, hf, inputs) <= GATE
    (BOTH | GEMMA2)[name](monkeypatch, model)
    with torch.no_grad():
        assert error(model, hf, inputs) > GATE


def norm_multiplied_after_the_cast(self, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return h.to(x.dtype) * (1.0 + self.weight)


CASTS = {
    "norm multiplied after the cast": replaced(
        gemma.RMSNorm, "forward", lambda _: norm_multiplied_after_the_cast
    ),
    "factor not cast": replaced(
        gemma.Gemma,
        "embed",
        lambda _: lambda self, ids: (self.embed_tokens(ids).float() * 72**0.5).bfloat16(),
    ),
    "RoPE applied in fp32": replaced(
        attention.Rope, "__call__", lambda turn: lambda self, x: turn(self, x.float()).to(x.dtype)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASTS)
@cpu.using("torch")
def test_the_bf16_gate_rejects(name, monkeypatch):
    """Breaks when a misplaced cast would go unnoticed: fp32 cannot see it, bf16 equality to the bit
    can."""
    hf = reload_hf(hf_model(1), "eager", torch.bfloat16)
    model, inputs = ours(hf_model(1), dtype=torch.bfloat16), batch(hf, ROWS)
    valid = is_valid(inputs)
    with torch.no_grad():
        theirs = hf_forward(hf, inputs)[valid].float()
        assert torch.equal(model(**inputs)[valid], theirs)
        CASTS[name](monkeypatch, model)
        assert not torch.equal(model(**inputs)[valid], theirs)
