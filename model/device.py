"""Devices and dtypes by the names that the flags of commands take.

In: `--device` and `--dtype`. Out: a device that exists, and a dtype.
"""

import torch

from model.common import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is CUDA if available, else the CPU. Raises UserError for an absent device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: {reason}: take cpu, or a GPU that is there") from None
    return device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" or None is bf16 on CUDA, else fp32."""
    if name in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]
