"""Sizes of the model: frozen dataclasses, read from a published config.json or taken from a preset by name.

In: the dictionary of a config.json (PaliGemma 1 or 2, of any transformers version), or a preset's name.
Out: `PaliGemmaConfig`, which `model.paligemma.PaliGemma` is built from. Other models: `model/system_configs.py`.

Published files leave out what equalled the default of their day, so the defaults below are part of the format
(spec: transformers' GemmaConfig, Gemma2Config, SiglipVisionConfig and PaliGemmaConfig).

Dimension letters, used throughout the project: B batch, S sequence, I image tokens, H hidden, N heads,
K key/value heads, D head dim, F feed-forward, V vocabulary, P patches per side, R image side in pixels.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from math import isqrt
from pathlib import Path

from model.common import UserError, read_json


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP's ViT. Defaults: So400m/14 at 224 px, PaliGemma's eye."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    patch_size: int = 14
    image_size: int = 224
    layer_norm_eps: float = 1e-6
    # None: what the final norm returns. Else that entry of [embeddings, layer 1, …, layer n], not normed: −2 is what
    # LLaVA and its successors read
    feature_layer: int | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_image_tokens(self) -> int:
        """I: one token a patch, no class token."""
        return self.patches_per_side**2


@dataclass(frozen=True)
class TextConfig:
    """Gemma's decoder, generation 1 (`model_type` gemma) or 2 (gemma2). Defaults: the 2B of PaliGemma 1."""

    model_type: str = "gemma"
    vocab_size: int = 257152
    hidden_size: int = 2048
    intermediate_size: int = 16384
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    hidden_activation: str = "gelu_pytorch_tanh"
    # Gemma 2 only; None switches each off
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None

    @property
    def is_gemma2(self) -> bool:
        """Four norms a layer, soft-capped logits, every other layer slides."""
        return self.model_type == "gemma2"

    @property
    def attention_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def window(self, layer: int) -> int | None:
        """Width of the sliding window of a layer, counted from 0; None for full attention. Even layers slide."""
        return self.sliding_window if layer % 2 == 0 else None


@dataclass(frozen=True)
class PaliGemmaConfig:
    """The whole model: an eye, a decoder and the ids that join them."""

    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    image_token_id: int = 257152
    pad_token_id: int = 0
    eos_token_id: int = 1
    bos_token_id: int = 2

    @property
    def num_image_tokens(self) -> int:
        """Positions that a picture takes in the sequence."""
        return self.vision.num_image_tokens

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "PaliGemmaConfig":
        """Read a published config.json. Raises UserError for another architecture or sizes that contradict."""
        if raw.get("model_type") != "paligemma":
            raise UserError(
                f"{where}: model_type is {raw.get('model_type')!r}, expected 'paligemma': this loader opens "
                "PaliGemma 1 and 2; pick such a checkpoint"
            )
        config = cls(
            vision=_read_vision(raw.get("vision_config") or {}, raw.get("text_config") or {}, where),
            text=_read_text(raw.get("text_config") or {}, raw, where),
            image_token_id=raw.get("image_token_index", raw.get("image_token_id", 256000)),
            **{
                name: _first(raw.get(name), (raw.get("text_config") or {}).get(name), default)
                for name, default in (("pad_token_id", 0), ("eos_token_id", 1), ("bos_token_id", 2))
            },
        )
        config.check(where)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "PaliGemmaConfig":
        """Read config.json at `path`. Raises UserError if it is absent, not JSON, or not a PaliGemma."""
        return cls.from_dict(read_json(path), str(path))

    def to_dict(self) -> dict:
        """The config.json that transformers reads back to the same model."""
        vision, text = asdict(self.vision), asdict(self.text)
        if vision["feature_layer"] is None:
            del vision["feature_layer"]
        vision |= {
            "model_type": "siglip_vision_model",
            "projection_dim": self.text.hidden_size,
            "num_image_tokens": self.vision.num_image_tokens,
            "vision_use_head": False,
        }
        text |= {
            "hidden_act": self.text.hidden_activation,
            "num_image_tokens": self.vision.num_image_tokens,
            "tie_word_embeddings": True,
            "pad_token_id": self.pad_token_id,
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
        }
        if self.text.is_gemma2:  # a null would be read as the default, 256
            text["query_pre_attn_scalar"] = self.text.query_pre_attn_scalar or self.text.head_dim
        else:
            text = {name: value for name, value in text.items() if value is not None}
        return {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "image_token_index": self.image_token_id,
            "pad_token_id": self.pad_token_id,
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
            "hidden_size": self.text.hidden_size,
            "projection_dim": self.text.hidden_size,
            "tie_word_embeddings": True,
            "vision_config": vision,
            "text_config": text,
        }

    def check(self, where: str = "config") -> None:
        """Raise UserError, all contradictions in one line, unless the sizes fit together."""
        v, t = self.vision, self.text
        positive = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        problems = [
            f"{part}.{name} is {getattr(config, name)!r}, expected a positive integer"
            for part, config, names in (
                ("vision_config", v, (*positive, "patch_size", "image_size")),
                ("text_config", t, (*positive, "num_key_value_heads", "head_dim", "vocab_size")),
            )
            for name in names
            if not isinstance(getattr(config, name), int) or getattr(config, name) < 1
        ]
        if not problems:
            if v.image_size % v.patch_size:
                problems.append(f"image_size {v.image_size} is no multiple of patch_size {v.patch_size}")
            if v.hidden_size % v.num_attention_heads:
                problems.append(f"vision hidden_size {v.hidden_size} is no multiple of {v.num_attention_heads} heads")
            if t.num_attention_heads % t.num_key_value_heads:
                problems.append(f"{t.num_attention_heads} heads cannot share {t.num_key_value_heads} key heads evenly")
            if t.head_dim % 2:
                problems.append(f"head_dim {t.head_dim} is odd, but RoPE turns pairs")
        if t.hidden_activation not in ("gelu_pytorch_tanh", "silu"):
            problems.append(f"hidden_activation is {t.hidden_activation!r}, expected 'gelu_pytorch_tanh' or 'silu'")
        if problems:
            raise UserError(f"{where}: " + "; ".join(problems) + ": correct the file or download it again")


def _first(*values):
    return next(value for value in values if value is not None)


def read_known(cls, raw: dict, **overrides):
    """The dataclass `cls` from the keys of `raw` that it knows; a null in the file means the default."""
    known = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
    return cls(**(known | overrides))


def _read_vision(raw: dict, text: dict, where: str) -> VisionConfig:
    if raw.get("model_type", "siglip_vision_model") != "siglip_vision_model":
        raise UserError(f"{where}: vision_config.model_type is {raw['model_type']!r}, expected 'siglip_vision_model'")
    patch = raw.get("patch_size") or VisionConfig.patch_size
    tokens = raw.get("num_image_tokens") or text.get("num_image_tokens")
    # num_positions is stale in the published files of 448 and 896 px; the token count is not
    size = raw.get("image_size") or (isqrt(tokens) * patch if tokens else VisionConfig.image_size)
    return read_known(VisionConfig, raw, image_size=size, patch_size=patch)


def _read_text(raw: dict, top: dict, where: str) -> TextConfig:
    kind = raw.get("model_type", "gemma")
    if kind not in ("gemma", "gemma2"):
        raise UserError(f"{where}: text_config.model_type is {kind!r}, expected 'gemma' or 'gemma2'")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{where}: rope type {rope.get('rope_type', rope.get('type'))!r} is not part of PaliGemma")
    if raw.get("attention_bias"):
        raise UserError(f"{where}: attention_bias is true, but Gemma's projections have no bias")
    if raw.get("use_bidirectional_attention") is False:
        raise UserError(f"{where}: use_bidirectional_attention is false, but PaliGemma's prefix sees both ways")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or TextConfig.hidden_activation
    overrides = {
        "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or TextConfig.rope_theta),
        # "gelu" is what the first files said and never what the model computed
        "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu" else activation,
    }
    if kind == "gemma2":
        layers = raw.get("num_hidden_layers", 26)
        pattern = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
        if raw.get("layer_types") not in (None, pattern):
            raise UserError(f"{where}: layer_types differs from Gemma 2's, where every even layer slides")
        # null is a value for the caps and the window, it switches them off; elsewhere it means the default
        given = {name: value for name, value in raw.items() if name in _GEMMA2_OPTIONAL or value is not None}
        raw = _GEMMA2_DEFAULTS | given
        overrides |= {name: raw[name] for name in _GEMMA2_OPTIONAL}
    return replace(read_known(TextConfig, {"vocab_size": top.get("vocab_size"), **raw}), **overrides)


_GEMMA2_OPTIONAL = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
_GEMMA2_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}


def _paligemma1(image_size: int) -> PaliGemmaConfig:
    return PaliGemmaConfig(VisionConfig(image_size=image_size), TextConfig(vocab_size=257216))


def _paligemma2(image_size: int, **sizes) -> PaliGemmaConfig:
    text = TextConfig(model_type="gemma2", vocab_size=257216, **(_GEMMA2_DEFAULTS | sizes))
    return PaliGemmaConfig(VisionConfig(image_size=image_size), text)


_10B = {
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
_28B = {
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}

# The embedded base: 16 image tokens of 28 pixels; its tokenizer has 1,722 pieces, `<image>` comes after them.
_TINY = PaliGemmaConfig(
    VisionConfig(128, 512, 3, 4, patch_size=28, image_size=112),
    TextConfig("gemma", 1728, 128, 384, 4, 4, 1, head_dim=64),
    image_token_id=1722,
)
# Large enough to time, small enough for a laptop; it reads with the tokenizer of the embedded base.
_MINI = PaliGemmaConfig(
    VisionConfig(192, 768, 4, 3, patch_size=14, image_size=224),
    TextConfig("gemma", 8192, 256, 1024, 6, 4, 1, head_dim=64),
    image_token_id=1722,
)

# Geometries by name. `load_model(name)` fills one with random weights (seed 0), for tests and benchmarks.
PRESETS: dict[str, PaliGemmaConfig] = {
    "tiny": _TINY,
    "mini": _MINI,
    **{f"paligemma-3b-{size}": _paligemma1(size) for size in (224, 448, 896)},
    **{f"paligemma2-3b-{size}": _paligemma2(size) for size in (224, 448, 896)},
    **{f"paligemma2-10b-{size}": _paligemma2(size, **_10B) for size in (224, 448, 896)},
    **{f"paligemma2-28b-{size}": _paligemma2(size, **_28B) for size in (224, 448, 896)},
}
