"""Sizes of the model: frozen dataclasses, read from a published config.json or taken from a preset
by name.

In: the dictionary of a config.json (PaliGemma 1 or 2, of any transformers version), or a preset's
name. Out: a `PaliGemmaConfig`. Other models: `model/registry.py`.

Published files leave out what equalled the default of their day, so the defaults below are part of
the format. Wrong sizes show when `weights/load.py` compares shapes with those in the files; what no
shape shows is checked here.

Dimension letters, used throughout the project: B batch, S sequence, Sq and Sk that of queries and
of keys, T kept positions or new tokens, I image tokens, H hidden, N heads, K key/value heads, D
head dim, F feed-forward, V vocabulary, P patches per side, R image side in pixels.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from model.common import UserError, quoted, read_json, read_json_if, shown, without_none

# Gemma's, where a file says nothing
CONTROL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
GEMMA2_ONLY = (
    "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window"
).split()
# sizes that every published file of Gemma 1 has
_SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
).split()
# layers or heads: far beyond any published model; a damaged number would take hours to build
MAX_COUNT = 1024


def require(is_met: Any, problem: str) -> None:
    """Raise UserError unless a condition is met."""
    if not is_met:
        raise UserError(problem)


@contextlib.contextmanager
def config_errors(path: str | Path) -> Iterator[None]:
    """Turn what wrong values raise within the block into a UserError that names the file."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        re.error,
    ) as error:
        what = "" if isinstance(error, UserError) else f"{type(error).__name__} "
        raise UserError(
            f"{shown(path)}: {what}{shown(error)}: take another model or download it again"
        ) from None


# Keys of generation_config.json that change greedy decoding, with the values that do not
_NEUTRAL = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": [],
    "stop_strings": [],
    "guidance_scale": 1,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}


def read_generation(path: str | Path, *followed: str, **ours: int | None) -> dict:
    """The generation_config.json beside `path`, without nulls.

    Raises UserError for a key that would change answers. followed: keys that the caller obeys.
    ours: {key: a token id} that is obeyed here anyway; the file may repeat the id, also in a list.
    """
    file = Path(path).with_name("generation_config.json")
    given = read_json_if(file)
    for name in (_NEUTRAL | ours).keys() - set(followed):
        neutral = None, _NEUTRAL.get(name), ours.get(name), [ours.get(name)]
        if given.get(name) not in neutral:
            raise UserError(
                f"{shown(file)}: {name} changes answers, and is not followed here: delete this key"
            )
    return without_none(given)


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of the types, or one of the literals, of an annotation."""
    kinds = get_args(annotation) or (annotation,)
    return value in kinds or type(value) in kinds or float in kinds and type(value) is int


@dataclass(frozen=True)
class Config:
    """What configurations share: fields of their types, sizes of at least 1, positive floats, and a
    format in config.json.

    In that format a configuration within another is the object NAME_config. Raises UserError for
    other values.
    """

    kind: ClassVar[str] = ""  # config.json's model_type, of whole models
    # entries of config.json for which only this value is computed
    fixed: ClassVar[dict[str, Any]] = {}

    def __post_init__(self):
        for field in fields(self):
            value, least, most = getattr(self, field.name), 1, math.inf
            if field.name.endswith("_layer"):  # −2 is the last layer but one
                least = -MAX_COUNT
            elif field.name.endswith("_id"):
                least = 0
            elif field.name.startswith("num_"):
                most = MAX_COUNT
            is_right = fits(value, field.type) or type(value) is tuple
            if type(value) is int:
                is_right &= least <= value <= most
            if type(value) is float:
                is_right &= 0 < value < most
            kinds = get_args(field.type) or (field.type,)
            expected = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds)
            require(is_right, f"{field.name} is {quoted(value)}, expected a possible {expected}")

    @classmethod
    def from_dict(cls, raw: dict) -> Any:
        """Read a config.json: null means the default, other names are ignored. Raises UserError for
        another model."""
        given = raw.get("model_type")
        right_kind = given == cls.kind or not cls.kind
        expected = f"expected {cls.kind!r} (a run or an adapter has none)"
        require(right_kind, f"model_type is {quoted(given)}, {expected}")
        for name, value in cls.fixed.items():
            given = raw.get(name)
            require(given in (None, value), f"{name} is {quoted(given)}, expected {value!r}")
        values = {}
        for field in fields(cls):
            if isinstance(field.type, type) and issubclass(field.type, Config):
                values[field.name] = field.type.from_dict(raw.get(f"{field.name}_config") or {})
            elif raw.get(field.name) is not None:
                values[field.name] = raw[field.name]
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Any:
        """Read config.json at `path`. Raises UserError if it is absent, not JSON, or of another
        model."""
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


@dataclass(frozen=True)
class VisionConfig(Config):
    """SigLIP's ViT. Defaults: So400m/14 at 224 px, the vision tower of PaliGemma.

    feature_layer: None for the final norm's output, or an entry of [embeddings, layer 1, …, layer
    n]; LLaVA reads −2.
    """

    fixed = {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh"}
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    patch_size: int = 14
    image_size: int = 224
    layer_norm_eps: float = 1e-6
    feature_layer: int | None = None

    def __post_init__(self):
        super().__post_init__()
        width, heads = self.hidden_size, self.num_attention_heads
        require(width % heads == 0, f"hidden_size {width} is no multiple of {heads} heads")
        require(self.num_image_tokens, f"patch_size {self.patch_size} exceeds image_size")
        layer, layers = self.feature_layer or 0, self.num_hidden_layers
        problem = f"feature_layer {layer} is not one of SigLIP's {layers} layers"
        require(-layers - 1 <= layer <= layers, problem)

    @property
    def num_image_tokens(self) -> int:
        """I: one token per patch, no class token."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def from_dict(cls, raw: dict) -> "VisionConfig":
        """SigLIP of a vision_config, or of the config.json of a whole SigLIP. Raises UserError for
        another tower."""
        if raw.get("model_type") == "siglip":
            raw = raw["vision_config"]
        # transformers' defaults: no shape would show another number of heads
        return super().from_dict(vars(cls(768, 3072, 12, 12, 16)) | without_none(raw))


def rope_of(raw: dict) -> tuple[dict, Any]:
    """What a config.json says of RoPE, and its type."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return rope, "by layer"
    return rope, rope.get("rope_type", rope.get("type", "default"))


@dataclass(frozen=True)
class TextConfig(Config):
    """Gemma's decoder, generation 1 or 2. Defaults: the 2B of PaliGemma 1."""

    fixed = {"attention_bias": False}
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    model_type: Literal["gemma", "gemma2"] = "gemma"
    vocab_size: int = 257152
    hidden_size: int = 2048
    intermediate_size: int = 16384
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    hidden_activation: Literal["gelu_pytorch_tanh", "gelu", "silu"] = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True  # False: the head has a matrix of its own
    # these four are GEMMA2_ONLY; None switches each off
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None
    # what no size says; in another family some of it is read
    norm_offset: ClassVar[int] = 1  # the factor of a norm is its weight and this
    scales_embeddings: ClassVar[bool] = True  # by √H
    qkv_bias: ClassVar[Any] = False
    attention_bias: ClassVar[Any] = False  # of the attention's output
    mlp_bias: ClassVar[Any] = False  # of its three products
    # of RoPE's frequencies (D/2,), for longer texts than those of the first training
    stretch: ClassVar[Callable[[Any], Any] | None] = None

    def __post_init__(self):
        super().__post_init__()
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        require(heads % shared == 0, f"{heads} heads are no multiple of {shared} key/value heads")
        # RoPE turns pairs
        require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd, expected an even number")

    @property
    def is_gemma2(self) -> bool:
        """Four norms per layer, soft-capped logits, a sliding window in every other layer."""
        return self.model_type == "gemma2"

    def window(self, layer: int) -> int | None:
        """Width of the sliding window of layer 0, 1, …; None for full attention, as in all odd
        layers."""
        return self.sliding_window if layer % 2 == 0 else None

    @classmethod
    def from_dict(cls, raw: dict) -> "TextConfig":
        """The decoder of a config.json, or of its text_config. Raises UserError for one that is
        computed otherwise."""
        if raw.get("model_type") == "gemma2":
            return cls.read(
                raw,
                raw.get("hidden_activation"),
                vars(_DECODERS["paligemma2-3b"]),
                ("sliding_attention", "full_attention"),
                never_null=("sliding_window", "query_pre_attn_scalar"),
            )
        for name in _SIZES:
            require(raw.get(name), f"{name} is missing, for which transformers has Gemma 7B's")
        activation = raw.get("hidden_act")
        if activation == "gelu":
            # the first files say so, but the model was trained with the tanh approximation
            activation = "gelu_pytorch_tanh"
        return cls.read(raw | dict.fromkeys(GEMMA2_ONLY), activation, {})

    @classmethod
    def read(
        cls,
        raw: dict,
        activation: str | None,
        defaults: Mapping[str, Any],
        windows: Sequence[str] = ("full_attention",),
        never_null: Sequence[str] = (),
    ) -> Any:
        """As `from_dict`, for one family of decoders, which has these defaults.

        activation: the file's, by the key that transformers reads for this family. windows: the
        layer_types that are expected, in turn. never_null: keys that may be absent, but not null.
        """
        for name in ("rms_norm_eps", "rope_theta", *never_null):
            problem = f"{name} is null, expected a number, as in transformers"
            require(raw.get(name, 0) is not None, problem)
        layers = raw.get("layer_types") or []
        expected = [windows[number % len(windows)] for number in range(len(layers))]
        require(layers == expected, f"layer_types differs from {' and '.join(windows)}")
        rope, rope_type = rope_of(raw)
        known = " or ".join(map(repr, cls.rope_types))
        problem = f"rope type {quoted(rope_type)} is not computed here, expected {known}"
        require(rope_type in cls.rope_types, problem)
        # null switches the caps off; for other fields it means the default
        given = {
            name: value for name, value in raw.items() if value is not None or name in GEMMA2_ONLY
        }
        given["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta")
        given["hidden_activation"] = activation
        return super().from_dict({**defaults, **given})

    def to_dict(self) -> dict[str, Any]:
        """The decoder's part of a config.json."""
        given = super().to_dict() | {"hidden_act": self.hidden_activation}
        if self.is_gemma2:  # what is left out would be read as the default, not as off
            given |= {name: getattr(self, name) for name in GEMMA2_ONLY}
            given["query_pre_attn_scalar"] = self.query_pre_attn_scalar or self.head_dim
        return given


_DECODERS = {"paligemma-3b": TextConfig(vocab_size=257216)} | {
    name: TextConfig(
        "gemma2", 257216, *sizes, 1e-6, 1e4, "gelu_pytorch_tanh", True, scale, 50.0, 30.0, 4096
    )
    # hidden, feed-forward, layers, heads, key/value heads, head dim; query_pre_attn_scalar
    for name, *sizes, scale in (
        ("paligemma2-3b", 2304, 9216, 26, 8, 4, 256, 256),
        ("paligemma2-10b", 3584, 14336, 42, 16, 8, 256, 256),
        ("paligemma2-28b", 4608, 36864, 46, 32, 16, 128, 144),
    )
}


@dataclass(frozen=True)
class PaliGemmaConfig(Config):
    """The whole model: a vision tower, a decoder and the token ids that join them."""

    kind = "paligemma"
    vision: VisionConfig = VisionConfig()
    text: TextConfig = TextConfig()
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
        text, ids = raw.get("text_config") or {}, dict(CONTROL_TOKENS)
        is_causal = text.get("use_bidirectional_attention") is False
        problem = "use_bidirectional_attention is false, but PaliGemma's prefix is bidirectional"
        require(not is_causal, problem)
        for name in ids:
            for part in (text, raw):
                if part.get(name) is not None:
                    ids[name] = part[name]
        image = raw.get("image_token_index", raw.get("image_token_id", 256000))
        require(image is not None, "image_token_index is null, expected the id of <image>")
        require(raw.get("image_token_id", image) == image, "has two ids of <image>")
        ids["image_token_id"] = image
        text = {"vocab_size": raw.get("vocab_size"), **text, "tie_word_embeddings": True}
        return super().from_dict(raw | ids | {"text_config": text})

    def to_dict(self) -> dict:
        width, tokens = self.text.hidden_size, {"num_image_tokens": self.num_image_tokens}
        ids = {name: getattr(self, name) for name in CONTROL_TOKENS}
        tower = {
            "model_type": "siglip_vision_model",
            "projection_dim": width,
            "vision_use_head": False,
        }
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


# Geometries by name. `load_model(name)` fills one with random weights (seed 0), for tests and
# benchmarks. The numbers are, of a VisionConfig: hidden, feed-forward, layers, heads, patch, side;
# of a TextConfig: vocabulary, hidden, feed-forward, layers, heads, key/value heads, head dim.
PRESETS = {
    # the embedded base: 16 image tokens of 28 pixels; its tokenizer has 1,722 pieces, `<image>`
    # comes after them
    "tiny": PaliGemmaConfig(
        VisionConfig(128, 512, 3, 4, 28, 112),
        TextConfig("gemma", 1728, 128, 384, 4, 4, 1, 64),
        1722,
    ),
    # large enough to time, small enough for a laptop; it reads with that tokenizer
    "mini": PaliGemmaConfig(
        VisionConfig(192, 768, 4, 3), TextConfig("gemma", 8192, 256, 1024, 6, 4, 1, 64), 1722
    ),
    **{
        f"{name}-{side}": PaliGemmaConfig(VisionConfig(image_size=side), text)
        for name, text in _DECODERS.items()
        for side in (224, 448, 896)
    },
}
