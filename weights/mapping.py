"""What the published tensors are called, and which of our parameters they are.

Our names are those of transformers 5 without the leading `model.`. PaliGemma's safetensors come in
four dialects, which differ in the prefixes of the model's three parts. big_vision's .npz stacks the
layers of a tower in one array and keeps the attention heads as an axis.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Names:
    """How the files of one kind of model name its tensors."""

    # {dialect: {our prefix: the dialect's}}
    dialects: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {OWN: SAME})
    # further names, in any dialect: ours
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # prefixes of tensors that the model does not have

    def ignores(self, name: str) -> bool:
        """Also the frequencies of RoPE, which old files have and any model computes."""
        return name.startswith(self.ignored) or name.endswith("rotary_emb.inv_freq")


PALIGEMMA_NAMES = Names(DIALECTS, dict.fromkeys(HEADS, EMBEDDING))
# the text tower and the pooling head are left out; transformers 5 saves a tower by itself without a
# prefix
_NO_TOWER = tuple(
    "text_model. logit_ head. vision_model.head. vision_model.embeddings.position_ids".split()
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
# computes x @ weight.T, and keeps the heads as an axis. A rule maps the array of one layer, and of
# one of its parameters; the file stacks the layers on the first axis, then the parameters.
RULES: dict[str, Rule] = {
    "same": lambda w: w,
    "transposed": torch.t,
    "from_hwio": lambda w: w.permute(3, 2, 0, 1),
    "only": lambda w: w[0],
    "flat": lambda w: w.flatten(),  # (N, D) to (N·D)
    "from_heads": lambda w: w.flatten(1).t(),  # (H, N, D) to (N·D, H)
    "out_heads": lambda w: w.transpose(1, 2).flatten(0, 1),  # (N, H, D) to (N·D, H)
    "in_heads": lambda w: w.flatten(0, 1).t(),  # (N, D, H) to (H, N·D)
}
_VISION, _TEXT = "img/Transformer/encoderblock/", "llm/layers/"
# below the layers of a tower: an array, its rule, and our parameters
_VISION_LAYER = """LayerNorm_0/scale same layer_norm1.weight
LayerNorm_0/bias same layer_norm1.bias
LayerNorm_1/scale same layer_norm2.weight
LayerNorm_1/bias same layer_norm2.bias
MlpBlock_0/Dense_0/kernel transposed mlp.fc1.weight
MlpBlock_0/Dense_0/bias same mlp.fc1.bias
MlpBlock_0/Dense_1/kernel transposed mlp.fc2.weight
MlpBlock_0/Dense_1/bias same mlp.fc2.bias
MultiHeadDotProductAttention_0/query/kernel from_heads self_attn.q_proj.weight
MultiHeadDotProductAttention_0/query/bias flat self_attn.q_proj.bias
MultiHeadDotProductAttention_0/key/kernel from_heads self_attn.k_proj.weight
MultiHeadDotProductAttention_0/key/bias flat self_attn.k_proj.bias
MultiHeadDotProductAttention_0/value/kernel from_heads self_attn.v_proj.weight
MultiHeadDotProductAttention_0/value/bias flat self_attn.v_proj.bias
MultiHeadDotProductAttention_0/out/kernel in_heads self_attn.out_proj.weight
MultiHeadDotProductAttention_0/out/bias same self_attn.out_proj.bias
"""
_TEXT_LAYER = """attn/q_einsum/w out_heads self_attn.q_proj.weight
attn/kv_einsum/w out_heads self_attn.k_proj.weight self_attn.v_proj.weight
attn/attn_vec_einsum/w in_heads self_attn.o_proj.weight
mlp/gating_einsum transposed mlp.gate_proj.weight mlp.up_proj.weight
mlp/linear transposed mlp.down_proj.weight
pre_attention_norm/scale same input_layernorm.weight
"""
# In Gemma 1 `post_attention_layernorm` is the pre-norm of the MLP, in Gemma 2 the post-norm of the
# attention.
_GEMMA_1 = """pre_ffw_norm/scale same post_attention_layernorm.weight
"""
_GEMMA_2 = """post_attention_norm/scale same post_attention_layernorm.weight
pre_ffw_norm/scale same pre_feedforward_layernorm.weight
post_ffw_norm/scale same post_feedforward_layernorm.weight
"""
# the embedding is without the rows of <image> and padding, see weights/npz.py
_WHOLE = f"""img/embedding/kernel from_hwio vision_tower.embeddings.patch_embedding.weight
img/embedding/bias same vision_tower.embeddings.patch_embedding.bias
img/pos_embedding only vision_tower.embeddings.position_embedding.weight
img/Transformer/encoder_norm/scale same vision_tower.post_layernorm.weight
img/Transformer/encoder_norm/bias same vision_tower.post_layernorm.bias
img/head/kernel transposed multi_modal_projector.linear.weight
img/head/bias same multi_modal_projector.linear.bias
llm/embedder/input_embedding same {EMBEDDING}
llm/final_norm/scale same language_model.norm.weight
"""


def big_vision_rules(keys: Collection[str]) -> dict[str, tuple[Rule, list[str]]]:
    """{key of the .npz: how a layer's array becomes each of its parameters, and our names of them,
    with {} for the layer}. keys: what the file holds; Gemma's generation follows from them."""
    is_gemma2 = f"{_TEXT}post_ffw_norm/scale" in keys
    of_text = _TEXT_LAYER + (_GEMMA_2 if is_gemma2 else _GEMMA_1)
    rules = {}
    for below, above, table in (
        ("", "", _WHOLE),
        (_VISION, "vision_tower.encoder.layers.{}.", _VISION_LAYER),
        (_TEXT, "language_model.layers.{}.", of_text),
    ):
        for line in table.splitlines():
            key, rule, *names = line.split()
            ours = [above + name for name in names]
            rules[below + key] = RULES[rule], ours
    return rules


def is_stacked(key: str) -> bool:
    """Whether the array's first axis counts layers."""
    return key.startswith((_VISION, _TEXT))
