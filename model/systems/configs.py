"""Configurations of the models other than PaliGemma."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from model.common import quoted, read_json
from model.config import (
    CONTROL_TOKENS,
    GEMMA2_ONLY,
    Config,
    PaliGemmaConfig,
    TextConfig,
    VisionConfig,
    config_errors,
    read_generation,
    require,
    rope_of,
)

# the language models, by model_type
FAMILIES = ("gemma", "gemma2", "llama", "qwen2")
# what families other than Gemma's have where a file says nothing
DEFAULTS: dict[str, dict] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
}
# of a conversation in ChatML, where no template says another
DEFAULT_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class RopeStretch(Config):
    """Llama 3.1's RoPE for longer texts: waves longer than `original_max_position_embeddings` /
    low_freq_factor become `factor` times as long, those shorter than … / high_freq_factor stay."""

    fixed = {"partial_rotary_factor": 1}
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        require(low < high, f"rope type 'llama3' has factors {low} and {high}")

    def __call__(self, frequencies: Any) -> Any:
        """Frequencies (D/2,), stretched; between the two bounds a mean of both."""
        low, high = self.low_freq_factor, self.high_freq_factor
        waves = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        kept = ((waves - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class LlamaConfig(TextConfig):
    """A decoder of Llama's architecture (Touvron et al. 2023), as Qwen 1.5 and 2 (Yang et al. 2024)
    are, too."""

    fixed = {"use_sliding_window": False}
    rope_types = ("default", "llama3")
    norm_offset = 0
    scales_embeddings = False
    model_type: Literal["llama", "qwen2"] = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False
    stretch: RopeStretch | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2"

    @classmethod
    def from_dict(cls, raw: dict) -> "LlamaConfig":
        """As of `TextConfig`."""
        rope, rope_type = rope_of(raw)
        width, heads = raw.get("hidden_size", 0), raw.get("num_attention_heads", 0)
        require(width and heads, "hidden_size or num_attention_heads is missing")
        is_whole = raw.get("head_dim") or width % heads == 0
        require(is_whole, f"hidden_size {width} is no multiple of {heads} heads")
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "tie_word_embeddings": False,
        }
        given = raw | dict.fromkeys(GEMMA2_ONLY)
        given["stretch"] = RopeStretch.from_dict(rope) if rope_type == "llama3" else None
        if raw.get("model_type") == "qwen2":  # which has its own
            given |= {"attention_bias": False, "mlp_bias": False}
        return cls.read(given, raw.get("hidden_act") or "silu", defaults)

    def to_dict(self) -> dict[str, Any]:
        given = super().to_dict()
        if stretch := given.pop("stretch_config", None):
            given["rope_scaling"] = {"rope_type": "llama3"} | stretch
        return given


def decoder_of(raw: dict) -> TextConfig:
    """The decoder of a language model's config.json. Raises UserError."""
    is_gemma = str(raw.get("model_type")).startswith("gemma")
    return TextConfig.from_dict(raw) if is_gemma else LlamaConfig.from_dict(raw)


@dataclass(frozen=True)
class LanguageConfig(Config):
    """A published decoder and its control tokens. eos_token_id: each of them ends an answer; there
    may be none."""

    kind = "language"
    text: TextConfig | LlamaConfig
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    max_position_embeddings: int = 8192
    repetition_penalty: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        rows = self.text.vocab_size
        for id_ in (self.pad_token_id, self.bos_token_id):
            problem = f"token id {id_} is no row of the embedding, which has {rows}"
            require(id_ is None or id_ < rows, problem)

    @classmethod
    def from_file(cls, path: str | Path) -> "LanguageConfig":
        """As in `Config`. What generation_config.json has comes first, as in transformers'
        `generate`."""
        raw, given = read_json(path), read_generation(path, "repetition_penalty")
        for name in (*CONTROL_TOKENS, "repetition_penalty"):
            if name in given:
                raw[name] = given[name]
        with config_errors(path):
            return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict) -> "LanguageConfig":
        kind = raw.get("model_type")
        problem = f"model_type is {quoted(kind)}, expected a text model's: {', '.join(FAMILIES)}"
        require(kind in FAMILIES, problem)
        is_both_ways = raw.get("use_bidirectional_attention") or raw.get("is_causal") is False
        require(not is_both_ways, "use_bidirectional_attention, is_causal false: not computed here")
        raw = DEFAULTS.get(str(kind), CONTROL_TOKENS) | raw
        end, pad = raw.get("eos_token_id"), raw.get("pad_token_id")
        if not isinstance(end, list):
            end = [] if end is None else [end]
        problem = f"eos_token_id is {quoted(end)}, expected token ids or null"
        require(all(type(id_) is int for id_ in end), problem)
        penalty = raw.get("repetition_penalty")
        return cls(
            decoder_of(raw),
            tuple(end),
            end[0] if pad is None and end else pad,
            raw.get("bos_token_id"),
            raw.get("max_position_embeddings", 8192),
            1.0 if penalty is None else penalty,
        )

    def to_dict(self) -> dict:
        ends = list(self.eos_token_id)
        values = vars(self) | {
            "architectures": [f"{self.text.model_type.capitalize()}ForCausalLM"],
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        }
        del values["text"], values["repetition_penalty"]
        return self.text.to_dict() | values


PAD, EOS, BOS, UNK = range(4)  # of the tokenizer that a `TextModelConfig`'s text has


@dataclass(frozen=True)
class TextModelConfig(Config):
    """Sizes of a decoder that is trained from nothing, as it is built, and whether its attention is
    differential."""

    kind = "diff-transformer"
    # of its tokenizer
    bos_token_id = BOS
    pad_token_id = PAD
    text: TextConfig
    differential: bool = False

    @classmethod
    def of(
        cls,
        plain: TextConfig,
        differential: bool,
        wide: bool = False,
    ) -> "TextModelConfig":
        """The plain model, or the differential one: half as many heads, each twice as wide (Ye et
        al. 2024, 2.2); or the plain one with such heads."""
        maps = 2 if differential or wide else 1
        text = replace(
            plain,
            num_attention_heads=plain.num_attention_heads // maps,
            num_key_value_heads=plain.num_key_value_heads // maps,
            head_dim=maps * plain.head_dim,
        )
        return cls(text, differential)


# The plain model by name: a few thousand parameters for tests, up to two million for two cores, 90
# million for a GPU, and sizes that Ye et al. 2024 train, 3b for its figures, the others to see how
# the loss falls with size.
_TEXT_SIZES = {
    "nano": (1024, 48, 2, 4),
    "0.1m": (2048, 32, 3, 4),
    "0.2m": (2048, 48, 3, 4),
    "0.3m": (2048, 64, 3, 4),
    "0.6m": (2048, 96, 4, 6),
    "tiny": (2048, 192, 4, 6),
    "small": (8192, 768, 12, 12),
    "830m": (100288, 1536, 24, 16),
    "1.4b": (100288, 2048, 24, 16),
    "3b": (100288, 3072, 28, 24),
}
TEXT_PRESETS = {  # vocabulary, width, layers, heads
    name: TextConfig(
        "gemma", V, H, H * 8 // 3, layers, N, N, H // N, rms_norm_eps=1e-5, hidden_activation="silu"
    )
    for name, (V, H, layers, N) in _TEXT_SIZES.items()
}


@dataclass(frozen=True)
class WingsConfig(PaliGemmaConfig):
    """PaliGemma's sizes, and those of the learners. routed: with textual learners and routers, from
    stage 2 on. Its file is not in PaliGemma's format, which has no learners."""

    kind = "wings"
    rank: int = 64
    routed: bool = True

    @classmethod
    def from_dict(cls, raw: dict) -> Any:
        return super(PaliGemmaConfig, cls).from_dict(raw)

    def to_dict(self) -> dict:
        return super(PaliGemmaConfig, self).to_dict()


@dataclass(frozen=True)
class LanguageWingsConfig(WingsConfig):
    """WINGS on a published language model. chat: it is asked in turns of its family, after a
    `system` text where that has one, see `model/systems/chat.py`. adds_bos: before a text.
    opens_with_bos: before a conversation."""

    kind = "wings-language"
    text: TextConfig | LlamaConfig = TextConfig()
    bos_token_id: int | None = None
    chat: bool = False
    system: str | None = None
    adds_bos: bool = True
    opens_with_bos: bool = False

    @classmethod
    def from_dict(cls, raw: dict) -> Any:
        return super().from_dict(raw | {"text": decoder_of(raw.get("text_config") or {})})

    @property
    def language(self) -> LanguageConfig:
        """The configuration of the language model."""
        return LanguageConfig(self.text, (self.eos_token_id,), self.pad_token_id, self.bos_token_id)


@dataclass(frozen=True)
class MambaConfig(Config):
    """Sizes of a Mamba 1 language model with a tied head. Defaults: mamba-130m."""

    kind = "mamba"
    fixed = {"hidden_act": "silu"}
    vocab_size: int = 50280  # 50277 tokens of GPT-NeoX, padded to a multiple of 8
    hidden_size: int = 768
    num_hidden_layers: int = 24
    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    time_step_rank: int | str = "auto"  # ⌈H / 16⌉
    layer_norm_epsilon: float = 1e-5
    pad_token_id: int = 0
    eos_token_id: int = 0
    bos_token_id: int = 0

    @property
    def rank(self) -> int:
        """R."""
        if isinstance(self.time_step_rank, int):
            return self.time_step_rank
        return math.ceil(self.hidden_size / 16)

    def to_dict(self) -> dict:
        beside = {"architectures": ["MambaForCausalLM"], "tie_word_embeddings": True}
        return super().to_dict() | beside | {"intermediate_size": self.expand * self.hidden_size}


@dataclass(frozen=True)
class ProjectorConfig(Config):
    """Sizes of the Q-Mamba projector. Defaults: the paper's, with 256 queries (it reports 128, 256,
    512 and 729).

    projector: with learned queries; without them, each feature a vector, as in VL-Mamba; one linear
    map, as in LLaVA. local_attention: each query attends to its own span of features, else to all
    of them.
    """

    projector: Literal["qmamba", "connector", "linear"] = "qmamba"
    queries: int = 256
    hidden_size: int = 768
    num_blocks: int = 24
    num_attention_heads: int = 16
    state_size: int = 16
    local_attention: bool = True
    # of the connector
    scan_order: Literal["bidirectional", "forward", "backward"] = "bidirectional"

    @property
    def mixers(self) -> MambaConfig:
        """The Mamba layers inside: by default those of mamba-130m, whose weights fit
        (`fill_from_mamba`)."""
        return MambaConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_blocks,
            state_size=self.state_size,
        )


@dataclass(frozen=True)
class QMambaConfig(Config):
    """The whole model. Defaults: SigLIP So400m at 384 px without its last layer, and mamba-2.8b."""

    kind = "qmamba"
    vision: VisionConfig = VisionConfig(image_size=384, feature_layer=-2)
    projector: ProjectorConfig = ProjectorConfig()
    text: MambaConfig = MambaConfig(50280, 2560, 64)
    image_token_id: int = 50279  # a row of the embedding's padding, which no text uses

    def __post_init__(self):
        super().__post_init__()
        queries, features = self.num_image_tokens, self.vision.num_image_tokens
        problem = f"{queries} queries are more than the picture's {features} features"
        require(queries <= features, problem)
        width, heads = self.projector.hidden_size, self.projector.num_attention_heads
        require(width % heads == 0, f"projector width {width} is no multiple of {heads} heads")

    @property
    def num_image_tokens(self) -> int:
        """Positions of one picture in the sequence: one per query, or per feature if there are no
        queries."""
        has_queries = self.projector.projector == "qmamba"
        return self.projector.queries if has_queries else self.vision.num_image_tokens

    pad_token_id = property(lambda self: self.text.pad_token_id)
    eos_token_id = property(lambda self: self.text.eos_token_id)
    bos_token_id = property(lambda self: self.text.bos_token_id)


# The paper's model by name, with the control tokens of the embedded tokenizer, which presets are
# read with.
QMAMBA_PRESETS = {
    "qmamba-2.8b": QMambaConfig(text=MambaConfig(50280, 2560, 64, eos_token_id=1, bos_token_id=2))
}
