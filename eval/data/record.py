"""One example: what training learns from and evaluation asks about. `eval/data/records.py` reads
them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image

from eval.data.files import check
from model.common import UserError, check_text, quoted

PROMPT = "answer en {question}"  # the prompt of PaliGemma's authors
QUESTION_SOURCES = ("vqav2:", "vqa:")  # sources whose questions become prompts by such a template
# a file, an image, or a function that draws or opens one
Picture = Path | Image.Image | Callable[[], Any]
Turns = tuple[tuple[str, str], ...]  # (prompt, answer) pairs
# of whatever size, a model sees the same
gray_picture = partial(Image.new, "RGB", (64, 64), (127, 127, 127))


@dataclass(frozen=True)
class Box:
    """An object in a picture: x and y of its upper left corner, in pixels. A crowd is not one
    object."""

    label: str
    x: float
    y: float
    width: float
    height: float
    area: float  # as annotated: of the object's outline, not of the box
    is_crowd: bool = False
    segmentation: Any = None  # its mask as annotated, for `eval/data/masks.py`; None without

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what a file may hold that is no box."""
        label, *numbers, is_crowd, _ = vars(self).values()
        is_sound = math.isfinite(sum(numbers)) and min(numbers[2:]) >= 0
        is_sound = is_sound and isinstance(label, str) and is_crowd in (0, 1)
        check(is_sound, f"{quoted(self, 200)}: a name, a number or is_crowd is none")


@dataclass(frozen=True)
class Detection:
    """The objects of a picture of width × height pixels, those that are asked for."""

    width: int
    height: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Record:
    """One example: pictures, then one or several turns of a prompt and its answer.

    A record without turns stands for data that cannot be used: its picture raises the UserError
    that says why.
    """

    name: str  # unique, for messages
    key: str  # names the pictures; records with the same key share them, and their encoding
    pictures: tuple[Picture, ...]  # in the order in which they are shown; none for text alone
    turns: Turns  # `<image>` in a prompt marks the place of a picture
    answers: tuple[str, ...] = ()  # of the last turn where there are several, one by annotator
    sampled: bool = False  # each epoch learns one of `answers`, drawn anew
    detection: Detection | None = None  # the objects to be found
    kind: str = ""  # of the question, for a line of a table

    @property
    def prefix(self) -> str:
        """The prompt of the last turn."""
        return self.turns[-1][0] if self.turns else ""

    @property
    def suffix(self) -> str:
        """The answer of the last turn."""
        return self.turns[-1][1] if self.turns else ""

    @property
    def truths(self) -> list[str]:
        """The right answers of the last turn, its own included; an empty one is none."""
        given = list(self.answers)
        if self.suffix not in given:
            given.append(self.suffix)
        return [text for text in given if text.strip()]

    @property
    def truth(self) -> str | list[str]:
        """`truths` where the data give several answers, else the suffix."""
        several = self.truths if self.answers else []
        return several or self.suffix


@dataclass(frozen=True)
class Refusal:
    """A picture that cannot be used: opening it raises UserError."""

    problem: str

    def __call__(self) -> NoReturn:
        raise UserError(self.problem)


def check_prompt(template: str) -> str:
    """The template of a prompt. Raises UserError if the text {question} is not in it, or it is not
    UTF-8."""
    if "{question}" not in check_text(template):
        problem = f"must contain {{question}}, such as {PROMPT!r}"
        raise UserError(f"prompt template {quoted(template)}: {problem}")
    return template


def fill_prompt(template: str, question: str) -> str:
    """`template` with the question in place of the text {question}; other braces are text."""
    return template.replace("{question}", question)
