"""Make the small coder of masks beside the embedded base: a VQ-VAE that has seen drawn shapes.

    python -m train.masks          minutes on one core

In: a seed. Out: a file that `--masks FILE` opens, with its overlap on shapes that it has not seen;
`--masks embedded` opens the one of seed 0, weights/tiny/masks.safetensors. A published PaliGemma
needs big_vision's coder, since its tokens stand for the codes of that.

Source: van den Oord et al., "Neural Discrete Representation Learning", 2017: the decoder's gradient
goes to the encoder straight through the nearest codes; codes go to the vectors, and these to them.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm

from eval.command import add_flag, command_parser, whole
from eval.data.pictures import Dice
from model.common import atomic_path, run_command
from model.masks import CODES, SIDE, MaskCoder, crop
from weights.load import save_tensors

OUT = Path("runs/masks.safetensors")
WIDTH, SIZE = 4, 32
STEPS, ROWS = 4000, 64
RATE = 2e-3
COMMITMENT = 0.25  # how fast vectors go to their codes, beside codes to their vectors
RENEWED = 100  # steps between which a code is used
HELD_OUT = 1024  # shapes


def draw_shape(dice: Dice) -> Tensor:
    """A mask in its box, (64, 64) in [0, 1]: one to three wavy outlines together, of which a later
    one may be a hole."""
    canvas = 2 * SIDE
    while True:
        image = Image.new("1", (canvas, canvas))
        for number in range(1 + dice.below(3)):
            is_hole = number > 0 and dice.random() < 0.3
            ImageDraw.Draw(image).polygon(draw_outline(dice, canvas), fill=not is_hole)
        if box := image.getbbox():
            return crop(np.asarray(image), box)


def draw_outline(dice: Dice, canvas: int) -> list[float]:
    """x1, y1, x2, y2, … of corners around a point: few, or so many that they are a curve."""
    corners = dice.pick((3, 4, 5, 6, 8, 40, 40, 40))
    angle = math.tau * (dice.random() + np.arange(corners) / corners)
    radius = np.ones(corners)
    for waves in range(1, 5):
        height = dice.uniform(0, 0.5) / waves
        radius += height * np.sin(waves * angle + math.tau * dice.random())
    points = np.empty((corners, 2))
    for axis, wave in enumerate((np.cos(angle), np.sin(angle))):
        middle = dice.uniform(0.3, 0.7)
        points[:, axis] = middle + dice.uniform(0.08, 0.38) * radius * wave
    return (canvas * points).flatten().tolist()


def batches(split: str, count: int, seed: int) -> Iterator[Tensor]:
    """`count` batches (ROWS, 64, 64) of shapes."""
    dice = Dice(f"masks/{split}/{seed}")
    for _ in range(count):
        yield torch.stack([draw_shape(dice) for _ in range(ROWS)])


def coder_loss(coder: MaskCoder, masks: Tensor) -> Tensor:
    """How far decoded masks are from -1 and 1, and codes and vectors from each other."""
    vectors = coder.to_vectors(masks)
    codes = coder._vq_vae(coder._vq_vae.nearest(vectors))
    decoded = coder.to_masks(vectors + (codes - vectors).detach())
    return (
        F.mse_loss(decoded, 2 * masks - 1)
        + F.mse_loss(codes, vectors.detach())
        + COMMITMENT * F.mse_loss(vectors, codes.detach())
    )


@torch.no_grad()
def renew_codes(coder: MaskCoder, masks: Tensor) -> None:
    """Codes that are nearest to nothing begin anew where a vector is: otherwise most stay unused."""
    vectors = coder.to_vectors(masks).flatten(0, 1)
    is_unused = torch.ones(CODES, dtype=torch.bool)
    is_unused[coder._vq_vae.nearest(vectors)] = False
    drawn = torch.randperm(len(vectors))[: int(is_unused.sum())]
    coder._vq_vae._embedding[is_unused] = vectors[drawn]


def train_coder(seed: int) -> MaskCoder:
    """A coder that has learned STEPS batches of shapes."""
    torch.manual_seed(seed)
    coder = MaskCoder(WIDTH, SIZE).to(memory_format=torch.channels_last)  # takes half the time
    optimizer = torch.optim.AdamW(coder.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for step, masks in enumerate(tqdm(batches("train", STEPS, seed), "masks", STEPS)):
        if step % RENEWED == 0 and step < 0.75 * STEPS:
            renew_codes(coder, masks)
        coder_loss(coder, masks).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return coder.to(memory_format=torch.contiguous_format).eval()


@torch.no_grad()
def overlap(coder: MaskCoder, seed: int) -> float:
    """The mean IoU of shapes that were not trained on and of what their codes decode to."""
    shares = []
    for masks in batches("held-out", HELD_OUT // ROWS, seed):
        true = masks > 0.5
        said = coder.decode(coder.encode(masks)) > 0
        common = (true & said).sum((1, 2))
        either = (true | said).sum((1, 2))
        shares.append(common / either.clamp(min=1))
    return torch.cat(shares).mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("train.masks", __doc__)
    add_flag(parser, "--out", "file to write", OUT, type=Path, metavar="FILE")
    add_flag(parser, "--seed", "of the weights and the shapes", 0, type=whole(0))
    args = parser.parse_args(argv)
    coder = train_coder(args.seed)
    share = overlap(coder, args.seed)
    facts = {"seed": str(args.seed), "overlap": f"{share:.4f}"}
    with atomic_path(args.out) as temporary:
        save_tensors(coder.state_dict(), temporary, facts)
    print(f"{args.out}: overlap (IoU) {share:.3f} on {HELD_OUT} shapes that it has not seen")


if __name__ == "__main__":
    run_command(main)
