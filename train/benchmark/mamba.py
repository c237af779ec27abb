"""Mamba beside transformers' mixer, and beside a transformer of its size.

In: a device. Out: measurements of the scan, step by step and in parallel, of the mixer alone (`model/mamba.py`, the
sizes of mamba-130m), of one decoding step after contexts of several lengths, and of whole generations; and a figure of
the steps.

transformers' mixer is timed as it is, a loop over positions, and under torch.compile, where it becomes an associative
scan. The time of its backward pass grows with the square of the length: at 1,024 positions it runs once.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from eval import figures
from model.config import PRESETS, PaliGemmaConfig
from model.generate import generate
from model.mamba import MambaLM, MambaMixer, initialize_mamba, initialize_mixer
from model.paligemma import PaliGemma, initialize
from model.scan import parallel_steps, selective_scan
from model.system_configs import MambaConfig
from train.benchmark.timing import OURS, THEIRS, Measurement, in_own_process, take_turns
from train.metrics import peak_bytes, reset_peak
from train.optim import count

SECTION, COMPILED_PEER, TRANSFORMER = "mamba", f"{THEIRS}, compiled", "Gemma"
STEPS, PARALLEL = "step by step", "in parallel"
SLOW_SCAN = 4096  # from so many positions on, a scan takes seconds on a CPU
SLOW = 512  # from so many positions on, transformers' eager backward pass runs once


@dataclass(frozen=True)
class Sizes:
    """What is timed. The transformer is the decoder of `base`; Mamba has its width and about as many parameters."""

    mixer: MambaConfig = MambaConfig()
    scans: tuple[int, ...] = (256, 1024, 4096, 16384)
    lengths: tuple[int, ...] = (256, 1024)
    base: PaliGemmaConfig = PRESETS["mini"]
    contexts: tuple[int, ...] = (64, 256, 1024, 4096)
    steps: int = 16  # tokens timed after each context
    batch: int = 8  # rows of a generation
    prompt: int = 64
    answer: int = 128


def measure(device: torch.device | str, rounds: int, sizes: Sizes = Sizes(), memory: bool = True) -> list[Measurement]:
    """All measurements of the section; with `memory` also the peaks of the scans."""
    scans = measure_scans(device, rounds, sizes, memory)
    return [*scans, *measure_mixers(device, rounds, sizes), *measure_decoding(device, rounds, sizes)]


# The scan


def measure_scans(device: torch.device | str, rounds: int, sizes: Sizes, memory: bool) -> list[Measurement]:
    """Step by step, as a CPU scans, beside in parallel, as a GPU does; from SLOW_SCAN positions on twice."""
    found = []
    for length in sizes.scans:
        for backward in (False, True):
            runs = {side: scan_run(side, length, backward, sizes.mixer, device) for side in (STEPS, PARALLEL)}
            seconds = take_turns(runs, min(rounds, 2) if length >= SLOW_SCAN else rounds, device)
            work = f"scan, {length:,} positions, forward" + (" and backward" if backward else "")
            row = Measurement(SECTION, work, seconds, STEPS)
            for side in runs if memory else ():
                row.peak[side] = in_own_process(scan_peak, side, length, backward, sizes.mixer, str(device))
            found.append(row)
    return found


def scan_run(side: str, length: int, backward: bool, config: MambaConfig, device: torch.device | str) -> Callable:
    """A function that scans one row of random numbers, and with `backward` computes all gradients."""
    generator, channels = torch.Generator().manual_seed(length), config.intermediate_size
    x, delta = (torch.randn(1, length, channels, generator=generator) for _ in range(2))
    B, C = (torch.randn(1, length, config.state_size, generator=generator) for _ in range(2))
    A = -torch.arange(1.0, config.state_size + 1).repeat(channels, 1)
    inputs = [tensor.to(device).requires_grad_(backward) for tensor in (x, F.softplus(delta - 4), A, B, C)]
    chunk = 0 if side == STEPS else parallel_steps(1, config.state_size, channels)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            y, _ = selective_scan(*inputs, chunk=chunk)
        if backward:
            torch.autograd.grad(y.square().mean(), inputs)

    return run


def scan_peak(side: str, length: int, backward: bool, config: MambaConfig, device: str) -> int:
    """In a process of its own: bytes of a scan at its peak, beyond its inputs."""
    run = scan_run(side, length, backward, config, device)
    reset_peak(device)
    before = peak_bytes(device)
    run()
    return peak_bytes(device) - before


def chart(found: list[Measurement]) -> Image.Image:
    """Milliseconds of a decoding step against the tokens read before."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in found:
        if row.work.startswith("one token after "):
            context = float(row.work.split()[3].replace(",", ""))
            for side in row.seconds:
                series.setdefault("Mamba" if side == OURS else side, []).append((context, 1e3 * row.median(side)))
    return figures.line_chart(series, "One more token", "tokens read before", "ms", log_x=True)


# The mixer


def measure_mixers(device: torch.device | str, rounds: int, sizes: Sizes) -> list[Measurement]:
    """Forward, and forward and backward, at every length: against the eager mixer, and against the compiled one."""
    sides = mixers(sizes.mixer, device)
    found = []
    for length in sizes.lengths:
        h = torch.randn(1, length, sizes.mixer.hidden_size, generator=torch.Generator().manual_seed(length)).to(device)
        for backward in (False, True):
            work = f"mixer, {length:,} positions, forward" + (" and backward" if backward else "")
            runs = {side: mixer_run(mixer, h, backward) for side, mixer in sides.items()}
            for against in (THEIRS, COMPILED_PEER):
                if against not in runs:
                    continue
                pair = {OURS: runs[OURS], against: runs[against]}
                try:
                    once = against == THEIRS and backward and length >= SLOW
                    if once:
                        pair[OURS]()
                    seconds = take_turns(pair, 1 if once else rounds, device, warmup=0 if once else 1)
                except Exception as error:  # errors of many kinds come from the compiler
                    if against != COMPILED_PEER:
                        raise
                    print(f"{work}, {COMPILED_PEER}: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                found.append(
                    Measurement(SECTION, work + ", compiled peer" * (against == COMPILED_PEER), seconds, against)
                )
    return found


def mixers(config: MambaConfig, device: torch.device | str) -> dict[str, nn.Module]:
    """The same weights in our mixer and, where it is installed, transformers', eager and compiled."""
    ours = MambaMixer(config)
    initialize_mixer(ours, 1, torch.Generator().manual_seed(0))
    sides: dict[str, nn.Module] = {OURS: ours.to(device)}
    try:
        from transformers import MambaConfig as HFConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer as HFMixer
    except ImportError:
        print(f"mamba, {THEIRS}: transformers is not installed: only our side is measured", file=sys.stderr)
        return sides
    theirs = HFMixer(HFConfig.from_dict(config.to_dict()), 0)
    theirs.load_state_dict(ours.state_dict())
    sides[THEIRS] = theirs.to(device)
    sides[COMPILED_PEER] = torch.compile(copy.deepcopy(theirs))
    return sides


def mixer_run(mixer: nn.Module, h: torch.Tensor, backward: bool) -> Callable[[], object]:
    """A function that runs h (1, L, H) through the mixer and, with `backward`, computes all gradients."""
    if not backward:
        return torch.no_grad()(lambda: mixer(h))

    def run() -> None:
        mixer.zero_grad(set_to_none=True)
        mixer(h.detach().requires_grad_()).square().mean().backward()

    return run


# Decoding


def measure_decoding(device: torch.device | str, rounds: int, sizes: Sizes) -> list[Measurement]:
    """One decoding step after each context, and whole generations of a batch."""
    models = language_models(sizes, device)
    decoders = {OURS: models[OURS].backbone, TRANSFORMER: models[TRANSFORMER].language_model}
    found = []
    for context in sizes.contexts:
        runs = {side: steps_after(model, context, sizes) for side, model in models.items()}
        seconds = take_turns(runs, rounds, device)
        seconds = {side: [one / sizes.steps for one in of_side] for side, of_side in seconds.items()}
        found.append(Measurement(SECTION, f"one token after {context:,}", seconds, TRANSFORMER))
    ids = torch.randint(3, 1000, (sizes.batch, sizes.prompt), generator=torch.Generator().manual_seed(0)).to(device)
    runs = {
        side: lambda model=model: generate(model, ids, None, torch.zeros_like(ids), None, sizes.answer)
        for side, model in models.items()
    }
    row = Measurement(
        SECTION,
        f"{sizes.answer} tokens after {sizes.prompt}, batch {sizes.batch}",
        take_turns(runs, rounds, device),
        TRANSFORMER,
    )
    row.notes = {
        side: f"{sizes.batch * sizes.answer / row.median(side):,.0f} tokens/s, "
        f"{count(decoder.parameters()):,} parameters"
        for side, decoder in decoders.items()
    }
    return [*found, row]


def language_models(sizes: Sizes, device: torch.device | str) -> dict[str, nn.Module]:
    """A transformer and a Mamba with random weights: one vocabulary, one width and, as nearly as possible, one size."""
    config = sizes.base
    gemma = initialize(PaliGemma(config))
    gemma.config = replace(config, eos_token_id=-1)  # no end token: all answers have the same length
    one = MambaConfig(config.text.vocab_size, config.text.hidden_size, num_hidden_layers=1, eos_token_id=-1)
    decoder, layer = count(gemma.language_model.layers.parameters()), count(MambaLM(one).backbone.layers.parameters())
    mamba = MambaLM(replace(one, num_hidden_layers=max(1, round(decoder / layer))))
    initialize_mamba(mamba.backbone)
    return {OURS: mamba.to(device).eval(), TRANSFORMER: gemma.to(device).eval()}


@torch.no_grad()
def steps_after(model: nn.Module, context: int, sizes: Sizes) -> Callable[[], object]:
    """A function that decodes `sizes.steps` tokens after a context of random ones; each call starts there again."""
    device = next(model.parameters()).device
    length = context + sizes.steps
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(context)).to(device)
    types, valid = torch.ones_like(ids), torch.ones_like(ids)
    cache = model.new_cache(length)

    def read(first: int, last: int) -> None:
        model(
            input_ids=ids[:, first:last],
            pixel_values=None,
            token_type_ids=types[:, :last],
            attention_mask=valid[:, :last],
            cache=cache,
            positions_to_keep=1,
        )

    for start in range(0, context, 512):  # in chunks: a mask of all positions by all would be large
        read(start, min(start + 512, context))

    @torch.no_grad()
    def run() -> None:
        for layer in cache:
            if hasattr(layer, "length"):  # a key-value cache; Mamba's state has no length
                layer.length = context
        for at in range(context, length):
            read(at, at + 1)

    return run
