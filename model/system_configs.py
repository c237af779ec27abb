"""Configurations of the models other than PaliGemma, and the reader that picks one by config.json's model_type.

In: the dictionary of a config.json, or a preset's name. Out: a frozen dataclass with `from_dict` and `to_dict`.
"""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from model.common import quoted, read_json
from model.config import CONTROL_TOKENS, Config, PaliGemmaConfig, TextConfig, VisionConfig, config_errors, require

# Language models for text alone

# transformers' classes, by model_type
CLASSES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_NOT_COMPUTED = ("use_sliding_window", "use_bidirectional_attention", "quantization_config")


@dataclass(frozen=True)
class LanguageConfig(Config):
    """A published decoder and its control tokens. eos_token_id: each of them ends an answer; there may be none."""

    text: TextConfig
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    max_position_embeddings: int = 8192

    @classmethod
    def from_file(cls, path: str | Path) -> "LanguageConfig":
        """As in `Config`. Control tokens of generation_config.json come first, as in transformers' `generate`."""
        raw, beside = read_json(path), Path(path).with_name("generation_config.json")
        given = read_json(beside) if beside.is_file() else {}
        with config_errors(path):
            return cls.from_dict(raw | {name: given[name] for name in CONTROL_TOKENS if given.get(name) is not None})

    @classmethod
    def from_dict(cls, raw: dict) -> "LanguageConfig":
        kind, is_qwen = raw.get("model_type"), raw.get("model_type") == "qwen2"
        require(str(kind) in CLASSES, f"model_type is {quoted(kind)}, expected a text model's: {', '.join(CLASSES)}")
        pad, end, bos = (raw.get(name, None if is_qwen else default) for name, default in CONTROL_TOKENS.items())
        ends = tuple(end) if isinstance(end, list) else () if end is None else (end,)
        require(all(type(id_) is int for id_ in ends), f"eos_token_id is {quoted(end)}, expected token ids or null")
        for name in _NOT_COMPUTED:
            require(not raw.get(name), f"{name} is {quoted(raw.get(name))}: this is not computed here")
        if is_qwen:
            given = {name: value for name, value in raw.items() if value is not None}
            layers, activation = {*map(str, given.pop("layer_types", ()))}, given.pop("hidden_act", "silu")
            require(activation == "silu", f"hidden_act is {quoted(activation)}: this is not computed here")
            require(layers <= {"full_attention"}, f"layer_types is {quoted(layers)}: this is not computed here")
            heads = given["num_attention_heads"]
            filled = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads}
            raw = filled | {"tie_word_embeddings": False, "hidden_activation": "silu"} | given
        length = raw.get("max_position_embeddings", cls.max_position_embeddings)
        return cls(TextConfig.from_dict(raw), ends, ends[0] if pad is None and ends else pad, bos, length)

    def to_dict(self) -> dict:
        return self.text.to_dict() | {
            "architectures": [CLASSES[self.text.model_type]],
            "eos_token_id": self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id) or None,
            "pad_token_id": self.pad_token_id,
            "bos_token_id": self.bos_token_id,
            "max_position_embeddings": self.max_position_embeddings,
        }


@dataclass(frozen=True)
class TextModelConfig(Config):
    """Sizes of a decoder that is trained from nothing, as it is built, and whether its attention is differential."""

    kind: ClassVar[str] = "diff-transformer"
    text: TextConfig
    differential: bool = False

    @classmethod
    def of(cls, plain: TextConfig, differential: bool) -> "TextModelConfig":
        """The plain model, or the differential one: half as many heads, each twice as wide (Ye et al. 2024, 2.2)."""
        if not differential:
            return cls(plain)
        heads, key_heads = plain.num_attention_heads, plain.num_key_value_heads
        assert heads % 2 == key_heads % 2 == 0, f"{heads} heads on {key_heads} key heads cannot be paired"
        pairs = {"num_attention_heads": heads // 2, "num_key_value_heads": key_heads // 2}
        return cls(replace(plain, **pairs, head_dim=2 * plain.head_dim), True)


# The plain model by name: a few thousand parameters for tests, up to two million for two cores, 90 million for a GPU,
# and the sizes that Ye et al. 2024 train, 3b for its figures, the others to see how the loss falls with size.
_TEXT_SIZES = {"nano": (1024, 48, 2, 4), "0.1m": (2048, 32, 3, 4), "0.2m": (2048, 48, 3, 4), "0.3m": (2048, 64, 3, 4)}
_TEXT_SIZES |= {"0.6m": (2048, 96, 4, 6), "tiny": (2048, 192, 4, 6), "small": (8192, 768, 12, 12)}
_PAPER_SIZES = {"830m": (1536, 24, 16), "1.4b": (2048, 24, 16), "2.8b": (2560, 32, 20), "3b": (3072, 28, 24)}
_PAPER_SIZES |= {"6.8b": (4096, 32, 32), "13.1b": (5120, 40, 40)}
_TEXT_SIZES |= {name: (100_288, *sizes) for name, sizes in _PAPER_SIZES.items()}
TEXT_PRESETS = {  # vocabulary, width, layers, heads
    name: TextConfig("gemma", V, H, H * 8 // 3, layers, N, N, H // N, rms_norm_eps=1e-5, hidden_activation="silu")
    for name, (V, H, layers, N) in _TEXT_SIZES.items()
}

# WINGS


@dataclass(frozen=True)
class WingsConfig(PaliGemmaConfig):
    """PaliGemma's sizes, and those of the learners and routers, see `model.wings`.

    routed: with textual learners and routers, from stage 2 on. router: what a router reads. router_width: the positions
    that a router of "row" knows. rotary: learners rotate queries and keys.
    """

    kind: ClassVar[str] = "wings"
    rank: int = 64
    routed: bool = True
    router: Literal["octaves", "row"] = "octaves"
    router_width: int = 2048  # of the paper's training texts
    rotary: bool = True

    def __post_init__(self):
        super().__post_init__()
        width, heads = self.text.hidden_size, self.text.num_attention_heads
        require(width % (2 * heads) == 0, f"a learner cannot cut {width} channels into {heads} heads of an even width")

    @classmethod
    def beside(cls, base: PaliGemmaConfig, **learners) -> "WingsConfig":
        """The sizes of `base` with those of the learners."""
        return cls(**{field.name: getattr(base, field.name) for field in fields(PaliGemmaConfig)}, **learners)

    @classmethod
    def from_dict(cls, raw: dict) -> "WingsConfig":
        return super(PaliGemmaConfig, cls).from_dict(raw)  # not in the published format, which has no learners

    def to_dict(self) -> dict:
        return super(PaliGemmaConfig, self).to_dict()


# what `WingsConfig` adds, and the defaults
LEARNER_FIELDS = {f.name: f.default for f in fields(WingsConfig) if f.name not in PaliGemmaConfig.__dataclass_fields__}


@dataclass(frozen=True)
class LanguageWingsConfig(WingsConfig):
    """WINGS on a published language model, beside a SigLIP and a projector of two layers.

    eos_token_id ends an answer. chat: prompts and answers are turns of the family's conversation, see `model/chat.py`.
    """

    kind: ClassVar[str] = "wings-language"
    bos_token_id: int | None = None
    chat: bool = False

    @property
    def language(self) -> LanguageConfig:
        """The configuration of the language model."""
        return LanguageConfig(self.text, (self.eos_token_id,), self.pad_token_id, self.bos_token_id)


# Mamba and Q-Mamba

HELD = "zero_order_hold: only Δ·B is computed here, this option of B's discretization at commit 531252b"


@dataclass(frozen=True)
class MambaConfig(Config):
    """Sizes of a Mamba 1 language model with a tied head. Defaults: mamba-130m."""

    kind: ClassVar[str] = "mamba"
    vocab_size: int = 50280  # 50277 tokens of GPT-NeoX, padded to a multiple of 8
    hidden_size: int = 768
    num_hidden_layers: int = 24
    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    time_step_rank: int | None = None  # None: ⌈H / 16⌉
    layer_norm_epsilon: float = 1e-5
    pad_token_id: int = 0
    eos_token_id: int = 0
    bos_token_id: int = 0

    @property
    def intermediate_size(self) -> int:
        """E."""
        return self.expand * self.hidden_size

    @property
    def rank(self) -> int:
        """R."""
        return self.time_step_rank or math.ceil(self.hidden_size / 16)

    @classmethod
    def from_dict(cls, raw: dict) -> "MambaConfig":
        activation = raw.get("hidden_act", "silu")
        require(activation == "silu", f"hidden_act is {quoted(activation)}, expected 'silu'")
        require(not raw.get("zero_order_hold"), HELD)
        return super().from_dict(raw if raw.get("time_step_rank") != "auto" else raw | {"time_step_rank": None})

    def to_dict(self) -> dict:
        return super().to_dict() | {
            "architectures": ["MambaForCausalLM"],
            "tie_word_embeddings": True,
            "intermediate_size": self.intermediate_size,
            "time_step_rank": self.time_step_rank or "auto",
        }


MAMBA_2_8B = MambaConfig(hidden_size=2560, num_hidden_layers=64)


@dataclass(frozen=True)
class ProjectorConfig(Config):
    """Sizes of the Q-Mamba projector. Defaults: the paper's, with 256 queries (it reports 128, 256, 512 and 729)."""

    # with learned queries; without them, each feature a vector, as in VL-Mamba; one linear map, as in LLaVA
    projector: Literal["qmamba", "connector", "linear"] = "qmamba"
    queries: int = 256
    hidden_size: int = 768
    num_blocks: int = 24
    num_attention_heads: int = 16
    state_size: int = 16
    local_attention: bool = True  # each query attends to its own span of features; False: to all of them
    connector: bool = True
    scan_order: Literal["bidirectional", "forward", "backward"] = "bidirectional"  # of the connector
    feed_forward: bool = True

    @classmethod
    def from_dict(cls, raw: dict) -> "ProjectorConfig":
        require(not raw.get("zero_order_hold"), HELD)
        return super().from_dict(raw)

    def __post_init__(self):
        super().__post_init__()
        width, heads = self.hidden_size, self.num_attention_heads
        require(width % heads == 0, f"projector width {width} is no multiple of {heads} heads")
        is_plain = self.projector == "connector" and not self.connector
        require(not is_plain, "projector is 'connector', but connector is false: take one of them back")

    @property
    def mixers(self) -> MambaConfig:
        """The Mamba layers inside: by default those of mamba-130m, whose weights fit (`fill_from_mamba`)."""
        return MambaConfig(hidden_size=self.hidden_size, num_hidden_layers=self.num_blocks, state_size=self.state_size)


@dataclass(frozen=True)
class QMambaConfig(Config):
    """The whole model. Defaults: SigLIP So400m at 384 px without its last layer, and mamba-2.8b."""

    kind: ClassVar[str] = "qmamba"
    vision: VisionConfig = VisionConfig(image_size=384, feature_layer=-2)
    projector: ProjectorConfig = ProjectorConfig()
    text: MambaConfig = MAMBA_2_8B
    image_token_id: int = 50279  # a row of the embedding's padding, which no text uses

    def __post_init__(self):
        super().__post_init__()
        queries, features = self.num_image_tokens, self.vision.num_image_tokens
        require(queries <= features, f"{queries} queries are more than the picture's {features} features")

    @property
    def num_image_tokens(self) -> int:
        """Positions of one picture in the sequence: one per query, or per feature if there are no queries."""
        return self.projector.queries if self.projector.projector == "qmamba" else self.vision.num_image_tokens

    pad_token_id = property(lambda self: self.text.pad_token_id)
    eos_token_id = property(lambda self: self.text.eos_token_id)
    bos_token_id = property(lambda self: self.text.bos_token_id)


# The paper's model by name, with the control tokens of the embedded tokenizer, which presets are read with.
QMAMBA_PRESETS = {"qmamba-2.8b": QMambaConfig(text=replace(MAMBA_2_8B, eos_token_id=1, bos_token_id=2))}

CONFIGS: dict[str, type[Config]] = dict.fromkeys(CLASSES, LanguageConfig)
for _config in (PaliGemmaConfig, TextModelConfig, WingsConfig, LanguageWingsConfig, QMambaConfig):
    CONFIGS[_config.kind] = _config


def read_config(path: str | Path) -> Any:
    """The configuration in the config.json at `path`. Raises UserError for a file that is no model of this project."""
    # PaliGemma's reader has the best message for a type that is not in the table
    return CONFIGS.get(str(read_json(path).get("model_type")), PaliGemmaConfig).from_file(path)
