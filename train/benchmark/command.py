"""Time and memory beside transformers and PEFT: the same weights, the same work, in one run.

    python -m train.benchmark                                   sizes of a laptop, against what is installed
    python -m train.benchmark --geometry 3b --device cuda       also the share of what the GPU can do
    python -m train.benchmark --geometry 3b --section load --folder DIR
    python -m train.benchmark --collect runs/benchmark-*        BENCHMARKS.md from several runs

In: a geometry and a device; weights are random. Out: a folder of benchmark.md, benchmark.json and benchmark.png.
All sides of a measurement take turns in one process; memory is the peak of a process of its own, beyond what its
imports took. Where transformers or PEFT is not installed, only our side is measured, and no ratio is given.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from eval import figures
from model.common import UserError, write_text
from model.device import dtype_name
from train.benchmark.sections import SECTIONS, too_large
from train.benchmark.setup import Options, open_setup, use_threads
from train.benchmark.timing import OURS, Measurement, machine, table, today, versions
from train.flags import flag, read_flags
from train.origin import commit_of_code


@dataclass(frozen=True)
class CommandOptions(Options):
    """All flags of the command."""

    section: tuple[str, ...] = flag(
        (), "what to measure (default: all that the device has, but mamba)", list(SECTIONS), nargs="+"
    )
    collect: tuple[str, ...] = flag(
        (), "write BENCHMARKS.md from these folders (in --out, default: here), and stop", nargs="+", metavar="DIR"
    )


GPU_WORK = (
    "LoRA step of 3B in bf16, batch 16",
    "LoRA step of 3B in bf16, batch 4, checkpointing: memory",
    "decoding of 3B in bf16, batch 1",
    "variants of attention on a GPU",
)


def report(measurements: Sequence[Measurement], about: dict) -> str:
    """One run as Markdown, under the name of the processor or GPU."""
    name = about["machine"].rpartition("; ")[2].partition(", ")[0]
    parts = [
        f"## {name}: {about['geometry']}, {about['dtype']}, {about['device']}",
        "",
        f"{about['machine']}; {about['versions']}; {about['date']}; commit {about['commit']}",
        "",
        f"`{about['command']}`",
    ]
    for name in dict.fromkeys(measured.section for measured in measurements):
        own = [measured for measured in measurements if measured.section == name]
        against = " or ".join(dict.fromkeys(one.against for one in own))
        rounds = sorted({len(seconds) for one in own for seconds in one.seconds.values() if seconds})
        spelled = " to ".join(map(str, dict.fromkeys([*rounds[:1], *rounds[-1:]]))) or "no"
        method = f"÷: against {against}, median of the rounds' own ratios [quartiles], {spelled} rounds."
        parts += ["", f"### {SECTIONS[name].title}", "", table(own), "", method]
    return "\n".join(parts) + "\n"


def draw(measurements: Sequence[Measurement]) -> Image.Image | None:
    """Ratios with their quartiles; None where there are none."""
    bars = [
        (f"{one.section}: {one.work}" + ("" if side == OURS else f", {side}"), *one.ratio(side))
        for one in measurements
        for side in one.seconds
        if one.ratio(side)
    ]
    title = "Time against transformers and PEFT, plain attention, whole weights or PyTorch's products"
    return figures.interval_chart(bars, title, "ratio", reference=("equal", 1.0), width=900) if bars else None


def write_report(measurements: Sequence[Measurement], about: dict, out: Path) -> None:
    """Write benchmark.json, benchmark.md and, where there are ratios, benchmark.png."""
    record = about | {"rows": [measured.to_dict() for measured in measurements]}
    write_text(out / "benchmark.json", json.dumps(record, indent=1) + "\n")
    write_text(out / "benchmark.md", report(measurements, about))
    if (chart := draw(measurements)) is not None:
        figures.save(chart, out / "benchmark.png")


def collect(folders: Sequence[str], path: Path) -> None:
    """Write the reports of `folders` as one file, and list what none of them has measured."""
    texts, on_gpu = [], False
    for folder in map(Path, folders):
        try:
            texts.append((folder / "benchmark.md").read_text(encoding="utf-8"))
            on_gpu |= json.loads((folder / "benchmark.json").read_text())["device"].startswith("cuda")
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: not found: give folders that this command has written") from None
    head = (
        "# Benchmarks\n\nWhat `python -m train.benchmark` printed, side by side with transformers and PEFT on the "
        "same weights. Times of different runs do not compare; ratios within one do.\n"
    )
    if not on_gpu:
        lines = [f"| {work} | not yet measured |" for work in GPU_WORK]
        lines = ["## On a GPU", "", "| work | |", "|---|---|", *lines, ""]
        texts.append("\n".join([*lines, "`python -m train.benchmark --geometry 3b --device cuda`"]) + "\n")
    write_text(path, "\n".join([head, *texts]))


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = read_flags(CommandOptions, "train.benchmark", __doc__, argv)
    if options.collect:
        collect(options.collect, (options.out or Path()) / "BENCHMARKS.md")
        return
    setup = open_setup(options)
    use_threads(setup)
    options = replace(
        options,
        compile=setup.on_gpu if options.compile is None else options.compile,
        out=options.out or Path("runs", f"benchmark-{options.geometry}-{setup.device.type}"),
    )
    about = {
        "geometry": options.geometry,
        "dtype": dtype_name(setup.dtype),
        "device": str(setup.device),
        "machine": machine(setup.device),
        "versions": versions(),
        "date": today(),
        "commit": commit_of_code(),
        # without --out, which says nothing about what was measured
        "command": re.sub(r" --out[= ]\S+", "", " ".join(["python -m train.benchmark", *argv])),
    }
    measurements: list[Measurement] = []
    for name in options.section or [name for name, section in SECTIONS.items() if section.is_default(setup)]:
        section = SECTIONS[name]
        try:
            found = section.measure(section, setup, options)
        except torch.OutOfMemoryError:
            found = [too_large(section)]
        measurements += found
        print(f"\n### {section.title}\n\n{table(found)}", flush=True)
        write_report(measurements, about, options.out)
    print(f"\nin {options.out}: benchmark.md, benchmark.json" + (", benchmark.png" if draw(measurements) else ""))
