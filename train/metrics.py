"""The log of a run: metrics.jsonl, the progress bar, and the picture of the loss."""

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from model.common import atomic_path, file_errors
from train.checkpoint import Progress
from train.distributed import World

# Fields that differ from run to run: seconds of training so far, evaluations included; samples and supervised tokens a
# second, of the step alone; peak memory so far in MiB, of the first process
MEASURED = ("seconds", "samples_per_second", "tokens_per_second", "peak_memory")


class Log:
    """The metrics, the progress bar and the clock of a run; only the first process writes.

    progress: of the run; `sync` updates its `seconds`. Lines of steps after its checkpoint are deleted.
    """

    def __init__(self, run: Path, total: int, progress: Progress, world: World):
        self.progress, self.samples, self.shown, self.written = progress, progress.samples, {}, time.perf_counter()
        self.started, self.device, self.writes = self.written - progress.seconds, world.device, world.is_first
        self.bar = tqdm(total=total, initial=progress.step, desc="training", unit="step", disable=not world.is_first)
        self.path = run / "metrics.jsonl"
        if self.writes:
            lines = self.path.read_bytes().splitlines(keepends=True) if progress.step else []
            with atomic_path(self.path) as temporary:
                temporary.write_bytes(b"".join(lines[: progress.step]))
            self.file = self.path.open("a", buffering=1)  # each line is the system's as soon as it is written

    def seconds(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return time.perf_counter() - self.started

    def speed(self, tokens: int) -> dict[str, float]:
        """The fields MEASURED of a step with so many supervised tokens, which ends now."""
        took, samples = time.perf_counter() - self.written, self.progress.samples - self.samples
        values = self.seconds(), samples / took, tokens / took, peak_bytes(self.device) / 2**20
        return {name: round(value, 3) for name, value in zip(MEASURED, values, strict=True)}

    def write(self, record: dict) -> None:
        """Write the metrics of one step. Raises UserError if the disk is full."""
        if self.writes:
            with file_errors(self.path):
                self.file.write(json.dumps(record) + "\n")
            for name, unit in (("loss", ""), ("held_out_loss", ""), ("exact_match", " %")):
                if name in record:
                    self.shown[name] = f"{record[name]:.3f}{unit}"
            self.bar.set_postfix(self.shown, samples=f"{self.progress.samples / self.seconds():.0f}/s")
            self.bar.update()
        self.samples = self.progress.samples
        self.go_on()

    def go_on(self) -> None:
        """The next step begins: what was done since the last one is no part of its speed."""
        self.written = time.perf_counter()

    def sync(self) -> None:
        """Flush the metrics to disk, and update `progress`."""
        self.progress.seconds = self.seconds()
        if self.writes:
            with file_errors(self.path):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        """End the bar and the file."""
        self.bar.close()
        if self.writes:
            self.file.close()


def peak_bytes(device: torch.device | str = "cpu") -> int:
    """The peak memory of this process: on the GPU, or resident, including mapped files."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def draw_loss(run: Path) -> None:
    """Write `loss.png`: the loss of every step, its running mean, and the loss on held-out examples."""
    from eval import figures

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses, held_out = ([(r["step"], r[name]) for r in records if name in r] for name in ("loss", "held_out_loss"))
    width = max(1, len(losses) // 50)
    before = [losses[max(0, number - width + 1) : number + 1] for number in range(len(losses))]
    means = [(last[-1][0], sum(loss for _, loss in last) / len(last)) for last in before]
    lines = {"each step": losses, f"mean of {width}": means, **({"held-out": held_out} if held_out else {})}
    emphasis = {"pale": ["each step"], "marked": ["held-out"]}
    figures.save(figures.line_chart(lines, f"{run.name}: loss", "step", "nats a token", **emphasis), run / "loss.png")
