"""Time and peak memory beside transformers + PEFT, on the same weights, inputs and work.

    python -m train.benchmark                                    all sections, random weights of the size "mini"
    python -m train.benchmark --sections load,decode --base embedded --rounds 20
    python -m train.benchmark --base paligemma-3b-224 --device cuda --batch 1,16 --compile

The base is exported once to a temporary folder, which both sides open. Each side is a process that imports only its
own libraries, with PyTorch's default threads (OMP_NUM_THREADS sets both). They take turns, A B A B …. A ratio is ours ÷
transformers within a round; the median is printed with its 95 % interval. In fp32 on a CPU the command ends if tokens,
losses or logits differ.

    load      open the folder in a new process, and the first forward pass; at most 6 rounds
    prefill   a picture and 16 tokens, to the logits of the first new token
    decode    prefill and --tokens new tokens, greedy
    train     a LoRA step (r 16, attention of the decoder): loss, gradients, AdamW
    eval      24 questions on 4 pictures, from the files to the texts of the answers
    quantize  open, decode and train in int8, int4, nf4, against whole weights of transformers
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from PIL import Image

from eval import scenes
from eval.report import interval_text, markdown_table
from lora.quantize import KINDS
from model.common import UserError, run_command, write_text
from model.device import DTYPES, choose_device, choose_dtype
from train.flags import flag, read_flags
from train.origin import provenance
from weights.export import beside, companions, export_model
from weights.load import load_model

BATCHES = {"load": "1", "prefill": "1,8", "decode": "1,4,16", "train": "4", "eval": "12", "quantize": ""}
FOREIGN = {"ours": {"transformers", "peft"}, "peer": {"model", "lora", "weights", "eval"}}
LOAD_ROUNDS = 6  # the fewest whose extremes are a 95 % interval
PAUSE = 0.05  # seconds between turns: an idle OpenMP thread of the other side spins for about 20 ms before it sleeps


@dataclass(frozen=True)
class Options:
    """The flags."""

    sections: str = flag(",".join(BATCHES), "with commas between (default: all)")
    base: str = flag("mini", "a preset (random weights), a folder, a hub id or embedded")
    device: str = flag("cpu", "cpu, cuda, auto")
    dtype: str = flag("auto", "of the weights; auto is bf16 on CUDA, else fp32", ["auto", *DTYPES])
    batch: str | None = flag(None, "rows, with commas (default: prefill 1,8, decode 1,4,16, train 4, eval 12)")
    tokens: int = flag(20, "new tokens of decode", least=1)
    rounds: int = flag(9, "rounds of each row", least=1)
    compile: bool = flag(False, "our decode and train under torch.compile")
    checkpointing: bool = flag(False, "train both sides with activation checkpointing")
    json: bool = flag(False, "print JSON in place of tables")
    out: Path = flag(Path("runs/benchmark.md"), "the report; its JSON is written beside it", metavar="FILE")


class Process(subprocess.Popen):
    """The process of one side, "ours" or "peer"; as a context it ends with its stdin."""

    def __init__(self, name: str):
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        command, pipe = [sys.executable, "-m", f"train.benchmark.{name}"], subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True)

    def ask(self, do: str, **arguments) -> dict:
        """The answer to a request of `work.serve`. Raises UserError, in one line, for a side that fails."""
        line = ""
        with suppress(BrokenPipeError):
            os.write(self.stdin.fileno(), (json.dumps({"do": do, **arguments}) + "\n").encode())
            line = self.stdout.readline()
        if not line:  # the process has ended, at its imports or by a signal
            self.wait()
            self.log.seek(0)
            line = json.dumps({"error": (["it ended silently", *self.log.read().strip().splitlines()])[-1]})
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self.name}: {answer['error']}")
        assert not FOREIGN[self.name] & {*answer["imports"]}, f"{self.name} has imported the other side"
        return answer


@contextmanager
def open_sides(settings: dict, kind: str | None = None) -> Iterator[tuple[tuple[Process, Process], list[dict]]]:
    """Both processes, and their answers to "open". kind: of our quantized weights."""
    with Process("ours") as ours, Process("peer") as peer:
        for side in (ours, peer):
            side.ask("hello")  # imports take seconds, and are not to slow the other side
        yield (ours, peer), [side.ask("open", quantize=kind, **settings) for side in (ours, peer)]


@dataclass
class Row:
    """One work, done by both sides once in each round. Pairs are (ours, peer).

    quantize: the kind of our weights. peak: bytes, of all works so far in these processes, beyond their imports.
    same: how many numbers are equal on both sides, of how many.
    """

    work: str
    batch: int = 1
    quantize: str | None = None
    seconds: list[tuple[float, float]] = field(default_factory=list)
    peak: tuple[int, int] = (0, 0)
    weights: int = 0
    same: tuple[int, int] = (0, 0)

    @property
    def title(self) -> str:
        return f"{self.work}, batch {self.batch}" + f", {self.quantize}" * bool(self.quantize)

    def ratio(self) -> tuple[float, float, float]:
        """Median and 95 % interval of ours ÷ peer."""
        return median_interval([ours / peer for ours, peer in self.seconds])

    def cells(self) -> list[str]:
        times = [f"{1e3 * statistics.median(of_side):,.3g} ms" for of_side in zip(*self.seconds, strict=True)]
        sizes = [f"{size / 2**20:,.0f} MiB" for size in (*self.peak, self.weights)]
        return [self.title, *times, interval_text(self.ratio()), *sizes, "{} of {}".format(*self.same)]


HEAD = "work, ours, transformers, time ÷, our peak, transformers, our weights, same numbers".split(", ")


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that enclose the true one in 95 % of cases, whatever the distribution.

    Fewer than six values have no such pair: the ends are then the smallest and the largest.
    """
    ordered, n = sorted(values), len(values)
    cuts = [k for k in range(n // 2) if sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n]
    cut = max(cuts, default=0)
    return statistics.median(ordered), ordered[cut], ordered[n - 1 - cut]


def is_equal(ours: float | int | str, theirs: float | int | str) -> bool:
    """Whether both sides computed the same token or text, or the same loss or logit within 1e-4."""
    return math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-4) if isinstance(ours, float) else ours == theirs


def take_turns(sides: tuple[Process, Process], row: Row, work: str, rounds: int, warm_up: int = 1) -> None:
    """Add `rounds` to `row`; `warm_up` rounds before them are compared but not timed."""
    for side in sides:
        side.ask("prepare", work=work, batch=row.batch)
    for number in range(-warm_up, rounds):
        answers = []
        for side in sides:
            time.sleep(PAUSE)
            answers.append(side.ask("run"))
        ours, peer = answers
        equal = [is_equal(a, b) for a, b in zip(ours["numbers"], peer["numbers"], strict=True)]
        row.same = row.same[0] + sum(equal), row.same[1] + len(equal)
        row.peak = max(row.peak[0], ours["peak"]), max(row.peak[1], peer["peak"])
        if number >= 0:
            row.seconds.append((ours["seconds"], peer["seconds"]))


def measure_load(settings: dict, rounds: int, kind: str | None = None) -> Row:
    """Opening and the first forward pass, in new processes each round; the files are in the page cache."""
    row = Row("load", 1, kind)
    for _ in range(min(rounds, LOAD_ROUNDS)):
        with open_sides(settings, kind) as (sides, opened):
            take_turns(sides, row, "prefill", 1, warm_up=0)
        forward, row.weights = row.seconds.pop(), opened[0]["weights"]
        row.seconds.append((opened[0]["seconds"] + forward[0], opened[1]["seconds"] + forward[1]))
    return row


def measure(settings: dict, works: Sequence[tuple[str, int]], rounds: int, kind: str | None = None) -> list[Row]:
    """A row for each (work, batch), all in one pair of processes."""
    with open_sides(settings, kind) as (sides, opened):
        rows = [Row(work, batch, kind, weights=opened[0]["weights"]) for work, batch in works]
        for row in rows:
            take_turns(sides, row, row.work, rounds)
    return rows


def write_folder(base: str, folder: Path, dtype: torch.dtype) -> None:
    """Export `base` with its tokenizer, and the questions of the section eval, to a folder that both sides open."""
    model, files = load_model(base, dtype=dtype), companions(base)
    export_model(model, folder, companions=files, texts=beside(model.config, "", files))
    samples = [scenes.sample("vqa", "validation", number) for number in range(24)]
    for picture in {sample.image_id: sample for sample in samples}.values():
        Image.fromarray(picture.scene.render()).save(folder / f"{picture.image_id}.png")
    write_text(folder / "questions.json", json.dumps([(f"{s.image_id}.png", s.prefix) for s in samples]))


def describe(options: Options, settings: dict) -> dict:
    """What the numbers depend on. Raises UserError where transformers or PEFT is missing."""
    try:
        versions = {package: metadata.version(package) for package in ("transformers", "peft")}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install transformers peft") from None
    gpu = {"gpu": torch.cuda.get_device_name()} if settings["device"].startswith("cuda") else {}
    return {"base": options.base, **settings, **provenance(), **gpu, "threads": torch.get_num_threads(), **versions}


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(Options, "train.benchmark", __doc__, argv)
    sections, device = options.sections.split(","), choose_device(options.device)
    if unknown := {*sections} - {*BATCHES}:
        raise UserError(f"--sections {min(unknown)}: expected some of {','.join(BATCHES)}")
    dtype = choose_dtype(options.dtype, device)
    settings = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "tokens": options.tokens}
    settings |= {"compiled": options.compile, "checkpointing": options.checkpointing}
    record = describe(options, settings)
    lines = ["# Benchmark", "", ", ".join(f"{name} {value}" for name, value in record.items()), ""]
    record["rows"] = []
    with tempfile.TemporaryDirectory() as temporary:
        settings["folder"] = f"{temporary}/model"
        write_folder(options.base, Path(settings["folder"]), dtype)
        for section in sections:
            if section == "load":
                rows = [measure_load(settings, options.rounds)]
            elif section == "quantize":
                works = [("decode", 1), ("train", 4)]
                rows = [measure_load(settings, options.rounds, kind) for kind in KINDS]
                rows += [row for kind in KINDS for row in measure(settings, works, options.rounds, kind)]
            else:
                batches = (options.batch or BATCHES[section]).split(",")
                rows = measure(settings, [(section, int(batch)) for batch in batches], options.rounds)
            record["rows"] += [{"section": section, "ratio": row.ratio(), **asdict(row)} for row in rows]
            table = [f"## {section}", "", *markdown_table(HEAD, [row.cells() for row in rows]), ""]
            if not options.json:
                print("\n".join(table), flush=True)
            lines += table
            write_text(options.out.with_suffix(".md"), "\n".join(lines))
            write_text(options.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
            for row in rows:
                if (
                    row.same[0] < row.same[1]
                    and settings["dtype"] == "float32"
                    and device.type == "cpu"
                    and not row.quantize
                ):
                    raise UserError(
                        f"{row.title}: {row.same[0]} of {row.same[1]} numbers are equal on both sides: their times do not compare"
                    )
    print(json.dumps(record) if options.json else f"in {options.out.with_suffix('.md')}, and .json")


if __name__ == "__main__":
    run_command(main)
