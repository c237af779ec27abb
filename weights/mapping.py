"""What the published tensors are called, and which of our parameters they are.

Our names are those of transformers 5 without the leading `model.`. PaliGemma's safetensors come in
four dialects, which differ in the prefixes of the model's three parts. big_vision's .npz stacks the
layers of a tower in one array and keeps the attention heads as an axis.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# what a checkpoint of weights may hold; quantized and integer tensors are refused by name
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Entry(NamedTuple):
    """A tensor in a file, known from the header: the file, its shape and the name of its dtype
    there."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


# the dialects of PaliGemma: {our prefix: the dialect's}, the first that fits
DIALECTS: dict[str, dict[str, str]] = {
    # the hub's files of 2024, transformers 4.41 to 4.51
    "A": {
        "language_model.": "language_model.model.",
        "vision_tower.": "vision_tower.vision_model.",
        "": "",
    },
    # the modules of transformers 4.52 to 4.57
    "B": {"vision_tower.": "model.vision_tower.vision_model.", "": "model."},
    # the modules of transformers 5
    "C": {"": "model."},
    # what transformers 5 saves
    "D": {"language_model.": "language_model.model.", "": ""},
}
# our own names, and those of a .npz, whose arrays `weights/npz.py` renames
OWN, NPZ = "own", "big_vision"
SAME = {"": ""}
EMBEDDING = "language_model.embed_tokens.weight"
# the tied head, which any dialect may store besides the embedding or in its place
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class Names(NamedTuple):
    """How the files of one kind of model name its tensors."""

    # {dialect: {our prefix: the dialect's}}
    dialects: Mapping[str, Mapping[str, str]]
    # further names, in any dialect: ours
    aliases: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()  # prefixes of tensors that the model does not have

    def ignores(self, name: str) -> bool:
        """Also the frequencies of RoPE, which old files have and any model computes."""
        return name.startswith(self.ignored) or name.endswith("rotary_emb.inv_freq")


PALIGEMMA_NAMES = Names(DIALECTS, dict.fromkeys(HEADS, EMBEDDING))
# the text tower and the pooling head are left out; transformers 5 saves a tower by itself without a
# prefix
_NO_TOWER = (
    "text_model.",
    "logit_",
    "head.",
    "vision_model.head.",
    "vision_model.embeddings.position_ids",
)
SIGLIP_NAMES = Names({"siglip": {"": "vision_model."}, OWN: SAME}, ignored=_NO_TOWER)


def dialect_names(ours: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """{the dialect's name: our name} of each of our parameters."""
    names = {}
    for name in ours:
        prefix, theirs = next(pair for pair in prefixes.items() if name.startswith(pair[0]))
        names[theirs + name.removeprefix(prefix)] = name
    return names


Rule = Callable[[Tensor], Tensor]

# big_vision (https://github.com/google-research/big_vision) computes x @ kernel where torch
# computes x @ weight.T, and keeps the heads as an axis. A rule maps the array of one layer; the
# file stacks the layers on the first axis.


def _same(w: Tensor) -> Tensor:
    return w


def _out_heads(w: Tensor) -> Tensor:
    """(N, H, D) to (N·D, H)."""
    return w.transpose(1, 2).flatten(0, 1)


def _in_heads(w: Tensor) -> Tensor:
    """(N, D, H) to (H, N·D)."""
    return w.flatten(0, 1).t()


_BLOCK, _LAYER = "img/Transformer/encoderblock", "llm/layers"
_VISION, _TEXT = "vision_tower.encoder.layers.{}", "language_model.layers.{}"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"

_BIG_VISION: dict[str, dict[str, Rule]] = {
    "img/embedding/kernel": {  # (patch, patch, 3, H)
        "vision_tower.embeddings.patch_embedding.weight": lambda w: w.permute(3, 2, 0, 1)
    },
    "img/embedding/bias": {"vision_tower.embeddings.patch_embedding.bias": _same},
    "img/pos_embedding": {  # (1, I, H)
        "vision_tower.embeddings.position_embedding.weight": lambda w: w[0]
    },
    **{
        f"{_BLOCK}/LayerNorm_{i}/{theirs}": {f"{_VISION}.layer_norm{i + 1}.{ours}": _same}
        for i in (0, 1)
        for theirs, ours in (("scale", "weight"), ("bias", "bias"))
    },
    **{
        f"{_BLOCK}/MlpBlock_0/Dense_{i}/{theirs}": {f"{_VISION}.mlp.fc{i + 1}.{ours}": rule}
        for i in (0, 1)
        for theirs, ours, rule in (("kernel", "weight", torch.t), ("bias", "bias", _same))
    },
    **{
        f"{_ATTENTION}/{name}/{theirs}": {f"{_VISION}.self_attn.{name[0]}_proj.{ours}": rule}
        for name in ("query", "key", "value")
        for theirs, ours, rule in (
            ("kernel", "weight", lambda w: w.flatten(1).t()),  # (H, N, D) to (N·D, H)
            ("bias", "bias", torch.flatten),
        )
    },
    f"{_ATTENTION}/out/kernel": {f"{_VISION}.self_attn.out_proj.weight": _in_heads},
    f"{_ATTENTION}/out/bias": {f"{_VISION}.self_attn.out_proj.bias": _same},
    "img/Transformer/encoder_norm/scale": {"vision_tower.post_layernorm.weight": _same},
    "img/Transformer/encoder_norm/bias": {"vision_tower.post_layernorm.bias": _same},
    "img/head/kernel": {"multi_modal_projector.linear.weight": torch.t},
    "img/head/bias": {"multi_modal_projector.linear.bias": _same},
    # without the rows of <image> and padding, see weights/npz.py
    "llm/embedder/input_embedding": {EMBEDDING: _same},
    f"{_LAYER}/attn/q_einsum/w": {f"{_TEXT}.self_attn.q_proj.weight": _out_heads},
    f"{_LAYER}/attn/kv_einsum/w": {  # (2, K, H, D)
        f"{_TEXT}.self_attn.k_proj.weight": lambda w: _out_heads(w[0]),
        f"{_TEXT}.self_attn.v_proj.weight": lambda w: _out_heads(w[1]),
    },
    f"{_LAYER}/attn/attn_vec_einsum/w": {f"{_TEXT}.self_attn.o_proj.weight": _in_heads},
    f"{_LAYER}/mlp/gating_einsum": {  # (2, H, F)
        f"{_TEXT}.mlp.gate_proj.weight": lambda w: w[0].t(),
        f"{_TEXT}.mlp.up_proj.weight": lambda w: w[1].t(),
    },
    f"{_LAYER}/mlp/linear": {f"{_TEXT}.mlp.down_proj.weight": torch.t},
    "llm/final_norm/scale": {"language_model.norm.weight": _same},
}
# In Gemma 1 `post_attention_layernorm` is the pre-norm of the MLP, in Gemma 2 the post-norm of the
# attention.
_NORMS_1 = {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
_NORMS_2 = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def big_vision_rules(keys: Collection[str]) -> dict[str, dict[str, Rule]]:
    """{key of the .npz: {our name, with {} for the layer: how a layer's array becomes the
    parameter}}. keys: what the file holds; Gemma's generation follows from them."""
    norms = _NORMS_2 if f"{_LAYER}/post_ffw_norm/scale" in keys else _NORMS_1
    scales = {
        f"{_LAYER}/{theirs}/scale": {f"{_TEXT}.{name}.weight": _same}
        for theirs, name in norms.items()
    }
    return _BIG_VISION | scales


def is_stacked(key: str) -> bool:
    """Whether the array's first axis counts layers."""
    return key.startswith((_BLOCK, _LAYER))
