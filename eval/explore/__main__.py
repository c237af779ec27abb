"""Where a model looks: one page with every map of an answer, by token, layer and head, to open in a
browser.

    python -m eval.explore --image photo.jpg --prompt "answer en What is on the table?"
    python -m eval.explore --image photo.jpg --prompt "…" --adapter RUN --adapter OTHER
                                                         side by side, linked
    python -m eval.explore --data jsonl:test.jsonl --limit 20
                                                         hits and misses
    python -m eval.explore --model TEXT-MODEL --prompt "…" --mark "WORDS OF IT"
                                                         a language model over a text

In: a picture and a prompt, or examples with their answers; for a language model a text, and words
of it that are looked at in place of a picture. Out: one HTML file of less than 5 MB
that needs neither a server nor the network: the picture and the words under the attention that
decides each token of the answer; of a differential model both maps and what is left of them, beside
the base model's.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.command import add_flag, add_limit, add_model_flags, command_parser, positive
from eval.data.records import one_picture_records
from eval.explore.page import page
from eval.explore.record import Case
from eval.open import (
    Subject,
    load_subject,
    open_subject,
    out_folder,
    stored_prompt,
    subjects_of,
    wording_of,
)
from model.common import UserError, run_command, shown, write_text
from model.images import load_image


def cases_of(args: argparse.Namespace, subject: Subject, is_text: bool) -> list[Case]:
    """The questions that the flags name, not yet asked. Raises UserError."""
    if is_text:
        return [Case(None, args.prompt, mark=args.mark)]
    asked = args.image, args.prompt
    is_wrong = any(asked) if args.data else not all(asked)
    if is_wrong:
        raise UserError(
            "give --image and --prompt, or --data with examples and their answers; to language models "
            "--prompt alone"
        )
    if not args.data:
        return [Case(load_image(args.image), args.prompt)]
    records = one_picture_records(args.data, args.limit, args.images, stored_prompt(subject))
    cases = []
    for record in records:
        truths = () if record.detection else (*record.answers, record.suffix)  # boxes: not judged
        cases.append(Case(load_image(record.pictures[0]), record.prefix, truths))
    return cases


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.explore", __doc__)
    add_model_flags(parser, many=True)
    add_flag(parser, "--image", "a picture", metavar="FILE")
    add_flag(parser, "--prompt", "such as 'answer en Where is the dog?'", metavar="TEXT")
    words = "words of the prompt of a language model, such as a needle (default: all)"
    add_flag(parser, "--mark", words, "", metavar="TEXT")
    data = (
        "in place of both: embedded, jsonl:FILE, csv:FILE, vqav2:DIR or coco:FILE; shows hits and "
        "misses"
    )
    add_flag(parser, "--data", data, metavar="SRC")
    images = "folder of the pictures of --data (default: that of its file)"
    add_flag(parser, "--images", images, metavar="DIR")
    add_flag(parser, "--limit", "examples of --data, the first N", 12, type=positive, metavar="N")
    add_limit(parser, 32)
    out = "the page (default: runs/eval/MODEL/explore.html)"
    add_flag(parser, "--out", out, type=Path, metavar="FILE.html")
    args = parser.parse_args(argv)

    # 1. the questions, and the place of the page
    subjects = subjects_of(args)
    is_alone = args.prompt and not args.image and not args.data
    is_text = is_alone and all(wording_of(subject.source) == "text" for subject in subjects)
    cases = cases_of(args, subjects[0], is_text)
    out = args.out or out_folder(None, subjects[0].title) / "explore.html"
    out_folder(out.parent)
    # 2. the answers; one model is in memory at a time
    for subject in subjects:
        model, processor = open_subject(args, subject, text=is_text)
        for case in cases:
            case.ask(subject.title, model, processor, args.max_new_tokens)
        del model
        if subject.run is not None:  # the base of an adapter reads the same tokens
            plain = load_subject(args, subject._replace(run=None))
            for case in cases:
                case.add_plain(subject.title, plain)
    # 3. the page
    title = f"hits and misses · {args.data}"
    if not args.data:
        title = f"{args.prompt} · {', '.join(cases[0].answers)}"
    write_text(out, page(cases, title))
    for case in cases:
        for name, (said, _) in case.answers.items():
            print(" | ".join(shown(text, 10_000) for text in (name, case.prompt, said.text)))
    print(f"{out}: {out.stat().st_size / 1e3:,.0f} kB; open it in a browser")


if __name__ == "__main__":
    run_command(main)
