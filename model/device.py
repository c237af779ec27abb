"""Devices and dtypes by the names that the flags `--device`, `--dtype` and `--autocast` take."""

import os
import platform

import torch
from torch import nn

from model import cpu
from model.common import UserError, cpuinfo, shown

SMALL = 100_000_000  # parameters; a model with fewer is small
FEW = 2  # threads that the operators of a small model can use
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is CUDA if available, else MPS, else the CPU. Nothing has
    run on MPS yet. Raises UserError for an absent device, or a DMT_CPU_PATH that is not understood."""
    cpu.check_ways()
    # cuDNN's attention comes first on an H100, and plans anew for each shape: in decoding, at every
    # token
    torch.backends.cuda.enable_cudnn_sdp(False)
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            name = "cuda"
    try:
        torch.empty(1, device=name).tolist()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {shown(name)}: {shown(error)}: take auto, or a device that is there"
        ) from None
    return torch.device(name)


def use_threads(number: int | None, model: nn.Module) -> None:
    """Set how many threads PyTorch takes. None: OMP_NUM_THREADS, if set; else
    all cores, but FEW for a small model."""
    is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    if number is None and is_small and "OMP_NUM_THREADS" not in os.environ:
        number = min(FEW, torch.get_num_threads())
    if number is not None:
        torch.set_num_threads(number)


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" or None is bf16 on CUDA, else fp32."""
    return DTYPES.get(name or "auto", torch.bfloat16 if device.type == "cuda" else torch.float32)


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of `--autocast`, None for "none". "auto" is bf16 on a GPU."""
    return DTYPES.get("bf16" if name == "auto" and device.type == "cuda" else name)


def autocast_of(name: str, device: torch.device) -> torch.autocast:
    """The context of `--autocast`, see `autocast_dtype`."""
    dtype = autocast_dtype(name, device)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def processor_name() -> str:
    """The CPU's model."""
    return cpuinfo("model name") or platform.processor() or platform.machine()
