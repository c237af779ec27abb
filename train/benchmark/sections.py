"""The sections of the benchmark: one table, and how each section is measured.

In: a `Setup` and `Options`. Out: a list of `Measurement`. All sides of a measurement take turns in one process; memory
is the peak of a process of its own, beyond what its imports took.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from eval import figures
from eval.records import embedded_records
from lora import adapter
from lora.quantize import KINDS as QUANTIZED
from model import cpu
from model.common import UserError
from model.device import dtype_name
from model.differential import KINDS
from model.processor import Processor
from train.benchmark import growth, mamba, pictures, work
from train.benchmark.setup import Options, Setup, begin_process, our_model, prompt, random_state
from train.benchmark.timing import (
    COMPILED,
    OURS,
    THEIRS,
    Measurement,
    free_memory,
    in_own_process,
    limits_of,
    synchronize,
    take_turns,
)
from train.benchmark.work import Work
from train.data.batches import collate
from train.metrics import peak_bytes
from train.supervised import supervised_loss
from weights.checkpoint import examine
from weights.export import export_model
from weights.load import load_model


def measure_in_turns(section: "Section", setup: Setup, options: Options) -> list[Measurement]:
    """All works of a section: times, then peaks. A side that is not installed is reported and left out."""
    found = _times(section, setup, options)
    free_memory()  # the children need it
    for side in found[0].seconds if options.memory and section.has_peaks else ():
        peaks = in_own_process(peaks_of, section.name, side, setup) if any(one.seconds[side] for one in found) else {}
        for measured in found:
            if measured.work in peaks:
                measured.peak[side] = peaks[measured.work]
    return found


def _times(section: "Section", setup: Setup, options: Options) -> list[Measurement]:
    """All works of a section, without peaks."""
    sides = section.sides
    if section.can_compile and options.compile:
        sides = (OURS, COMPILED, THEIRS)
    state = random_state(setup.config, setup.dtype, setup.device)
    works: dict[str, dict[str, Work]] = {}
    lost: dict[str, list[float]] = {}  # sides that do not fit
    for side in sides:
        try:
            works[side] = section.make(setup, side, state)
        except torch.OutOfMemoryError:
            lost[side] = []
            free_memory()
        except UserError as error:
            if side == OURS or section.against != THEIRS:
                raise
            print(f"{section.name}, {side}: {error}", file=sys.stderr)
    found = [] if works else [too_large(section, lost)]
    has_share = any(one.flops or one.moved for one in works.get(OURS, {}).values())
    limits = limits_of(setup.device, setup.dtype) if has_share else None
    for name in dict.fromkeys(name for of_side in works.values() for name in of_side):
        by_side = {side: of_side[name] for side, of_side in works.items() if name in of_side}
        runs = {side: one.run for side, one in by_side.items()}
        seconds = take_turns(runs, options.rounds or section.rounds, setup.device)
        measured = Measurement(section.name, name, seconds | lost, section.against)
        fits = {side: one for side, one in by_side.items() if seconds[side]}
        measured.notes = {side: notes(measured, side, one, fits, limits) for side, one in fits.items()}
        found.append(measured)
    return found


def too_large(section: "Section", sides: Iterable[str] = (OURS,)) -> Measurement:
    """The row of a section that does not fit in memory."""
    return Measurement(section.name, section.title, {side: [] for side in sides}, section.against)


def notes(
    measured: Measurement, side: str, own: Work, works: dict[str, Work], limits: tuple[float, float] | None
) -> str:
    """A side's share of the device's limits (FLOP/s, bytes/s), and how many of its answers equal transformers'."""
    parts = []
    if limits and own.flops:
        share = own.flops / measured.median(side) / limits[0]
        parts.append(f"{100 * share:.0f} % of {limits[0] / 1e12:.3g} TFLOP/s")
    if limits and own.moved:
        share = own.moved / measured.median(side) / limits[1]
        parts.append(f"{100 * share:.0f} % of {limits[1] / 1e9:.4g} GB/s")
        parts.append(f"{1e3 * measured.median(side) / work.STEPS:.2f} ms a step")
    if side in (OURS, COMPILED) and own.result and THEIRS in works and works[THEIRS].result:
        ours, theirs = (
            [*map(str, torch.as_tensor(found).flatten().tolist())] if isinstance(found, torch.Tensor) else found
            for found in (own.result(), works[THEIRS].result())
        )
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        unit = "tokens" if measured.section == "decode" else "answers"
        parts.append(f"{same} of {len(ours)} {unit} as {THEIRS}")
    return ", ".join(parts)


def peaks_of(name: str, side: str, setup: Setup) -> dict[str, int]:
    """In a process of its own: the peak in bytes of each work of one side, beyond what was used before its model.

    On a CPU it is the peak of all works so far; they are ordered by size.
    """
    before, peaks = begin_process(setup, side), {}
    works = SECTIONS[name].make(setup, side, random_state(setup.config, setup.dtype, setup.device))
    for work_name, one in works.items():
        if setup.on_gpu:
            torch.cuda.reset_peak_memory_stats(setup.device)
        with suppress(torch.OutOfMemoryError):
            for _ in range(2):
                one.run()
            synchronize(setup.device)
            peaks[work_name] = peak_bytes(setup.device) - before
    return peaks


def measure_load(section: "Section", setup: Setup, options: Options) -> list[Measurement]:
    """Loading and the first forward pass, each time in a new process; the sides take turns.

    Both sides read the same files from the warm page cache.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "checkpoint"
        if options.folder is None:
            in_own_process(make_checkpoint, folder, setup)
        runs = _load_in_turns(folder, setup, options.rounds or section.rounds)
    seconds = {side: [run["load"] + run["forward"] for run in of_side] for side, of_side in runs.items()}
    measured = Measurement(section.name, f"load and first forward, {dtype_name(setup.dtype)}", seconds)
    for side, of_side in runs.items():
        load, forward, measured.peak[side] = (
            sorted(run[part] for run in of_side)[len(of_side) // 2] for part in ("load", "forward", "peak")
        )
        factor = measured.peak[side] / of_side[0]["weights"]
        measured.notes[side] = f"{load:.2f} + {forward:.2f} s; {factor:.2f} × the weights"
    return [measured]


def _load_in_turns(folder: Path, setup: Setup, rounds: int) -> dict[str, list[dict]]:
    """What `load_and_forward` returns, by side."""
    runs: dict[str, list[dict]] = {side: [] for side in (OURS, THEIRS) if side == OURS or find_spec("transformers")}
    if THEIRS not in runs:
        print(f"load, {THEIRS}: transformers is not installed: only our side is measured", file=sys.stderr)
    for _ in range(rounds):
        for side, of_side in runs.items():
            of_side.append(in_own_process(load_and_forward, folder, side, setup))
    return runs


def load_and_forward(folder: Path, side: str, setup: Setup) -> dict[str, float]:
    """In a process of its own: seconds of load and first forward pass, and the peak beyond what the imports took."""
    device, dtype = setup.device, setup.dtype
    inputs = prompt(replace(setup, config=examine(folder).config), 1)
    if side == THEIRS:
        from transformers import PaliGemmaForConditionalGeneration as HFModel
    before = begin_process(setup, side)
    started = time.perf_counter()
    if side == THEIRS:
        model = HFModel.from_pretrained(folder, dtype=dtype).to(device).eval()
    else:
        model = load_model(folder, dtype=dtype, device=device)
    synchronize(device)
    loaded = time.perf_counter()
    with torch.inference_mode():
        model(**inputs, **{"logits_to_keep": 1, "use_cache": False} if side == THEIRS else {"positions_to_keep": 1})
    synchronize(device)
    return {
        "load": loaded - started,
        "forward": time.perf_counter() - loaded,
        "peak": peak_bytes(device) - before,
        "weights": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
    }


def make_checkpoint(folder: Path, setup: Setup) -> None:
    """In a process of its own: write a model folder of random weights."""
    setup = replace(setup, device=torch.device("cpu"))
    model = our_model(setup, random_state(setup.config, setup.dtype, setup.device))
    model.config = setup.config
    export_model(model, folder)


def measure_few_bits(section: "Section", setup: Setup, options: Options, records: int = 64) -> list[Measurement]:
    """Times and peaks, and in a note the bytes of the weights and the loss of the embedded base."""
    found = measure_in_turns(section, setup, options)
    processor = Processor.from_source("embedded")
    micro = collate(embedded_records(("vqa",), split="validation", count=records), processor)
    for side in section.sides:
        model = our_model(setup, random_state(setup.config, setup.dtype, setup.device)).requires_grad_(False)
        base = load_model("embedded").requires_grad_(False)
        if side != "whole":
            adapter.quantize(model, side)
            adapter.quantize(base, side)
        size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 2**20
        with torch.no_grad():
            loss = supervised_loss(base, micro).item() / micro.tokens
        found[0].notes[side] = (
            f"weights {size:,.0f} MiB; loss of the embedded base {loss:.4f} nats a token ({records} held-out questions)"
        )
    return found


def measure_growth(section: "Section", setup: Setup, options: Options) -> list[Measurement]:
    """The measurements of `train/benchmark/growth.py`, and a figure of them in `options.out`."""
    found = growth.measure(setup, options.rounds or section.rounds, options.memory)
    if options.out:
        figures.save(growth.chart(found), options.out / "benchmark-growth.png")
    return found


def measure_pictures(section: "Section", setup: Setup, options: Options) -> list[Measurement]:
    """The measurements of `train/benchmark/pictures.py`."""
    return pictures.measure(setup, options.rounds or section.rounds)


def measure_mamba(section: "Section", setup: Setup, options: Options) -> list[Measurement]:
    """The measurements of `train/benchmark/mamba.py`, and a figure of them in `options.out`."""
    found = mamba.measure(setup.device, options.rounds or section.rounds, memory=options.memory)
    if options.out:
        figures.save(mamba.chart(found), options.out / "benchmark-mamba.png")
    return found


@dataclass(frozen=True)
class Section:
    """One section. make: the works of one side, for sections that are timed in turns.

    against: the side to which ratios are taken. rounds: of each measurement. can_compile: --compile adds a side.
    has_peaks: memory is measured too. is_default: whether it is measured when the command names no section.
    """

    name: str
    title: str
    make: Callable[[Setup, str, dict[str, torch.Tensor]], dict[str, Work]] | None = None
    sides: tuple[str, ...] = (OURS, THEIRS)
    against: str = THEIRS
    rounds: int = 7
    can_compile: bool = False
    has_peaks: bool = True
    is_default: Callable[[Setup], bool] = lambda setup: True
    measure: Callable[["Section", Setup, Options], list[Measurement]] = measure_in_turns


SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        Section("load", "Load and first forward", rounds=3, measure=measure_load),
        Section("prefill", "Prefill: a picture and a prompt, to the first logits", work.prefill),
        Section("decode", "Generation: picture, prompt and new tokens", work.decode, rounds=5, can_compile=True),
        Section("train", "LoRA training step", work.train, can_compile=True),
        Section("eval", "Evaluation: questions on pictures, to the answers' text", work.evaluate),
        Section(
            "attention",
            "Variants of attention: LoRA training step",
            work.attention,
            tuple(KINDS),
            "softmax",
            rounds=15,  # variants differ by little
        ),
        Section(
            "quantize",
            "Weights in few bits: LoRA training step, generation",
            work.few_bits,
            ("whole", *QUANTIZED),
            "whole",
            measure=measure_few_bits,
        ),
        Section(
            "linear",
            "Products on a CPU, forward and backward",
            work.products,
            cpu.PATHS,
            "torch",
            has_peaks=False,
            is_default=lambda setup: not setup.on_gpu and setup.dtype == torch.float32,
        ),
        Section(
            "data",
            "Pictures from files to micro-batches",
            rounds=5,
            is_default=lambda setup: setup.on_gpu,
            measure=measure_pictures,
        ),
        Section(
            "growth",
            "Time and memory as the work grows",
            rounds=5,
            is_default=lambda setup: False,
            measure=measure_growth,
        ),
        Section("mamba", "Mamba and Q-Mamba", is_default=lambda setup: False, measure=measure_mamba),
    )
}
