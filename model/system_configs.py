"""Configurations of the models other than PaliGemma, and the reader that picks one by config.json's model_type.

In: the dictionary of a config.json, or a preset's name. Out: a frozen dataclass with `from_dict` and `to_dict`.
"""

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from model.common import Expected, UserError, field_problems, quoted, read_field, read_json
from model.config import (
    SIZE,
    Config,
    Depth,
    Epsilon,
    PaliGemmaConfig,
    Size,
    TextConfig,
    TokenId,
    VisionConfig,
    VocabSize,
    control_token_problems,
    read_known,
    read_section,
    require_type,
)
from model.language_config import CLASSES, LanguageConfig

ROUTERS = ("octaves", "row")


@dataclass(frozen=True)
class WingsConfig(PaliGemmaConfig):
    """PaliGemma's sizes, and those of the learners and routers, see `model.wings`.

    routed: with textual learners and routers, from stage 2 on. router: what a router reads. router_width: the positions
    that a router of "row" knows. rotary: learners rotate queries and keys.
    """

    rank: Size = 64
    routed: bool = True
    router: Annotated[str, Expected(str, choices=ROUTERS)] = "octaves"
    router_width: Size = 2048  # of the paper's training texts
    rotary: bool = True

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "WingsConfig":
        base, learners = read_section(raw, "paligemma_config", where), raw.get("learner_config", {})
        authors = "the weights of the authors have the shapes of another decoder and router: train with --wings"
        require_type(raw, "wings", where, f": {authors}")
        if not base:
            raise UserError(f"{where}: has no paligemma_config: {authors}")
        return cls.beside(PaliGemmaConfig.from_dict(base, where), **read_learners(learners, where)).check(where)

    @classmethod
    def beside(cls, base: PaliGemmaConfig, **learners) -> "WingsConfig":
        """The sizes of `base` with those of the learners."""
        return cls(**{field.name: getattr(base, field.name) for field in fields(PaliGemmaConfig)}, **learners)

    def to_dict(self) -> dict:
        return {
            "model_type": "wings",
            "paligemma_config": super().to_dict(),
            "learner_config": {name: getattr(self, name) for name in LEARNER_FIELDS},
        }

    def problems(self) -> list[str]:
        return super().problems() or self.learner_problems()

    def learner_problems(self) -> list[str]:
        width, heads = self.text.hidden_size, self.text.num_attention_heads
        fits = width % (2 * heads) == 0
        return [] if fits else [f"a learner cannot cut {width} channels into {heads} heads of an even width"]


# what `WingsConfig` adds, and the defaults
LEARNER_FIELDS = {f.name: f.default for f in fields(WingsConfig) if f.name not in PaliGemmaConfig.__dataclass_fields__}


def read_learners(raw, where: str) -> dict:
    """The `learner_config` of a config.json. Raises UserError for other names."""
    if not isinstance(raw, dict) or not raw.keys() <= LEARNER_FIELDS.keys():
        raise UserError(
            f"{where}: learner_config is {quoted(raw)}, expected {', '.join(LEARNER_FIELDS)}: correct the file"
        )
    return raw


@dataclass(frozen=True)
class LanguageWingsConfig(WingsConfig):
    """WINGS on a published language model, beside a SigLIP and a projector of two layers.

    eos_token_id ends an answer. chat: prompts and answers are turns of the family's conversation, see `model/chat.py`.
    """

    bos_token_id: TokenId | None = None
    chat: bool = False

    @property
    def language(self) -> LanguageConfig:
        """The configuration of the language model."""
        return LanguageConfig(self.text, (self.eos_token_id,), self.pad_token_id, self.bos_token_id)

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "LanguageWingsConfig":
        require_type(raw, "wings-language", where)
        language = LanguageConfig.from_dict(read_section(raw, "text_config", where), where)
        return cls(
            vision=read_known(VisionConfig, read_section(raw, "vision_config", where)),
            text=language.text,
            image_token_id=raw.get("image_token_id", language.text.vocab_size),
            eos_token_id=language.eos_token_id[0],
            pad_token_id=language.pad_token_id,
            bos_token_id=language.bos_token_id,
            chat=raw.get("chat", False),
            **read_learners(raw.get("learner_config", {}), where),
        ).check(where)

    def to_dict(self) -> dict:
        return {
            "model_type": "wings-language",
            "image_token_id": self.image_token_id,
            "chat": self.chat,
            "vision_config": asdict(self.vision),
            "text_config": self.language.to_dict(),
            "learner_config": {name: getattr(self, name) for name in LEARNER_FIELDS},
        }

    def problems(self) -> list[str]:
        problems = [*self.vision.problems(), *self.language.problems(), *field_problems(self)]
        return problems or self.learner_problems()


@dataclass(frozen=True)
class MambaConfig(Config):
    """Sizes of a Mamba language model. Defaults: mamba-130m."""

    vocab_size: VocabSize = 50280  # 50277 tokens of GPT-NeoX, padded to a multiple of 8
    hidden_size: Size = 768
    num_hidden_layers: Depth = 24
    state_size: Annotated[int, Expected(int, 1, 4096)] = 16
    expand: Annotated[int, Expected(int, 1, 64)] = 2
    conv_kernel: Annotated[int, Expected(int, 1, 64)] = 4
    time_step_rank: Size | None = None  # None: ⌈H / 16⌉
    layer_norm_epsilon: Epsilon = 1e-5
    pad_token_id: TokenId = 0
    eos_token_id: TokenId = 0
    bos_token_id: TokenId = 0

    @property
    def intermediate_size(self) -> int:
        """E."""
        return self.expand * self.hidden_size

    @property
    def rank(self) -> int:
        """R."""
        return self.time_step_rank or math.ceil(self.hidden_size / 16)

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "MambaConfig":
        """Read a config.json, of transformers or of the original repository."""
        layer = read_section(raw, "ssm_cfg", where)
        original = {
            "hidden_size": raw.get("d_model"),
            "num_hidden_layers": raw.get("n_layer"),
            "state_size": layer.get("d_state"),
            "expand": layer.get("expand"),
            "conv_kernel": layer.get("d_conv"),
            "time_step_rank": layer.get("dt_rank"),
        }
        given = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        given = {name: value for name, value in original.items() if value is not None} | given
        if given.get("time_step_rank") == "auto":
            del given["time_step_rank"]
        problems = [
            f"{name} is {quoted(value)}, expected {expected!r}"
            for name, value, expected in (
                ("model_type", raw.get("model_type", "mamba"), "mamba"),
                ("ssm_cfg.layer", layer.get("layer", "Mamba1"), "Mamba1"),
                ("attn_layer_idx", raw.get("attn_layer_idx") or [], []),
                ("rms_norm", raw.get("rms_norm", True), True),
                ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
                ("use_bias", raw.get("use_bias", False), False),
                ("use_conv_bias", raw.get("use_conv_bias", True), True),
                ("tie_word_embeddings", raw.get("tie_word_embeddings", raw.get("tie_embeddings", True)), True),
            )
            if value != expected
        ] + [f"{name} is missing" for name in ("vocab_size", "hidden_size", "num_hidden_layers") if name not in given]
        if problems:
            raise UserError(f"{where}: {'; '.join(problems)}: only Mamba 1 with a tied head is built here")
        config = cls(**given).check(where)
        if raw.get("pad_vocab_size_multiple") is None:
            return config
        multiple = read_field(raw, "pad_vocab_size_multiple", SIZE, where)
        return replace(config, vocab_size=-(-config.vocab_size // multiple) * multiple)

    def to_dict(self) -> dict:
        return asdict(self) | {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "tie_word_embeddings": True,
            "intermediate_size": self.intermediate_size,
            "time_step_rank": self.time_step_rank or "auto",
        }

    def problems(self) -> list[str]:
        return field_problems(self) or control_token_problems(self, self.vocab_size)


# Geometries by name: layers × hidden width of state-spaces/mamba-*.
MAMBA_PRESETS: dict[str, MambaConfig] = {
    name: MambaConfig(num_hidden_layers=layers, hidden_size=width)
    for name, layers, width in (
        ("mamba-130m", 24, 768),
        ("mamba-370m", 48, 1024),
        ("mamba-790m", 48, 1536),
        ("mamba-1.4b", 48, 2048),
        ("mamba-2.8b", 64, 2560),
    )
}


SCAN_ORDERS = ("bidirectional", "forward", "backward")
# With learned queries; without them, each feature a vector, as in VL-Mamba; one linear map, as in LLaVA
PROJECTORS = ("qmamba", "connector", "linear")


@dataclass(frozen=True)
class ProjectorConfig:
    """Sizes of the Q-Mamba projector. Defaults: the paper's, with 256 queries (it reports 128, 256, 512 and 729)."""

    projector: Annotated[str, Expected(str, choices=PROJECTORS)] = "qmamba"
    queries: Size = 256
    hidden_size: Size = 768
    num_blocks: Depth = 24
    num_attention_heads: Size = 16
    state_size: Annotated[int, Expected(int, 1, 4096)] = 16
    local_attention: bool = True  # each query attends to its own span of features; False: to all of them
    connector: bool = True
    scan_order: Annotated[str, Expected(str, choices=SCAN_ORDERS)] = "bidirectional"  # of the connector
    feed_forward: bool = True

    @property
    def mixers(self) -> MambaConfig:
        """The Mamba layers inside: by default those of mamba-130m, whose weights fit (`fill_from_mamba`)."""
        return MambaConfig(hidden_size=self.hidden_size, num_hidden_layers=self.num_blocks, state_size=self.state_size)


@dataclass(frozen=True)
class QMambaConfig(Config):
    """The whole model. Defaults: SigLIP So400m at 384 px without its last layer, and mamba-2.8b."""

    vision: VisionConfig = field(default_factory=lambda: VisionConfig(image_size=384, feature_layer=-2))
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    text: MambaConfig = field(default_factory=lambda: MAMBA_PRESETS["mamba-2.8b"])
    image_token_id: TokenId = 50279  # a row of the embedding's padding, which no text uses

    @property
    def num_image_tokens(self) -> int:
        """Positions of one picture in the sequence: one per query, or per feature if there are no queries."""
        return self.projector.queries if self.projector.projector == "qmamba" else self.vision.num_image_tokens

    @property
    def pad_token_id(self) -> int:
        return self.text.pad_token_id

    @property
    def eos_token_id(self) -> int:
        return self.text.eos_token_id

    @property
    def bos_token_id(self) -> int:
        return self.text.bos_token_id

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "QMambaConfig":
        require_type(raw, "qmamba", where)
        return cls(
            vision=read_known(VisionConfig, read_section(raw, "vision_config", where)),
            projector=read_known(ProjectorConfig, read_section(raw, "projector_config", where)),
            text=MambaConfig.from_dict(read_section(raw, "text_config", where), where),
            image_token_id=raw.get("image_token_id", cls.image_token_id),
        ).check(where)

    def to_dict(self) -> dict:
        return {
            "model_type": "qmamba",
            "image_token_id": self.image_token_id,
            "vision_config": asdict(self.vision),
            "projector_config": asdict(self.projector),
            "text_config": self.text.to_dict(),
        }

    def problems(self) -> list[str]:
        v, p = self.vision, self.projector
        problems = v.problems() + field_problems(p, "projector_config.") + self.text.problems() + field_problems(self)
        if p.projector == "connector" and not p.connector:
            problems.append("projector is 'connector', but connector is false: take one of them back")
        if not problems and self.num_image_tokens > v.num_image_tokens:
            problems.append(f"{p.queries} queries are more than the picture's {v.num_image_tokens} features")
        if not problems and p.hidden_size % p.num_attention_heads:
            problems.append(f"projector width {p.hidden_size} is no multiple of {p.num_attention_heads} heads")
        return problems


# The paper's model by name, with the control tokens of the embedded tokenizer, which presets are read with.
QMAMBA_PRESETS: dict[str, QMambaConfig] = {
    "qmamba-2.8b": QMambaConfig(text=replace(MAMBA_PRESETS["mamba-2.8b"], eos_token_id=1, bos_token_id=2))
}


MODEL_TYPE = "diff-transformer"


def _plain(vocab_size: int, hidden_size: int, layers: int, heads: int) -> TextConfig:
    return TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        rms_norm_eps=1e-5,
        hidden_activation="silu",
    )


# The plain model by name: a few thousand parameters for tests, up to two million for two cores, 90 million for a GPU,
# and the sizes that Ye et al. 2024 train, 3b for its figures, the others to see how the loss falls with size.
TEXT_PRESETS = {
    "nano": _plain(1024, 48, 2, 4),
    "0.1m": _plain(2048, 32, 3, 4),
    "0.2m": _plain(2048, 48, 3, 4),
    "0.3m": _plain(2048, 64, 3, 4),
    "0.6m": _plain(2048, 96, 4, 6),
    "tiny": _plain(2048, 192, 4, 6),
    "small": _plain(8192, 768, 12, 12),
    "830m": _plain(100_288, 1536, 24, 16),
    "1.4b": _plain(100_288, 2048, 24, 16),
    "2.8b": _plain(100_288, 2560, 32, 20),
    "3b": _plain(100_288, 3072, 28, 24),
    "6.8b": _plain(100_288, 4096, 32, 32),
    "13.1b": _plain(100_288, 5120, 40, 40),
}


@dataclass(frozen=True)
class TextModelConfig(Config):
    """Sizes of the decoder as it is built, and whether its attention is differential."""

    text: TextConfig
    differential: bool = False

    @classmethod
    def of(cls, plain: TextConfig, differential: bool) -> "TextModelConfig":
        """The plain model, or the differential one: half as many heads, each twice as wide (Ye et al. 2024, 2.2).

        Raises UserError for an odd number of heads.
        """
        if not differential:
            return cls(plain)
        heads, key_heads = plain.num_attention_heads, plain.num_key_value_heads
        if heads % 2 or key_heads % 2:
            raise UserError(f"{heads} heads on {key_heads} key heads cannot be paired: both numbers must be even")
        pairs = {"num_attention_heads": heads // 2, "num_key_value_heads": key_heads // 2}
        return cls(replace(plain, **pairs, head_dim=2 * plain.head_dim), True)

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "TextModelConfig":
        require_type(raw, MODEL_TYPE, where)
        text = read_field(raw, "text_config", Expected(dict), where)
        return cls(read_known(TextConfig, text), raw.get("differential", False)).check(where)

    def problems(self) -> list[str]:
        return self.text.problems() + field_problems(self)

    def to_dict(self) -> dict:
        text = {name: value for name, value in asdict(self.text).items() if value is not None}
        return {"model_type": MODEL_TYPE, "differential": self.differential, "text_config": text}


# by config.json's model_type
CONFIGS = {"paligemma": PaliGemmaConfig, "qmamba": QMambaConfig, MODEL_TYPE: TextModelConfig, "wings": WingsConfig}
CONFIGS |= dict.fromkeys(CLASSES, LanguageConfig) | {"wings-language": LanguageWingsConfig}


def read_config(path: str | Path) -> PaliGemmaConfig | QMambaConfig | TextModelConfig | LanguageConfig:
    """The configuration in the config.json at `path`. Raises UserError for a file that is no model of this project."""
    raw = read_json(path, unique_keys=True)
    # PaliGemma's reader has the best message for a type that is not in the table
    return CONFIGS.get(str(raw.get("model_type")), PaliGemmaConfig).from_file(path)
