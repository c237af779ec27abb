"""Sizes of the model: frozen dataclasses, read from a published config.json or taken from a preset by name.

In: the dictionary of a config.json (PaliGemma 1 or 2, of any transformers version), or a preset's name.
Out: `PaliGemmaConfig`, which `model.paligemma.PaliGemma` is built from. Other models: `model/system_configs.py`.

Published files leave out what equalled the default of their day, so the defaults below are part of the format
(spec: transformers' GemmaConfig, Gemma2Config, SiglipVisionConfig and PaliGemmaConfig). Wrong sizes show when
`weights/load.py` compares the shapes of a model with those in its files; here stands what no shape shows.

Dimension letters, used throughout the project: B batch, S sequence, I image tokens, H hidden, N heads,
K key/value heads, D head dim, F feed-forward, V vocabulary, P patches per side, R image side in pixels.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from model.common import UserError, quoted, read_json, shown

CONTROL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # Gemma's, where a file says nothing
MAX_DEPTH = 1024  # layers: far beyond any published model; a damaged number would take hours to build

ConfigT = TypeVar("ConfigT", bound="Config")


def require(is_met: Any, problem: str) -> None:
    """Raise UserError unless a condition is met."""
    if not is_met:
        raise UserError(problem)


def read_section(raw: dict, name: str) -> dict:
    """The object raw[name], empty where it is absent or null. Raises UserError for another type."""
    section = {} if raw.get(name) is None else raw[name]
    require(isinstance(section, dict), f"{name} is {quoted(section)}, expected an object")
    return section


@contextlib.contextmanager
def config_errors(path: str | Path) -> Iterator[None]:
    """Turn what wrong values raise within the block into a UserError that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = "" if isinstance(error, UserError) else f"{type(error).__name__} "
        raise UserError(f"{shown(path)}: {what}{shown(str(error))}: take another model or download it again") from None


class Config:
    """What configurations share: fields of the types that they name, sizes of at least 1, and a format in config.json.

    In that format a configuration within another is the object NAME_config. Raises UserError for other values.
    """

    kind: ClassVar[str] = ""  # config.json's model_type, of whole models

    def __post_init__(self):
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            kinds = get_args(hints[name]) or (hints[name],)
            is_right = value in kinds or type(value) in (*kinds, tuple) or float in kinds and type(value) is int
            if isinstance(value, float):
                is_right = is_right and math.isfinite(value)
            elif type(value) is int and not name.endswith(("_id", "_layer")):  # −2 is the last layer but one
                is_right = is_right and 1 <= value <= (MAX_DEPTH if name.endswith(("_layers", "_blocks")) else value)
            expected = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds)
            require(is_right, f"{name} is {quoted(value)}, expected a possible {expected}")

    @classmethod
    def from_dict(cls: type[ConfigT], raw: dict) -> ConfigT:
        """Read the contents of a config.json; null means the default, other names are ignored.

        Raises UserError for another model or values that contradict.
        """
        given = raw.get("model_type")
        require(given == cls.kind or not cls.kind, f"model_type is {quoted(given)}, expected {cls.kind!r}")
        values = {}
        for name, hint in get_type_hints(cls).items():
            if isinstance(hint, type) and issubclass(hint, Config):
                values[name] = hint.from_dict(read_section(raw, f"{name}_config"))
            elif name != "kind" and raw.get(name) is not None:
                values[name] = raw[name]
        return cls(**values)

    @classmethod
    def from_file(cls: type[ConfigT], path: str | Path) -> ConfigT:
        """Read config.json at `path`. Raises UserError if it is absent, not JSON, or of another model."""
        raw = read_json(path)
        with config_errors(path):
            return cls.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """The config.json that `from_dict` reads back, and transformers where it has the model."""
        values: dict[str, Any] = {"model_type": self.kind} if self.kind else {}
        for name, value in vars(self).items():
            if isinstance(value, Config):
                values[f"{name}_config"] = value.to_dict()
            elif value is not None:
                values[name] = value
        return values


# what transformers' SiglipVisionConfig has where a file leaves it out; no shape would show another number of heads
_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_SIGLIP |= {"patch_size": 16}


@dataclass(frozen=True)
class VisionConfig(Config):
    """SigLIP's ViT. Defaults: So400m/14 at 224 px, the vision tower of PaliGemma."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    patch_size: int = 14
    image_size: int = 224
    layer_norm_eps: float = 1e-6
    # None: the output of the final norm. Else an entry of [embeddings, layer 1, …, layer n] without the final norm; −2
    # is that of LLaVA and its successors
    feature_layer: int | None = None

    def __post_init__(self):
        super().__post_init__()
        layers = self.num_hidden_layers
        is_layer = self.feature_layer is None or -layers - 1 <= self.feature_layer <= layers
        require(is_layer, f"feature_layer {self.feature_layer} is not one of SigLIP's {layers} layers")
        require(self.num_image_tokens, f"image_size {self.image_size} is less than patch_size {self.patch_size}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_image_tokens(self) -> int:
        """I: one token per patch, no class token."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def from_dict(cls, raw: dict) -> "VisionConfig":
        """SigLIP of a vision_config, or of the config.json of a whole SigLIP. Raises UserError for another tower."""
        if raw.get("model_type") == "siglip":
            raw = read_section(raw, "vision_config")
        for name, expected in (("model_type", "siglip_vision_model"), ("hidden_act", "gelu_pytorch_tanh")):
            given = raw.get(name, expected)
            require(given == expected, f"vision_config.{name} is {quoted(given)}, expected {expected!r}")
        raw = _SIGLIP | {name: value for name, value in raw.items() if value is not None}
        # num_positions is stale in the published files of 448 and 896 px; the token count is not
        if "image_size" not in raw and "num_image_tokens" in raw:
            tokens = raw["num_image_tokens"]
            require(isqrt(tokens) ** 2 == tokens, f"num_image_tokens is {tokens}, expected a square")
            raw["image_size"] = isqrt(tokens) * raw["patch_size"]
        return super().from_dict(raw)


@dataclass(frozen=True)
class TextConfig(Config):
    """A decoder: Gemma's, generation 1 or 2, or Qwen's (1.5 and 2). Defaults: the 2B of PaliGemma 1."""

    model_type: Literal["gemma", "gemma2", "qwen2"] = "gemma"
    vocab_size: int = 257152
    hidden_size: int = 2048
    intermediate_size: int = 16384
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    hidden_activation: Literal["gelu_pytorch_tanh", "silu"] = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True  # False: the head has a matrix of its own
    # Gemma 2 only; None switches each off
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None

    def __post_init__(self):
        super().__post_init__()
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        require(heads % key_heads == 0, f"{heads} heads cannot share {key_heads} key heads evenly")
        require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd, but RoPE rotates pairs")

    @property
    def is_gemma2(self) -> bool:
        """Four norms per layer, soft-capped logits, a sliding window in every other layer."""
        return self.model_type == "gemma2"

    @property
    def is_qwen(self) -> bool:
        """q, k and v with a bias, norms whose factor is their weight and not 1 more, embeddings that are not scaled."""
        return self.model_type == "qwen2"

    @property
    def attention_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def window(self, layer: int) -> int | None:
        """Width of the sliding window of layer 0, 1, …; None for full attention, as in all odd layers."""
        return self.sliding_window if layer % 2 == 0 else None

    @classmethod
    def from_dict(cls, raw: dict) -> "TextConfig":
        """The decoder of a config.json, or of its text_config. Raises UserError for one that is computed otherwise."""
        rope = read_section(raw, "rope_scaling") or read_section(raw, "rope_parameters")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        require(rope_type == "default", f"rope type {quoted(rope_type)} is not computed here, expected 'default'")
        require(not raw.get("attention_bias"), "attention_bias is true, but Gemma's projections have no bias")
        activation = raw.get("hidden_activation") or raw.get("hidden_act") or cls.hidden_activation
        overrides = {
            "rope_theta": rope.get("rope_theta") or raw.get("rope_theta"),
            # the first files say "gelu", but the model was trained with the tanh approximation
            "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu" else activation,
        }
        if raw.get("model_type") == "gemma2":
            # null switches the caps and the window off; for other fields it means the default
            given = {name: value for name, value in raw.items() if value is not None or name in _GEMMA2_OPTIONAL}
            raw = _GEMMA2["3b"] | given
            layers = enumerate(raw.get("layer_types") or ())
            is_known = all(kind == ("sliding_attention", "full_attention")[layer % 2] for layer, kind in layers)
            require(is_known, "layer_types differs from Gemma 2's, in which every even layer has a sliding window")
        else:  # it has none of them, whatever the file says
            raw = raw | dict.fromkeys((*_GEMMA2_OPTIONAL, "query_pre_attn_scalar"))
        return super().from_dict(raw | overrides)

    def to_dict(self) -> dict[str, Any]:
        """The decoder's part of a config.json."""
        given = super().to_dict() | {"hidden_act": self.hidden_activation}
        if self.is_gemma2:  # what is left out would be read as the default: 256, and caps and window that are off
            given |= {name: getattr(self, name) for name in _GEMMA2_OPTIONAL}
            given["query_pre_attn_scalar"] = self.query_pre_attn_scalar or self.head_dim
        return given


@dataclass(frozen=True)
class PaliGemmaConfig(Config):
    """The whole model: a vision tower, a decoder and the token ids that join them."""

    kind: ClassVar[str] = "paligemma"
    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    image_token_id: int = 257152
    pad_token_id: int = 0
    eos_token_id: int = 1
    bos_token_id: int = 2

    @property
    def num_image_tokens(self) -> int:
        """Positions of one picture in the sequence."""
        return self.vision.num_image_tokens

    @classmethod
    def from_dict(cls, raw: dict) -> "PaliGemmaConfig":
        given = raw.get("model_type")
        require(given == cls.kind, f"model_type is {quoted(given)}, expected 'paligemma', which is 1 or 2")
        vision, text = read_section(raw, "vision_config"), read_section(raw, "text_config")
        is_causal = text.get("use_bidirectional_attention") is False
        require(not is_causal, "use_bidirectional_attention is false, but PaliGemma's prefix is bidirectional")
        tokens = vision.get("num_image_tokens") or text.get("num_image_tokens")
        tower = VisionConfig.from_dict(vision | {"num_image_tokens": tokens}) if vision else VisionConfig()
        images = [raw[name] for name in ("image_token_index", "image_token_id") if raw.get(name) is not None]
        ids = {name: part[name] for part in (text, raw) for name in CONTROL_TOKENS if part.get(name) is not None}
        return cls(
            vision=tower,
            text=TextConfig.from_dict({"vocab_size": raw.get("vocab_size"), **text, "tie_word_embeddings": True}),
            image_token_id=(*images, 256000)[0],
            **CONTROL_TOKENS | ids,
        )

    def to_dict(self) -> dict:
        width, tokens = self.text.hidden_size, {"num_image_tokens": self.vision.num_image_tokens}
        ids = {name: getattr(self, name) for name in CONTROL_TOKENS}
        tower = {"model_type": "siglip_vision_model", "projection_dim": width, "vision_use_head": False}
        return {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": self.kind,
            "image_token_index": self.image_token_id,
            **ids,
            "hidden_size": width,
            "projection_dim": width,
            "tie_word_embeddings": True,
            "vision_config": self.vision.to_dict() | tower | tokens,
            "text_config": self.text.to_dict() | tokens | ids,
        }


_GEMMA2_OPTIONAL = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
_GEMMA2_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_GEMMA2 = {
    name: dict(zip([*_GEMMA2_SIZES.split(), "query_pre_attn_scalar"], sizes, strict=True)) | _GEMMA2_OPTIONAL
    for name, sizes in {
        "3b": (2304, 9216, 26, 8, 4, 256, 256),
        "10b": (3584, 14336, 42, 16, 8, 256, 256),
        "28b": (4608, 36864, 46, 32, 16, 128, 144),
    }.items()
}


def _paligemma(image_size: int, **text) -> PaliGemmaConfig:
    return PaliGemmaConfig(VisionConfig(image_size=image_size), TextConfig(vocab_size=257216, **text))


# Geometries by name. `load_model(name)` fills one with random weights (seed 0), for tests and benchmarks.
PRESETS: dict[str, PaliGemmaConfig] = {
    # the embedded base: 16 image tokens of 28 pixels; its tokenizer has 1,722 pieces, `<image>` comes after them
    "tiny": PaliGemmaConfig(
        VisionConfig(128, 512, 3, 4, patch_size=28, image_size=112),
        TextConfig("gemma", 1728, 128, 384, 4, 4, 1, head_dim=64),
        image_token_id=1722,
    ),
    # large enough to time, small enough for a laptop; it reads with the tokenizer of the embedded base
    "mini": PaliGemmaConfig(
        VisionConfig(192, 768, 4, 3, patch_size=14, image_size=224),
        TextConfig("gemma", 8192, 256, 1024, 6, 4, 1, head_dim=64),
        image_token_id=1722,
    ),
    **{f"paligemma-3b-{side}": _paligemma(side) for side in (224, 448, 896)},
    **{
        f"paligemma2-{size}-{side}": _paligemma(side, model_type="gemma2", **sizes)
        for size, sizes in _GEMMA2.items()
        for side in (224, 448, 896)
    },
}
