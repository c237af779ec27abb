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
from typing import Annotated, Any, TypeVar

from model.common import Expected, UserError, field_problems, quoted, read_field, read_json

# What a field may be. The bounds are far beyond any published model; what exceeds them is a damaged or hostile file.
DEPTH, SIZE, PICTURE_TOKENS = Expected(int, 1, 1024), Expected(int, 1, 1 << 16), Expected(int, 1, 1 << 16)
Depth = Annotated[int, DEPTH]
Size = Annotated[int, SIZE]  # a width, a number of heads, a patch or picture in pixels
WideSize = Annotated[int, Expected(int, 1, 1 << 20)]
VocabSize = Annotated[int, Expected(int, 1, 1 << 24)]
TokenId = Annotated[int, Expected(int, 0, 1 << 24)]
Epsilon = Annotated[float, Expected(float, 0, 1)]
Positive = Annotated[float, Expected(float, 1e-6, 1e12)]

CONTROL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # Gemma's, where a file says nothing

ConfigT = TypeVar("ConfigT", bound="Config")


class Config:
    """What the configurations of whole models share: a config.json is read, and all that is wrong with it is named."""

    @classmethod
    def from_dict(cls: type[ConfigT], raw: dict, where: str = "config.json") -> ConfigT:
        """Read a config.json. Raises UserError for another model or sizes that contradict."""
        raise NotImplementedError

    @classmethod
    def from_file(cls: type[ConfigT], path: str | Path) -> ConfigT:
        """Read config.json at `path`. Raises UserError if it is absent, not JSON, or of another model."""
        return cls.from_dict(read_json(path, unique_keys=True), str(path))

    def to_dict(self) -> dict:
        """The config.json that `from_dict` reads back, and transformers where it has the model."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """What is wrong with the sizes, a text for each problem."""
        raise NotImplementedError

    def check(self: ConfigT, where: str = "config") -> ConfigT:
        """This configuration. Raises UserError, with all problems in one line, unless all fields fit together."""
        if problems := self.problems():
            raise UserError(f"{where}: {'; '.join(problems)}: correct the file or download it again")
        return self


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP's ViT. Defaults: So400m/14 at 224 px, the vision tower of PaliGemma."""

    hidden_size: Size = 1152
    intermediate_size: WideSize = 4304
    num_hidden_layers: Depth = 27
    num_attention_heads: Size = 16
    patch_size: Size = 14
    image_size: Size = 224
    layer_norm_eps: Epsilon = 1e-6
    # None: the output of the final norm. Else an entry of [embeddings, layer 1, …, layer n] without the final norm; −2
    # is that of LLaVA and its successors
    feature_layer: Annotated[int, Expected(int, -1024, 1024)] | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_image_tokens(self) -> int:
        """I: one token per patch, no class token."""
        return (self.image_size // self.patch_size) ** 2

    def problems(self) -> list[str]:
        """What is wrong with the sizes, a text for each problem."""
        if problems := field_problems(self, "vision_config."):
            return problems
        if not PICTURE_TOKENS.accepts(self.num_image_tokens):
            problems.append(f"a picture has {self.num_image_tokens} tokens, expected {PICTURE_TOKENS}")
        if self.hidden_size % self.num_attention_heads:
            problems.append(f"vision hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads")
        layers = self.num_hidden_layers
        if self.feature_layer is not None and not -layers - 1 <= self.feature_layer <= layers:
            problems.append(f"feature_layer {self.feature_layer} is not one of SigLIP's {layers} layers")
        return problems


@dataclass(frozen=True)
class TextConfig:
    """A decoder: Gemma's, generation 1 or 2, or Qwen's (1.5 and 2). Defaults: the 2B of PaliGemma 1."""

    model_type: Annotated[str, Expected(str, choices=("gemma", "gemma2", "qwen2"))] = "gemma"
    vocab_size: VocabSize = 257152
    hidden_size: Size = 2048
    intermediate_size: WideSize = 16384
    num_hidden_layers: Depth = 18
    num_attention_heads: Size = 8
    num_key_value_heads: Size = 1
    head_dim: Size = 256
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Positive = 10000.0
    hidden_activation: Annotated[str, Expected(str, choices=("gelu_pytorch_tanh", "silu"))] = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True  # False: the head has a matrix of its own
    # Gemma 2 only; None switches each off
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    sliding_window: Annotated[int, Expected(int, 1, 1 << 31)] | None = None

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

    def to_dict(self) -> dict[str, Any]:
        """The decoder's part of a config.json."""
        given = asdict(self) | {"hidden_act": self.hidden_activation}
        if self.is_gemma2:  # a null would be read as the default, 256
            return given | {"query_pre_attn_scalar": self.query_pre_attn_scalar or self.head_dim}
        return {name: value for name, value in given.items() if value is not None}

    def window(self, layer: int) -> int | None:
        """Width of the sliding window of layer 0, 1, …; None for full attention, as in all odd layers."""
        return self.sliding_window if layer % 2 == 0 else None

    def problems(self) -> list[str]:
        """What is wrong with the sizes, a text for each problem."""
        if problems := field_problems(self, "text_config."):
            return problems
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % key_heads:
            problems.append(f"{heads} heads cannot share {key_heads} key heads evenly")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs")
        return problems


@dataclass(frozen=True)
class PaliGemmaConfig(Config):
    """The whole model: a vision tower, a decoder and the token ids that join them."""

    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    image_token_id: TokenId = 257152
    pad_token_id: TokenId = 0
    eos_token_id: TokenId = 1
    bos_token_id: TokenId = 2

    @property
    def num_image_tokens(self) -> int:
        """Positions of one picture in the sequence."""
        return self.vision.num_image_tokens

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "PaliGemmaConfig":
        require_type(raw, "paligemma", where, ": this loader opens PaliGemma 1 and 2; pick such a checkpoint")
        vision, text = read_section(raw, "vision_config", where), read_section(raw, "text_config", where)
        return cls(
            vision=read_vision(vision, where, text.get("num_image_tokens")) if vision else VisionConfig(),
            text=_read_paligemma_text(text, raw, where),
            image_token_id=_first(raw.get("image_token_index"), raw.get("image_token_id"), 256000),
            **{name: _first(raw.get(name), text.get(name), default) for name, default in CONTROL_TOKENS.items()},
        ).check(where)

    def to_dict(self) -> dict:
        vision = asdict(self.vision)
        if vision["feature_layer"] is None:
            del vision["feature_layer"]
        vision |= {
            "model_type": "siglip_vision_model",
            "projection_dim": self.text.hidden_size,
            "num_image_tokens": self.vision.num_image_tokens,
            "vision_use_head": False,
        }
        ids = {name: getattr(self, name) for name in CONTROL_TOKENS}
        return {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "image_token_index": self.image_token_id,
            **ids,
            "hidden_size": self.text.hidden_size,
            "projection_dim": self.text.hidden_size,
            "tie_word_embeddings": True,
            "vision_config": vision,
            "text_config": self.text.to_dict() | {"num_image_tokens": self.vision.num_image_tokens} | ids,
        }

    def problems(self) -> list[str]:
        problems = [*self.vision.problems(), *self.text.problems(), *field_problems(self)]
        size, patch = self.vision.image_size, self.vision.patch_size
        if not problems and size % patch:  # SigLIP alone crops, as at 384 px
            problems.append(f"image_size {size} is no multiple of patch_size {patch}")
        return problems or control_token_problems(self, self.text.vocab_size)


def control_token_problems(config: Any, vocab_size: int) -> list[str]:
    """What is wrong with the ids of pad, eos and bos in `config`: each must be a row of the embedding."""
    given = {name: getattr(config, name) for name in CONTROL_TOKENS}
    return [f"{name} is {id_}, but vocab_size only {vocab_size}" for name, id_ in given.items() if id_ >= vocab_size]


def require_type(raw: dict, expected: str, where: str, remedy: str = ": pick another model") -> None:
    """Raise UserError unless the model_type of a config.json is `expected`."""
    if raw.get("model_type") != expected:
        raise UserError(f"{where}: model_type is {quoted(raw.get('model_type'))}, expected {expected!r}{remedy}")


def read_section(raw: dict, name: str, where: str) -> dict:
    """The object raw[name], empty where it is absent or null. Raises UserError for another type."""
    return {} if raw.get(name) is None else read_field(raw, name, Expected(dict), where)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def read_known(cls, raw: dict, **overrides) -> Any:
    """The dataclass `cls` from the keys of `raw` that it has; null means the default. The values are not checked."""
    known = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
    return cls(**(known | overrides))


# what transformers' SiglipVisionConfig has where a file leaves it out; no shape would show another number of heads
_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def read_vision(raw: dict, where: str, tokens: Any = None) -> VisionConfig:
    """SigLIP of a vision_config. tokens: of a picture, where that does not say. UserError for another tower."""
    for name, expected in (("model_type", "siglip_vision_model"), ("hidden_act", "gelu_pytorch_tanh")):
        if raw.get(name, expected) != expected:
            raise UserError(f"{where}: vision_config.{name} is {quoted(raw[name])}, expected {expected!r}")
    raw = _SIGLIP | {"patch_size": 16, "num_image_tokens": tokens} | {k: v for k, v in raw.items() if v is not None}
    # num_positions is stale in the published files of 448 and 896 px; the token count is not
    if "image_size" not in raw and raw["num_image_tokens"] is not None:
        side = isqrt(read_field(raw, "num_image_tokens", PICTURE_TOKENS, where))
        if side**2 != raw["num_image_tokens"]:
            raise UserError(f"{where}: num_image_tokens is {raw['num_image_tokens']}, expected a square")
        raw["image_size"] = side * read_field(raw, "patch_size", SIZE, where)
    return read_known(VisionConfig, raw)


def _read_paligemma_text(raw: dict, top: dict, where: str) -> TextConfig:
    kind = raw.get("model_type", "gemma")
    if kind not in ("gemma", "gemma2"):
        raise UserError(f"{where}: text_config.model_type is {quoted(kind)}, expected 'gemma' or 'gemma2'")
    if raw.get("use_bidirectional_attention") is False:
        raise UserError(
            f"{where}: use_bidirectional_attention is false, but PaliGemma's prefix attends in both directions"
        )
    return read_decoder({"vocab_size": top.get("vocab_size"), **raw, "tie_word_embeddings": True}, where)


def read_decoder(raw: dict, where: str) -> TextConfig:
    """The decoder of a config.json, or of its text_config. Raises UserError for one that is computed otherwise."""
    kind = raw.get("model_type", "gemma")
    rope = read_section(raw, "rope_scaling", where) or read_section(raw, "rope_parameters", where)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UserError(f"{where}: rope type {quoted(rope_type)} is not computed here, expected 'default'")
    if raw.get("attention_bias"):
        raise UserError(f"{where}: attention_bias is true, but Gemma's projections have no bias")
    activation = _first(raw.get("hidden_activation"), raw.get("hidden_act"), TextConfig.hidden_activation)
    overrides = {
        "rope_theta": _first(rope.get("rope_theta"), raw.get("rope_theta"), TextConfig.rope_theta),
        # the first files say "gelu", but the model was trained with the tanh approximation
        "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu" else activation,
    }
    if kind == "gemma2":
        # null switches the caps and the window off; for other fields it means the default
        given = {name: value for name, value in raw.items() if name in _GEMMA2_OPTIONAL or value is not None}
        raw = _gemma2("3b") | given
        layers = read_field(raw, "num_hidden_layers", DEPTH, where)
        pattern = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
        if raw.get("layer_types") not in (None, pattern):
            raise UserError(
                f"{where}: layer_types differs from Gemma 2's, in which every even layer has a sliding window"
            )
        overrides |= {name: raw[name] for name in _GEMMA2_OPTIONAL}
    else:  # it has none of them, whatever the file says
        overrides |= dict.fromkeys((*_GEMMA2_OPTIONAL, "query_pre_attn_scalar"))
    return replace(read_known(TextConfig, raw), **overrides)


_GEMMA2_OPTIONAL = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
_GEMMA2_SIZES = {  # H, F, layers, N, K, D, query_pre_attn_scalar
    "3b": (2304, 9216, 26, 8, 4, 256, 256),
    "10b": (3584, 14336, 42, 16, 8, 256, 256),
    "28b": (4608, 36864, 46, 32, 16, 128, 144),
}


def _gemma2(size: str) -> dict[str, Any]:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim".split()
    sizes = dict(zip([*names, "query_pre_attn_scalar"], _GEMMA2_SIZES[size], strict=True))
    return sizes | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}


def _paligemma(image_size: int, **text) -> PaliGemmaConfig:
    return PaliGemmaConfig(VisionConfig(image_size=image_size), TextConfig(vocab_size=257216, **text))


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
    **{f"paligemma-3b-{side}": _paligemma(side) for side in (224, 448, 896)},
    **{
        f"paligemma2-{size}-{side}": _paligemma(side, model_type="gemma2", **_gemma2(size))
        for size in _GEMMA2_SIZES
        for side in (224, 448, 896)
    },
}
