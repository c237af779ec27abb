"""The configuration of a published language model for text alone: Gemma, Gemma 2, Qwen1.5 and Qwen2.

In: config.json, as any version of transformers writes it, with generation_config.json beside it. Out: the sizes of the
decoder, the control tokens and the length that it was trained to read. `model/language.py` is the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from model.common import Expected, UserError, field_problems, quoted, read_field, read_json
from model.config import CONTROL_TOKENS, SIZE, Config, TextConfig, read_decoder

# transformers' classes, by model_type
CLASSES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
_UNUSED = ("layer_types", "hidden_act")  # of Qwen; checked before


@dataclass(frozen=True)
class LanguageConfig(Config):
    """A decoder and its control tokens. eos_token_id: each of them ends an answer."""

    text: TextConfig
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    bos_token_id: int | None = None
    max_position_embeddings: Annotated[int, Expected(int, 1, 1 << 31)] = 8192

    @classmethod
    def from_file(cls, path: str | Path) -> "LanguageConfig":
        """As in `Config`. Control tokens of generation_config.json come first, as in transformers' `generate`."""
        raw, beside = read_json(path, unique_keys=True), Path(path).with_name("generation_config.json")
        given = read_json(beside) if beside.is_file() else {}
        return cls.from_dict(
            raw | {name: given[name] for name in CONTROL_TOKENS if given.get(name) is not None}, str(path)
        )

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "LanguageConfig":
        kind, is_qwen = raw.get("model_type"), raw.get("model_type") == "qwen2"
        layers = raw.get("layer_types") if is_qwen else None  # Gemma 2's are checked with the decoder
        if not isinstance(kind, str) or kind not in CLASSES:
            raise UserError(f"{where}: model_type is {quoted(kind)}, expected a text model's: {', '.join(CLASSES)}")
        not_computed = [
            f"{name} is {quoted(raw[name])}"
            for name, is_known in (
                ("use_sliding_window", not raw.get("use_sliding_window")),
                ("use_bidirectional_attention", not raw.get("use_bidirectional_attention")),
                ("quantization_config", raw.get("quantization_config") is None),
                ("hidden_act", not is_qwen or raw.get("hidden_act", "silu") == "silu"),
                (
                    "layer_types",
                    layers is None or isinstance(layers, list) and set(map(str, layers)) == {"full_attention"},
                ),
            )
            if not is_known
        ]
        if not_computed:
            raise UserError(f"{where}: {', '.join(not_computed)}: this is not computed here, take another model")
        if is_qwen:
            width, heads = (read_field(raw, name, SIZE, where) for name in ("hidden_size", "num_attention_heads"))
            filled = {"num_key_value_heads": heads, "head_dim": width // heads, "tie_word_embeddings": False}
            raw = (
                filled
                | {"hidden_activation": "silu"}
                | {name: value for name, value in raw.items() if value is not None and name not in _UNUSED}
            )
        if missing := [name for name in _SIZES if raw.get(name) is None]:
            raise UserError(f"{where}: {', '.join(missing)} missing: download the file again")
        pad, ends, bos = (raw.get(name, None if is_qwen else default) for name, default in CONTROL_TOKENS.items())
        ends = tuple(ends) if isinstance(ends, list) else (ends,)
        pad: Any = ends[0] if pad is None and ends else pad
        length = raw.get("max_position_embeddings", cls.max_position_embeddings)
        return cls(read_decoder(raw, where), ends, pad, bos, length).check(where)

    def to_dict(self) -> dict:
        return self.text.to_dict() | {
            "architectures": [CLASSES[self.text.model_type]],
            "eos_token_id": self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id),
            "pad_token_id": self.pad_token_id,
            "bos_token_id": self.bos_token_id,
            "max_position_embeddings": self.max_position_embeddings,
        }

    def problems(self) -> list[str]:
        if problems := self.text.problems() + field_problems(self):
            return problems
        ids = [("eos_token_id", id_) for id_ in self.eos_token_id or (None,)] + [("pad_token_id", self.pad_token_id)]
        ids += [] if self.bos_token_id is None else [("bos_token_id", self.bos_token_id)]
        expected = Expected(int, 0, self.text.vocab_size - 1)
        return [f"{name} is {quoted(id_)}, expected {expected}" for name, id_ in ids if not expected.accepts(id_)]
