"""Ask a model about pictures of your own.

    python -m eval.ask --image photo.jpg --prompt "answer en What is on the table?"
    python -m eval.ask --image photo.jpg --prompt "detect cat" --draw boxes.png
    python -m eval.ask --adapter RUN --image photo.jpg --question "What is on the table?"
    python -m eval.ask --model Qwen/Qwen2-0.5B-Instruct --chat --prompt "What is a decoder?"

In: picture files and prompts in PaliGemma's language (`caption en`, `answer en QUESTION`, `detect
THING`, …); for a language model (Gemma, Gemma 2, Qwen1.5, Qwen2) prompts alone, which it continues
or, with --chat, answers. Out: the answer to every prompt for every picture; for detections, boxes
in the picture's own pixels, and a drawing.
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from eval import figures
from eval.command import add_flag, command_parser, positive, whole
from eval.data.published import fill_prompt
from eval.open import add_model_flags, kind_of, model_of, open_model, stored_prompt, toy_note
from model.common import UserError, run_command, shown
from model.generate import NonFiniteError, ask, check_options
from model.images import load_image
from model.processor import parse_boxes

BATCH = 16  # prompts at a time


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.ask", __doc__)
    add_model_flags(parser)
    add_flag(parser, "--image", "pictures", [], nargs="+", metavar="FILE")
    add_flag(parser, "--prompt", "prompts, all for each picture", [], nargs="+", metavar="TEXT")
    add_flag(
        parser,
        "--question",
        "questions, put into the prompt of the training",
        [],
        nargs="+",
        metavar="TEXT",
    )
    add_flag(
        parser,
        "--chat",
        "put the prompt into the turns that the language model was trained with",
        False,
    )
    add_flag(
        parser, "--max-new-tokens", "limit of an answer's tokens", 64, type=positive, metavar="N"
    )
    add_flag(parser, "--temperature", "0 is greedy", 0.0, type=float)
    add_flag(parser, "--top-p", "nucleus to sample from", 1.0, type=float)
    add_flag(parser, "--seed", "of sampling", 0, type=whole(0, 2**63 - 1))
    add_flag(
        parser,
        "--draw",
        "draw the boxes of all answers on their pictures",
        type=Path,
        metavar="OUT.png",
    )
    add_flag(parser, "--json", "print one JSON list", False)
    args = parser.parse_args(argv)
    check_options(args.max_new_tokens, args.temperature, args.top_p)
    images = {name: load_image(name) for name in args.image}  # before a large model is read
    if args.draw:
        figures.check_name(args.draw)
    subject = model_of(args)
    prompts = args.prompt + [
        fill_prompt(stored_prompt(subject), question) for question in args.question
    ]
    if not prompts:
        raise UserError("give a --prompt, such as 'caption en', or a --question")
    is_text = kind_of(subject.source) == "text"
    if is_text and (args.image or args.question or args.draw or subject.run):
        raise UserError(
            f"{shown(subject.name)} reads text alone: leave out --image, --question, --draw and "
            "--adapter"
        )
    if not is_text and (args.chat or not args.image):
        raise UserError(
            f"{shown(subject.name)} answers about pictures: give --image FILE, and leave out --chat"
        )
    model, processor = open_model(args, subject, text=is_text)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(args.seed)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "generator": generator}
    if is_text:
        texts = processor.ask(model, prompts, args.max_new_tokens, args.chat, **sampling)
        answers = [
            {"prompt": prompt, "answer": text} for prompt, text in zip(prompts, texts, strict=True)
        ]
    else:
        asked, answers = list(product(args.image, prompts)), []
        for start in range(0, len(asked), BATCH):
            names, texts = zip(*asked[start : start + BATCH], strict=True)
            try:
                said = ask(
                    model,
                    processor,
                    [images[name] for name in names],
                    texts,
                    args.max_new_tokens,
                    **sampling,
                )
            except NonFiniteError as error:
                raise NonFiniteError(
                    error.rows, f"question {shown(names[error.rows[0]])}"
                ) from None
            for name, prompt, text in zip(names, texts, said, strict=True):
                boxes = parse_boxes(text, *images[name].size)
                boxes = [
                    {"label": label, "box": [round(side, 1) for side in box]}
                    for label, box in boxes
                ]
                answers.append({"image": name, "prompt": prompt, "answer": text, "boxes": boxes})
    if args.draw:
        drawn = []
        for name in args.image:
            boxes = [
                box for answer in answers if answer["image"] == name for box in answer["boxes"]
            ]
            sides, labels = [box["box"] for box in boxes], [box["label"] for box in boxes]
            drawn.append(figures.draw_boxes(images[name], sides, labels, least=448))
        titles = [Path(name).name for name in args.image]
        figures.save(
            drawn[0] if len(drawn) == 1 else figures.contact_sheet(drawn, titles, size=448),
            args.draw,
        )
    # a call that fails says one line, and no more
    print(f"{shown(subject.name)} answers{toy_note(subject)}", file=sys.stderr)
    if args.json:
        print(json.dumps(answers, ensure_ascii=False, indent=1))
        return
    for answer in answers:
        print(
            " | ".join(
                shown(answer[name], 10_000)
                for name in ("image", "prompt", "answer")
                if name in answer
            )
        )
        for box in answer.get("boxes", ()):
            left, top, right, bottom = box["box"]
            print(f"    {shown(box['label'])}: x {left} to {right}, y {top} to {bottom} pixels")


if __name__ == "__main__":
    run_command(main)
