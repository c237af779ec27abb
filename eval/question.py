"""One question to a model about pictures. Benchmarks make it, `eval/answer.py` asks it, and the
scorers read it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.data.files import check
from eval.data.record import Picture, Record, gray_picture
from model.common import quoted
from model.confidence import Certainty

# a text; or, of a question that `wants_log_probs`, one of each choice in nats
Answer = str | list[float]


@dataclass(frozen=True)
class Question:
    """A prompt about a picture or several, and what is known about the right answer. Without
    choices the answer is decoded greedily."""

    id: int | str  # unique, as in the data
    key: str  # questions with one key share their pictures, and the encoding
    picture: Picture | Sequence[Picture]
    prefix: str  # the prompt
    choices: tuple[str, ...] = ()  # the answer is the likeliest of them, with its end token
    files: Collection[Path] = ()  # those that a function among the pictures reads
    before: tuple[tuple[str, str], ...] = ()  # earlier turns, prompts with their answers
    # the answer is the log-probability of each choice, in nats, without the end token
    wants_log_probs: bool = False
    truth: Any = None  # what the benchmark's `score` needs
    kind: str = ""  # a line of the benchmark's table
    group: str = ""  # questions of one group are not independent (default: key)

    @property
    def pictures(self) -> list[Any]:
        return list(self.picture) if isinstance(self.picture, list | tuple) else [self.picture]

    def images(self) -> list:
        """The pictures: files, images, or arrays of pixels."""
        return [picture() if callable(picture) else picture for picture in self.pictures]

    def takes(self, answer: Any) -> bool:
        """Whether an answer from a file has the form that this question asks for."""
        if not self.wants_log_probs:
            return isinstance(answer, str)
        is_listed = isinstance(answer, list) and len(answer) == len(self.choices)
        is_numbers = is_listed and all(type(number) is float for number in answer)
        # log-probabilities sum to 0 at most; NaN fails the comparison
        return is_numbers and sum(answer) < 1

    def blind(self) -> "Question":
        """The same question with every picture gray; all of them share one encoding."""
        count = len(self.pictures)
        if not count:
            return self
        return replace(self, key=f"gray {count}", picture=(gray_picture,) * count, files=())


def parts_of(items: Sequence, size: int) -> list:
    """The items in parts of this size; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def log_prob_twins(
    questions: Sequence[Question], choices: Sequence[str], name: str
) -> list[Question]:
    """The same questions, for the log-probabilities of `choices`; `name` ends their ids."""
    options = {"choices": tuple(choices), "wants_log_probs": True}
    return [replace(q, id=f"{q.id}, {name}", **options) for q in questions]


def question_of(record: Record, **more: Any) -> Question:
    """The question of a record's last turn."""
    return Question(
        record.name,
        record.key,
        record.pictures,
        record.prefix,
        before=record.turns[:-1],
        kind=record.kind,
        **more,
    )


def read_certainty(record: Mapping[str, Any]) -> Certainty | None:
    """How sure the model was of a record's answer, from a file; None where the record does not say.
    Raises TypeError and ValueError."""
    if not {"confidence", "ended"} <= record.keys():
        return None
    found = Certainty(record["confidence"], record["ended"], record.get("scores", []))
    parts = str(record.get("answer")).count(";") + 1
    is_sound = 0 <= found.confidence <= 1 and type(found.ended) is bool and sum(found.scores) >= 0
    problem = f"confidence, ended or scores: {quoted(list(found))}"
    check(is_sound and len(found.scores) in (0, parts), problem)
    return found
