"""Ask a model about pictures of your own.

    python -m eval.ask --image photo.jpg --prompt "answer en What is on the table?"
    python -m eval.ask --image photo.jpg --prompt "detect cat" --draw boxes.png
    python -m eval.ask --image photo.jpg --prompt "segment cat" --draw cat.png --masks vae-oid.npz
    python -m eval.ask --adapter RUN --image photo.jpg --question "What is on the table?"
    python -m eval.ask --model Qwen/Qwen2-0.5B-Instruct --chat --prompt "What is a decoder?"

In: picture files and prompts in PaliGemma's language (`caption en`, `answer en QUESTION`, `detect
THING`, …); for a language model (Gemma 1 and 2, Llama, Qwen1.5, Qwen2) prompts alone, which it
continues or, with --chat, answers. Out: the answer to every prompt for every picture; for
detections, boxes in the picture's own pixels, and a drawing. With --json also how sure the model
is: the confidence of an answer is exp of the mean log-probability of its tokens, end token included;
the score of a box is the product of the probabilities of its four locations. They are those of the
model itself, whatever --temperature and --top-p have drawn.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import torch

from eval import figures
from eval.command import MASKS_HELP, add_flag, add_limit, add_model_flags, command_parser, whole
from eval.data.record import fill_prompt
from eval.open import open_subject, stored_prompt, subject_of, toy_note, wording_of
from eval.question import parts_of
from model.boxes import parse_objects
from model.common import UserError, run_command, shown
from model.generate import NonFiniteError, ask, check_options
from model.images import load_image
from model.masks import MaskCoder
from weights.masks import load_mask_coder

BATCH = 16  # prompts at a time


def parser_of() -> ArgumentParser:
    parser = command_parser("eval.ask", __doc__)
    add_model_flags(parser)
    texts = dict(nargs="+", metavar="TEXT")
    add_flag(parser, "--image", "pictures", [], nargs="+", metavar="FILE")
    add_flag(parser, "--prompt", "prompts, all for each picture", [], **texts)
    add_flag(parser, "--question", "questions, put into the prompt of the training", [], **texts)
    turns = "put the prompt into the turns that the language model was trained with"
    add_flag(parser, "--chat", turns, False)
    add_limit(parser, 64)
    add_flag(parser, "--temperature", "0 is greedy", 0.0, type=float)
    add_flag(parser, "--top-p", "nucleus to sample from", 1.0, type=float)
    add_flag(parser, "--seed", "of sampling", 0, type=whole(0, 2**63 - 1))
    boxes = "draw the boxes of all answers on their pictures"
    add_flag(parser, "--draw", boxes, type=Path, metavar="OUT.png")
    masks = f"draw masks too, with the coder of the model: {MASKS_HELP}"
    add_flag(parser, "--masks", masks, metavar="FILE")
    add_flag(parser, "--json", "print one JSON list", False)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser_of().parse_args(argv)

    # 1. what can fail before a large model is read
    names = ("max_new_tokens", "temperature", "top_p")
    options = {name: getattr(args, name) for name in names}
    check_options(**options)
    images = {name: load_image(name) for name in args.image}
    if args.draw:
        figures.check_name(args.draw)
        if args.draw.resolve() in [Path(name).resolve() for name in args.image]:
            raise UserError(f"--draw {shown(args.draw)}: is asked about: give another name")
    coder = load_mask_coder(args.masks)
    if coder and not args.draw:
        raise UserError("--masks draws: give --draw OUT.png too")
    subject = subject_of(args)
    prompts = list(args.prompt)
    for question in args.question:
        prompts.append(fill_prompt(stored_prompt(subject), question))
    if not prompts:
        raise UserError("give a --prompt, such as 'caption en', or a --question")
    name = shown(subject.name)
    is_text = wording_of(subject.source) == "text"
    if is_text and (images or args.question or args.draw or subject.run):
        raise UserError(
            f"{name} reads text alone: leave out --image, --question, --draw and --adapter"
        )
    if not is_text and (args.chat or not images):
        raise UserError(f"{name} answers about pictures: give --image FILE, and leave out --chat")

    # 2. the answers
    model, reader = open_subject(args, subject, text=is_text)
    options["generator"] = torch.Generator(model.device).manual_seed(args.seed)
    if is_text:
        answers = answers_in_text(model, reader, prompts, chat=args.chat, **options)
    else:
        answers = answers_about(model, reader, images, prompts, **options)

    # 3. a drawing, and the text
    if args.draw:
        write_drawing(images, answers, args.draw, coder)
    # a call that fails says one line, and no more
    print(f"{name} answers{toy_note(subject)}", file=sys.stderr)
    if args.json:
        print(json.dumps(answers, ensure_ascii=False, indent=1))
    else:
        print_answers(answers)


def answers_in_text(model, reader, prompts: list[str], **options) -> list[dict]:
    """The answer of a language model to each prompt."""
    sure = []
    texts = reader.ask(model, prompts, sure=sure, **options)
    answers = []
    for prompt, text, certainty in zip(prompts, texts, sure, strict=True):
        answers.append({"prompt": prompt, "answer": text, "confidence": certainty.confidence})
    return answers


def answers_about(
    model,
    processor,
    images: Mapping,
    prompts: list[str],
    **options,
) -> list[dict]:
    """The answer to each prompt about each picture, by name, with the boxes in it."""
    answers = []
    asked = list(product(images, prompts))
    for part in parts_of(asked, BATCH):
        names, texts = zip(*part, strict=True)
        pictures = [images[name] for name in names]
        try:
            sure = []
            said = ask(model, processor, pictures, texts, sure=sure, **options)
        except NonFiniteError as error:
            raise NonFiniteError(error.rows, f"question {shown(names[error.rows[0]])}") from None
        for name, prompt, text, certainty in zip(names, texts, said, sure, strict=True):
            boxes = []
            for found in parse_objects(text, *images[name].size):
                box = [round(side, 1) for side in found.box]
                score = certainty.scores[found.part]
                entry = {"label": found.label, "box": box, "score": score}
                if found.codes:
                    entry["codes"] = found.codes
                boxes.append(entry)
            answers.append(
                {
                    "image": name,
                    "prompt": prompt,
                    "answer": text,
                    "confidence": certainty.confidence,
                    "boxes": boxes,
                }
            )
    return answers


def write_drawing(
    images: Mapping,
    answers: Sequence[Mapping],
    path: Path,
    coder: MaskCoder | None,
) -> None:
    """Write the pictures with the boxes of all answers, and with their masks where there is a
    coder; several as one sheet."""
    drawn = []
    for name, image in images.items():
        found = []
        for answer in answers:
            if answer["image"] == name:
                found += parse_objects(answer["answer"], *image.size)
        drawn.append(figures.draw_objects(image, found, coder))
    sheet = drawn[0]
    if len(drawn) > 1:
        titles = [Path(name).name for name in images]
        sheet = figures.contact_sheet(drawn, titles, size=448)
    figures.save(sheet, path)


def print_answers(answers: Sequence[Mapping]) -> None:
    """A line for each answer, and one for each of its boxes."""
    for answer in answers:
        texts = [answer[name] for name in ("image", "prompt", "answer") if name in answer]
        print(" | ".join(shown(text, 10_000) for text in texts))
        for box in answer.get("boxes", ()):
            left, top, right, bottom = box["box"]
            print(f"    {shown(box['label'])}: x {left} to {right}, y {top} to {bottom} pixels")


if __name__ == "__main__":
    run_command(main)
