"""Time and memory beside transformers and PEFT: the same weights, the same work, in one run.

    python -m train.benchmark                                   sizes of a laptop, against what is installed
    python -m train.benchmark --geometry 3b --device cuda       also the share of what the GPU can do
    python -m train.benchmark --geometry 3b --section load --folder DIR
    python -m train.benchmark --collect runs/benchmark-*        BENCHMARKS.md from several runs
    python -m train.benchmark --estimate                        memory of the published sizes on 1, 8 and 64 GPUs

In: a geometry and a device; weights are random. Out: a folder of benchmark.md, benchmark.json and benchmark.png.
All sides of a measurement take turns in one process; memory is the peak of a process of its own, beyond what its
imports took. Where transformers or PEFT is not installed, only our side is measured, and no ratio is given.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from eval import figures
from model.common import UserError, write_text
from model.config import PRESETS
from model.device import DTYPES, choose_device
from train.benchmark.estimate import estimate
from train.benchmark.sections import SECTIONS, Options, use_threads
from train.benchmark.setup import Setup, geometry
from train.benchmark.timing import OURS, Measurement, machine, table, today, versions

GPU_WORK = (
    "LoRA step of 3B in bf16, batch 16",
    "LoRA step of 3B in bf16, batch 4, checkpointing: memory",
    "decoding of 3B in bf16, batch 1",
    "variants of attention on a GPU",
)


def report(measurements: Sequence[Measurement], about: dict) -> str:
    """One run as Markdown."""
    parts = [
        f"## {about['geometry']}, {about['dtype']}, {about['device']}",
        "",
        f"{about['machine']}; {about['versions']}; {about['date']}",
        "",
        f"`{about['command']}`",
    ]
    for name in dict.fromkeys(measured.section for measured in measurements):
        own = [measured for measured in measurements if measured.section == name]
        against, rounds = (
            " or ".join(dict.fromkeys(one.against for one in own)),
            len(next(iter(own[0].seconds.values()))),
        )
        method = f"÷: against {against}, median of the rounds' own ratios [quartiles], {rounds} rounds."
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
    title = "Time against transformers and PEFT, plain attention, whole weights or MKL"
    return figures.interval_chart(bars, title, "ratio", reference=("equal", 1.0), width=900) if bars else None


def write_report(measurements: Sequence[Measurement], about: dict, out: Path) -> None:
    """Write benchmark.json, benchmark.md and, where there are ratios, benchmark.png."""
    record = about | {"rows": [measured.to_dict() for measured in measurements]}
    write_text(out / "benchmark.json", json.dumps(record, indent=1) + "\n")
    write_text(out / "benchmark.md", report(measurements, about))
    if (chart := draw(measurements)) is not None:
        figures.save(chart, out / "benchmark.png")


def collect(folders: Sequence[Path], path: Path) -> None:
    """Write the reports of `folders` as one file, and list what none of them has measured."""
    texts, on_gpu = [], False
    for folder in folders:
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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--section",
        nargs="+",
        choices=list(SECTIONS),
        metavar="NAME",
        help=f"of {', '.join(SECTIONS)} (default: all that the device has, but mamba)",
    )
    parser.add_argument(
        "--geometry",
        choices=["3b", *PRESETS],
        default="mini",
        metavar="NAME",
        help=f"3b or one of {', '.join(PRESETS)} (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="weights (default: bf16 for 3b and on CUDA, else fp32)")
    parser.add_argument("--rounds", type=int, help="rounds of each row (default: 7; load 3, decode 5, attention 15)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="measure generation and training with torch.compile too (default: on CUDA)",
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure each side's peak in a process of its own (default: --memory)",
    )
    parser.add_argument("--folder", type=Path, help="model folder for section load (default: made, and removed)")
    parser.add_argument("--out", type=Path, help="folder to write (default: runs/benchmark-GEOMETRY-DEVICE)")
    parser.add_argument(
        "--collect",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="write BENCHMARKS.md from these folders (in --out, default: here), and stop",
    )
    parser.add_argument("--estimate", action="store_true", help="print estimates for the published sizes, and stop")
    return parser


def read_setup(args: argparse.Namespace) -> Setup:
    """The setup that the flags name. Raises UserError for numbers below 1 and for a device that is not there."""
    for name in ("rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, expected 1 or more")
    device = choose_device(args.device)
    dtype = args.dtype or ("bf16" if args.geometry == "3b" or device.type != "cpu" else "fp32")
    return Setup(geometry(args.geometry), device, DTYPES[dtype], args.threads)


def without_out(words: Sequence[str]) -> list[str]:
    """The words of a command line without --out, which says nothing about what was measured."""
    words = list(words)
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return words


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    if args.collect:
        collect(args.collect, (args.out or Path()) / "BENCHMARKS.md")
        return
    if args.estimate:
        print(estimate())
        return
    setup = read_setup(args)
    use_threads(setup)
    out = args.out or Path("runs", f"benchmark-{args.geometry}-{setup.device.type}")
    compiled = setup.on_gpu if args.compile is None else args.compile
    options = Options(args.rounds, compiled, args.memory, args.folder, out)
    about = {
        "geometry": args.geometry,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == setup.dtype),
        "device": str(setup.device),
        "machine": machine(setup.device),
        "versions": versions(),
        "date": today(),
        "command": " ".join(["python -m train.benchmark", *without_out(sys.argv[1:] if argv is None else argv)]),
    }
    measurements: list[Measurement] = []
    for name in args.section or [name for name, section in SECTIONS.items() if section.is_default(setup)]:
        section = SECTIONS[name]
        found = section.measure(section, setup, options)
        measurements += found
        print(f"\n### {section.title}\n\n{table(found)}", flush=True)
        write_report(measurements, about, out)
    print(f"\nin {out}: benchmark.md, benchmark.json" + (", benchmark.png" if draw(measurements) else ""))
