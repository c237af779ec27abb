"""POPE's questions about embedded scenes: is there a dog in the image?

In: a strategy, a split and a number of pictures. Out: `Sample`s, answered yes and no in turn.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", EMNLP 2023,
arXiv 2305.10355.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache

from eval.data.pictures import GRID, NAMES, Dice, Sample, compose, count, ordinary, paint
from eval.data.wording import with_article

STRATEGIES = ("random", "popular", "adversarial")


def pope(
    strategy: str,
    split: str = "test",
    images: int = 100,
    objects: int | None = None,
) -> list[Sample]:
    """POPE's polling: of each picture three present objects and three absent ones in turn. Absent
    ones are drawn at random; or are the most frequent objects; or those that most often accompany
    the present object asked about just before, as counted over train scenes. Pictures and "yes"
    questions are the same in all three. objects: in each picture, all different, in random squares
    (None: up to 5 of an ordinary one, 3 kinds at least)."""

    def crowd(dice: Dice) -> Iterable[tuple[int, str]]:
        return zip(dice.draw(range(GRID**2), objects), dice.draw(NAMES, objects), strict=True)

    def rank(present: str) -> Counter:
        """How often the objects are drawn as absent ones."""
        if strategy == "random":
            return Counter()
        frequency, company = object_statistics()
        return frequency if strategy == "popular" else company[present]

    def usable(squares: Iterable[str]) -> bool:
        return len(count(squares)) >= 3

    stream = "pope"
    draw = ordinary
    if objects:
        stream = f"pope/{objects}"
        draw = crowd
    samples = []
    for image_id in range(images):
        dice, squares = compose(stream, split, 0, image_id, draw, usable)
        scene = paint(dice, squares)
        present = dice.draw(count(squares), 3)
        absent = [name for name in dice.draw(NAMES, len(NAMES)) if name not in squares]
        for name in present:
            # the first of equals, and `absent` is shuffled
            other = max(absent, key=rank(name).__getitem__)
            absent.remove(other)
            for thing, answer in ((name, "yes"), (other, "no")):
                prefix = f"answer en Is there {with_article(thing)} in the image?"
                about = image_id, len(samples) + 1, "is there a", "yes/no"
                samples.append(Sample(f"pope-{strategy}", scene, prefix, answer, *about))
    return samples


@cache
def object_statistics() -> tuple[Counter, dict[str, Counter]]:
    """How many of 4000 train scenes hold each object, and each pair of objects."""
    frequency = Counter()
    company = {name: Counter() for name in NAMES}
    for index in range(4000):
        _, squares = compose("statistics", "train", 0, index)
        there = count(squares)
        frequency.update(there.keys())
        for name in there:
            company[name].update(there.keys() - {name})
    return frequency, company
