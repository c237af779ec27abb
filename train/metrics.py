"""The log of a run: metrics.jsonl, TensorBoard where installed, the progress bar, and the picture of its loss."""

import contextlib
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from eval import figures
from model.common import atomic_path, file_errors
from train.checkpoint import Progress
from train.distributed import World

# Fields of the metrics that differ from run to run: the seconds of training so far, evaluations included; samples and
# supervised tokens a second, of the step alone; the most memory so far in MiB, of the first process
MEASURED = ("seconds", "samples_per_second", "tokens_per_second", "peak_memory")


def saved_metrics(path: Path, progress: Progress) -> bytes | None:
    """The metrics as they were when `progress` was saved; None if the file does not begin with them any more."""
    before = path.read_bytes()[: progress.metrics_bytes] if path.exists() else b""
    digest = hashlib.sha256(before).hexdigest()
    is_same = len(before) == progress.metrics_bytes and progress.metrics_sha256 in (None, digest)
    return before if is_same else None


def _lines_before(path: Path, step: int) -> bytes:
    """The lines of the metrics that can be read, of steps before `step`, each step once."""
    lines = {}
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            if 0 <= record["step"] < step and isinstance(record.get("loss", 0.0), float):
                lines.setdefault(record["step"], line + b"\n")
    return b"".join(lines[number] for number in sorted(lines))


class Log:
    """The metrics, the progress bar and the clock of a run; only the process with `writes` writes.

    progress: of the run; `sync` updates its `seconds`, `metrics_bytes` and `metrics_sha256`. What metrics.jsonl holds
    after the first `metrics_bytes` is cut off: it belongs to steps after the checkpoint that the run resumes from. If
    the file has been changed, the lines that can be read are kept.
    """

    def __init__(self, run: Path, total: int, progress: Progress, world: World):
        self.progress, self.seconds_before, self.started = progress, progress.seconds, time.perf_counter()
        self.device, self.samples, self.written, self.held_out = world.device, progress.samples, self.started, ""
        self.bar = tqdm(total=total, initial=progress.step, desc="training", unit="step", disable=not world.is_first)
        self.path, self.file, self.board = run / "metrics.jsonl", None, None
        if not world.is_first:
            return
        with file_errors(self.path):
            self.path.touch()
            if (kept := saved_metrics(self.path, progress)) is None:
                kept = _lines_before(self.path, progress.step)
                with atomic_path(self.path) as temporary:
                    temporary.write_bytes(kept)
            os.truncate(self.path, len(kept))
            self.size, self.digest = len(kept), hashlib.sha256(kept)
            self.file = self.path.open("ab", buffering=0)
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(run / "tensorboard")

    def seconds(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return self.seconds_before + time.perf_counter() - self.started

    def speed(self, tokens: int) -> dict[str, float]:
        """The fields MEASURED of a step with so many supervised tokens, which ends now."""
        took = time.perf_counter() - self.written
        samples = self.progress.samples - self.samples
        values = self.seconds(), samples / took, tokens / took, peak_bytes(self.device) / 2**20
        return dict(zip(MEASURED, (round(value, 3) for value in values), strict=True))

    def write(self, record: dict) -> None:
        """Write the metrics of one step. Raises UserError if the disk is full."""
        if self.file is not None:
            line = (json.dumps(record) + "\n").encode()
            with file_errors(self.path):
                written = 0
                while written < len(line):
                    written += self.file.write(line[written:])
            self.size += len(line)
            self.digest.update(line)
            if "held_out_loss" in record:
                self.held_out = f"held-out {record['held_out_loss']:.3f}, "
                self.held_out += f"{record['exact_match']:.1f} %, " if "exact_match" in record else ""
            samples_per_second = self.progress.samples / self.seconds()
            loss = f"loss {record['loss']:.3f}" if "loss" in record else "no usable record"
            self.bar.set_postfix_str(f"{loss}, {self.held_out}{samples_per_second:.0f} samples/s")
            self.bar.update()
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, record["step"])
        self.samples = self.progress.samples
        self.go_on()

    def go_on(self) -> None:
        """The next step begins: what was done since the last one is no part of its speed."""
        self.written = time.perf_counter()

    def sync(self) -> None:
        """Flush the metrics to disk, and update `progress`."""
        self.progress.seconds = self.seconds()
        if self.file is not None:
            with file_errors(self.path):
                os.fsync(self.file.fileno())
            self.progress.metrics_bytes, self.progress.metrics_sha256 = self.size, self.digest.hexdigest()


def peak_bytes(device: torch.device | str = "cpu") -> int:
    """The peak memory of this process: on the GPU, or resident, including mapped files."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device | str = "cpu") -> None:
    """Let `peak_bytes` count from here, where the system can."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def draw_loss(run: Path) -> None:
    """Write `loss.png`: the loss of every step, its running mean, and the loss on held-out examples."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [(r["step"], r["loss"]) for r in records if "loss" in r]
    losses = [loss for _, loss in logged]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]
    means = [(step, mean) for (step, _), mean in zip(logged, smooth, strict=True)]
    lines = {"each step": logged, f"mean of {width}": means}
    if held_out := [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]:
        lines["held-out"] = held_out
    chart = figures.line_chart(
        lines, f"{run.name}: loss", "step", "nats a token", pale=["each step"], marked=["held-out"]
    )
    figures.save(chart, run / "loss.png")
