"""Ask a model about pictures of your own.

    python -m eval.ask --image photo.jpg --prompt "answer en What is on the table?"
    python -m eval.ask --image photo.jpg --prompt "detect cat" --draw boxes.png
    python -m eval.ask --adapter RUN --image photo.jpg --question "What is on the table?"
    python -m eval.ask --model Qwen/Qwen2-0.5B-Instruct --chat --prompt "What is a decoder?"

In: picture files and prompts in PaliGemma's language (`caption en`, `answer en QUESTION`, `detect THING`, …); for a
language model (Gemma, Gemma 2, Qwen1.5, Qwen2) prompts alone, which it continues or, with --chat, answers.
Out: the answer to every prompt for every picture; for detections, boxes in the picture's own pixels, and a drawing.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from eval import figures
from eval.command import add_flag, command_parser, positive, whole
from eval.data import fill_prompt
from eval.open import (
    Subject,
    add_model_flags,
    is_language_model,
    model_of,
    open_language_model,
    open_model,
    out_folder,
    stored_prompt,
)
from model.common import UserError, quoted, run_command, shown
from model.generate import NonFiniteError, ask, ask_text, check_options
from model.images import load_image
from model.processor import parse_boxes

BATCH = 16  # prompts at a time


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.ask", __doc__)
    add_model_flags(parser)
    add_flag(parser, "--image", "pictures", [], nargs="+", metavar="FILE")
    add_flag(parser, "--prompt", "prompts, all for each picture (default: none)", [], nargs="+", metavar="TEXT")
    question = "questions, put into the prompt of the run's training (default: none)"
    add_flag(parser, "--question", question, [], nargs="+", metavar="TEXT")
    add_flag(parser, "--chat", "put the prompt into the turns that the language model was trained with", False)
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", 64, type=positive, metavar="N")
    add_flag(parser, "--temperature", "0 is greedy", 0.0, type=float)
    add_flag(parser, "--top-p", "nucleus to sample from", 1.0, type=float)
    add_flag(parser, "--seed", "of sampling", 0, type=whole(0, 2**63 - 1))
    add_flag(parser, "--draw", "draw the boxes of all answers on their pictures", type=Path, metavar="OUT.png")
    add_flag(parser, "--json", "print one JSON list", False)
    args = parser.parse_args(argv)
    # mistakes are told before a large model is read
    check_options(args.max_new_tokens, args.temperature, args.top_p)
    for name in args.image:
        load_image(name)
    if args.draw:
        figures.check_name(args.draw)
        out_folder(args.draw.parent)
    texts = args.prompt + args.question
    if not texts or not all(text.strip() for text in texts):
        raise UserError("--prompt, --question: none is given, or one is empty: write one, such as 'caption en'")
    subject = model_of(args)
    is_text = is_language_model(subject.source)
    if is_text and (args.image or args.question or args.draw or subject.run):
        raise UserError(f"{shown(subject.name)} reads text alone: leave out --image, --question, --draw and --adapter")
    if not is_text and (args.chat or not args.image):
        raise UserError(f"{shown(subject.name)} answers about pictures: give --image FILE, and leave out --chat")
    answers = answer_all(args, subject, is_text)
    if args.draw:
        draw_answers(args, answers)
    if args.json:
        print(json.dumps(answers, ensure_ascii=False, indent=1))
        return
    for answer in answers:
        print(" | ".join(shown(answer[name], 10_000) for name in ("image", "prompt", "answer") if name in answer))
        for box in answer.get("boxes", ()):
            left, top, right, bottom = box["box"]
            print(f"    {shown(box['label'])}: x {left} to {right}, y {top} to {bottom} pixels")
    if args.draw:
        print(f"{args.draw}: {sum(len(answer['boxes']) for answer in answers)} boxes")


def answer_all(args: Namespace, subject: Subject, is_text: bool) -> list[dict]:
    """The answer to each prompt, about each picture if there are any, with its boxes. Raises UserError."""
    prompts = args.prompt + [fill_prompt(stored_prompt(subject), question) for question in args.question]
    asked, answers = [(name, prompt) for name in args.image or [""] for prompt in prompts], []
    print(f"{shown(subject.name)} answers", file=sys.stderr)
    model, reader = (open_language_model if is_text else open_model)(args, subject)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(args.seed)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "generator": generator}
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        texts = [prompt for _, prompt in part]
        try:
            if is_text:
                said = ask_text(model, reader, texts, args.max_new_tokens, args.chat, **sampling)
            else:
                images = {name: load_image(name) for name in dict(part)}
                said = ask(model, reader, [images[name] for name, _ in part], texts, args.max_new_tokens, **sampling)
        except NonFiniteError as error:
            name, prompt = part[error.rows[0]]
            raise NonFiniteError(error.rows, ", ".join(filter(None, (shown(name), quoted(prompt))))) from None
        for (name, prompt), text in zip(part, said, strict=True):
            answer = {"prompt": prompt, "answer": text}
            if not is_text:
                boxes = parse_boxes(text, *images[name].size)
                boxes = [{"label": label, "box": [round(side, 1) for side in box]} for label, box in boxes]
                answer = {"image": name, **answer, "boxes": boxes}
            answers.append(answer)
    return answers


def draw_answers(args: Namespace, answers: list[dict]) -> None:
    """Write the pictures with the boxes of all answers about them to --draw."""
    drawn = []
    for name in args.image:
        boxes = [box for answer in answers if answer["image"] == name for box in answer["boxes"]]
        sides, labels = [box["box"] for box in boxes], [box["label"] for box in boxes]
        drawn.append(figures.draw_boxes(load_image(name), sides, labels, least=448))
    names = [Path(name).name for name in args.image]
    figures.save(drawn[0] if len(drawn) == 1 else figures.contact_sheet(drawn, names, size=448), args.draw)


if __name__ == "__main__":
    run_command(main)
