"""What a run writes down at each step: metrics.jsonl, TensorBoard, the progress bar; and the picture of its loss."""

import json
import os
import time
from pathlib import Path

from tqdm import tqdm

from eval import figures


class Metrics:
    """`metrics.jsonl`, and TensorBoard beside it if that is installed. Lines after the first `size` bytes are cut off:
    they belong to steps after the checkpoint that the run resumes from."""

    def __init__(self, path: Path, size: int):
        path.touch()
        os.truncate(path, size)
        self.file = path.open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(path.parent / "tensorboard")
        except ImportError:
            self.board = None

    def write(self, record: dict) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, record["step"])

    def sync(self) -> int:
        """Flush it to disk; its length in bytes."""
        os.fsync(self.file.fileno())
        return self.file.tell()


class Log:
    """The metrics, the progress bar and the clock of a run; only the first process writes.

    progress: the run's counts, updated in place: "seconds" of training, "metrics_bytes".
    """

    def __init__(self, run: Path, step: int, total: int, progress: dict, writes: bool):
        self.progress, self.seconds_before, self.started = progress, progress["seconds"], time.perf_counter()
        self.metrics = Metrics(run / "metrics.jsonl", progress["metrics_bytes"]) if writes else None
        self.bar = tqdm(total=total, initial=step, desc="training", unit="step", disable=not writes)

    def seconds(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return self.seconds_before + time.perf_counter() - self.started

    def write(self, record: dict) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
            self.bar.set_postfix_str(
                f"loss {record['loss']:.3f}, {self.progress['samples'] / self.seconds():.0f} samples/s"
            )
            self.bar.update()

    def sync(self) -> None:
        """Flush the metrics to disk, and bring `progress` up to date."""
        self.progress["seconds"] = self.seconds()
        if self.metrics is not None:
            self.progress["metrics_bytes"] = self.metrics.sync()


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
