"""Where a model looks: one page with every map of an answer, by token, layer and head, to open in a browser.

    python -m eval.explore --image photo.jpg --prompt "answer en What is on the table?"
    python -m eval.explore --image photo.jpg --prompt "…" --adapter RUN --adapter OTHER        # side by side, linked
    python -m eval.explore --gallery runs/eval/MODEL/vqa                                       # hits and misses

In: a picture and a prompt, or the folder of `eval.vqa` or `eval.needle`, whose model the flags name. Out: one HTML file
of less than 5 MB that needs neither a server nor the network: the picture and the words under the attention that
decides each token of the answer; of a differential model both maps and what is left of them, beside the base model's.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.command import add_flag, add_outside_flag, command_parser, positive
from eval.explore.gallery import Question, questions_of
from eval.explore.page import Case, page
from eval.explore.record import answer, maps_of
from eval.session import Subject, add_model_flags, models_of, open_model, open_plain, out_folder, stored_prompt
from model.common import UserError, quoted, shown, write_text
from model.images import load_image
from model.processor import parse_boxes


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, many=True)
    add_flag(parser, "--image", "a picture", metavar="FILE")
    add_flag(parser, "--prompt", "such as 'answer en Where is the dog?'", metavar="TEXT")
    gallery = "instead of --image and --prompt: a folder of eval.vqa or eval.needle; shows hits and misses"
    add_flag(parser, "--gallery", gallery, type=Path, metavar="DIR")
    add_flag(parser, "--data", "of the gallery's questions, as eval.vqa takes it", "embedded", metavar="SRC")
    add_flag(parser, "--images", "folder of the pictures of --data (default: that of its file)", metavar="DIR")
    add_outside_flag(parser)
    add_flag(parser, "--limit", "questions of a gallery, half of them hits", 12, type=positive, metavar="N")
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", 32, type=positive, metavar="N")
    add_flag(parser, "--out", "the page (default: runs/eval/MODEL/explore.html)", type=Path, metavar="FILE.html")


def add_answer(case: Case, question: Question, model, processor, title: str, limit: int) -> None:
    """Let a model answer, and keep its maps. The first one's answer is judged, and its boxes are drawn."""
    said = answer(model, processor, question.image, question.prompt, limit)
    if not case.answers:
        case.hit = question.is_right(said.text)
        case.boxes = [list(box) for _, box in parse_boxes(said.text, *question.image.size)]
    case.answers[title] = said, maps_of(model, said, quoted(question.prompt))


def add_plain(case: Case, title: str, plain) -> None:
    """The maps of the base model at the tokens that the model of this title said."""
    said, maps = case.answers[title]
    beside = maps_of(plain, said, quoted(case.prompt))
    maps.kinds["plain"], maps.laws["plain"] = beside.kinds["A"], beside.laws["A"]


def look(args: argparse.Namespace, subjects: Sequence[Subject], questions: Sequence[Question]) -> list[Case]:
    """The cases of the questions: each model answers all; then the base of each adapter reads the same tokens. One
    model is in memory at a time. Raises UserError."""
    cases = [Case(question.image, question.prompt, truth=question.truth) for question in questions]
    for subject in subjects:
        model, processor = open_model(args, subject)
        for question, case in zip(questions, cases, strict=True):
            add_answer(case, question, model, processor, subject.title, args.max_new_tokens)
        weight = next(model.parameters())
        del model
        if subject.run is not None:
            plain = open_plain(subject, weight)
            for case in cases:
                add_plain(case, subject.title, plain)
    return cases


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.explore", __doc__)
    add_flags(parser)
    args = parser.parse_args(argv)
    if (args.gallery is None) == (args.image is None or args.prompt is None):
        raise UserError("give --image and --prompt, or --gallery with the folder of a result")
    subjects = models_of(args)
    out = args.out or out_folder(None, subjects[0].title) / "explore.html"
    out_folder(out.parent)
    if args.gallery is None:
        questions = [Question(load_image(args.image), args.prompt)]
        title = f"{args.prompt} · {', '.join(subject.title for subject in subjects)}"
    else:
        questions, title = questions_of(args, stored_prompt(subjects[0])), f"hits and misses · {args.gallery}"
    cases = look(args, subjects, questions)
    said = [(q.said, next(iter(case.answers.values()))[0].text) for q, case in zip(questions, cases, strict=True)]
    if others := sum(before not in (None, now) for before, now in said):
        print(f"{others} of {len(said)} answers differ from those in {args.gallery}: another model?", file=sys.stderr)
    write_text(out, page(cases, title))
    for case in cases:
        for name, (said, _) in case.answers.items():
            print(" | ".join(shown(text, 10_000) for text in (name, case.prompt, said.text)))
    print(f"{out}: {out.stat().st_size / 1e3:,.0f} kB; open it in a browser")
