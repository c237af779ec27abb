"""Short hashes that name weights without reading all of them: 64 values of each tensor.

In: tensors by name, or a model. Out: 16 hexadecimal digits, the same on every machine. Hashes are stored in adapters,
logs of answers and results of studies: a change of the format makes them all look like another model's.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from model.graft import Adaptable

SAMPLES = 64


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP2 has sharded; every process must call this."""
    gather = getattr(tensor, "full_tensor", None)  # the class takes 0.7 s to import
    return tensor if gather is None else gather()


def _sample(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """At most 64 values, evenly spread. The stride is odd: a multiple of the row length would see one column only."""
    return gathered(tensor).detach().flatten()[:: tensor.numel() // SAMPLES | 1][:SAMPLES].to("cpu", dtype)


class Sample(NamedTuple):
    """What a hash reads of a tensor: its shape, and the bits of the sampled values in bf16."""

    shape: tuple[int, ...]
    values: list[int]


def sample(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Sample:
    """The sample of `tensor` after a cast to `dtype`; None: as it is."""
    values = _sample(tensor, dtype or tensor.dtype).bfloat16()
    return Sample(tuple(tensor.shape), values.view(torch.int16).tolist())


def tensor_fingerprint(tensors: Mapping[str, torch.Tensor | Sample]) -> str:
    """A hash of names, shapes and values in bf16: the same for a checkpoint opened in fp32 and in bf16.

    fp16 rounds differently. Adapters store this hash of their base. Sharded tensors are gathered one at a time.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        shape, values = sample(tensor) if isinstance(tensor, torch.Tensor) else tensor
        digest.update(f"{name} {shape} {values}\n".encode())
    return digest.hexdigest()[:16]


def exact_fingerprint(model: nn.Module) -> str:
    """A hash of all that `model` computes with: parameters, persistent buffers and grafts, with their dtypes.

    Logs of answers and results of studies store this hash of the model that gave them.
    """
    parts: list = [[graft.arguments() for graft in model.grafts] if isinstance(model, Adaptable) else []]
    for name, tensor in (dict(model.named_parameters()) | model.state_dict()).items():
        parts.append([name, str(tensor.dtype), list(tensor.shape), _sample(tensor, torch.float32).tolist()])
    return hashlib.sha256(json.dumps([parts]).encode()).hexdigest()[:16]
