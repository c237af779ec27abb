"""The log of a run: metrics.jsonl, TensorBoard where installed, the progress bar, and the picture of its loss."""

import contextlib
import json
import os
import time
from pathlib import Path

from tqdm import tqdm

from eval import figures


class Log:
    """The metrics, the progress bar and the clock of a run; only the process with `writes` writes.

    progress: the counts of the run; `sync` updates "seconds" of training and "metrics_bytes". Lines of metrics.jsonl
    after the first "metrics_bytes" are cut off: they belong to steps after the checkpoint that the run resumes from.
    """

    def __init__(self, run: Path, step: int, total: int, progress: dict, writes: bool):
        self.progress, self.seconds_before, self.started = progress, progress["seconds"], time.perf_counter()
        self.bar = tqdm(total=total, initial=step, desc="training", unit="step", disable=not writes)
        self.file = self.board = None
        if writes:
            path = run / "metrics.jsonl"
            path.touch()
            os.truncate(path, progress["metrics_bytes"])
            self.file = path.open("a", encoding="utf-8")
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(run / "tensorboard")

    def seconds(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return self.seconds_before + time.perf_counter() - self.started

    def write(self, record: dict) -> None:
        """Write the metrics of one step."""
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            samples_per_second = self.progress["samples"] / self.seconds()
            self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {samples_per_second:.0f} samples/s")
            self.bar.update()
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Flush the metrics to disk, and update `progress`."""
        self.progress["seconds"] = self.seconds()
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.progress["metrics_bytes"] = self.file.tell()


def draw_loss(run: Path) -> None:
    """Write `loss.png`: the loss of every step, and its running mean."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]
    lines = {
        "each step": list(zip(steps, losses, strict=True)),
        f"mean of {width}": list(zip(steps, smooth, strict=True)),
    }
    chart = figures.line_chart(lines, f"{run.name}: loss", "step", "nats a token", pale=["each step"])
    figures.save(chart, run / "loss.png")
