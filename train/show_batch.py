"""`train.finetune --show-batch`: the first batch of a run as the model reads it: the text of every
row, with what is learned between ⟦ and ⟧, and a sheet of the pictures. Nothing is trained or
kept."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from PIL import Image

from eval import figures
from model.boxes import parse_boxes
from model.common import shown
from model.processor import Processor
from train.data.batches import Order
from train.data.sources import read_records
from train.distributed import World
from train.model import open_model, open_processor
from train.settings import Settings


def show_batch(settings: Settings, sheet: Path) -> list[str]:
    """The lines to print, with ↵ for a newline and no padding; `sheet` gets the pictures. Raises
    UserError."""
    figures.check_name(sheet)
    model, _ = open_model(settings, torch.device("meta"))  # shapes and the tokenizer are enough
    processor, _ = open_processor(settings, model)
    single = replace(
        settings, step_batch=None
    )  # a micro-batch is shown where data are too few for a step
    order = Order(read_records(settings), processor, single, World(0, 1, torch.device("cpu")))
    micro = next(order.steps(0))[0]
    batch, lines, slots = micro.batch, [], iter((micro.batch.image_index + 1).tolist())
    pixels = ((batch.pixel_values + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    images = [Image.fromarray(picture) for picture in pixels]
    for number, name in enumerate(micro.names):
        valid, text = batch.attention_mask[number].bool(), ""
        ids, learned = (
            batch.input_ids[number][valid].tolist(),
            (batch.labels[number][valid] != -100).tolist(),
        )
        for is_learned, group in groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1]):
            part = spell([token for token, _ in group], processor, slots)
            text += f"⟦{part}⟧" if is_learned else part
            if is_learned and (place := re.search(r"\[picture (\d+)\]", text)):
                image = images[picture := int(place[1]) - 1]
                if boxes := parse_boxes(part.removesuffix("<eos>"), *image.size):
                    labels, corners = zip(*boxes, strict=True)
                    images[picture] = figures.draw_boxes(image, corners, labels, least=448)
        lines += [
            f"{number + 1}  {shown(name)}: {len(ids)} tokens, {sum(learned)} of them learned",
            f"   {text}",
        ]
    lines += [f"left out {line}" for line in micro.bad]
    if images:
        captions = [f"picture {number + 1}" for number in range(len(images))]
        figures.save(
            figures.contact_sheet(images, captions, title="the pictures, as the model sees them"),
            sheet,
        )
        lines.append(f"in {shown(sheet)}: {len(images)} pictures of {pixels.shape[1]} px")
    return [*lines, "nothing was trained"]


def spell(ids: list[int], processor: Processor, slots: Iterator[int]) -> str:
    """Tokens as text; a picture's are one [picture n], control tokens have their names."""
    config, tokenizer, text = processor.config, processor.tokenizer, ""
    control = {config.bos_token_id, config.eos_token_id, config.pad_token_id}
    for kind, group in groupby(
        ids, key=lambda i: "picture" if i == config.image_token_id else i in control
    ):
        tokens = list(group)
        if kind == "picture":
            text += "".join(
                f"[picture {next(slots)}]" for _ in range(len(tokens) // config.num_image_tokens)
            )
        else:
            text += (
                "".join(map(tokenizer.id_to_piece, tokens)) if kind else tokenizer.decode(tokens)
            )
    return text.replace("\n", "↵")
