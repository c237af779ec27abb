"""Time and peak memory beside transformers + PEFT, on the same weights, inputs and work.

    python -m train.benchmark --sections load decode --base embedded --rounds 20
    python -m train.benchmark --base paligemma-3b-224 --device cuda --batch 1 16 --compile

Both sides open the same exported folder. Each row has two new processes, which import only their
own side's libraries, have PyTorch's default threads (OMP_NUM_THREADS sets both) and take turns.
Ratios are ours ÷ transformers within a round: their median and its 95 % interval. Memory is the
peak beyond imports. In fp32 on a CPU the command ends if tokens, texts, losses or logits differ.

    load      open the folder in new processes, and the first forward pass
    prefill   a picture and 16 tokens, to the logits of the first new token
    decode    prefill and --tokens new tokens, greedy
    train     a LoRA step (r 16, attention of the decoder): loss, gradients, AdamW
    eval      24 questions on 4 pictures, from the files to the texts of the answers
    quantize  load, decode and train in int8 and nf4, against whole weights of transformers
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from PIL import Image

from eval.command import whole
from eval.data import scenes
from eval.report import interval_text, markdown_table
from model.common import UserError, run_command, write_text
from model.device import DTYPES, choose_device, choose_dtype
from train.flags import flag, from_values, given_flags
from train.run import provenance
from weights.export import companions, export_model, processor_files
from weights.load import load_model
from weights.quantize import KINDS

SECTIONS = {
    "load": (1,),
    "prefill": (1, 8),
    "decode": (1, 4, 16),
    "train": (4,),
    "eval": (12,),
    "quantize": (1,),
}
# seconds between turns: an idle OpenMP thread of the other side spins for about 20 ms before it
# sleeps
PAUSE = 0.05
HEAD = "work, ours, transformers, time ÷, our peak, transformers, our weights, same numbers".split(
    ", "
)


@dataclass(frozen=True)
class Options:
    sections: tuple[str, ...] = flag(
        tuple(SECTIONS), "(default: all)", choices=[*SECTIONS], nargs="+"
    )
    base: str = flag("mini", "a preset (random weights), a folder, a hub id or embedded")
    device: str = flag("cpu", "cpu, cuda, auto")
    dtype: str = flag(
        "auto", "of the weights; auto is bf16 on CUDA, else fp32", choices=["auto", *DTYPES]
    )
    batch: tuple[int, ...] = flag(
        (), "rows (default: of each section its own)", type=whole(1, 2**20), nargs="+"
    )
    tokens: int = flag(20, "new tokens of decode", least=1)
    rounds: int = flag(9, "rounds of each row", least=1)
    compile: bool = flag(False, "our decode and train under torch.compile")
    out: Path = flag(
        Path("runs/benchmark.md"), "the report; its JSON is written beside it", metavar="FILE"
    )


class Process(subprocess.Popen):
    """The process of one side, "ours" or "peer"; as a context it ends with its stdin."""

    def __init__(self, name: str):
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        command, pipe = [sys.executable, "-m", f"train.benchmark.{name}"], subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True)

    def ask(self, do: str, **arguments) -> dict:
        """The answer to a request of `work.serve`. Raises UserError, in one line, for a side that
        has ended."""
        time.sleep(PAUSE)
        assert self.stdin and self.stdout
        with suppress(BrokenPipeError):
            os.write(self.stdin.fileno(), (json.dumps({"do": do, **arguments}) + "\n").encode())
        if line := self.stdout.readline():
            return json.loads(line)
        self.wait()
        self.log.seek(0)
        raise UserError(
            f"{self.name}: {['it ended silently', *self.log.read().strip().splitlines()][-1]}"
        )


@dataclass
class Row:
    """One work, done by both sides once in each round. Pairs are (ours, peer): seconds by round,
    bytes of the peaks. quantize: the kind of our weights. same: how many numbers of both sides
    agree, within 1e-4, and of how many."""

    work: str
    batch: int
    quantize: str | None = None
    seconds: list[tuple[float, float]] = field(default_factory=list)
    peak: tuple[int, int] = (0, 0)
    weights: int = 0
    same: tuple[int, int] = (0, 0)

    def ratio(self) -> tuple[float, float, float]:
        """Median of ours ÷ peer, and the order statistics that enclose the true one in 95 % of
        cases; of fewer than six rounds the smallest and the largest."""
        ratios, n = sorted(ours / peer for ours, peer in self.seconds), len(self.seconds)
        cuts = [
            k for k in range(n // 2) if sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n
        ]
        cut = max(cuts, default=0)
        return statistics.median(ratios), ratios[cut], ratios[n - 1 - cut]

    def cells(self) -> list[str]:
        title = f"{self.work}, batch {self.batch}" + f", {self.quantize}" * bool(self.quantize)
        times = [
            f"{1e3 * statistics.median(of_side):,.3g} ms"
            for of_side in zip(*self.seconds, strict=True)
        ]
        sizes = [f"{size / 2**20:,.0f} MiB" for size in (*self.peak, self.weights)]
        return [title, *times, interval_text(self.ratio()), *sizes, "{} of {}".format(*self.same)]

    def measure(self, settings: dict, rounds: int) -> None:
        """Add `rounds`, in two new processes. A round before them warms up; of a first forward pass
        there is none."""
        is_load = self.work == "load"
        with Process("ours") as ours, Process("peer") as peer:

            def both(do: str, **arguments) -> list[dict]:
                return [side.ask(do, **arguments) for side in (ours, peer)]

            both("hello")  # imports take seconds, and are not to slow the other side
            opened = both("open", quantize=self.quantize, **settings)
            self.weights, before = (
                opened[0]["weights"],
                [answer["seconds"] * is_load for answer in opened],
            )
            both("prepare", work="prefill" if is_load else self.work, batch=self.batch)
            for number in range(rounds if is_load else rounds + 1):
                a, b = both("run")
                for x, y in zip(a["numbers"], b["numbers"], strict=True):
                    equal = (
                        math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-4)
                        if isinstance(x, float)
                        else x == y
                    )
                    self.same = self.same[0] + equal, self.same[1] + 1
                self.peak = max(self.peak[0], a["peak"]), max(self.peak[1], b["peak"])
                if number or is_load:
                    self.seconds.append((before[0] + a["seconds"], before[1] + b["seconds"]))


def write_folder(base: str, folder: Path, dtype: torch.dtype) -> None:
    """Export `base` with its tokenizer, and the questions of the section eval, to a folder that
    both sides open."""
    model, files = load_model(base, dtype=dtype), companions(base)
    export_model(model, folder, companions=files, texts=processor_files(model.config))
    samples = [scenes.sample("vqa", "validation", number) for number in range(24)]
    for picture in {sample.image_id: sample for sample in samples}.values():
        Image.fromarray(picture.scene.render()).save(folder / f"{picture.image_id}.png")
    write_text(
        folder / "questions.json", json.dumps([(f"{s.image_id}.png", s.prefix) for s in samples])
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = from_values(Options, given_flags([Options], "train.benchmark", __doc__, argv))
    device = choose_device(options.device)
    dtype, chosen = (
        choose_dtype(options.dtype, device),
        [name for name in options.sections if name != "quantize"],
    )
    rows = [Row(name, batch) for name in chosen for batch in options.batch or SECTIONS[name]]
    for kind in KINDS if "quantize" in options.sections else ():
        rows += [Row("load", 1, kind), Row("decode", 1, kind), Row("train", 4, kind)]
    settings = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    settings |= {"tokens": options.tokens, "compiled": options.compile}
    try:
        versions = {package: metadata.version(package) for package in ("transformers", "peft")}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install transformers peft") from None
    gpu = {"gpu": torch.cuda.get_device_name()} if device.type == "cuda" else {}
    about = {
        "base": options.base,
        **settings,
        **provenance(),
        **gpu,
        "threads": torch.get_num_threads(),
        **versions,
    }
    with tempfile.TemporaryDirectory() as temporary:
        settings["folder"] = f"{temporary}/model"
        write_folder(options.base, Path(settings["folder"]), dtype)
        for number, row in enumerate(rows, 1):
            for _ in range(options.rounds if row.work == "load" else 1):
                row.measure(settings, 1 if row.work == "load" else options.rounds)
            head, done = (
                ", ".join(f"{name} {value}" for name, value in about.items()),
                rows[:number],
            )
            table, record = (
                markdown_table(HEAD, [row.cells() for row in done]),
                about | {"rows": [*map(asdict, done)]},
            )
            write_text(
                options.out.with_suffix(".md"), "\n".join(["# Benchmark", "", head, "", *table, ""])
            )
            write_text(options.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
            print(" · ".join(row.cells()), flush=True)
            if (
                dtype == torch.float32
                and device.type == "cpu"
                and not row.quantize
                and row.same[0] < row.same[1]
            ):
                raise UserError(
                    f"{row.cells()[0]}: the sides agree in {row.same[0]} of {row.same[1]} numbers "
                    "only"
                )


if __name__ == "__main__":
    run_command(main)
