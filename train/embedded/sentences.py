"""Text-only tasks in the words of the embedded base's tokenizer: sums, copying, lookup and facts, in sentences.

In: a task's name, a split and an index. Out: a `Sentence`, a prompt and its one right answer, without a picture.
`train/studies/wings.py` measures how much of them a model forgets when it is trained on pictures.

    add       How many are 7 and 5?                                  12
    copy      Caption: cat 4 key dog 9. What is the caption?         cat 4 key dog 9
    lookup    Row: cat 4 key dog 9. What is in column 3?             key
    fact      What is a tiger?                                       animal

A prompt to copy or to look up belongs to exactly one split, by its hash. All splits ask the same 140 sums and facts.
"""

from typing import NamedTuple

from eval.pictures import CATEGORIES, NAMES, Dice, split_of
from eval.scenes import with_article

TASKS = ("add", "copy", "lookup", "fact")
BY_HEART = ("add", "fact")
WORDS = [*NAMES, *map(str, range(10))]


class Sentence(NamedTuple):
    """One prompt and its answer."""

    task: str
    prefix: str
    suffix: str


def sentence(task: str, split: str, index: int, seed: int = 0) -> Sentence:
    """Sentence number `index` of a task's endless stream: the same on every machine."""
    dice = Dice(f"sentence/{task}/{split}/{seed}/{index}")
    drawn = _draw(task, dice)
    while task not in BY_HEART and split_of((drawn.prefix,)) != split:
        drawn = _draw(task, dice)
    return drawn


def _draw(task: str, dice: Dice) -> Sentence:
    if task == "add":
        a, b = dice.below(10), dice.below(10)
        return Sentence(task, f"How many are {a} and {b}?", str(a + b))
    if task == "fact":
        name = dice.pick(NAMES)
        kind = next(kind for kind, names in CATEGORIES.items() if name in names)
        return Sentence(task, f"What is {with_article(name)}?", kind)
    words = dice.draw(WORDS, 3 + dice.below(4) if task == "copy" else 5)
    if task == "copy":
        return Sentence(task, f"Caption: {' '.join(words)}. What is the caption?", " ".join(words))
    column = dice.below(5)
    return Sentence(task, f"Row: {' '.join(words)}. What is in column {column + 1}?", words[column])
