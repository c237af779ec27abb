"""Names of the embedded objects in a sentence."""

from collections.abc import Sequence

from eval.data.pictures import count

NUMBERS = ("two", "three", "four", "five")
IRREGULAR = {
    "fish": "fish",
    "grapes": "grapes",
    "bus": "buses",
    "butterfly": "butterflies",
    "strawberry": "strawberries",
}


def plural(name: str) -> str:
    return IRREGULAR.get(name, name + "s")


def with_article(name: str) -> str:
    """The article follows the first letter alone, as in POPE."""
    article = "an" if name.startswith(tuple("aeiou")) else "a"
    return f"{article} {name}"


def describe(squares: Sequence[str]) -> str:
    """A caption: the objects in raster order ("two dogs, a cat and an apple")."""
    parts = []
    for name, number in count(squares).items():
        if number == 1:
            parts.append(with_article(name))
        else:
            parts.append(f"{NUMBERS[number - 2]} {plural(name)}")
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
