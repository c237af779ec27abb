"""Time and memory beside transformers and PEFT: the same weights, the same work, in one run.

    python -m train.benchmark                                   sizes of a laptop, against what is installed
    python -m train.benchmark --geometry 3b --device cuda       also the share of what the GPU can do
    python -m train.benchmark --geometry 3b --section load --folder DIR
    python -m train.benchmark --collect runs/benchmark-*        BENCHMARKS.md from several runs
    python -m train.benchmark --estimate                        memory of the published sizes on 1, 8 and 64 GPUs

In: a geometry and a device; weights are random. Out: a folder of benchmark.md, benchmark.json and benchmark.png.
All sides of a row take turns in one process; memory is the peak of a process of its own, beyond what its imports took.
Where transformers or PEFT is not installed, only our side is measured, and no ratio is given.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from PIL import Image

from eval import figures
from lora.quantize import Int8Linear, quantize
from model.common import UserError, write_text
from model.config import PRESETS
from model.device import DTYPES as DTYPE_FLAGS
from model.processor import Processor
from train.benchmark.estimate import estimate
from train.benchmark.sides import (
    COMPILED,
    OURS,
    SECTIONS,
    STEPS,
    THEIRS,
    Setup,
    Work,
    geometry,
    our_model,
    prompt,
    random_state,
)
from train.benchmark.timing import (
    Row,
    copy_bandwidth,
    in_own_process,
    machine,
    matmul_peak,
    peak_bytes,
    synchronize,
    table,
    take_turns,
    today,
    versions,
)
from train.data.batches import collate
from train.data.records import embedded_records
from train.supervised import supervised_loss
from weights.checkpoint import examine
from weights.export import export_model
from weights.load import load_model

TITLES = {
    "load": "Load and first forward",
    "prefill": "Prefill: a picture and a prompt, to the first logits",
    "decode": "Generation: picture, prompt and new tokens",
    "train": "LoRA training step",
    "eval": "Evaluation: questions on pictures, to the answers' text",
    "attention": "Variants of attention: LoRA training step",
    "quantize": "Frozen weights in 8 bits: LoRA training step",
    "linear": "Products on a CPU, forward and backward",
    "mamba": "Mamba and Q-Mamba",
}
ROUNDS = {"load": 3, "decode": 5, "attention": 15}  # of the others 7; variants differ by little
GPU_ROWS = (
    "LoRA step of 3B in bf16, batch 16",
    "LoRA step of 3B in bf16, batch 4, checkpointing: memory",
    "decoding of 3B in bf16, batch 1",
    "variants of attention on a GPU",
)


# ---------------------------------------------------------------------------------------------------------------------
# One section
# ---------------------------------------------------------------------------------------------------------------------


def measure(section: str, setup: Setup, args: argparse.Namespace) -> list[Row]:
    """Every row of a section: times, then the peaks. A side that is not installed is told of and left out."""
    make, sides, against = SECTIONS[section]
    if section in ("decode", "train") and args.compile:
        sides = (OURS, COMPILED, THEIRS)
    state = random_state(setup.config, setup.dtype, setup.device)
    works: dict[str, dict[str, Work]] = {}
    for side in sides:
        try:
            works[side] = make(setup, side, state)
        except UserError as error:
            if side == OURS or against != THEIRS:
                raise
            print(f"{section}, {side}: {error}", file=sys.stderr)
    rows = []
    limits = (matmul_peak(setup.device, setup.dtype), copy_bandwidth(setup.device)) if setup.on_gpu else None
    for name in dict.fromkeys(name for of_side in works.values() for name in of_side):
        taking_part = {side: of_side[name] for side, of_side in works.items() if name in of_side}
        seconds = take_turns(
            {side: work.run for side, work in taking_part.items()}, args.rounds or ROUNDS.get(section, 7), setup.device
        )
        row = Row(section, name, seconds, against)
        row.notes = {side: notes(row, side, work, taking_part, limits) for side, work in taking_part.items()}
        rows.append(row)
    del works, state
    gc.collect()
    for side in rows[0].seconds if args.memory and section != "linear" else ():
        asked = {
            "section": section,
            "side": side,
            "geometry": args.geometry,
            "device": str(setup.device),
            "dtype": args.dtype,
            "threads": args.threads,
        }
        peaks = in_own_process("train.benchmark", "--child", json.dumps(asked))
        for row in rows:
            if row.work in peaks:
                row.peak[side] = peaks[row.work]
    if section == "quantize":
        rows[0].notes["int8"] = what_eight_bits_cost(setup)
    return rows


def notes(row: Row, side: str, work: Work, all_works: dict[str, Work], limits: tuple[float, float] | None) -> str:
    """What else a row says of a side: its share of the GPU's limits, and whether the sides found the same."""
    found = []
    if limits and work.flops:
        found.append(f"{100 * work.flops / row.median(side) / limits[0]:.0f} % of {limits[0] / 1e12:.0f} TFLOP/s")
    if limits and work.moved:
        found.append(f"{100 * work.moved / row.median(side) / limits[1]:.0f} % of {limits[1] / 1e9:.0f} GB/s")
        found.append(f"{1e3 * row.median(side) / STEPS:.2f} ms a step")
    if side in (OURS, COMPILED) and work.result and THEIRS in all_works and all_works[THEIRS].result:
        ours, theirs = (
            [*map(str, torch.as_tensor(r).flatten().tolist())] if isinstance(r, torch.Tensor) else r
            for r in (work.result(), all_works[THEIRS].result())
        )
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        found.append(f"{same} of {len(ours)} {'tokens' if row.section == 'decode' else 'answers'} as {THEIRS}")
    return ", ".join(found)


def child_peak(asked: dict) -> dict[str, int]:
    """In a process of its own: the peak of one side by work, beyond what was there before its model.

    On a CPU it is the peak of all works so far, which come in the order of their size.
    """
    setup = make_setup(asked["geometry"], asked["device"], asked["dtype"], asked["threads"])
    if asked["side"] == THEIRS:
        import_theirs()
    before, peaks = 0 if setup.on_gpu else peak_bytes(), {}
    works = SECTIONS[asked["section"]][0](setup, asked["side"], random_state(setup.config, setup.dtype, setup.device))
    for name, work in works.items():
        if setup.on_gpu:
            torch.cuda.reset_peak_memory_stats(setup.device)
        for _ in range(2):
            work.run()
        synchronize(setup.device)
        peaks[name] = peak_bytes(setup.device) - before
    return peaks


def import_theirs() -> None:
    """What transformers and PEFT import lazily, so that it does not count as the model's memory."""
    import transformers.models.paligemma.modeling_paligemma as modeling

    modeling.logging.disable_progress_bar()
    if find_spec("peft"):
        import peft  # noqa: F401


def what_eight_bits_cost(setup: Setup, records: int = 64) -> str:
    """Bytes of the weights, and the loss of the embedded base on held-out questions, whole and in 8 bits."""
    model = our_model(setup, random_state(setup.config, setup.dtype, setup.device)).requires_grad_(False)

    def size() -> float:
        return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 2**20

    whole = size()
    quantize(model)
    try:
        base, processor = load_model("embedded"), Processor.from_source("embedded")
    except UserError as error:
        return f"weights {whole:,.0f} → {size():,.0f} MiB; no loss: {error}"
    base.requires_grad_(False)
    micro = collate(embedded_records(("vqa",), split="validation", count=records), processor)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(supervised_loss(base, micro).item() / micro.tokens)
        quantize(base)
    assert any(isinstance(module, Int8Linear) for module in base.modules())
    return (
        f"weights {whole:,.0f} → {size():,.0f} MiB; loss of the embedded base on {records} held-out questions "
        f"{losses[0]:.4f} → {losses[1]:.4f} nats a token"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Load and first forward
# ---------------------------------------------------------------------------------------------------------------------


def load_rows(setup: Setup, args: argparse.Namespace) -> list[Row]:
    """Each side in processes of its own, in turn, so that a warm file cache favours neither."""
    if args.folder:
        return _load_rows(args.folder, setup, args)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        asked = {"make": str(folder), "geometry": args.geometry, "dtype": args.dtype}
        in_own_process("train.benchmark", "--child", json.dumps(asked))
        return _load_rows(folder, setup, args)


def _load_rows(folder: Path, setup: Setup, args: argparse.Namespace) -> list[Row]:
    found: dict[str, list[dict]] = {side: [] for side in (OURS, THEIRS) if side == OURS or find_spec("transformers")}
    if THEIRS not in found:
        print(f"load, {THEIRS}: transformers is not installed: only our side is measured", file=sys.stderr)
    for _ in range(args.rounds or ROUNDS["load"]):
        for side in found:
            asked = {
                "load": str(folder),
                "side": side,
                "device": str(setup.device),
                "dtype": args.dtype,
                "threads": args.threads,
            }
            found[side].append(in_own_process("train.benchmark", "--child", json.dumps(asked)))
    row = Row(
        "load",
        f"load and first forward, {args.dtype}",
        {side: [run["load"] + run["forward"] for run in runs] for side, runs in found.items()},
    )
    for side, runs in found.items():
        row.peak[side] = sorted(run["peak"] for run in runs)[len(runs) // 2]
        seconds = "{:.2f} + {:.2f} s".format(
            *(sorted(run[part] for run in runs)[len(runs) // 2] for part in ("load", "forward"))
        )
        row.notes[side] = f"{seconds}; {row.peak[side] / runs[0]['weights']:.2f} × the weights"
    return [row]


def child_load(asked: dict) -> dict:
    """In a process of its own: seconds of load and first forward, and the peak beyond what the imports took."""
    device, dtype = torch.device(asked["device"]), DTYPE_FLAGS[asked["dtype"]]
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    folder, theirs = asked["load"], asked["side"] == THEIRS
    if theirs:
        import_theirs()
        from transformers import PaliGemmaForConditionalGeneration as HFModel
    inputs = prompt(Setup(examine(folder).config, device, dtype), 1)
    before = 0 if device.type == "cuda" else peak_bytes()
    started = time.perf_counter()
    if theirs:
        model = HFModel.from_pretrained(folder, dtype=dtype).to(device).eval()
    else:
        model = load_model(folder, dtype=dtype, device=device)
    synchronize(device)
    loaded, load_peak = time.perf_counter(), peak_bytes(device)
    with torch.inference_mode():
        model(**inputs, **{"logits_to_keep" if theirs else "positions_to_keep": 1})
    synchronize(device)
    return {
        "load": loaded - started,
        "forward": time.perf_counter() - loaded,
        "load_peak": load_peak - before,
        "peak": peak_bytes(device) - before,
        "weights": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
    }


def child_make(asked: dict) -> dict:
    """In a process of its own: a checkpoint of random weights."""
    config, dtype = geometry(asked["geometry"]), DTYPE_FLAGS[asked["dtype"]]
    model = our_model(Setup(config, torch.device("cpu"), dtype), random_state(config, dtype, torch.device("cpu")))
    model.config = config
    export_model(model, asked["make"])
    return {}


def child(asked: dict) -> None:
    act = next(
        act for key, act in {"make": child_make, "load": child_load, "section": child_peak}.items() if key in asked
    )
    print(json.dumps(act(asked)))


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def make_setup(name: str, device: str, dtype: str, threads: int | None) -> Setup:
    if threads:
        torch.set_num_threads(threads)
    return Setup(geometry(name), torch.device(device), DTYPE_FLAGS[dtype])


def report(rows: Sequence[Row], about: dict) -> str:
    """One run as Markdown."""
    parts = [
        f"## {about['geometry']}, {about['dtype']}, {about['device']}",
        "",
        f"{about['machine']}; {about['versions']}; {about['date']}",
        "",
        f"`{about['command']}`",
    ]
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        parts += [
            "",
            f"### {TITLES[section]}",
            "",
            table(own),
            "",
            "÷: against " + " or ".join(dict.fromkeys(row.against for row in own)) + ", median of the "
            f"rounds' own ratios [quartiles], {len(next(iter(own[0].seconds.values())))} rounds.",
        ]
    return "\n".join(parts) + "\n"


def draw(rows: Sequence[Row]) -> Image.Image | None:
    """Ratios with their quartiles; None where there are none."""
    bars = [
        (f"{row.section}: {row.work}" + ("" if side == OURS else f", {side}"), *row.ratio(side))
        for row in rows
        for side in row.seconds
        if row.ratio(side)
    ]
    title = "Time against transformers and PEFT, plain attention, whole weights or MKL"
    return figures.interval_chart(bars, title, "ratio", reference=("equal", 1.0), width=900) if bars else None


def write_report(rows: Sequence[Row], about: dict, out: Path) -> None:
    write_text(out / "benchmark.json", json.dumps(about | {"rows": [row.to_dict() for row in rows]}, indent=1) + "\n")
    write_text(out / "benchmark.md", report(rows, about))
    if (chart := draw(rows)) is not None:
        figures.save(chart, out / "benchmark.png")


def collect(folders: Sequence[Path], path: Path) -> None:
    """Write the reports of `folders` as one file, and what no run of them has measured."""
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
        lines = [f"| {work} | not yet measured |" for work in GPU_ROWS]
        lines = ["## On a GPU", "", "| work | |", "|---|---|", *lines, ""]
        texts.append("\n".join([*lines, "`python -m train.benchmark --geometry 3b --device cuda`"]) + "\n")
    write_text(path, "\n".join([head, *texts]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = list(TITLES)
    parser.add_argument(
        "--section",
        nargs="+",
        choices=sections,
        metavar="NAME",
        help=f"of {', '.join(sections)} (default: all that the device has, but mamba)",
    )
    parser.add_argument(
        "--geometry",
        choices=["3b", *PRESETS],
        default="mini",
        metavar="NAME",
        help=f"3b or one of {', '.join(PRESETS)} (default: %(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=DTYPE_FLAGS, help="weights (default: bf16 for 3b and on CUDA, else fp32)")
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
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child))
        return
    if args.collect:
        collect(args.collect, (args.out or Path()) / "BENCHMARKS.md")
        return
    if args.estimate:
        print(estimate())
        return
    for name in ("rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, expected 1 or more")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        message = str(error).splitlines()[0]
        raise UserError(f"--device {args.device}: {message}: take cpu, or a GPU that is there") from None
    args.dtype = args.dtype or ("bf16" if args.geometry == "3b" or args.device != "cpu" else "fp32")
    setup = make_setup(args.geometry, args.device, args.dtype, args.threads)
    args.compile = setup.on_gpu if args.compile is None else args.compile
    left_out = {"mamba"} | ({"linear"} if setup.on_gpu or args.dtype != "fp32" else set())
    chosen = args.section or [section for section in sections if section not in left_out]
    rows: list[Row] = []
    words = list(sys.argv[1:] if argv is None else argv)
    if "--out" in words:  # where it went says nothing of what was measured
        place = words.index("--out")
        del words[place : place + 2]
    about = {
        "geometry": args.geometry,
        "dtype": args.dtype,
        "device": args.device,
        "machine": machine(setup.device),
        "versions": versions(),
        "date": today(),
        "command": " ".join(["python -m train.benchmark", *words]),
    }
    out = args.out or Path("runs", f"benchmark-{args.geometry}-{setup.device.type}")
    for section in chosen:
        if section == "mamba":
            from train.benchmark import mamba as benchmark_mamba

            found = benchmark_mamba.rows(setup.device, args.rounds or 7)
            figures.save(benchmark_mamba.chart(found), out / "benchmark-mamba.png")
        else:
            found = load_rows(setup, args) if section == "load" else measure(section, setup, args)
        rows += found
        print(f"\n### {TITLES[section]}\n\n{table(found)}", flush=True)
        write_report(rows, about, out)
    print(f"\nin {out}: benchmark.md, benchmark.json" + (", benchmark.png" if draw(rows) else ""))
