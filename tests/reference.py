"""Tiny random transformers models, their twins of ours through the production mapping, and how far
apart they are.

The models are made so that mistakes show (each of these hid a mutant when left at its default): √H
is no bf16 number, norms and biases are random, and query/key weights are large, so that attention
is far from uniform.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging

from model.attention import attention_modules
from model.paligemma import PaliGemma
from weights.load import load_model, load_system

IMAGE_TOKEN = 127
# by model_type; "text" is each language model
SIZES = json.loads("""{
    "gemma": {"vocab_size": 128, "hidden_size": 72, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 16},
    "gemma2": {"vocab_size": 128, "hidden_size": 72, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6},
    "siglip": {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "patch_size": 14, "vision_use_head": false},
    "paligemma": {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "projection_dim": 72,
        "hidden_size": 72},
    "text": {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 3e-6, "max_position_embeddings": 512, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 2},
    "mamba": {"hidden_size": 36, "state_size": 5, "conv_kernel": 3, "num_hidden_layers": 3,
        "vocab_size": 60, "layer_norm_epsilon": 1e-3, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 1}
}""")
Tensors = dict[str, torch.Tensor]
generations = pytest.mark.parametrize("generation", [1, 2])  # of PaliGemma, as `hf_model` takes it
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
backends = pytest.mark.parametrize("backend", ["sdpa", "eager"])
logging.disable_progress_bar()  # of files that are written and read in milliseconds


def hf_model(
    generation: int = 1,
    image_size: int = 56,
    backend: str = "eager",
    seed: int = 0,
    vision_heads: int = 4,
    **text,
):
    """A random transformers PaliGemma in fp32: 16 image tokens (patch 14), hidden 72, three or four
    layers."""
    kind = "gemma" if generation == 1 else "gemma2"
    decoder = transformers.AutoConfig.for_model(kind, **(SIZES[kind] | text))
    tower = transformers.SiglipVisionConfig(
        **SIZES["siglip"], num_attention_heads=vision_heads, image_size=image_size
    )
    parts = {"vision_config": tower, "text_config": decoder, "image_token_index": IMAGE_TOKEN}
    config = transformers.PaliGemmaConfig(**parts, **SIZES["paligemma"])
    config._attn_implementation = backend
    torch.manual_seed(seed)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    randomize(model)
    return model


def hf_language(kind: str, **more) -> transformers.PreTrainedModel:
    """A random language model of transformers in fp32, of a model_type."""
    if kind.startswith("gemma"):
        more = {"head_dim": 32} | more
    config = transformers.AutoConfig.for_model(kind, **(SIZES["text"] | more))
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(hf)
    return hf


def dice(seed: int) -> torch.Generator:
    """Random numbers of a seed, apart from torch's own."""
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def randomize(model) -> None:
    """Give every parameter a value that matters."""
    for name, parameter in model.named_parameters():
        leaf = f".{name}".split(".")[-2]
        if "norm" in leaf:
            offset = 1.0 if "vision" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + 0.3 * torch.randn_like(parameter))
        elif leaf in ("q_proj", "k_proj") and parameter.dim() == 2:
            parameter.copy_(torch.randn_like(parameter) * 2.5 * parameter.shape[1] ** -0.5)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * torch.randn_like(parameter))
        elif leaf == "position_embedding":
            parameter.copy_(0.5 * torch.randn_like(parameter))
        elif leaf == "embed_tokens":
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
        else:
            parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)


def set_attention_backend(model, backend: str) -> None:
    """Make every attention of `model` use "sdpa" (the fused kernels) or "eager" (the equations)."""
    for module in attention_modules(model).values():
        module.tap = None if backend == "sdpa" else lambda weights: None


def ours(hf, backend: str = "eager", dtype: torch.dtype = torch.float32) -> PaliGemma:
    """The same model through the production path: saved as safetensors, opened by `load_model`."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        model = load_model(folder, dtype=dtype)
    set_attention_backend(model, backend)
    return model


def twins(generation: int = 1, rows=((5, 4), (3, 6)), seed: int = 1, **sizes):
    """A transformers model, the same of ours, and a batch of `rows`."""
    hf = hf_model(generation, **sizes)
    return hf, ours(hf), batch(hf, rows, seed)


def inputs_of(batch) -> tuple[torch.Tensor, ...]:
    """What `generate` and a model take of a processor's batch."""
    return batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask


def is_valid(inputs: Tensors) -> torch.Tensor:
    """Where there is no padding."""
    return inputs["attention_mask"].bool()


def error(model, hf, inputs) -> float:
    """The relative error of the logits, where there is no padding."""
    valid = is_valid(inputs)
    return relative_error(model(**inputs)[valid], hf_forward(hf, inputs)[valid])


def hf_mamba(seed: int = 0, **sizes) -> transformers.MambaForCausalLM:
    """A random transformers model whose every parameter matters: three layers, state size and
    kernel not the usual."""
    config = transformers.MambaConfig(**(SIZES["mamba"] | sizes))
    torch.manual_seed(seed)
    model = transformers.MambaForCausalLM(config).eval()
    randomize(model)
    return model


def our_mamba(hf, dtype: torch.dtype = torch.float32):
    """The same model through the production path."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        return load_system(folder, "mamba", dtype)


def reload_hf(hf, backend: str, dtype: torch.dtype):
    """The transformers model as from_pretrained builds it in `dtype`; `.to` would cast its RoPE
    frequencies too."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        return (
            type(hf).from_pretrained(Path(folder), dtype=dtype, attn_implementation=backend).eval()
        )


def batch(hf, rows=((5, 4), (3, 6)), seed: int = 1) -> Tensors:
    """A left-padded batch of the model, as `left_padded` makes it."""
    vision = hf.config.vision_config
    return left_padded(
        rows, (vision.image_size // vision.patch_size) ** 2, vision.image_size, IMAGE_TOKEN, seed
    )


def left_padded(rows, slots: int, side: int, image_token: int, seed: int = 1) -> Tensors:
    """Rows of `slots` image tokens, then prefix and suffix of the lengths in `rows`; pixels (B, 3,
    side, side)."""
    generator = dice(seed)
    width = slots + max(map(sum, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    types = torch.zeros_like(ids)
    valid = torch.zeros_like(ids)
    for row, (prefix, suffix) in enumerate(rows):
        start = width - slots - prefix - suffix
        ids[row, start : start + slots] = image_token
        ids[row, start + slots :] = torch.randint(
            3, image_token, (prefix + suffix,), generator=generator
        )
        types[row, width - suffix :] = 1
        valid[row, start:] = 1
    pixels = torch.rand(len(rows), 3, side, side, generator=generator) * 2 - 1
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "token_type_ids": types,
        "attention_mask": valid,
    }


def padded_texts(lengths, least: int, most: int) -> Tensors:
    """Rows of so many random tokens, padded on the left with 0: input_ids and attention_mask."""
    ids = torch.randint(least, most, (len(lengths), max(lengths)), generator=dice(1))
    valid = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * valid, "attention_mask": valid.long()}


def right_padded(inputs: Tensors) -> Tensors:
    """The same batch with the padding of each row moved behind its tokens."""
    order = (~is_valid(inputs)).long().argsort(dim=1, stable=True)
    return {
        name: value if name == "pixel_values" else value.gather(1, order)
        for name, value in inputs.items()
    }


def hf_forward(hf, inputs: Tensors):
    """transformers' logits from types and positions: without them it computes other masks and
    positions."""
    positions = inputs["attention_mask"].cumsum(-1).clamp(min=1)
    return hf(**inputs, position_ids=positions, use_cache=False).logits


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a − b‖ / ‖b‖ in fp64."""
    a = a.detach().double()
    b = b.detach().double()
    return ((a - b).norm() / b.norm()).item()


def outputs_by_layer(model, names: list[str], run) -> Tensors:
    """What the modules `names` return while `run()` calls the model."""
    seen: Tensors = {}

    def keep(name):
        def hook(module, args, output):
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen
