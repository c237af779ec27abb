"""Devices and dtypes by the names that the flags of commands take.

In: `--device` and `--dtype`. Out: a device that exists, and a dtype.
"""

import contextlib
import platform
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from model import cpu
from model.common import UserError, shown

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

shapes_only = False


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within it, tensors have shapes and no values, as `train/plan.py` makes them, and seem to be on a CPU: scans and
    weights in few bits are computed as on a GPU."""
    global shapes_only
    before, shapes_only = shapes_only, True
    try:
        yield
    finally:
        shapes_only = before


_IS_THERE = {
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "xpu": torch.xpu.is_available,
    "cpu": lambda: True,
}


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is CUDA if available, else MPS, else the CPU. Nothing has run on MPS yet.

    Raises UserError for an absent device, or a DMT_CPU_PATH that is not understood.
    """
    cpu.uses("products")
    if _IS_THERE["cuda"]():
        # cuDNN's attention comes first on an H100, and plans anew for each shape: in decoding, at every token
        torch.backends.cuda.enable_cudnn_sdp(False)
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if _IS_THERE[kind]()))
    there = [kind for kind, is_there in _IS_THERE.items() if is_there()]
    if not re.fullmatch(rf"({'|'.join(there)})(:\d{{1,3}})?", name):
        raise UserError(
            f"--device {shown(name)}: expected auto or, of this PyTorch, {', '.join(there)}, cuda:1 and so on"
        )
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # a number that is too high
        raise UserError(f"--device {name}: {shown(str(error).splitlines()[0])}: take one that is there") from None
    return torch.device(name)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in DTYPES."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" or None is bf16 on CUDA, else fp32. Raises UserError for another name."""
    if name in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype {shown(name)}: expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@cache
def processor_name() -> str:
    """The CPU's model, never empty: sums are rounded in another order on another one."""
    commands = None, ["env", "LC_ALL=C", "lscpu"], ["sysctl", "machdep.cpu.brand_string"]
    for command in commands:  # Linux on x86, where a file says it; Linux on ARM, macOS
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            if command is None:
                text = Path("/proc/cpuinfo").read_text()
            else:
                text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            names = re.findall(r"^[ \t]*(?:model name|machdep\.cpu\.brand_string)\s*:[ \t]*(\w.*)", text, re.M | re.I)
            if names:
                return " + ".join(dict.fromkeys(name.strip() for name in names))  # small and large cores
    return platform.processor() or platform.machine() or "unknown processor"


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of `--autocast`, None for "none". "auto" is bf16 on a GPU."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "none"
    return DTYPES.get(name)


def autocast_of(name: str, device: torch.device) -> torch.autocast:
    """The context of `--autocast`, see `autocast_dtype`."""
    dtype = autocast_dtype(name, device)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def numerics(device: torch.device) -> dict[str, str]:
    """What decides how results are rounded: the library, the device, on a CPU its threads, and the present autocast."""
    on_gpu = device.type == "cuda"
    products = ", ".join(sorted(cpu.ways)) or "torch"
    on_cpu = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()} {products}"
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else "no autocast"
    return {
        "torch": torch.__version__,
        "device": device.type,
        "processor": torch.cuda.get_device_name(device) if on_gpu else on_cpu,
        "threads": "" if on_gpu else f"{torch.get_num_threads()} threads",
        "autocast": str(autocast),
    }
