"""Ours equals transformers at the published resolutions; two layers, since the sequences are long."""

import pytest
import torch

from model import cpu
from tests.reference import batch, hf_forward, hf_model, ours, relative_error


@pytest.mark.long
@pytest.mark.parametrize(("pixels", "generation"), [(224, 1), (448, 1), (896, 1), (896, 2)])
def test_published_geometries(pixels, generation):
    """Breaks when a sequence of 256, 1024 or 4096 image tokens is laid out, masked or windowed wrongly."""
    # 896 px and Gemma 2: the suffix reaches past the window of 4096, and must lose sight of the first patches
    window = {"sliding_window": 4096} if generation == 2 else {}
    # a head more at 4096 tokens takes a second more, and no other place
    heads = {"vision_heads": 1, "num_attention_heads": 2, "num_key_value_heads": 1} if pixels == 896 else {}
    hf = hf_model(generation, pixels, num_hidden_layers=2, **window, **heads)
    inputs = batch(hf, ((3, 5),))
    model = ours(hf)
    with torch.no_grad():
        kept = inputs["token_type_ids"].shape[1] - torch.arange(8, 0, -1)
        theirs = hf_forward(hf, inputs)[:, kept]
        for path, bound in (("onednn", 1e-5), ("torch", 1e-6)):  # oneDNN brings a GELU of its own
            with cpu.using(path):
                assert relative_error(model(**inputs, positions_to_keep=kept), theirs) <= bound
