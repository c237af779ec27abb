"""Attention on the picture: the share of it in each layer, and the parts that the query deciding an answer attends to.

    python -m eval.attention --image photo.jpg --prompt "answer en What is on the table?"

In: a picture and a prompt. Out: LAWS by layer, printed and as `laws.png`; and `attention.png`, the attention of the
position that decides an answer token, drawn over the picture: of the plain model, and for a differential one of both
its maps and of their difference.

LAWS (Zhang et al., "Wings: Learning Multimodal LLMs without Text-only Forgetting", NeurIPS 2024): the attention weights
of a layer, averaged over heads, summed over all queries i and over the keys j of a token group. Rows of attention sum
to 1, so the LAWS of all groups add up to the number of queries. The picture comes first in PaliGemma: the groups are
the picture and the text after it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from eval import figures
from eval.command import Report, add_flag, add_json_flag, command_parser, print_report
from eval.explore.record import answer
from eval.overlay import Panel, full_color, sheet
from eval.session import add_model_flags, model_of, open_model, open_plain, out_folder
from model.attention import Attention, attention_modules, tapped
from model.common import UserError, quoted, run_command
from model.generate import check_finite
from model.images import load_image
from model.language import TextModel
from model.paligemma import PaliGemma


class Look(NamedTuple):
    """One attention map of one layer, reduced, mean over heads: (S,) float32 on the CPU, of one row."""

    received: torch.Tensor  # weights summed over all queries
    last: torch.Tensor  # the weights of the last query


@torch.no_grad()
def decoder_maps(model: PaliGemma | TextModel, reduce: Callable[[torch.Tensor], Any], name: str, **batch) -> list[list]:
    """What `reduce` makes of the one or two maps (B, N, Sq, Sk) of each decoder layer, A₁ first, in a forward pass.

    batch: the model's arguments. Each map is reduced at once: complete maps of a long prompt would fill the memory.
    Raises NonFiniteError, which `name`s the question.
    """
    layers = [m for path, m in attention_modules(model).items() if path.startswith("language_model.")]
    found: dict[Attention, list] = {layer: [] for layer in layers}

    def tap(maps: list, weights: torch.Tensor) -> None:
        maps.append(reduce(weights))

    with tapped({layer: partial(tap, maps) for layer, maps in found.items()}):
        check_finite(model(**batch, positions_to_keep=1), name)
    return list(found.values())


def look(model: PaliGemma, name: str, **batch) -> list[list[Look]]:
    """The maps of each decoder layer, see `decoder_maps`; `batch` is of one row."""

    def reduce(weights: torch.Tensor) -> Look:
        mean = weights[0].float().mean(0)  # (Sq, Sk)
        return Look(mean.sum(0).cpu(), mean[-1].cpu())

    return decoder_maps(model, reduce, name, **batch)


def laws(maps: Sequence[Look], is_picture: torch.Tensor) -> list[tuple[float, float]]:
    """(LAWS on the picture, LAWS on the text) of each layer, from one map a layer; is_picture (S,) is boolean."""
    return [(float(m.received[is_picture].sum()), float(m.received[~is_picture].sum())) for m in maps]


def overlays(
    image: Image.Image,
    columns: Mapping[str, Sequence[Look]],
    is_picture: torch.Tensor,
    layers: Sequence[int],
    title: str,
) -> Image.Image:
    """The last query's attention drawn over the picture, one per map; the maps of one of the `layers` (counted from 1)
    share a row. After maps A1 and A2 comes their difference, in a color for each of them.

    Maps of one layer share their scale, the difference has its own.
    """
    panels, keys = [], len(is_picture)
    side = round(sqrt(int(is_picture.sum())))
    for layer in layers:
        grids = {name: maps[layer - 1].last[is_picture].reshape(side, side).numpy() for name, maps in columns.items()}
        limit = max(full_color(grid, keys) for grid in grids.values())
        panels += [
            Panel(f"layer {layer}, {name}", grid, limit, f"{100 * float(grid.sum()):.1f} % on the picture")
            for name, grid in grids.items()
        ]
        if "A2" in grids:
            rest = grids["A1"] - grids["A2"]
            note = f"{100 * float(rest.sum()):+.1f} points on the picture"
            panels.append(Panel(f"layer {layer}, A1 - A2", rest, full_color(rest, keys, True), note, ("A1", "A2")))
    each = len(panels) // len(layers)
    return sheet(image, panels, each if each > 1 else min(4, len(panels)), title)


def spread(layers: int, most: int = 4) -> list[int]:
    """Up to `most` of the layers 1 … `layers`, evenly spaced from the first to the last."""
    return sorted({round(1 + (layers - 1) * step / max(1, most - 1)) for step in range(most)})


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.attention", __doc__)
    add_model_flags(parser)
    add_flag(parser, "--image", "a picture", required=True, metavar="FILE")
    add_flag(parser, "--prompt", "such as 'answer en Where is the dog?'", required=True, metavar="TEXT")
    token = "answer token whose attention is drawn, counted from 0"
    add_flag(parser, "--token", token, 0, type=int, metavar="N")
    layers = "layers to draw, counted from 1 (default: four, from the first to the last)"
    add_flag(parser, "--layers", layers, type=int, nargs="+", metavar="N")
    add_flag(parser, "--out", "folder of the figures (default: runs/eval/MODEL/attention)", type=Path, metavar="DIR")
    add_json_flag(parser)
    args = parser.parse_args(argv)
    image, subject = load_image(args.image), model_of(args)
    title, out = subject.title, out_folder(args.out, subject.title, "attention")
    model, processor = open_model(args, subject)
    depth = model.config.text.num_hidden_layers
    layers = args.layers or spread(depth)
    if not all(1 <= layer <= depth for layer in layers):
        raise UserError(f"--layers {' '.join(map(str, layers))}: expected numbers from 1 to {depth}")
    limit = max(32, min(args.token + 1, processor.max_length or args.token + 1))
    said = answer(model, processor, image, args.prompt, limit)
    if not 0 <= args.token < len(said.new):
        raise UserError(f"--token {args.token}: the answer {said.text!r} has tokens 0 to {len(said.new) - 1}")
    inputs = said.inputs(args.token)
    maps = list(zip(*look(model, quoted(args.prompt), **inputs), strict=True))  # one or two, each with a Look per layer
    columns = dict(zip(("A1", "A2") if len(maps) == 2 else (title,), maps, strict=True))
    if subject.run is not None:
        weight = next(model.parameters())
        del model
        plain = look(open_plain(subject, weight), quoted(args.prompt), **inputs)
        columns = {"plain": [map_ for (map_,) in plain]} | columns

    is_picture = (inputs["input_ids"][0] == processor.config.image_token_id).cpu()
    number = int(said.new[args.token])
    is_piece = number < processor.tokenizer.vocab_size()  # the embedding has a few rows more
    token = processor.tokenizer.id_to_piece(number).replace("\u2581", " ").strip() if is_piece else f"id {number}"
    drawn = overlays(image, columns, is_picture, layers, f"{title}: attention that decides {token!r}")
    figures.save(drawn, out / "attention.png")
    report = report_of(columns, is_picture, token, said.text)
    chart = figures.line_chart(
        {
            name: [(n, 100 * picture / (picture + text)) for n, (picture, text) in enumerate(laws(maps, is_picture), 1)]
            for name, maps in columns.items()
        },
        f"{title}: attention on the picture",
        "layer",
        "LAWS, % of the weight of all queries",
    )
    figures.save(chart, out / "laws.png")
    lines = [f"{args.prompt} | {said.text}", *report.lines, f"in {out}: laws.png, attention.png"]
    print_report(Report(report.values, lines), args.json)


def report_of(columns: Mapping[str, Sequence[Look]], is_picture: torch.Tensor, token: str, text: str) -> Report:
    """LAWS by layer, and the share of the deciding query's attention that is on the picture, for each column."""
    measured = {name: laws(maps, is_picture) for name, maps in columns.items()}
    deciding = {name: [float(m.last[is_picture].sum()) for m in maps] for name, maps in columns.items()}
    values = {
        "answer": text,
        "token": token,
        "queries": len(is_picture),
        "laws": {name: [{"picture": p, "text": t} for p, t in pairs] for name, pairs in measured.items()},
        "deciding_query": deciding,
    }
    lines = [
        f"% of the attention that falls on the picture: of all {len(is_picture)} queries (LAWS), and of the one that "
        f"decides {token!r}",
        "     " + "".join(f"{name:>20}" for name in columns),
        "layer" + f"{'LAWS':>11}{'deciding':>9}" * len(columns),
    ]
    for number in range(len(next(iter(columns.values())))):
        pairs = ((*measured[name][number], deciding[name][number]) for name in columns)
        shares = (f"{100 * picture / (picture + text):11.2f}{100 * share:9.2f}" for picture, text, share in pairs)
        lines.append(f"{number + 1:5}" + "".join(shares))
    return Report(values, lines)


if __name__ == "__main__":
    run_command(main)
