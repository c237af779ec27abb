"""Hits and misses of a result: which questions of `eval.vqa` or `eval.needle` the explorer shows, and their truth.

In: the results folder, and the data that was asked about. Out: `Question`s, half of them hits as far as there are.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from PIL import Image

from eval import scenes
from eval.bench import records_of
from eval.datasets import Annotation
from eval.needle import words_of
from eval.needle_scoring import judge, read_responses
from eval.vqa import Vqa
from eval.vqa_scoring import truths_of
from model.common import UserError, shown
from model.images import load_image


class Question(NamedTuple):
    """What is asked. truth: the right answer, in words. right: whether an answer is right; None where nobody knows.
    said: the answer in the results folder."""

    image: Image.Image
    prompt: str
    truth: str = ""
    right: Callable[[str], bool] | None = None
    said: str | None = None

    def is_right(self, answer: str) -> bool | None:
        return None if self.right is None else self.right(answer)


def questions_of(args: argparse.Namespace, prompt: str) -> list[Question]:
    """The questions of the folder --gallery, up to --limit. Raises UserError."""
    if (args.gallery / "results.json").is_file():
        return vqa_questions(args, prompt)
    kinds = [kind for kind in scenes.NEEDLES if (args.gallery / f"responses-{kind}.json").is_file()]
    if not kinds:
        raise UserError(
            f"{shown(args.gallery)}: no results.json of eval.vqa, nor responses of eval.needle on the scenes"
        )
    share = -(-args.limit // len(kinds))
    return [question for kind in kinds for question in needle_questions(args, kind, share)][: args.limit]


def both(items: Sequence, hits: Sequence[bool], limit: int) -> list:
    """The first items, as many hits as misses where there are so many."""
    right, wrong = ([item for item, hit in zip(items, hits, strict=True) if hit is kind] for kind in (True, False))
    misses = min(len(wrong), max(limit // 2, limit - len(right)))
    return right[: limit - misses] + wrong[:misses]


def vqa_questions(args: argparse.Namespace, prompt: str) -> list[Question]:
    """Of eval.vqa's results.json, with the truth from --data."""
    results = {str(record["question_id"]): record["answer"] for _, record in records_of(args.gallery / "results.json")}
    benchmark, limit = Vqa(), len(results) if args.data == "embedded" else None
    unused = dict.fromkeys(("questions", "annotations", "scoring", "guess", "answerability", "prompt"))
    flags = {"data": args.data, "images": args.images, "template": prompt, "limit": limit}
    asked = [q for q in benchmark.questions(Namespace(**unused, **flags)) if str(q.id) in results]
    if not asked:
        raise UserError(f"{shown(args.gallery)}: none of its questions is in --data {shown(args.data)}: give its data")

    def right(answer: str, question) -> bool:
        return next(iter(benchmark.score(question, answer).values())) >= 0.5

    hits = [right(results[str(q.id)], q) for q in asked]
    return [
        Question(
            load_image(q.images()[0]),
            q.prefix,
            q.truth.answer if isinstance(q.truth, Annotation) else truths_of(q.truth)[0],
            partial(right, question=q),
            results[str(q.id)],
        )
        for q in both(asked, hits, args.limit)
    ]


def needle_questions(args: argparse.Namespace, kind: str, limit: int) -> list[Question]:
    """Of eval.needle's responses about the scenes: the questions of the paper's protocol about each test."""
    records = [
        r for r in read_responses(args.gallery / f"responses-{kind}.json") if not r["ground_truth"].startswith("0,")
    ]
    judged = [(record, verdict[2]) for record in records if (verdict := judge(record)) is not None]
    chosen = both(*zip(*judged, strict=True), limit) if judged else []
    found = []
    for record in chosen:
        count = record["ground_truth"].count(";") + 1
        for sample in scenes.needle(kind, "test", record["id"], needles=count).samples():
            truth = f"{sample.suffix} ({words_of(kind)})"
            found.append(Question(sample.image, sample.prefix, truth, partial(_is_word, word=sample.suffix)))
    return list(islice(found, limit))


def _is_word(answer: str, word: str) -> bool:
    return answer.strip().lower() == word
