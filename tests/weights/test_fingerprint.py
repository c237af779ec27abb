"""The hashes that adapters, logs and studies store: they keep their values, and see every kind of
change."""

import torch
from torch import nn

from weights.fingerprint import exact_fingerprint, tensor_fingerprint


def layer():
    module = nn.Linear(40, 30)
    with torch.no_grad():
        module.weight.copy_(torch.arange(1200.0).view(30, 40) / 7)
        module.bias.copy_(torch.arange(30.0))
    return module


def test_stored_values_stay():
    """Breaks when adapters and results written earlier no longer find their base."""
    assert tensor_fingerprint(dict(layer().named_parameters())) == "ffe5381b6243ec90"
    assert exact_fingerprint(layer()) == "53b485e35d82b558"


def test_every_kind_of_change_is_seen():
    """Breaks when a base in bf16 is the same for answers, or buffers are left out."""
    wide = layer()
    narrow = layer().bfloat16()
    scaled = layer()
    scaled.register_buffer("scale", torch.ones(3))
    marks = {exact_fingerprint(wide), exact_fingerprint(narrow), exact_fingerprint(scaled)}
    scaled.scale += 1
    assert len(marks | {exact_fingerprint(scaled)}) == 4
