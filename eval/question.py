"""One question to a model about pictures. Benchmarks make it, `eval/answer.py` asks it, and the
scorers read it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.data.records import Picture, Record, gray_picture

Answer = (
    str | list[float]
)  # a text; or, of a question whose choices are `scored`, their log-probabilities in nats


@dataclass(frozen=True)
class Question:
    """A prompt about a picture or several, and what is known about the right answer. id: unique, as
    in the data. key: questions with one key share their pictures, and the encoding. prefix: the
    prompt. choices: if given, the answer is the likeliest of them, each with its end token; if also
    `scored`, the list of their log-probabilities without it. Without choices the answer is decoded
    greedily. files: those that a function among the pictures reads. before: earlier turns, prompts
    with their answers. truth: what the benchmark's `score` needs. kind: a line of the benchmark's
    table. group: questions of one group are not independent (default: key)."""

    id: int | str
    key: str
    picture: Picture | Sequence[Picture]
    prefix: str
    choices: tuple[str, ...] = ()
    files: Collection[Path] = ()
    before: tuple[tuple[str, str], ...] = ()
    scored: bool = False
    truth: Any = None
    kind: str = ""
    group: str = ""

    @property
    def pictures(self) -> list[Any]:
        return list(self.picture) if isinstance(self.picture, list | tuple) else [self.picture]

    def images(self) -> list:
        """The pictures: files, images, or arrays of pixels."""
        return [picture() if callable(picture) else picture for picture in self.pictures]

    def takes(self, answer: Any) -> bool:
        """Whether an answer, of a file, has the form of one to this question."""
        if not self.scored:
            return isinstance(answer, str)
        return (
            isinstance(answer, list)
            and [*map(type, answer)] == [float] * len(self.choices)
            and sum(answer) < 1  # NaN is not
        )

    def blind(self) -> "Question":
        """The same question with every picture gray; all of them share one encoding."""
        count = len(self.pictures)
        return (
            replace(self, key=f"gray {count}", picture=(gray_picture,) * count, files=())
            if count
            else self
        )


def question_of(record: Record, **more: Any) -> Question:
    """The question of a record's last turn."""
    about = record.name, record.key, record.pictures, record.prefix
    return Question(*about, before=record.turns[:-1], kind=record.kind, **more)
