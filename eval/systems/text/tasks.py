"""Tasks that a language model can only solve from its context: needles in a haystack, recall, and
many examples.

In: a `Corpus` and a source of random numbers. Out: documents as token ids, and the places of their
answers. The same documents are mixed into the training text of both models;
`eval/systems/text/measures.py` asks about the test split.

A *record* is a key and its value in one token, such as «Lisbon=C»; «Lisbon?» asks for it, and «C»
is the answer. One layer of attention can find it. Three kinds of documents:

- Needles (Ye et al. 2024, 3.4): records on lines of their own, between the lines of a text. The
  first one asked for lies at a chosen depth, the others anywhere.
- Recall (Arora et al. 2023, "Zoology"): records without text.
- Examples: many records of each of a few keys, whose values are right in `RELIABLE` of all cases.
  The answer is the value that is right in most cases; few examples often show another more often.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from eval.systems.text.corpus import NEWLINE, Corpus
from model.systems.configs import BOS, EOS

CITIES = (
    "Lisbon Cairo Oslo Lima Paris Tokyo Delhi Rome "
    "Quito Seoul Dakar Berlin Havana Athens Madrid Vienna"
).split()
LETTERS = "ABCDEFGH"
RECORDS = tuple(f"«{city}={letter}»" for city in CITIES for letter in LETTERS)
QUESTIONS = tuple(f"«{city}?»" for city in CITIES)
ANSWERS = tuple(f"«{letter}»" for letter in LETTERS)
SYMBOLS = RECORDS + QUESTIONS + ANSWERS  # tokens of their own
MOST_ASKED = 8  # of one document
SHOWN = 4  # keys of the examples
RELIABLE = 0.7  # of the examples
Record = tuple[str, str]  # a key and a value


class Document(NamedTuple):
    """Token ids, and positions in them: the answers; for needles their records, in the order in
    which they are asked for, and the haystack around them, (start, end)."""

    ids: list[int]
    answers: Sequence[int]
    needles: Sequence[int]
    haystack: tuple[int, int]


class Tasks:
    """Makes documents from the text of one split of a corpus."""

    def __init__(self, corpus: Corpus, split: str):
        self.split = split
        self.ids = corpus.ids[split]
        self.id_of = corpus.tokenizer.piece_to_id
        self.newline = self.id_of(NEWLINE)
        # no model is trained to foresee them
        self.unforeseen = [*map(self.id_of, RECORDS + QUESTIONS)]

    def record(self, record: Record) -> int:
        return self.id_of("«{}={}»".format(*record))

    def document(
        self,
        ids: list[int],
        asked: Sequence[Record],
        needles: Sequence[int] = (),
    ) -> Document:
        """`ids`, then the questions with their answers, a new line and the end."""
        ends = []
        for city, letter in asked:
            ends += [self.id_of(f"«{city}?»"), self.id_of(f"«{letter}»")]
        start = len(ids)
        answers = range(start + 1, start + len(ends), 2)
        return Document([*ids, *ends, self.newline, EOS], answers, needles, (1, start))

    def draw(self, dice: Random, records: int, asked: int) -> list[Record]:
        """Records, those that are asked for first: their keys have no other record."""
        keys = dice.sample(CITIES, min(asked, records))
        others = [city for city in CITIES if city not in keys]
        keys += [dice.choice(others) for _ in range(records - len(keys))]
        return [(city, dice.choice(LETTERS)) for city in keys]

    def needles(
        self,
        dice: Random,
        length: int,
        needles: int,
        asked: int,
        depth: float | None = None,
    ) -> Document:
        """A haystack with so many `needles`, at most `length` tokens in total. depth: of the needle
        asked first, 0 at the start of the text, 1 at its end, None at random."""
        # 1. the needles, and the gaps where they may lie
        asked = min(asked, needles)
        drawn = self.draw(dice, needles, asked)
        text = self._lines(dice, length - 2 * needles - 2 * asked - 3)
        gaps = [0]
        gaps += [place for place, token in enumerate(text, 1) if token == self.newline]
        places = [dice.choice(gaps) for _ in drawn]
        if depth is not None:
            places[0] = min(gaps, key=lambda gap: abs(gap - depth * len(text)))
        # 2. the text around them; those in one gap in random order
        order = dice.sample(range(needles), needles)
        ids = [BOS]
        spots = {}
        done = 0
        for number in sorted(order, key=places.__getitem__):
            ids += text[done : places[number]]
            spots[number] = len(ids)
            ids += [self.record(drawn[number]), self.newline]
            done = places[number]
        ids += text[done:]
        return self.document(ids, drawn[:asked], [spots[number] for number in range(asked)])

    def _lines(self, dice: Random, room: int) -> list[int]:
        """At most `room` tokens of text, from the start of a line to the end of one."""
        assert room > 0, "needles and questions do not fit"
        start = dice.randrange(max(1, len(self.ids) - 2 * room))
        text = self.ids[start : start + 2 * room].tolist()
        first = 0
        if self.newline in text[:room]:
            first = text.index(self.newline) + 1
        text = [token for token in text[first : first + room] if token != EOS]
        while self.newline in text[:-1] and text[-1] != self.newline:
            text.pop()
        return [*text[:-1], self.newline]

    def recall(self, dice: Random, records: int, asked: int) -> Document:
        """Records without text."""
        drawn = self.draw(dice, records, asked)
        return self.listed(dice.sample(drawn, records), drawn[:asked])

    def episode(self, dice: Random, examples: int) -> tuple[list[Record], list[Record]]:
        """Examples, of SHOWN keys in turn, in random order; and each key that has one with the
        value that is right."""
        cities = dice.sample(CITIES, SHOWN)
        right = dict(zip(cities, dice.sample(LETTERS, SHOWN), strict=True))
        keys = [cities[number % SHOWN] for number in range(examples)]
        drawn = []
        for key in keys:
            letter = right[key]
            if dice.random() >= RELIABLE:
                letter = dice.choice([other for other in right.values() if other != letter])
            drawn.append((key, letter))
        dice.shuffle(drawn)
        asked = dice.sample(keys[:SHOWN], min(SHOWN, examples))
        return drawn, [(key, right[key]) for key in asked]

    def listed(self, shown: Sequence[Record], asked: Sequence[Record]) -> Document:
        """Records in this order, then the questions with their answers."""
        return self.document([BOS, *map(self.record, shown)], asked)
