"""Short hashes that name weights without reading all of them: 64 values of each tensor.

They are stored in adapters, logs of answers and results of studies: a change of the format makes
them all look like another model's.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from model.common import short_hash
from model.gemma import Adaptable

SAMPLES = 64
# a tensor's shape, and the bits of the sampled values in bf16
Sample = tuple[tuple[int, ...], list[int]]


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 has sharded; every process must call this."""
    gather = getattr(tensor, "full_tensor", None)  # the class takes 0.7 s to import
    return tensor if gather is None else gather()


def _values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """At most 64 values, evenly spread. The stride is odd: a multiple of the row length would see
    one column only."""
    values = gathered(tensor).detach().flatten()
    return values[:: tensor.numel() // SAMPLES | 1][:SAMPLES].to("cpu", dtype)


def sampled(tensor: Tensor, dtype: torch.dtype | None = None) -> Sample:
    """What a hash reads of `tensor` after a cast to `dtype`; None: as it is."""
    values = _values(tensor, dtype or tensor.dtype).bfloat16()
    return tuple(tensor.shape), values.view(torch.int16).tolist()


def tensor_fingerprint(tensors: Mapping[str, Tensor | Sample]) -> str:
    """A hash of names, shapes and values in bf16: the same for a checkpoint opened in fp32 and in
    bf16 (not in fp16).

    Adapters store this hash of their base. Sharded tensors are gathered one at a time.
    """
    text = ""
    for name, tensor in sorted(tensors.items()):
        shape, values = sampled(tensor) if isinstance(tensor, Tensor) else tensor
        text += f"{name} {shape} {values}\n"
    return short_hash(text)


def exact_fingerprint(model: nn.Module) -> str:
    """A hash of all that `model` computes with, for logs: parameters, persistent buffers, grafts,
    and their dtypes."""
    grafts = model.grafts if isinstance(model, Adaptable) else ()
    parts: list = [grafts]
    for name, tensor in (dict(model.named_parameters()) | model.state_dict()).items():
        values = _values(tensor, torch.float32).tolist()
        parts.append([name, str(tensor.dtype), tensor.shape, values])
    return short_hash(json.dumps([parts]))
