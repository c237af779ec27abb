"""Needles in prose: does a language model find one fact among others like it?

    python -m eval.systems.needles --model FOLDER
    python -m eval.systems.needles --model FOLDER --text book.txt --lengths 512 1024 --facts 1 16

In: a language model with its tokenizer, and prose: a UTF-8 file, by default the reference manual
that comes with Python (its package `pydoc_data`, PSF licence). Out: by length and number of facts
the share of exact answers, the log-probability of an answer and where the attention lies that
decides it, with 95 % intervals over contexts; needles.json with every question, layer and head, and
a figure.

A context of L tokens is prose with N facts, each behind a random sentence, such as "The magic number
of Oslo is 48213."; each city has two, a magic and a postal number. Of facts behind one sentence
those that are asked come first. A question is a fact up to its value. A
context is read once, and its questions are asked from the cache. Training and test share no form,
city, kind of value or prose.
"""

import json
import os.path
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from eval import figures
from eval.command import add_flag, add_model_flags, command_parser, positive
from eval.explore.record import deciding_maps
from eval.open import open_subject, out_folder, subject_of
from eval.report import interval_of, interval_text, markdown_table
from model.common import UserError, read_text, run_command, shown, write_text
from model.systems.chat import TextTokenizer

SEED = 11
LEAST = 200  # sentences of a split
WORDS = 8  # of a paragraph of prose
SHARES = ("asked", "others", "first", "rest")  # of attention


class Form(NamedTuple):
    """How a fact is spelled up to its value, of whom, and with which values."""

    templates: Sequence[str]
    cities: Sequence[str]
    value: Callable[[random.Random], str]


THINGS = (
    "amber apple arrow basket beacon bell bridge candle canyon cedar cliff copper coral crown "
    "desert eagle ember falcon feather forest garden glacier harbor hammer island ivory jungle "
    "kettle ladder lantern marble meadow mirror mountain needle ocean orchard pearl prairie silver"
).split()
FORMS = {
    "train": Form(
        ("The secret words of {} are", "The two signs of {} are"),
        (
            "Accra Algiers Amman Ankara Baku Bamako Bern Bogota Boston Bristol Budapest Caracas "
            "Chicago Cologne Dallas Denver Dublin Geneva Hanoi Helsinki Houston Jakarta Kabul "
            "Krakow Lagos Leeds Lyon Manila Miami Milan Munich Naples"
        ).split(),
        lambda dice: " ".join(dice.sample(THINGS, 2)),
    ),
    "test": Form(
        ("The magic number of {} is", "The postal number of {} is"),
        (
            "Athens Berlin Brussels Cairo Dakar Delhi Florence Glasgow Hamburg Havana Istanbul "
            "Kyoto Lima Lisbon London Madrid Montreal Moscow Nairobi Oslo Paris Prague Quito Riga "
            "Rome Seoul Sofia Sydney Tokyo Toronto Vienna Warsaw"
        ).split(),
        lambda dice: str(dice.randrange(10_000, 100_000)),
    ),
}
MOST = 2 * len(FORMS["test"].cities)


class Context(NamedTuple):
    """Prose with facts: token ids, (start, end) of each fact, and the ids of the questions about
    the first facts, each with its answer."""

    ids: list[int]
    places: list[tuple[int, int]]
    questions: list[tuple[list[int], list[int]]]
    shared: int  # tokens with which every answer begins, such as a space before digits

    @property
    def longest(self) -> int:
        """The tokens of a question with its answer, at most."""
        return max(len(question) + len(answer) for question, answer in self.questions)


def sentences_of(path: Path | None) -> list[str]:
    """The sentences of a file's paragraphs, or of Python's manual. Raises UserError."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
    else:
        text = read_text(path)
    sentences = {}  # each of them once
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        is_prose = len(words) >= WORDS and words[0][0].isupper() and words[-1].endswith(".")
        if is_prose:
            sentences |= dict.fromkeys(re.split(r"(?<=[.!?]) (?=[^\W\d_a-z])", " ".join(words)))
    if len(sentences) < 2 * LEAST:
        problem = f"{len(sentences)} sentences of prose, expected {2 * LEAST} or more"
        raise UserError(f"{path}: has {problem}: give a longer text")
    return list(sentences)


class Haystack:
    """Makes contexts from the prose of one split: the first half of the sentences is for training,
    the second for testing."""

    def __init__(self, tokenizer: TextTokenizer, sentences: Sequence[str], split: str):
        half = len(sentences) // 2
        part = sentences[:half] if split == "train" else sentences[half:]
        self.tokenizer = tokenizer
        self.sentences = [self.behind("is", f" {sentence}") for sentence in part]
        self.form = FORMS[split]
        values = [self.behind("is", f" {self.form.value(random.Random(n))}") for n in range(9)]
        self.shared = len(os.path.commonprefix(values))

    def behind(self, prefix: str, text: str) -> list[int]:
        """The ids of a text behind another one: by itself it may begin with a blank of the
        tokenizer's own."""
        start = len(self.tokenizer.encode(prefix))
        return self.tokenizer.encode(prefix + text)[start:]

    def prose(self, dice: random.Random, room: int) -> list[list[int]]:
        """Sentences in a row, the last one cut so that they have `room` tokens."""
        at = dice.randrange(len(self.sentences))
        chosen = []
        while room > 0:
            sentence = self.sentences[at % len(self.sentences)][:room]
            chosen.append(sentence)
            room -= len(sentence)
            at += 1
        return chosen

    def context(self, dice: random.Random, length: int, facts: int, asked: int) -> Context:
        """A context of `length` tokens with so many facts, and the questions about `asked` of
        them. Raises UserError if they do not fit."""
        # 1. the facts
        cities = dice.sample(self.form.cities, -(-facts // 2))
        pairs = [(template, city) for template in self.form.templates for city in cities]
        needles, questions = [], []
        for template, city in dice.sample(pairs, facts):
            value = self.form.value(dice)
            said = template.format(city)
            needles.append(self.behind("is", f" {said} {value}."))
            question = f"\n{said}"
            questions.append((self.behind("is", question), self.behind(question, f" {value}")))
        ids = list(self.tokenizer.begin)
        room = length - len(ids) - sum(map(len, needles))
        if room < length // 5:
            raise UserError(f"{facts} facts fill {length} tokens: ask fewer, or longer contexts")
        # 2. the prose around them, each behind a sentence
        sentences = self.prose(dice, room)
        gaps = [dice.randrange(len(sentences)) for _ in needles]
        places = {}
        for number, sentence in enumerate(sentences):
            ids += sentence
            for fact, needle in enumerate(needles):
                if gaps[fact] == number:
                    places[fact] = len(ids), len(ids) + len(needle)
                    ids += needle
        ordered = [places[fact] for fact in range(facts)]
        context = Context(ids, ordered, questions[:asked], self.shared)
        longest, limit = length + context.longest, self.tokenizer.max_length
        if longest > limit:
            problem = f"{length} tokens and a question are {longest}, the model reads {limit}"
            raise UserError(f"{problem}: ask shorter contexts")
        return context

    def contexts(
        self, length: int, facts: int, numbers: Sequence[int], asked: int
    ) -> Iterator[tuple[int, Context]]:
        """`context` for each of these numbers, from which it is drawn."""
        for number in numbers:
            dice = random.Random(f"{SEED}/{length}/{facts}/{number}")
            yield number, self.context(dice, length, facts, asked)


class Reply(NamedTuple):
    """What a model makes of a question. shares (4, layers, heads): SHARES of the attention that
    decides the first token by which values differ."""

    exact: bool
    log_probability: float
    shares: np.ndarray


@torch.no_grad()
def ask(model: Any, context: Context, name: str) -> list[Reply]:
    """The replies to all questions of a context. An answer is exact if each of its tokens is the
    likeliest. Raises NonFiniteError, which names `name`."""
    device = model.device
    length = len(context.ids)
    cache = model.new_cache(length + context.longest)
    model(torch.tensor([context.ids], device=device), cache=cache, positions_to_keep=1)
    replies = []
    for fact, (question, answer) in enumerate(context.questions):
        place = len(question) - 1 + context.shared
        ids = torch.tensor([[*question, *answer]], device=device)
        rows, logits = deciding_maps(
            model, place, name, input_ids=ids, cache=cache, keep=len(answer) + 1
        )
        for layer in cache:
            layer.length = length  # the next question follows the context
        chances = logits[0, :-1].log_softmax(-1)
        truth = ids[0, len(question) :]
        said = chances.gather(1, truth[:, None]).sum().item()
        exact = torch.equal(chances.argmax(-1), truth)
        maps = torch.stack(rows).cpu().numpy()
        replies.append(Reply(exact, said, shares_of(maps, context.places, fact)))
    return replies


def shares_of(maps: np.ndarray, places: Sequence[tuple[int, int]], asked: int) -> np.ndarray:
    """SHARES (4, layers, heads) of weights (layers, heads, keys), by their absolute values, since
    what is left of two maps may be negative."""
    weights = np.abs(maps)
    weights = weights / weights.sum(-1, keepdims=True)
    facts = np.stack([weights[..., start:end].sum(-1) for start, end in places])
    signal, first = facts[asked], weights[..., 0]
    others = facts.sum(0) - signal
    return np.stack([signal, others, first, 1 - signal - others - first])


def measure(
    model: Any,
    haystack: Haystack,
    length: int,
    facts: int,
    contexts: Sequence[int],
    asked: int,
) -> dict:
    """The questions of a rung, and the mean shares by layer and head. contexts: their numbers."""
    questions, shares = [], []
    for number, context in haystack.contexts(length, facts, contexts, asked):
        replies = ask(model, context, f"context {number + 1}")
        for reply, (start, _) in zip(replies, context.places, strict=False):
            known = {"context": number, "depth": start / length} | reply._asdict()
            shares.append(known.pop("shares"))
            means = shares[-1].mean((1, 2)).tolist()
            questions.append(known | dict(zip(SHARES, means, strict=True)))
    heads = np.mean(shares, axis=0).round(4).tolist()
    return {"length": length, "facts": facts, "questions": questions, "heads": heads}


def table(rungs: Sequence[dict]) -> list[str]:
    """A row a rung, with intervals over contexts."""
    measures = ("exact", "log_probability", *SHARES)
    rows = []
    for rung in rungs:
        groups = [question["context"] for question in rung["questions"]]
        row = [f"{rung['length']}, {rung['facts']}"]
        for name in measures:
            values = [float(question[name]) for question in rung["questions"]]
            row.append(interval_text(interval_of(values, groups), 3 if name in SHARES else 2))
        rows.append(row)
    return markdown_table(["tokens, facts", *measures], rows)


def figure(rungs: Sequence[dict], title: str) -> Image.Image:
    """Where each head looks, by layer: a row of maps a rung, darker where more of it is."""
    layers, heads = np.shape(rungs[0]["heads"][0])
    wide, high, gap = max(8, 120 / heads), max(4, 120 / layers), 50
    width, height = heads * wide, layers * high
    sheet = figures.Canvas(
        110 + len(SHARES) * (width + gap), 80 + len(rungs) * (height + gap), title
    )
    for number, rung in enumerate(rungs):
        top = 80 + number * (height + gap)
        sheet.text(10, top + 14, f"{rung['length']} tokens", 12, anchor="lm")
        sheet.text(10, top + 30, f"{rung['facts']} facts", 12, anchor="lm")
        for column, (name, grid) in enumerate(zip(SHARES, rung["heads"], strict=True)):
            left = 110 + column * (width + gap)
            mean = 100 * np.mean(grid)
            sheet.text(left + width / 2, top - 10, f"{name} {mean:.1f} %", 11)
            for layer, row in enumerate(grid):
                for head, share in enumerate(row):
                    x, y = left + head * wide, top + layer * high
                    color = figures.accuracy_color(min(1.0, share**0.5))
                    sheet.box(x, y, x + wide, y + high, fill=color)
    about = "attention by layer (down) and head (across), the darker the more"
    sheet.text(110, 50, about, 12, figures.SOFT, "lm")
    return sheet.finish()


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.systems.needles", __doc__)
    add_model_flags(parser)
    prose = "prose, a UTF-8 file (default: Python's reference manual)"
    add_flag(parser, "--text", prose, type=Path, metavar="FILE")
    whole = {"type": positive, "nargs": "+", "metavar": "N"}
    add_flag(parser, "--lengths", "tokens of a context", [512, 1024], **whole)
    add_flag(parser, "--facts", "in a context", [1, 4, 16], **whole)
    add_flag(parser, "--contexts", "of a length and number", 30, type=positive, metavar="N")
    add_flag(parser, "--asked", "facts of a context that are asked", 4, type=positive, metavar="N")
    add_flag(parser, "--out", "folder (default: runs/eval/needles/MODEL)", type=Path)
    args = parser.parse_args(argv)
    if max(args.facts) > MOST:
        raise UserError(f"--facts {max(args.facts)}: there are {MOST} of a form: give less")
    sentences = sentences_of(args.text)
    subject = subject_of(args)
    model, reader = open_subject(args, subject, text=True)
    if not isinstance(reader.tokenizer, TextTokenizer):
        raise UserError(f"{shown(subject.name)}: is no published language model: give --model")
    haystack = Haystack(reader.tokenizer, sentences, "test")
    plan = list(product(args.lengths, args.facts))
    contexts = range(args.contexts)
    for length, facts in plan:  # what does not fit is said at once
        list(haystack.contexts(length, facts, contexts, args.asked))
    rungs = []
    for length, facts in plan:
        rungs.append(measure(model, haystack, length, facts, contexts, args.asked))
        print(
            f"{length} tokens, {facts} facts: {len(rungs[-1]['questions'])} questions", flush=True
        )
    folder = out_folder(args.out, "needles", subject.title)
    write_text(folder / "needles.json", json.dumps(rungs) + "\n")
    figures.save(figure(rungs, shown(subject.title)), folder / "needles.png")
    print("", *table(rungs), "", f"{folder}: needles.json, needles.png", sep="\n")


if __name__ == "__main__":
    run_command(main)
