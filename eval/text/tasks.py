"""Tasks that a language model can only solve from its context: needles in a haystack, recall, and many examples.

In: a `Corpus` and a source of random numbers. Out: documents as token ids, and the places of their answers. The same
documents are mixed into the training text of both models; `eval/text/measures.py` asks about the test split.

A *record* is a key and its value in one token, such as «Lisbon=C»; «Lisbon?» asks for it, and «C» is the answer. One
layer of attention can find it. Keys and values in two tokens need two layers, which models of this size do not learn
from half a million tokens: 4 pairs stay at chance. Three kinds of documents:

- Needles (Ye et al. 2024, 3.4): records on lines of their own, between the lines of a text. The first one asked for
  lies at a chosen depth, the others anywhere.
- Recall (Arora et al. 2023, "Zoology"): records without text.
- Examples: many records of each of a few keys, whose values are right in `RELIABLE` of all cases. The answer is the
  value that the key has most often: it takes many examples, in whatever order.

A key that is asked for has one record in needles and recall; the others are of any other keys.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from eval.text.corpus import BOS, EOS, Corpus
from model.common import UserError

CITIES = "Lisbon Cairo Oslo Lima Paris Tokyo Delhi Rome Quito Seoul Dakar Berlin Havana Athens Madrid Vienna".split()
LETTERS = "ABCDEFGH"
RECORDS = tuple(f"«{city}={letter}»" for city in CITIES for letter in LETTERS)
QUESTIONS = tuple(f"«{city}?»" for city in CITIES)
ANSWERS = tuple(f"«{letter}»" for letter in LETTERS)
SYMBOLS = (*RECORDS, *QUESTIONS, *ANSWERS)  # tokens of their own
MOST_ASKED = 8  # of one document
SHOWN = 4  # keys of the examples
RELIABLE = 0.7  # of the examples
Record = tuple[str, str]  # a key and a value


@dataclass(frozen=True)
class Document:
    """Token ids, and spans (start, end) in them: the answers; for needles their lines, in the order in which they are
    asked for, and the haystack around them."""

    ids: list[int]
    answers: list[tuple[int, int]]
    needles: tuple[tuple[int, int], ...] = ()
    haystack: tuple[int, int] | None = None


class Tasks:
    """Makes documents from the text of one split of a corpus."""

    def __init__(self, corpus: Corpus, split: str):
        self.split, self.ids = split, corpus.ids[split]
        self.newline, self.encode = corpus.newline, corpus.tokenizer.encode
        # what no model can foresee, and none is trained to: which records there are, and which are asked for
        self.unforeseen = [corpus.tokenizer.piece_to_id(symbol) for symbol in (*RECORDS, *QUESTIONS)]

    def record(self, record: Record) -> list[int]:
        return self.encode("«{}={}»".format(*record))

    def question(self, asked: Sequence[Record], ids: list[int]) -> list[tuple[int, int]]:
        """Add the questions with their answers, a new line and the end to `ids`; the spans of the answers."""
        spans = []
        for city, letter in asked:
            ids += self.encode(f"«{city}?»")
            start = len(ids)
            ids += self.encode(f"«{letter}»")
            spans.append((start, len(ids)))
        ids += [self.newline, EOS]
        return spans

    def draw(self, dice: random.Random, records: int, asked: int) -> list[Record]:
        """Records, those that are asked for first."""
        keys = dice.sample(CITIES, min(asked, records, MOST_ASKED))
        others = [city for city in CITIES if city not in keys]
        keys += [dice.choice(others) for _ in range(records - len(keys))]
        return [(city, dice.choice(LETTERS)) for city in keys]

    def needles(
        self, dice: random.Random, length: int, needles: int, asked: int, depth: float | None = None
    ) -> Document:
        """A haystack with so many `needles`, at most `length` tokens in total. depth: of the needle asked first, 0 at
        the start of the text, 1 at its end, None at random. Raises UserError if they do not fit."""
        drawn, ends = self.draw(dice, needles, asked), []
        asked = min(asked, needles, MOST_ASKED)
        lines = [[*self.record(record), self.newline] for record in drawn]
        answers = self.question(drawn[:asked], ends)
        room = length - sum(map(len, lines)) - len(ends) - 1
        if room < 1:
            raise UserError(f"{needles} needles and {asked} questions do not fit into {length} tokens: give more")
        text = self._lines(dice, room)
        gaps = [0, *(place + 1 for place, token in enumerate(text) if token == self.newline)]
        places = [dice.choice(gaps) for _ in drawn]
        if depth is not None:
            places[0] = min(gaps, key=lambda gap: abs(gap - depth * len(text)))
        ids, spans, done = [BOS], {}, 0
        order = dice.sample(range(needles), needles)  # of those in one gap
        for number in sorted(order, key=places.__getitem__):
            ids += text[done : places[number]]
            spans[number] = len(ids), len(ids) + len(lines[number])
            ids += lines[number]
            done = places[number]
        ids += text[done:]
        end = len(ids)
        answers = [(first + end, last + end) for first, last in answers]
        return Document(ids + ends, answers, tuple(spans[number] for number in range(asked)), (1, end))

    def _lines(self, dice: random.Random, room: int) -> list[int]:
        """At most `room` tokens of text, from the start of a line to the end of one."""
        start = dice.randrange(max(1, len(self.ids) - 2 * room))
        text = self.ids[start : start + 2 * room].tolist()
        first = text.index(self.newline) + 1 if self.newline in text[:room] else 0
        text = [token for token in text[first : first + room] if token != EOS]
        while self.newline in text[:-1] and text[-1] != self.newline:
            text.pop()
        return [*text[:-1], self.newline]

    def recall(self, dice: random.Random, records: int, asked: int) -> Document:
        """Records without text."""
        drawn = self.draw(dice, records, asked)
        return self.listed(dice.sample(drawn, records), drawn[: min(asked, MOST_ASKED)])

    def episode(self, dice: random.Random, examples: int) -> tuple[list[Record], list[Record]]:
        """Examples, of SHOWN keys in turn, in random order; and each key that has one with the value that is right."""
        right = dict(zip(dice.sample(CITIES, SHOWN), dice.sample(LETTERS, SHOWN), strict=True))
        keys = [list(right)[number % SHOWN] for number in range(examples)]
        wrong = {city: [other for other in right.values() if other != letter] for city, letter in right.items()}
        drawn = [(key, right[key] if dice.random() < RELIABLE else dice.choice(wrong[key])) for key in keys]
        dice.shuffle(drawn)
        return drawn, [(key, right[key]) for key in dice.sample(keys[:SHOWN], min(SHOWN, examples))]

    def listed(self, shown: Sequence[Record], asked: Sequence[Record]) -> Document:
        """Records in this order, then the questions with their answers."""
        ids = [BOS, *(token for record in shown for token in self.record(record))]
        return Document(ids, self.question(asked, ids))
