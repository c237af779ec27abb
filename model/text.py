"""A language model trained from nothing: the Differential Transformer (Ye et al. 2024), and its plain twin.

In: token ids (B, S), and which document each belongs to. Out: float32 logits (B, S, V), or the loss against targets.
Everything in it is shared: Gemma's blocks with a silu gate (pre-norm, RMSNorm, SwiGLU of 8/3·H, a tied head), and
`split` of `model/differential.py` with fresh RoPE pairs, which is the published attention. Next: `train/text.py`.

    attention       heads              maps of a head     per head                            a layer has
    plain           2h of width d      1                  A·V                                 4·H² + 8·H² weights
    differential    h of width 2d      2, of width d      norm((A₁ − λ·A₂)·V)·(1 − λ_init)    as many, 4d + 2d more
"""

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from model.common import UserError
from model.config import TextConfig, read_known
from model.differential import graft
from model.gemma import Gemma
from model.paligemma import initialize, summed_loss

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


# The plain twin by name: for a first look, two million parameters for two cores, 90 million for a GPU, and what the
# paper trained.
TEXT_PRESETS = {
    "nano": _plain(1024, 48, 2, 4),
    "tiny": _plain(2048, 192, 4, 6),
    "small": _plain(8192, 768, 12, 12),
    "3b": _plain(100_288, 3072, 28, 24),
}


@dataclass(frozen=True)
class TextModelConfig:
    """Sizes of the decoder as it is built, and whether its attention is differential."""

    text: TextConfig
    differential: bool = False

    @classmethod
    def of(cls, plain: TextConfig, differential: bool) -> "TextModelConfig":
        """The plain model, or its differential twin: half as many heads, each twice as wide (Ye et al. 2024, 2.2).

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
        """Read what `to_dict` wrote. Raises UserError for another architecture."""
        kind = raw.get("model_type")
        if kind != MODEL_TYPE or not isinstance(raw.get("text_config"), dict):
            raise UserError(f"{where}: model_type is {kind!r}, expected {MODEL_TYPE!r} and its text_config")
        return cls(read_known(TextConfig, raw["text_config"]), bool(raw.get("differential")))

    def to_dict(self) -> dict:
        text = {name: value for name, value in asdict(self.text).items() if value is not None}
        return {"model_type": MODEL_TYPE, "differential": self.differential, "text_config": text}


class TextModel(nn.Module):
    """Gemma's decoder and head alone. `seed` draws the λ vectors, which no later initialisation touches."""

    def __init__(self, config: TextModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.language_model = Gemma(config.text)
        if config.differential:
            graft(self, "split", rope_pairs="fresh", seed=seed)

    def forward(
        self,
        input_ids: torch.Tensor,
        documents: torch.Tensor | None = None,
        *,
        positions_to_keep: int | torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 logits (B, S, V), or those of the positions asked for; with `targets`, the loss against them.

        documents (B, S): a number for each token's document, where several are packed into a row: each sees its own
        alone. None means one a row. positions_to_keep as in `PaliGemma.forward`. targets: the token that must follow
        each kept position, −100 for none; the loss is the sum of cross-entropies, in nats.
        """
        valid = torch.ones_like(input_ids)
        embeddings = self.language_model.embed(input_ids)
        hidden = self.language_model(embeddings, valid.bool(), valid, None, positions_to_keep, documents)
        head = self.language_model.head
        return head(hidden) if targets is None else summed_loss(head, self.config.text.vocab_size, hidden, targets)


def new_model(preset: str, differential: bool, seed: int = 0) -> TextModel:
    """A model of random weights, drawn from `seed`: with one seed, the twins' embeddings, norms and MLPs are equal.

    Raises UserError for an unknown preset.
    """
    if preset not in TEXT_PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose one of {', '.join(TEXT_PRESETS)}")
    return initialize(TextModel(TextModelConfig.of(TEXT_PRESETS[preset], differential), seed), seed)
