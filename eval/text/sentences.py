"""Text-only tasks in the words of the embedded base's tokenizer: sums, copying, lookup and facts, in sentences.

In: a task's name, a split and an index. Out: a `Sentence`, a prompt and its one right answer, without a picture.
`train/studies/wings.py` measures how much of them a model forgets when it is trained on pictures.

    add       How many are 7 and 5?                                  12
    copy      Caption: cat 4 key dog 9. What is the caption?         cat 4 key dog 9
    lookup    Row: cat 4 key dog 9. What is in column 3?             key
    fact      What is a tiger?                                       animal

Everything follows from (task, split, seed, index). A prompt to copy or to look up belongs to exactly one split, by its
hash: no prompt of the test split occurs in training. There are only 140 sums and facts, to be memorised: all splits ask
the same ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

from eval.pictures import CATEGORIES, NAMES, SPLITS, Dice, split_of
from eval.scenes import with_article
from model.common import UserError


@dataclass(frozen=True)
class Sentence:
    """One prompt and its answer."""

    task: str
    prefix: str
    suffix: str


def sentence(task: str, split: str, index: int, seed: int = 0) -> Sentence:
    """Sentence number `index` of a task's endless stream. Raises UserError for an unknown task or split."""
    if task not in TASKS or split not in SPLITS:
        raise UserError(f"task {task!r}, split {split!r}: expected {', '.join(TASKS)}, and {', '.join(SPLITS)}")
    dice = Dice(f"sentence/{task}/{split}/{seed}/{index}")
    while True:
        prefix, suffix = TASKS[task](dice)
        if task in BY_HEART or split_of((prefix,)) == split:
            return Sentence(task, prefix, suffix)


def _add(dice: Dice) -> tuple[str, str]:
    a, b = dice.below(10), dice.below(10)
    return f"How many are {a} and {b}?", str(a + b)


def _copy(dice: Dice) -> tuple[str, str]:
    words = _words(dice, 3 + dice.below(4))
    return f"Caption: {' '.join(words)}. What is the caption?", " ".join(words)


def _lookup(dice: Dice) -> tuple[str, str]:
    words = _words(dice, 5)
    asked = dice.below(5)
    return f"Row: {' '.join(words)}. What is in column {asked + 1}?", words[asked]


def _fact(dice: Dice) -> tuple[str, str]:
    name = dice.pick(NAMES)
    return f"What is {with_article(name)}?", next(kind for kind, names in CATEGORIES.items() if name in names)


def _words(dice: Dice, count: int) -> list[str]:
    return dice.draw([*NAMES, *map(str, range(10))], count)


TASKS: dict[str, Callable[[Dice], tuple[str, str]]] = {"add": _add, "copy": _copy, "lookup": _lookup, "fact": _fact}
BY_HEART = ("add", "fact")
