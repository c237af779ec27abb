"""Attention shift: how a picture in the middle of a text changes which layers attend to the text
before and after it.

    python -m eval.systems.shift --model runs/wings-2/model
    python -m eval.systems.shift --model embedded --slot inside --data examples.jsonl

In: a model, and prompts with a picture each. Out: LAWS by layer for the text before the picture,
the picture and the text after it; the attention shift with its 95 % interval; shift.json.

LAWS (Zhang et al., "Wings: Learning Multimodal LLMs without Text-only Forgetting", NeurIPS 2024):
the attention weights of a layer, mean over heads, summed over all queries and over the keys of a
group; bos is text. The shift is 1 − E[ρ(before, after)], ρ Pearson's correlation of two LAWS over
the layers: from 0, the same layers attend to both texts, to 2. PaliGemma puts the picture first and
has none; `--slot inside` puts it between the words, as for WINGS.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from eval.bench import write_json
from eval.command import add_flag, add_model_flags, command_parser, positive
from eval.data.records import one_picture_records
from eval.explore.record import decoder_maps
from eval.open import open_subject, out_folder, subject_of
from eval.report import interval_of, interval_text, markdown_table
from model.common import run_command, shown
from model.paligemma import PaliGemma
from model.processor import Processor
from model.systems.configs import WingsConfig
from model.systems.processors import SlotProcessor
from model.turns import SLOT

GROUPS = ("text before", "picture", "text after")


class Shift(NamedTuple):
    """laws (examples, layers, 3): LAWS of each of GROUPS in one example; `queries` (examples,):
    what they add up to."""

    laws: np.ndarray
    queries: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """(layers, 3): mean over examples of LAWS, in percent of the queries."""
        return 100 * (self.laws / self.queries[:, None, None]).mean(axis=0)

    @property
    def each(self) -> np.ndarray:
        """1 − ρ of each example; NaN where a curve is flat, such as that of no text at all."""
        curves = self.laws - self.laws.mean(axis=1, keepdims=True)
        before, after = curves[..., 0], curves[..., 2]
        scale = np.sqrt((before**2).sum(axis=1) * (after**2).sum(axis=1))
        correlations = np.full(len(scale), np.nan)
        np.divide((before * after).sum(axis=1), scale, out=correlations, where=scale > 1e-9)
        return 1 - correlations


def put_slot(prompt: str, share: float = 0.5) -> str:
    """`prompt` with a picture's slot after that share of its words, never before the first nor
    after the last of several. It stands before the space, so that the words keep their tokens. A
    prompt that has a slot is unchanged."""
    if SLOT in prompt:
        return prompt
    words = prompt.split(" ")
    place = min(max(1, round(share * len(words))), max(1, len(words) - 1))
    words[place - 1] += SLOT
    return " ".join(words)


def measure(
    model: PaliGemma,
    processor: Processor,
    examples: Sequence[tuple[Any, str]],
) -> Shift:
    """LAWS of (picture, prompt) pairs; `model` must be in eval mode. Of a differential attention it
    is the first map's, whose rows sum to 1. Raises UserError for a decoder without attention, and
    NonFiniteError."""

    def received(weights: torch.Tensor) -> torch.Tensor:
        """What each key gets from all queries, the mean over heads."""
        return weights[0].float().mean(0).sum(0)

    # the mark stays where it is: a PaliGemma that is asked reads its picture first
    if type(processor) is Processor:
        processor = SlotProcessor(processor.config, processor.tokenizer, processor.max_length)
    laws, queries = [], []
    for number, (picture, prompt) in enumerate(examples, start=1):
        row = processor.row_of(1, [(prompt, None)])
        batch = processor.pad([row], [picture]).to(model.device)
        is_picture = batch.input_ids[0] == model.config.image_token_id
        after = is_picture.cumsum(0) > 0
        groups = torch.stack((~after, is_picture, after & ~is_picture), dim=1).float()  # (S, 3)
        maps, *_ = decoder_maps(
            model,
            received,
            f"prompt {number}",
            input_ids=batch.input_ids,
            pixel_values=batch.pixel_values,
            token_type_ids=batch.token_type_ids,
        )
        by_layer = torch.stack([first for first, *_ in maps.values()])  # (layers, S)
        laws.append((by_layer @ groups).cpu().numpy())
        queries.append(batch.input_ids.shape[1])
    return Shift(np.array(laws), np.array(queries))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.systems.shift", __doc__)
    add_model_flags(parser)
    data = "embedded, or a JSONL file of image, prefix, suffix"
    add_flag(parser, "--data", data, "embedded", metavar="SRC")
    slot = "of the picture (default: inside for WINGS, else first)"
    add_flag(parser, "--slot", slot, choices=("first", "inside"))
    add_flag(parser, "--limit", "prompts", 100, type=positive, metavar="N")
    out = "folder of the files (default: runs/eval/MODEL/shift)"
    add_flag(parser, "--out", out, type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    # 1. the prompts
    subject = subject_of(args)
    out = out_folder(args.out, subject.title, "shift")
    source = args.data if args.data == "embedded" else f"jsonl:{args.data}"
    records = one_picture_records(source, args.limit)
    model, processor = open_subject(args, subject)
    slot = args.slot or ("inside" if isinstance(model.config, WingsConfig) else "first")
    examples = []
    for record in records:
        prompt = put_slot(record.prefix) if slot == "inside" else record.prefix.replace(SLOT, "")
        examples.append((record.pictures[0], prompt))
    # 2. the shift
    shift = measure(model, processor, examples)
    defined = shift.each[~np.isnan(shift.each)]
    interval = interval_of(defined) if len(defined) else None
    result = {
        "model": subject.title,
        "data": args.data,
        "slot": slot,
        "prompts": len(examples),
        "laws_percent": [dict(zip(GROUPS, layer, strict=True)) for layer in shift.shares.tolist()],
        "attention_shift": interval,
        "undefined": len(examples) - len(defined),
    }
    write_json(out / "shift.json", result)
    # 3. its table
    about = f"% of the attention of all queries, mean of {len(examples)} prompts, picture {slot}"
    print(f"LAWS of {shown(subject.title)}, {about}")
    body = []
    for number, layer in enumerate(shift.shares, start=1):
        body.append([f"{number}", *(f"{share:.2f}" for share in layer)])
    print("\n".join(markdown_table(["layer", *GROUPS], body)))
    text = "not defined, since nothing stands before the picture"
    if interval:
        text = interval_text(interval, 3)
    print(f"attention shift: {text}\nin {shown(out)}: shift.json")


if __name__ == "__main__":
    run_command(main)
