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

from eval.bench import write_json
from eval.command import whole
from eval.data import scenes
from eval.report import interval_text, markdown_table
from model.common import UserError, run_command, write_text
from model.device import DTYPES, choose_device, choose_dtype
from train.flags import flag, from_values, given_flags, several
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
TITLES = "work, ours, transformers, time ÷, our peak, transformers, our weights, same numbers"


@dataclass(frozen=True)
class Options:
    sections: tuple[str, ...] = several(SECTIONS, "(default: all)")
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
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", f"train.benchmark.{name}"]
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True)

    def ask(self, do: str, **arguments) -> dict:
        """The answer to a request of `work.answer_requests`. Raises UserError, in one line, for a side that
        has ended."""
        time.sleep(PAUSE)
        assert self.stdin and self.stdout
        request = json.dumps({"do": do, **arguments}) + "\n"
        with suppress(BrokenPipeError):
            os.write(self.stdin.fileno(), request.encode())
        if line := self.stdout.readline():
            return json.loads(line)
        self.wait()
        self.log.seek(0)
        *_, said = ["it ended silently", *self.log.read().strip().splitlines()]
        raise UserError(f"{self.name}: {said}")


@dataclass
class Work:
    """One work, done by both sides once in each round. Pairs are (ours, peer)."""

    work: str
    batch: int
    quantize: str | None = None  # the kind of our weights
    seconds: list[tuple[float, float]] = field(default_factory=list)  # by round
    peak: tuple[int, int] = (0, 0)  # bytes
    weights: int = 0  # bytes of ours
    same: tuple[int, int] = (0, 0)  # numbers of both sides that agree within 1e-4, of how many

    def ratio(self) -> tuple[float, float, float]:
        """Median of ours ÷ peer, and the order statistics that enclose the true one in 95 % of
        cases; of fewer than six rounds the smallest and the largest."""
        ratios = sorted(ours / peer for ours, peer in self.seconds)
        n = len(ratios)
        cut, below = 0, 0
        for k in range(n // 2):
            below += math.comb(n, k)
            if below <= 0.025 * 2**n:
                cut = k
        return statistics.median(ratios), ratios[cut], ratios[n - 1 - cut]

    def cells(self) -> list[str]:
        """The texts of a line of the report."""
        title = f"{self.work}, batch {self.batch}"
        if self.quantize:
            title += f", {self.quantize}"
        sides = zip(*self.seconds, strict=True)
        times = [f"{1e3 * statistics.median(of_side):,.3g} ms" for of_side in sides]
        sizes = [f"{size / 2**20:,.0f} MiB" for size in (*self.peak, self.weights)]
        return [
            title,
            *times,
            interval_text(self.ratio()),
            *sizes,
            "{} of {}".format(*self.same),
        ]

    def measure(self, settings: dict, rounds: int) -> None:
        """Add `rounds`, in two new processes; of a load one, which has a first forward pass. A
        round before the others warms up."""
        with Process("ours") as ours, Process("peer") as peer:

            def both(do: str, **arguments) -> list[dict]:
                return [side.ask(do, **arguments) for side in (ours, peer)]

            both("hello")  # imports take seconds, and are not to slow the other side
            opened = both("open", quantize=self.quantize, **settings)
            self.weights = opened[0]["weights"]
            if self.work == "load":
                both("prepare", work="prefill", batch=self.batch)
                ran = self.compare(both("run"))
                self.seconds.append((opened[0]["seconds"] + ran[0], opened[1]["seconds"] + ran[1]))
                return
            both("prepare", work=self.work, batch=self.batch)
            self.compare(both("run"))
            for _ in range(rounds):
                self.seconds.append(self.compare(both("run")))

    def compare(self, answers: list[dict]) -> tuple[float, float]:
        """Count the numbers that agree, keep the peaks; returns the seconds."""
        ours, peer = answers
        for x, y in zip(ours["numbers"], peer["numbers"], strict=True):
            equal = x == y
            if isinstance(x, float):
                equal = math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-4)
            self.same = self.same[0] + int(equal), self.same[1] + 1
        self.peak = max(self.peak[0], ours["peak"]), max(self.peak[1], peer["peak"])
        return ours["seconds"], peer["seconds"]


def write_folder(base: str, folder: Path, dtype: torch.dtype) -> None:
    """Export `base` with its tokenizer, and the questions of the section eval, to a folder that
    both sides open."""
    model = load_model(base, dtype=dtype)
    export_model(model, folder, companions=companions(base), texts=processor_files(model.config))
    questions = []
    for number in range(24):
        sample = scenes.sample("vqa", "validation", number)
        name = f"{sample.image_id}.png"
        Image.fromarray(sample.scene.render()).save(folder / name)
        questions.append((name, sample.prefix))
    write_text(folder / "questions.json", json.dumps(questions))


def works_of(options: Options) -> list[Work]:
    """The works of the sections that are asked for."""
    rows = []
    for name in options.sections:
        if name != "quantize":
            rows += [Work(name, batch) for batch in options.batch or SECTIONS[name]]
    for kind in KINDS if "quantize" in options.sections else ():
        rows += [Work("load", 1, kind), Work("decode", 1, kind), Work("train", 4, kind)]
    return rows


def write_report(file: Path, about: dict, rows: Sequence[Work]) -> None:
    """Write the rows that are done, as Markdown and as JSON."""
    head = ", ".join(f"{name} {value}" for name, value in about.items())
    table = markdown_table(TITLES.split(", "), [row.cells() for row in rows])
    text = "\n".join(["# Benchmark", "", head, "", *table, ""])
    record = about | {"rows": [asdict(row) for row in rows]}
    write_text(file.with_suffix(".md"), text)
    write_json(file.with_suffix(".json"), record)


def main(argv: Sequence[str] | None = None) -> None:
    # 1. what is compared, and where
    options = from_values(Options, given_flags([Options], "train.benchmark", __doc__, argv))
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    settings = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    settings |= {"tokens": options.tokens, "compiled": options.compile}
    try:
        versions = {package: metadata.version(package) for package in ("transformers", "peft")}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install transformers peft") from None
    about = {"base": options.base, **settings, **provenance()}
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    about |= {"threads": torch.get_num_threads(), **versions}
    # 2. row by row
    rows = works_of(options)
    with tempfile.TemporaryDirectory() as temporary:
        settings["folder"] = f"{temporary}/model"
        write_folder(options.base, Path(settings["folder"]), dtype)
        for number, row in enumerate(rows, 1):
            for _ in range(options.rounds if row.work == "load" else 1):
                row.measure(settings, options.rounds)
            write_report(options.out, about, rows[:number])
            cells = row.cells()
            print(" · ".join(cells), flush=True)
            is_exact = dtype == torch.float32 and device.type == "cpu" and not row.quantize
            if is_exact and row.same[0] < row.same[1]:
                raise UserError(f"{cells[0]}: the sides agree in {cells[-1]} numbers only")


if __name__ == "__main__":
    run_command(main)
