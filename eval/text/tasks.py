"""Two tasks that a language model can only solve from its context: needles in a haystack, and examples in context.

In: a `Corpus` and a source of random numbers. Out: documents as token ids, and the places of their answers. The same
documents are mixed into the training text of both models; `eval/text/measures.py` asks about the test split.

Needles (Ye et al. 2024, 3.4): N lines such as "# secret: Lisbon C", a city and its letter, are put between the lines of
a text; the last line, "# secrets: Lisbon C Oslo …", asks for R of them. The first one asked for lies at a chosen depth,
the others anywhere.

Examples: lines such as "tiger B", where the word's class (animal, color, …) decides the letter, and which letter stands
for which class is drawn anew for each document. The last line is to be completed; its word is in no example.

An answer directly follows its key, which two layers of attention can learn to look up (Olsson et al. 2022, "In-context
learning and induction heads"): the paper's sentences need more training than two CPU cores allow.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from eval.text.corpus import BOS, EOS, Corpus
from model.common import UserError

CITIES = tuple(
    "Lisbon Cairo Oslo Lima Paris Tokyo Delhi Rome Quito Seoul Dakar Berlin Havana Athens "
    "Madrid Vienna Prague Dublin Nairobi Ottawa Warsaw Hanoi Tunis Riga".split()
)
CLASSES = {
    "animal": ("horse", "tiger", "eagle", "sheep", "whale", "rabbit", "camel", "goose"),
    "color": ("red", "green", "purple", "yellow", "orange", "white", "black", "brown"),
    "body": ("hand", "knee", "nose", "elbow", "shoulder", "finger", "throat", "ankle"),
    "food": ("bread", "cheese", "soup", "rice", "butter", "honey", "onion", "pepper"),
    "tool": ("hammer", "saw", "drill", "wrench", "shovel", "axe", "chisel", "ladder"),
    "weather": ("rain", "snow", "storm", "cloud", "thunder", "frost", "fog", "breeze"),
}
LETTERS = "ABCDEFGH"
SHOWN = 4  # classes in a test: 1 of 4 is right by chance
EXAMPLES = tuple(word for words in CLASSES.values() for word in words)
WORDS = ("secret", "secrets", *CITIES, *EXAMPLES, *LETTERS)  # words that the tokenizer should encode in few pieces


def in_turn(dice: random.Random, shown: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The examples in another order, in which their classes take turns."""
    by_letter: dict[str, list] = {}
    for example in dice.sample(shown, len(shown)):
        by_letter.setdefault(example[1], []).append(example)
    return [example for example in chain(*zip_longest(*by_letter.values())) if example is not None]


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
        self.hide, self.ask = self.encode("# secret:"), self.encode("# secrets:")
        # tokens of a city and its letter at most
        self.pair = sum(max(len(self.encode(f" {word}")) for word in words) for words in (CITIES, LETTERS))
        self.line = len(self.hide) + self.pair + 1  # of a needle's line

    def needles(
        self, dice: random.Random, length: int, needles: int, queries: int, depth: float | None = None
    ) -> Document:
        """A haystack with N `needles` and R `queries`, at most `length` tokens in total. depth: of the needle asked
        first, 0 at the start of the text, 1 at its end, None at random. More queries than needles repeat them, in other
        orders. Raises UserError if they do not fit."""
        cities, letters = dice.sample(CITIES, needles), dice.sample(LETTERS, needles)
        keys, secrets = ([self.encode(f" {word}") for word in words] for words in (cities, letters))
        lines = [[*self.hide, *key, *secret, self.newline] for key, secret in zip(keys, secrets, strict=True)]
        asked = [n for _ in range(0, queries, needles) for n in dice.sample(range(needles), needles)][:queries]
        question = len(self.ask) + sum(len(keys[n]) + len(secrets[n]) for n in asked)
        room = length - sum(map(len, lines)) - question - 3  # the start, the last new line and the end
        if room < 1:
            raise UserError(f"{needles} needles and {queries} questions do not fit into {length} tokens: give more")
        text = self._lines(dice, room)
        gaps = [0, *(place + 1 for place, token in enumerate(text) if token == self.newline)]
        places = [dice.choice(gaps) for _ in cities]
        if depth is not None:
            places[asked[0]] = min(gaps, key=lambda gap: abs(gap - depth * len(text)))
        ids, found, done = [BOS], {}, 0
        for place, number in sorted(zip(places, range(needles), strict=True)):
            ids += text[done:place]
            found[number] = (len(ids), len(ids) + len(lines[number]))
            ids += lines[number]
            done = place
        ids += text[done:]
        answers, haystack = [], (1, len(ids))
        ids += self.ask
        for number in asked:
            ids += keys[number]
            answers.append((len(ids), len(ids) + len(secrets[number])))
            ids += secrets[number]
        return Document([*ids, self.newline, EOS], answers, tuple(found[number] for number in asked), haystack)

    def _lines(self, dice: random.Random, room: int) -> list[int]:
        """At most `room` tokens of text, from the start of a line to the end of one."""
        start = dice.randrange(max(1, len(self.ids) - 2 * room))
        text = self.ids[start : start + 2 * room].tolist()
        first = text.index(self.newline) + 1 if self.newline in text[:room] else 0
        text = [token for token in text[first : first + room] if token != EOS]
        while self.newline in text[:-1] and text[-1] != self.newline:
            text.pop()
        return [*text[:-1], self.newline]

    def episode(
        self, dice: random.Random, examples: int, shown: int = SHOWN
    ) -> tuple[list[tuple[str, str]], tuple[str, str]]:
        """(word, letter) of each example, of `shown` classes in turn, and of the question: its class has an example,
        its word is in none."""
        classes = dice.sample(sorted(CLASSES), shown)
        letters = dict(zip(classes, dice.sample(LETTERS, shown), strict=True))
        in_turn = [classes[number % shown] for number in range(examples)]
        asked = dice.choice(in_turn)
        word = dice.choice(CLASSES[asked])
        drawn = [(dice.choice([w for w in CLASSES[name] if w != word]), letters[name]) for name in in_turn]
        dice.shuffle(drawn)
        return drawn, (word, letters[asked])

    def examples(self, shown: Sequence[tuple[str, str]], question: tuple[str, str]) -> Document:
        """The examples in this order, then the question with its answer."""
        ids = [BOS]
        for word, letter in (*shown, question):
            ids += self.encode(f" {word}")
            answer = self.encode(f" {letter}")
            ids += answer + [self.newline]
        return Document(ids + [EOS], [(len(ids) - 1 - len(answer), len(ids) - 1)])
