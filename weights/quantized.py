"""Quantize a model while it is read, so that its whole weights are never all in memory.

In: a model on the meta device and the files that hold its weights. Out: the model, its layers in few bits, by
`lora/quantize.py`. Memory holds the result, one layer's parts and a few blocks of one matrix.
"""

from collections.abc import Mapping

import torch

from lora.quantize import replaceable
from model.common import UserError
from model.graft import Adaptable
from model.linear import block_rows
from weights.fingerprint import sample
from weights.streaming import Entry, read_rows, stream_into, untied, view


def stream_quantized(
    model: Adaptable,
    kind: str,
    entries: Mapping[str, Entry],
    name_map: Mapping[str, str],
    device: torch.device | str = "cpu",
) -> None:
    """As `weights.streaming.stream_into`, with every layer of `replaceable`, head included, quantized to `kind`.

    The largest matrices come first, while little else is in memory. Raises UserError as both.
    """
    device, left = torch.device(device), dict(entries)
    layers = replaceable(model, kind, head=True)
    for path, (module, quantized) in sorted(layers.items(), key=lambda item: -item[1][0].weight.numel()):
        names = [name for name in entries if name_map[name] == f"{path}.weight"]
        dtype, first = module.weight.dtype, left.pop(names[0])
        rows = block_rows(module.weight.shape[1])
        for name in names[1:]:  # a head tied to the embedding
            _require_equal(names[0], first, name, left.pop(name), dtype, rows)
        pieces = read_rows(names[0], first, dtype, device, rows)
        original = sample(view(first).view(first.shape), dtype)
        model.set_submodule(path, quantized(module, pieces, original).train(module.training))
    model.quantized = kind
    stream_into(model, left, name_map, device)


def _require_equal(name: str, entry: Entry, other: str, tied: Entry, dtype: torch.dtype, rows: int) -> None:
    """Raise UserError unless the matrices of two tied entries are equal in `dtype`."""
    cpu = torch.device("cpu")
    pairs = zip(read_rows(name, entry, dtype, cpu, rows), read_rows(other, tied, dtype, cpu, rows), strict=True)
    if not all(torch.equal(*pair) for pair in pairs):
        raise UserError(untied(tied, other, name))
