"""Make the small vision tower beside the embedded base: it reads 8×8 patches of pictures of 64
pixels, and has seen drawn signs.

    python -m train.tower          an hour and a half on one core

In: the tower of commit 9b54c6d, which had seen 64 signs in 2,600 batches, ever harder. Out: a tower
such as `--new-tower` gives a run, after STEPS more, of 400 signs; weights/tiny/tower.safetensors is
made so. A published PaliGemma starts from SigLIP, so the toy on pictures of one's own starts
from a tower that knows strokes, colors, places and angles, also under noise. Its signs are strokes
at random: it has seen no letter, no digit and no photograph. It answers questions about them by the
head of `train/align.py`.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm

from eval.command import add_flag, command_parser
from model.common import atomic_path, run_command
from model.paligemma import PaliGemma
from model.source import EMBEDDED
from train.align import PICTURES, SIDE, loss_of, open_head, small_tower, update
from train.optim import rate_factor, set_rates
from weights.load import load_model, save_tensors

OUT = Path("runs/tower.safetensors")
STEPS = 9000
CANVAS = 2 * SIDE
COLORS = {
    "red": (215, 45, 45),
    "green": (45, 165, 65),
    "blue": (55, 85, 215),
    "yellow": (230, 210, 50),
    "black": (25, 25, 25),
    "white": (240, 240, 240),
    "orange": (235, 140, 40),
    "purple": (140, 60, 170),
}
SIGNS, ANGLES, QUARTERS = 400, 24, 4
# the number of a question, and that of its first answer
QUESTIONS = {
    "sign": (1, 0),
    "color": (2, 400),
    "row": (3, 410),
    "column": (4, 420),
    "size": (5, 430),
    "angle": (6, 440),
    "length": (7, 480),
    "ground": (8, 490),
}
Facts = list[tuple[str, int]]  # a question, and its answer, from 0
Line = list[tuple[float, float]]


@cache
def strokes_of(sign: int) -> list[Line]:
    """The lines and curves of a sign in the unit square."""
    dice = Random(f"symbol/{sign}")
    grid = [(x / 2, y / 2) for x in range(3) for y in range(3)]
    strokes = []
    for _ in range(dice.randint(2, 4)):
        start, end = dice.sample(grid, 2)
        if dice.random() < 0.55:
            strokes.append([start, end])
            continue
        x, y = dice.choice(grid)
        bend = x + dice.uniform(-0.5, 0.5), y + dice.uniform(-0.5, 0.5)
        t = np.linspace(0, 1, 9)[:, None]
        curve = (1 - t) ** 2 * np.array(start) + 2 * t * (1 - t) * np.array(bend)
        curve += t * t * np.array(end)
        strokes.append(list(map(tuple, curve)))
    return strokes


def draw(dice: Random, hardness: float) -> tuple[Tensor, Facts]:
    """A picture (3, SIDE, SIDE) in [-1, 1], and what it is asked. hardness: from 0 to 1."""
    # 1. the ground
    names = list(COLORS)
    name = names[dice.randrange(len(names))] if dice.random() < 0.3 else None
    if name:
        ground = np.array(COLORS[name])
    else:
        ground = np.array([dice.randint(20, 235) for _ in range(3)])
    # 2. the color of what is on it
    other = [name for name in names if np.abs(np.array(COLORS[name]) - ground).sum() > 120]
    color = dice.choice(other)
    ink = tuple(value + dice.randint(-15, 15) for value in COLORS[color])
    asked = [("color", names.index(color))] if dice.random() < 0.4 else []
    if name and dice.random() < 0.3:
        asked.append(("ground", names.index(name)))
    # 3. faint shapes, and a sign or a hand
    image = Image.new("RGB", (CANVAS, CANVAS), tuple(map(int, ground)))
    canvas = ImageDraw.Draw(image)
    if dice.random() < 0.3:
        draw_shapes(dice, canvas, ground)
    if dice.random() < 0.75:
        asked += draw_sign(dice, canvas, ink, hardness)
    else:
        asked += draw_hand(dice, canvas, ink, ground)
    # 4. pixels, with noise
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32)
    if dice.random() < 0.5 * hardness:
        generator = np.random.default_rng(dice.getrandbits(32))
        noise = generator.normal(0, dice.uniform(2, 40 * hardness + 3), pixels.shape)
        pixels = pixels + noise.astype(np.float32)
    scaled = pixels.clip(0, 255) / 127.5 - 1
    return torch.from_numpy(scaled).permute(2, 0, 1), asked


def draw_shapes(dice: Random, canvas: ImageDraw.ImageDraw, ground: np.ndarray) -> None:
    """Circles and squares in colors near that of the ground."""
    for _ in range(dice.randint(1, 4)):
        color = tuple(int(value) + dice.randint(-25, 25) for value in ground)
        x, y = dice.randrange(CANVAS), dice.randrange(CANVAS)
        radius = dice.randint(5, 50)
        shape = dice.choice((canvas.ellipse, canvas.rectangle))
        shape((x - radius, y - radius, x + radius, y + radius), fill=color)


def draw_sign(
    dice: Random, canvas: ImageDraw.ImageDraw, ink: tuple[int, ...], hardness: float
) -> Facts:
    """A sign somewhere; which one it is, and half of the times where or how large."""
    # 1. its form
    sign = dice.randrange(SIGNS)
    size = dice.uniform(84 - 44 * hardness, 100 + 6 * hardness)
    width = size * dice.uniform(0.06, 0.2)
    stretch = dice.uniform(0.6, 1.0)
    angle = math.radians(dice.uniform(-12, 12) * hardness)
    slant = dice.uniform(-0.25, 0.25) * hardness
    # 2. its place
    half = (size + width) / 2
    middle = [CANVAS / 2, CANVAS / 2]
    if half < CANVAS / 2:
        for axis in (0, 1):
            middle[axis] += hardness * (dice.uniform(half, CANVAS - half) - CANVAS / 2)
    # 3. its strokes, with round ends
    sine, cosine = math.sin(angle), math.cos(angle)
    for stroke in strokes_of(sign):
        points = []
        for x, y in stroke:
            down = (y - 0.5) * size
            right = (x - 0.5) * size * stretch + slant * down
            turned = right * cosine - down * sine, right * sine + down * cosine
            points.append((middle[0] + turned[0], middle[1] + turned[1]))
        canvas.line(points, fill=ink, width=max(2, round(width)), joint="curve")
        for x, y in (points[0], points[-1]):
            radius = width / 2
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    # 4. what is asked
    asked = [("sign", sign)]
    if dice.random() < 0.5:
        column, row = (min(3, int(place / CANVAS * QUARTERS)) for place in middle)
        of_size = int((size - 40) / 66 * 3.999)
        asked.append(dice.choice([("size", of_size), ("row", row), ("column", column)]))
    return asked


def draw_hand(
    dice: Random, canvas: ImageDraw.ImageDraw, ink: tuple[int, ...], ground: np.ndarray
) -> Facts:
    """A line from the middle of a ring; its angle, and sometimes how long it is."""
    radius = dice.uniform(28, 60)
    x, y = dice.uniform(radius, CANVAS - radius), dice.uniform(radius, CANVAS - radius)
    number = dice.randrange(ANGLES)
    angle = math.tau * number / ANGLES
    if dice.random() < 0.6:
        opposite = tuple(255 - int(value) for value in ground)
        outline = opposite if dice.random() < 0.5 else ink
        ring = x - radius, y - radius, x + radius, y + radius
        canvas.ellipse(ring, outline=outline, width=dice.randint(1, 4))
    length = dice.randrange(3)
    reach = radius * (0.4, 0.65, 0.92)[length]
    end = x + reach * math.sin(angle), y - reach * math.cos(angle)
    canvas.line((x, y, *end), fill=ink, width=dice.randint(2, 8))
    asked = [("angle", number)]
    if dice.random() < 0.3:
        asked.append(("length", length))
    return asked


def batch(split: str, number: int, hardness: float, size: int = PICTURES) -> tuple[dict, dict]:
    """Pictures by key, and their questions and answers by number, as `train.align` takes them."""
    dice = Random(f"{split}/{number}")
    pictures, asked = {}, {}
    for key in map(str, range(size)):
        pictures[key], facts = draw(dice, hardness)
        asked[key] = []
        for question, answer in facts:
            of_question, first = QUESTIONS[question]
            asked[key].append((of_question, first + answer))
    return pictures, asked


def train_tower() -> PaliGemma:
    """The embedded base with the small tower, after STEPS more batches."""
    model = load_model(EMBEDDED)
    small_tower(model)
    head, optimizer = open_head(model, 0)
    for step in tqdm(range(STEPS), "tower"):
        torch.manual_seed(7_000_003 + step)  # of the moves in `loss_of`
        hardness = min(1.0, 0.5 + step / STEPS)
        loss = loss_of(model, head, *batch("more", step, hardness), "none")
        set_rates(optimizer, rate_factor(step, STEPS, 50, "cosine"))
        update(loss, model, head, optimizer)
    return model.eval()


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("train.tower", __doc__)
    add_flag(parser, "--out", "file to write", OUT, type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    tensors = train_tower().vision_tower.to(torch.bfloat16).state_dict()
    with atomic_path(args.out) as temporary:
        save_tensors(tensors, temporary)


if __name__ == "__main__":
    run_command(main)
