"""`train.finetune --show-batch`: the first batch of a run as the model reads it: the text of every
row, with what is learned between ⟦ and ⟧, and a sheet of the pictures. Nothing is trained or
kept."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
from PIL import Image

from eval import figures
from model.boxes import parse_objects
from model.common import shown
from model.processor import Processor
from train.data.batches import Order
from train.data.sources import read_split
from train.model import open_model, open_processor
from train.plan import ALONE
from train.settings import Settings
from weights.masks import load_mask_coder


def show_batch(settings: Settings, sheet: Path) -> list[str]:
    """The lines to print, with ↵ for a newline and no padding; `sheet` gets the pictures. Raises
    UserError."""
    # 1. the batch
    figures.check_name(sheet)
    model, _ = open_model(settings, torch.device("meta"))  # shapes and the tokenizer are enough
    processor, _ = open_processor(settings, model)
    single = replace(settings, step_batch=None)  # data may be too few for a step
    order = Order(read_split(settings), processor, single, ALONE)
    micro = next(order.steps(0))[0]
    batch = micro.batch
    pixels = ((batch.pixel_values + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    images = [Image.fromarray(picture) for picture in pixels]

    # 2. its texts; boxes and masks that are learned are drawn
    coder = load_mask_coder(settings.masks_file)
    lines = []
    slots = iter((batch.image_index + 1).tolist())
    for number, name in enumerate(micro.names):
        valid = batch.attention_mask[number].bool()
        ids = batch.input_ids[number][valid].tolist()
        is_learned = (batch.labels[number][valid] != -100).tolist()
        text = ""
        for learned, group in groupby(zip(ids, is_learned, strict=True), key=itemgetter(1)):
            part = text_of([token for token, _ in group], processor, slots)
            text += f"⟦{part}⟧" if learned else part
            place = re.search(r"\[picture (\d+)\]", text)
            if learned and place:
                picture = int(place[1]) - 1
                image = images[picture]
                said = parse_objects(part.removesuffix("<eos>"), *image.size)
                if said:
                    images[picture] = figures.draw_objects(image, said, coder)
        of_row = f"{len(ids)} tokens, {sum(is_learned)} of them learned"
        lines += [f"{number + 1}  {shown(name)}: {of_row}", f"   {text}"]
    lines += [f"left out {line}" for line in micro.bad]

    # 3. its pictures
    if images:
        captions = [f"picture {number + 1}" for number in range(len(images))]
        title = "the pictures, as the model sees them"
        figures.save(figures.contact_sheet(images, captions, title=title), sheet)
        lines.append(f"in {shown(sheet)}: {len(images)} pictures of {pixels.shape[1]} px")
    return [*lines, "nothing was trained"]


def text_of(ids: list[int], processor: Processor, slots: Iterator[int]) -> str:
    """Tokens as text; a picture's are one [picture n], control tokens have their names."""
    config, tokenizer = processor.config, processor.tokenizer
    control = {config.bos_token_id, config.eos_token_id, config.pad_token_id}

    def kind(token: int) -> str:
        if token == config.image_token_id:
            return "picture"
        return "control" if token in control else "text"

    text = ""
    for of_kind, group in groupby(ids, key=kind):
        tokens = list(group)
        if of_kind == "picture":
            for _ in range(len(tokens) // config.num_image_tokens):
                text += f"[picture {next(slots)}]"
        elif of_kind == "control":
            text += "".join(map(tokenizer.id_to_piece, tokens))
        else:
            text += tokenizer.decode(tokens)
    return text.replace("\n", "↵")
