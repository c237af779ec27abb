"""How time and memory grow with the work: tokens read at once, rows, the picture's size, tokens in the cache.

In: a `Setup`. Out: a measurement of each amount of work, and a figure of all. Our model, with plain and with twin
attention, and transformers' have the same weights. Mamba has the decoder's width and size, and reads as many tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, product

import torch
from PIL import Image
from torch import nn

from eval import figures
from model.common import UserError
from model.differential import graft
from train.benchmark.mamba import Sizes, language_models, steps_after
from train.benchmark.setup import SUFFIX, Setup, begin_process, our_model, prompt, random_state, their_model
from train.benchmark.timing import OURS, THEIRS, Measurement, free_memory, in_own_process, take_turns
from train.metrics import peak_bytes, reset_peak

SECTION, TWIN, MAMBA = "growth", "ours, twin", "Mamba"
SIDES = (OURS, TWIN, MAMBA, THEIRS)
STEPS = 16  # tokens that are decoded after a context


@dataclass(frozen=True)
class Axis:
    """What grows, by `values` in ascending order. work: what is timed at a value."""

    label: str
    values: tuple[int, ...]
    work: str


AXES = {
    "length": Axis("tokens", (256, 1024, 4096, 8192), "{:,} tokens of text, read at once"),
    "rows": Axis("rows", (1, 2, 4, 8, 16), "{} rows of a picture and 32 tokens"),
    "picture": Axis("pixels of a side", (224, 448, 896), "a picture of {} pixels and 32 tokens"),
    "cache": Axis("tokens in the cache", (256, 1024, 4096, 8192), "one token after {:,}"),
}


def sized(setup: Setup, axis: str, value: int) -> Setup:
    """The setup of an amount of work: on the axis of pictures each has a vision tower of its own."""
    vision = replace(setup.config.vision, image_size=value) if axis == "picture" else setup.config.vision
    return replace(setup, config=replace(setup.config, vision=vision))


def build(setup: Setup, side: str) -> nn.Module:
    """The model of a side. Raises UserError where transformers is not installed."""
    if side == MAMBA:
        return language_models(Sizes(base=setup.config), setup.device)[OURS].to(setup.dtype)
    state = random_state(setup.config, setup.dtype, setup.device)
    if side == THEIRS:
        return their_model(setup, state)
    model = our_model(setup, state).eval()
    if side == TWIN:
        graft(model, "twin")
    return model


def work(setup: Setup, side: str, model: nn.Module, axis: str, value: int) -> Callable[[], object]:
    """What is timed: from prompts to the logits of the next token or, on the axis of the cache, STEPS tokens."""
    if axis == "cache":
        run = their_steps if side == THEIRS else steps_after
        return run(model, value, Sizes(steps=STEPS))
    inputs = prompt(setup, value if axis == "rows" else 1, SUFFIX)
    if axis == "length" or side == MAMBA:
        shape = (1, value) if axis == "length" else inputs["input_ids"].shape
        ids = torch.randint(3, 1000, shape, generator=torch.Generator().manual_seed(value)).to(setup.device)
        zeros = torch.zeros_like(ids)  # a prompt, whose tokens see each other
        inputs = {"input_ids": ids, "pixel_values": None, "token_type_ids": zeros, "attention_mask": zeros + 1}
    if side == THEIRS:
        return torch.inference_mode()(lambda: model(**inputs, logits_to_keep=1, use_cache=False).logits)
    return torch.inference_mode()(lambda: model(**inputs, positions_to_keep=1))


def their_steps(model: nn.Module, context: int, sizes: Sizes) -> Callable[[], object]:
    """`steps_after` of transformers' model."""
    from transformers import DynamicCache

    device, cache = next(model.parameters()).device, DynamicCache(config=model.config.get_text_config())
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(3, 1000, (1, context + sizes.steps), generator=generator).to(device)

    @torch.inference_mode()
    def read(first: int, last: int) -> None:
        model(input_ids=ids[:, first:last], past_key_values=cache, logits_to_keep=1)

    def run() -> None:
        if (more := cache.get_seq_length() - context) > 0:  # of the call before
            cache.crop(-more)
        for at in range(context, context + sizes.steps):
            read(at, at + 1)

    for start in range(0, context, 512):
        read(start, min(start + 512, context))
    return run


def measure(setup: Setup, rounds: int, memory: bool = True) -> list[Measurement]:
    """The measurements of all axes; with `memory` also the peaks, each side's in a process of its own."""
    found = {axis: [] for axis in AXES}
    models = installed(setup)
    sides = list(models)
    for axis, grows in AXES.items():
        for value in grows.values:
            given = sized(setup, axis, value)
            own = installed(given) if axis == "picture" else models
            seconds = take_turns({s: work(given, s, own[s], axis, value) for s in sides}, rounds, setup.device)
            if axis == "cache":
                seconds = {side: [one / STEPS for one in of_side] for side, of_side in seconds.items()}
            found[axis].append(Measurement(SECTION, grows.work.format(value), seconds))
    del models, own
    free_memory()
    for axis, side in product(AXES if memory else (), sides):
        for measured, peak in zip(found[axis], in_own_process(peaks, setup, side, axis), strict=False):
            measured.peak[side] = peak
    return list(chain(*found.values()))


def installed(setup: Setup) -> dict[str, nn.Module]:
    """The models of all sides but those that are not installed."""
    models = {}
    for side in SIDES:
        try:
            models[side] = build(setup, side)
        except UserError:
            if side != THEIRS:
                raise
    return models


def peaks(setup: Setup, side: str, axis: str) -> list[int]:
    """In a process of its own: bytes at the peak of each amount of work, weights included, as far as memory lasts."""
    before, found, model = begin_process(setup, side), [], None
    for value in AXES[axis].values:
        given = sized(setup, axis, value)
        if model is None or axis == "picture":
            model = build(given, side)
        reset_peak(setup.device)
        try:
            work(given, side, model, axis, value)()
        except torch.OutOfMemoryError:
            break
        found.append(peak_bytes(setup.device) - before)
    return found


def chart(found: list[Measurement]) -> Image.Image:
    """Time and memory of every side against each axis."""
    pictures = []
    for grows in AXES.values():
        rows = {grows.work.format(value): value for value in grows.values}
        own = [one for one in found if one.work in rows]
        of_time = {side: [(rows[one.work], 1e3 * one.median(side)) for one in own] for side in own[0].seconds}
        of_memory = {
            side: [(rows[one.work], one.peak[side] / 2**20) for one in own if side in one.peak] for side in of_time
        }
        for series, unit in ((of_time, "ms"), (of_memory, "MiB")):
            if any(series.values()):
                title = grows.work.replace("{:,}", "N").replace("{}", "N")
                options = {"log_x": True, "log_y": True, "marked": SIDES, "height": 260, "width": 560}
                pictures.append(figures.line_chart(series, title, grows.label, unit, **options))
    return figures.stack(pictures, 2 if len(pictures) == 2 * len(AXES) else 1)
