"""One step of decoding through torch.compile, for many calls of `model.generate.generate`.

In: a model with a key/value cache, and the shapes of a batch. Out: logits of the next token.
"""

from typing import Any

import torch
from torch import Tensor

from model.attention import LayerCache
from model.common import UserError
from model.paligemma import PaliGemma


class CompiledStep:
    """A compiled step; on CUDA a CUDA graph.

    It keeps its caches, because a CUDA graph reads fixed addresses. Each number of rows and
    capacity, a multiple of `bucket`, is compiled by itself, which takes long. `options` are
    torch.compile's.
    """

    def __init__(self, model: PaliGemma, bucket: int = 128, **options: Any):
        device = model.device
        if options == {} and device.type == "cuda":
            options = {"mode": "reduce-overhead"}
        # one compilation for each (rows, capacity); beyond its limit the compiler would raise
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.model, self.bucket = model, bucket
        self.caches: dict[tuple[int, int], list[LayerCache]] = {}
        self.cache: list[LayerCache] = []  # that of the present batch
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = torch.compile(self._step, fullgraph=True, dynamic=False, **options)

    def open(self, rows: int, capacity: int) -> list[LayerCache]:
        """A cache for `rows` prompts, ready to read them. Raises UserError for a model without keys
        and values."""
        capacity += -capacity % self.bucket
        if (rows, capacity) not in self.caches:
            self.caches[rows, capacity] = self.model.new_cache(capacity)
        self.cache = self.caches[rows, capacity]
        for layer in self.cache:
            if not isinstance(layer, LayerCache):
                raise UserError(
                    "a model with no key/value cache cannot be compiled: decode without --compile"
                )
            layer.length, layer.position, layer.least = 0, None, capacity
            # of the batch before: a masked weight of 0 times a NaN would be NaN
            layer.keys.zero_()
            layer.values.zero_()
        return self.cache

    def seal(self) -> None:
        """Call this once the prompts are read: from here on, steps of one token follow."""
        self.position.fill_(self.cache[0].length - 1)
        for layer in self.cache:
            torch._dynamo.mark_static_address(layer.keys)
            torch._dynamo.mark_static_address(layer.values)
            layer.position = self.position

    def __call__(self, token: Tensor, types: Tensor, valid: Tensor) -> Tensor:
        """Logits (B, V) after `token` (B,); types and valid (B, capacity) describe all positions.
        Raises UserError."""
        self.position += 1
        torch.compiler.cudagraph_mark_step_begin()
        try:
            return self.step(token[:, None], types, valid, self.cache)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            message = " ".join(str(error).partition("\n\n")[0].split())
            raise UserError(
                f"torch.compile: {message}: install a C++ compiler, or decode without --compile"
            ) from error

    def _step(self, token, types, valid, cache) -> Tensor:
        written = torch.arange(valid.shape[1], device=valid.device) <= cache[0].position
        logits = self.model(
            token,
            pixel_values=None,
            token_type_ids=types,
            attention_mask=valid * written,
            cache=cache,
        )
        return logits[:, -1]
