"""The equivalence gate rejects each known mistake, made on purpose: it proves something.

The gate is a relative error of 1e-6 in fp32 on the valid logits, or, for mistakes of a cast, equality to the bit in
bf16. An absolute tolerance of 1e-4, as is common, would let most of the small ones pass.
"""

import pytest
import torch
import torch.nn.functional as F

import model.attention as attention
import model.gemma as gemma
import model.linear as linear
from model import cpu
from tests.reference import batch, hf_forward, hf_model, ours, relative_error, reload_hf

GATE = 1e-6
ROWS = ((5, 4), (3, 9), (1, 1))


def gelu_erf(patch, model):
    patch.setitem(linear.ACTIVATIONS, "gelu_pytorch_tanh", F.gelu)


def vision_gelu_erf(patch, model):
    exact = F.gelu

    def forward(self, x):
        return self.fc2(exact(self.fc1(x)))

    patch.setattr("model.siglip.SiglipMLP.forward", forward)


def text_norm_eps(patch, model):
    for module in model.modules():
        if isinstance(module, gemma.RMSNorm):
            module.eps = 1e-5


def vision_norm_eps(patch, model):
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5


def norm_without_one(patch, model):
    for module in model.modules():
        if isinstance(module, gemma.RMSNorm):
            module.weight.data -= 1.0


def interleaved_rope(patch, model):
    def call(self, x):
        cos, sin = self._table(x.shape[-1], x.dtype)
        half = x.shape[-1] // 2
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack(
            (even * cos[..., half:] - odd * sin[..., half:], odd * cos[..., half:] + even * sin[..., half:]), dim=-1
        ).flatten(-2)

    patch.setattr(attention.Rope, "__call__", call)


def rope_other_way_round(patch, model):
    def call(self, x):
        cos, sin = self._table(x.shape[-1], x.dtype)
        return x * cos - x.roll(x.shape[-1] // 2, dims=-1) * sin

    patch.setattr(attention.Rope, "__call__", call)


def rope_theta(patch, model):
    object.__setattr__(model.language_model.config, "rope_theta", 10001.0)


def rope_frequencies_in_bf16(patch, model):
    def table(self, width, dtype):
        even = torch.arange(0, width, 2, dtype=torch.float32)
        frequencies = (1.0 / self.theta ** (even / width)).bfloat16().float()
        angles = self.positions[:, None, :, None].float() * frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    patch.setattr(attention.Rope, "_table", table)


def with_mask(change):
    def mutant(patch, model):
        original = attention.attention_mask
        patch.setattr(gemma, "attention_mask", lambda *args, documents=None: change(original, *args))

    return mutant


def position_embedding_shifted(patch, model):
    weight = model.vision_tower.embeddings.position_embedding.weight
    weight.data = weight.data.roll(1, dims=0)


def patches_column_major(patch, model):
    def forward(self, pixel_values):
        patches = self.patch_embedding(pixel_values).transpose(2, 3)
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight

    patch.setattr("model.siglip.SiglipEmbeddings.forward", forward)


def no_post_layernorm(patch, model):
    model.vision_tower.post_layernorm = torch.nn.Identity()


def unscaled_embeddings(patch, model):
    patch.setattr(gemma.Gemma, "embed", lambda self, ids: self.embed_tokens(ids))


def scaled_image(patch, model):
    encode = type(model).encode_images
    patch.setattr(type(model), "encode_images", lambda self, pixels: encode(self, pixels) * 72**0.5)


def image_divided(patch, model):
    encode = type(model).encode_images
    patch.setattr(type(model), "encode_images", lambda self, pixels: encode(self, pixels) / 72**0.5)


def attention_scale(patch, model):
    for layer in model.language_model.layers:
        layer.self_attn.scale *= 1.01


def key_heads_tiled(patch, model):
    """Query head i reads key head i mod K instead of i // (N/K): the order `repeat` gives instead of expand."""
    patch.setattr(torch.Tensor, "repeat_interleave", lambda self, n, dim: torch.cat([self] * n, dim=dim))


def no_attention_cap(patch, model):
    for layer in model.language_model.layers:
        layer.self_attn.softcap = None


def no_final_cap(patch, model):
    object.__setattr__(model.language_model.config, "final_logit_softcapping", None)


def scale_from_head_dim(patch, model):
    for layer in model.language_model.layers:
        layer.self_attn.scale = layer.self_attn.head_dim**-0.5


def no_window(patch, model):
    object.__setattr__(model.language_model.config, "sliding_window", None)


def window_one_wider(patch, model):
    object.__setattr__(model.language_model.config, "sliding_window", 7)


def odd_layers_slide(patch, model):
    patch.setattr(type(model.language_model.config), "window", lambda self, i: self.sliding_window if i % 2 else None)


def post_norms_swapped(patch, model):
    for layer in model.language_model.layers:
        layer.post_attention_layernorm, layer.post_feedforward_layernorm = (
            layer.post_feedforward_layernorm,
            layer.post_attention_layernorm,
        )


def no_post_norms(patch, model):
    for layer in model.language_model.layers:
        layer.post_attention_layernorm = layer.post_feedforward_layernorm = torch.nn.Identity()


def untied_head(patch, model):
    patch.setattr(gemma.Gemma, "head", lambda self, hidden: hidden @ self.embed_tokens.weight.roll(1, 0).T)


def causal(original, valid, types, queries, window=None):
    return original(valid, torch.ones_like(types), queries, window)


def bidirectional(original, valid, types, queries, window=None):
    return original(valid, torch.zeros_like(types), queries, window)


def padding_visible(original, valid, types, queries, window=None):
    return original(torch.ones_like(valid), types, queries, window)


def image_only_prefix(original, valid, types, queries, window=None):
    text = (torch.arange(types.shape[1]) - (valid == 0).sum(1, keepdim=True)) >= 16
    return original(valid, (text | types.bool()).long(), queries, window)


def window_cuts_the_prefix(original, valid, types, queries, window=None):
    seen = original(valid, types, queries, window)
    if window is None:
        return seen
    index = torch.arange(valid.shape[1])
    return seen & ((index[:, None] - index[None, :]).abs() < window)


BOTH = {
    "gelu with erf": gelu_erf,
    "vision gelu with erf": vision_gelu_erf,
    "RMSNorm eps 1e-5": text_norm_eps,
    "vision LayerNorm eps 1e-5": vision_norm_eps,
    "RMSNorm weight without 1 +": norm_without_one,
    "RoPE interleaved": interleaved_rope,
    "RoPE turned the other way": rope_other_way_round,
    "RoPE theta 10001": rope_theta,
    "RoPE frequencies in bf16": rope_frequencies_in_bf16,
    "fully causal": with_mask(causal),
    "suffix bidirectional": with_mask(bidirectional),
    "padding visible": with_mask(padding_visible),
    "prefix text causal": with_mask(image_only_prefix),
    "vision positions shifted": position_embedding_shifted,
    "patches column-major": patches_column_major,
    "no post_layernorm": no_post_layernorm,
    "embeddings unscaled": unscaled_embeddings,
    "picture scaled": scaled_image,
    "picture divided": image_divided,
    "attention scale 1 % off": attention_scale,
    "head untied": untied_head,
}
GEMMA2 = {
    "key heads tiled": key_heads_tiled,
    "no attention soft-cap": no_attention_cap,
    "no final soft-cap": no_final_cap,
    "scale from head_dim": scale_from_head_dim,
    "no sliding window": no_window,
    "window one wider": window_one_wider,
    "odd layers slide": odd_layers_slide,
    "window cuts the prefix": with_mask(window_cuts_the_prefix),
    "post-norms swapped": post_norms_swapped,
    "no post-norms": no_post_norms,
}
CASES = [(1, name, mutant) for name, mutant in BOTH.items()] + [
    (2, name, mutant) for name, mutant in (BOTH | GEMMA2).items()
]


def error(model, hf, inputs) -> float:
    valid = inputs["attention_mask"].bool()
    return relative_error(model(**inputs)[valid], hf_forward(hf, inputs)[valid])


@pytest.mark.long
@pytest.mark.parametrize(("generation", "name", "mutant"), CASES, ids=[f"{name}-{g}" for g, name, _ in CASES])
def test_the_gate_rejects(generation, name, mutant, monkeypatch):
    """Breaks when a known mistake would pass the gate: then the gate proves nothing about it."""
    monkeypatch.setattr(
        cpu, "ways", frozenset()
    )  # a processor's own products round otherwise, by about as much as GATE
    hf = hf_model(generation)
    inputs = batch(hf, ROWS)
    model = ours(hf)
    assert error(model, hf, inputs) <= GATE
    mutant(monkeypatch, model)
    with torch.no_grad():
        assert error(model, hf, inputs) > GATE


def norm_multiplied_after_the_cast(patch, model):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * (1.0 + self.weight)

    patch.setattr(gemma.RMSNorm, "forward", forward)


def factor_not_cast(patch, model):
    patch.setattr(gemma.Gemma, "embed", lambda self, ids: (self.embed_tokens(ids).float() * 72**0.5).bfloat16())


def rope_applied_in_fp32(patch, model):
    turn = attention.Rope.__call__
    patch.setattr(attention.Rope, "__call__", lambda self, x: turn(self, x.float()).to(x.dtype))


@pytest.mark.long
@pytest.mark.parametrize("mutant", [norm_multiplied_after_the_cast, factor_not_cast, rope_applied_in_fp32])
def test_the_bf16_gate_rejects(mutant, monkeypatch):
    """Breaks when a misplaced cast would go unnoticed: fp32 cannot see it, bf16 equality to the bit can."""
    monkeypatch.setattr(cpu, "ways", frozenset())
    hf = reload_hf(hf_model(1), "eager", torch.bfloat16)
    model, inputs = ours(hf_model(1), dtype=torch.bfloat16), batch(hf, ROWS)
    valid = inputs["attention_mask"].bool()
    with torch.no_grad():
        theirs = hf_forward(hf, inputs)[valid].float()
        assert torch.equal(model(**inputs)[valid], theirs)
        mutant(monkeypatch, model)
        assert not torch.equal(model(**inputs)[valid], theirs)
