"""What both sides of the benchmark share: inputs, the update of a training step, and the loop that
answers requests.

In: JSON lines on stdin, {"do": "hello" | "open" | "prepare" | "run", …}. Out: one JSON line for
each on stdout. It imports nothing of the project and nothing of transformers.
"""

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # 78 MiB that AdamW imports at its first step: they are no memory of a step
from torch import Tensor

# tokens of text behind the picture's: the prompt, and in training an answer
PREFIX, SUFFIX = 16, 16
ANSWER = 8  # new tokens to a question of the section eval
TARGETS = r".*language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"  # of LoRA
RANK, ALPHA = 16, 32
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.98), "weight_decay": 0.0}


@dataclass
class Side:
    """One side: `open` returns its model; prefill, decode, train and eval prepare a batch and
    return a function without arguments, which is timed once in each round."""

    folder: str
    device: str
    dtype: str  # "float32", "bfloat16"
    tokens: int  # new ones of decode
    quantize: str | None  # ours only
    compiled: bool  # ours only

    def __post_init__(self):
        self.place = {"device": torch.device(self.device), "dtype": getattr(torch, self.dtype)}
        self.optimizer = None
        self.model = self.open()
        tensors = (*self.model.parameters(), *self.model.buffers())
        self.size = sum(tensor.nbytes for tensor in tensors)

    def prompts(self, rows: int, suffix: int = 0) -> dict[str, Any]:
        """Prompts of equal length S = picture + PREFIX + suffix, the same on both sides: input_ids,
        token_type_ids and attention_mask (rows, S), pixel_values (rows, 3, R, R)."""
        config = json.loads(Path(self.folder, "config.json").read_text())
        vision = config["vision_config"]
        size = vision["image_size"]
        patches = (size // vision["patch_size"]) ** 2
        dice = torch.Generator().manual_seed(rows)
        text = torch.randint(3, 1000, (rows, PREFIX + suffix), generator=dice)
        image = torch.full((rows, patches), config["image_token_index"])
        ids = torch.cat((image, text), dim=1)
        types = (torch.arange(ids.shape[1]) >= patches + PREFIX).long()
        pixels = torch.rand(rows, 3, size, size, generator=dice) * 2 - 1
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels.to(self.place["dtype"]),
            "token_type_ids": types.repeat(rows, 1),
        }
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def examples(self, rows: int) -> tuple[dict[str, Any], Tensor]:
        """Prompts with an answer of SUFFIX tokens, and labels (rows, S): its ids, -100
        elsewhere."""
        inputs = self.prompts(rows, SUFFIX)
        return inputs, inputs["input_ids"].masked_fill(inputs["token_type_ids"] == 0, -100)

    def questions(self) -> list[tuple[Path, str]]:
        """The pictures and prompts of the section eval, which the driver writes beside the
        model."""
        folder = Path(self.folder)
        questions = json.loads((folder / "questions.json").read_text())
        return [(folder / name, prompt) for name, prompt in questions]

    def update(self, loss: Callable[[], Tensor]) -> Tensor:
        """One training step; the loss before it. A GPU computes it under autocast to bf16."""
        kind = self.place["device"].type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            value = loss()
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value.detach()


def answer_requests(side: type[Side]) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    before = peak_bytes()
    opened, run, result = None, list, []
    for request in map(json.loads, sys.stdin):
        gc.collect()
        started = time.perf_counter()
        match request.pop("do"):
            case "open":
                opened = side(**request)
            case "prepare":
                run = getattr(opened, request["work"])(request["batch"])
            case "run":
                result = run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            before = 0  # the peak is that of the GPU
        reply = {
            "seconds": time.perf_counter() - started,
            "peak": peak_bytes() - before,
            "weights": opened and opened.size,
            "numbers": numbers(result),
            "imports": sorted({name.partition(".")[0] for name in sys.modules}),
        }
        print(json.dumps(reply), file=answers, flush=True)


def numbers(result: Tensor | list[str]) -> list:
    """What both sides must agree on: texts, tokens, a loss; of logits (…, V) maxima and logs of
    summed exponentials."""
    if not isinstance(result, Tensor):
        return result
    if result.is_floating_point() and result.dim():
        result = torch.stack((result.float().logsumexp(-1), result.float().amax(-1)))
    return result.flatten().tolist()


def peak_bytes() -> int:
    """The most memory that this process has held: on a GPU, else resident with mapped files (0 off
    Linux)."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024
    return 0
