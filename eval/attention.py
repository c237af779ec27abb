"""Where a model looks: how much attention each layer spends on the picture, and which parts of it an answer looks at.

    python -m eval.attention --image photo.jpg --prompt "answer en What is on the table?"

In: a picture and a prompt. Out: LAWS by layer, printed and as `laws.png`; and `attention.png`, the attention of the
position that decides an answer token, drawn over the picture: of the plain model, and for a differential one of both
its maps and of their difference. Next: nothing; this is for the reader.

LAWS (Zhang et al., "Wings: Learning Multimodal LLMs without Text-only Forgetting", NeurIPS 2024): the attention weights
of a layer, averaged over heads, summed over all queries i and over the keys j of a token group. Rows of attention sum
to 1, so the groups' LAWS add up to the number of queries. A picture comes first in PaliGemma: the groups are the
picture and the text after it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from eval import figures
from eval.session import add_model_flags, model_of, open_model
from model.attention import attention_modules, tapped
from model.common import UserError, run_command
from model.generate import generate
from model.images import load_image
from model.paligemma import PaliGemma
from weights.load import load_model


class Look(NamedTuple):
    """What one attention map of one layer does with each key, mean over heads: (S,) float32 on the CPU, of one row."""

    received: torch.Tensor  # weights summed over all queries
    last: torch.Tensor  # the weights of the last query


@torch.no_grad()
def look(model: PaliGemma, **batch) -> list[list[Look]]:
    """One forward pass of one row, `batch` as the model's arguments: for each decoder layer its one map or two, A₁
    first. Maps are reduced as they come: whole ones of a long prompt would fill the memory."""
    layers = [m for path, m in attention_modules(model).items() if path.startswith("language_model.")]
    found: list[list[Look]] = [[] for _ in layers]

    def watch(maps: list[Look]):
        def tap(weights: torch.Tensor) -> None:
            mean = weights[0].float().mean(0)  # (Sq, Sk)
            maps.append(Look(mean.sum(0).cpu(), mean[-1].cpu()))

        return tap

    with tapped({layer: watch(maps) for layer, maps in zip(layers, found, strict=True)}):
        model(**batch, positions_to_keep=1)
    return found


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
    """The last query's attention on the picture, a picture a map; several maps of one of the `layers` (counted from 1)
    fill a row. With maps A1 and A2 their difference follows, red where A1 is larger and blue where A2 is.

    Maps of one layer share their scale, the difference has its own; captions name what full color stands for.
    """
    pictures, captions = [], []
    side = round(sqrt(int(is_picture.sum())))
    for layer in layers:
        grids = {name: maps[layer - 1].last[is_picture].reshape(side, side) for name, maps in columns.items()}
        limit = max(float(grid.max()) for grid in grids.values())
        limits = dict.fromkeys(grids, limit)
        if "A2" in grids:
            grids["A1 - A2"] = grids["A1"] - grids["A2"]
            limits["A1 - A2"] = float(grids["A1 - A2"].abs().max()) or limit  # equal maps: no color
        for name, grid in grids.items():
            share = 100 * float(grid.sum())
            on_picture = f"{share:+.1f} points" if name == "A1 - A2" else f"{share:.1f} %"
            pictures.append(figures.overlay_attention(image, grid.numpy(), limits[name], size=448))
            captions.append(f"layer {layer}, {name}: {on_picture} on the picture, full color {limits[name]:.2g}")
    each = len(pictures) // len(layers)
    return figures.contact_sheet(pictures, captions, title=title, columns=each if each > 1 else 4, size=220)


def spread(layers: int, most: int = 4) -> list[int]:
    """Up to `most` of the layers 1 … `layers`, evenly from the first to the last."""
    return sorted({round(1 + (layers - 1) * step / max(1, most - 1)) for step in range(most)})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser)
    parser.add_argument("--image", required=True, metavar="FILE", help="a picture")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="such as 'answer en Where is the dog?'")
    parser.add_argument(
        "--token",
        type=int,
        default=0,
        metavar="N",
        help="answer token whose attention is drawn, counted from 0 (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        metavar="N",
        help="layers to draw, counted from 1 (default: four, from the first to the last)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the figures (default: runs/eval/MODEL/attention)"
    )
    parser.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON only (default: a table)"
    )
    args = parser.parse_args(argv)
    image = load_image(args.image)
    source, run, _ = model_of(args)
    model, processor, title = open_model(args)
    depth = model.config.text.num_hidden_layers
    layers = args.layers or spread(depth)
    if not all(1 <= layer <= depth for layer in layers):
        raise UserError(f"--layers {' '.join(map(str, layers))}: expected numbers from 1 to {depth}")

    weight = model.language_model.embed_tokens.weight
    batch = processor([image], [args.prompt]).to(weight.device)
    new = generate(
        model, batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask, max(32, args.token + 1)
    )[0]
    if not 0 <= args.token < len(new):
        raise UserError(f"--token {args.token}: the answer {processor.decode(new)!r} has tokens 0 to {len(new) - 1}")
    told = new[: args.token]  # the position before a token decides it: it is the last query
    inputs = {
        "input_ids": torch.cat((batch.input_ids[0], told))[None],
        "pixel_values": batch.pixel_values,
        "token_type_ids": torch.cat((batch.token_type_ids[0], torch.ones_like(told)))[None],
    }
    by_layer = look(model, **inputs)
    maps = list(zip(*by_layer, strict=True))  # one or two, each with a Look a layer
    columns = dict(zip(("A1", "A2") if len(maps) == 2 else (title,), maps, strict=True))
    if run is not None:
        del model
        plain = look(load_model(source, dtype=weight.dtype, device=weight.device), **inputs)
        columns = {"plain": [look_ for (look_,) in plain]} | columns

    is_picture = (inputs["input_ids"][0] == processor.config.image_token_id).cpu()
    measured = {name: laws(of_model, is_picture) for name, of_model in columns.items()}
    shares = {name: [100 * picture / (picture + text) for picture, text in pairs] for name, pairs in measured.items()}
    answers = {name: [100 * float(m.last[is_picture].sum()) for m in of_model] for name, of_model in columns.items()}
    token = processor.tokenizer.id_to_piece(int(new[args.token])).replace("\u2581", " ").strip()
    out = args.out or Path("runs", "eval", title, "attention")
    chart = figures.line_chart(
        {name: list(enumerate(values, start=1)) for name, values in shares.items()},
        f"{title}: attention on the picture",
        "layer",
        "LAWS, % of the weight of all queries",
    )
    sheet = overlays(image, columns, is_picture, layers, f"{title}: attention that decides {token!r}")
    figures.save(chart, out / "laws.png")
    figures.save(sheet, out / "attention.png")
    if args.json:
        print(
            json.dumps(
                {
                    "answer": processor.decode(new),
                    "token": token,
                    "queries": len(is_picture),
                    "laws": {
                        name: [{"picture": picture, "text": text} for picture, text in pairs]
                        for name, pairs in measured.items()
                    },
                    "deciding_query": {name: [value / 100 for value in values] for name, values in answers.items()},
                }
            )
        )
        return
    print(f"{args.prompt} | {processor.decode(new)}")
    print(
        f"% of the attention that falls on the picture: of all {len(is_picture)} queries (LAWS), and of the one that "
        f"decides {token!r}"
    )
    print("     " + "".join(f"{name:>20}" for name in columns))
    print("layer" + f"{'LAWS':>11}{'deciding':>9}" * len(columns))
    for number in range(depth):
        values = (f"{shares[name][number]:11.2f}{answers[name][number]:9.2f}" for name in columns)
        print(f"{number + 1:5}" + "".join(values))
    print(f"in {out}: laws.png, attention.png")


if __name__ == "__main__":
    run_command(main)
