"""Text that is kept at an equal accuracy on pictures: rows that learn at different speed cannot be compared at a step.

In: the points of runs, from the start of the second stage on: pictures and text of a run at its checkpoints. Out: the
text of each sentence at the moment at which a run first reads so many of the pictures, and differences of rows there.

A row has the rate that keeps most text at MAIN_LEVEL: on every other sentence, and for the reported ones the others.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from eval.statistics import Estimate
from train.studies.engine import describe, difference
from train.studies.rules import TUNING_SEEDS, judge

LEVELS = (50, 80, 90, 95)  # percent of the pictures
MAIN_LEVEL = 90


def pictures_of(point: Mapping) -> float:
    """Percent of the pictures that are read."""
    return 100 * float(np.mean(point["pictures"]))


def sentences_of(point: Mapping, most: int) -> np.ndarray:
    """Right or wrong, in percent, of the first `most` sentences of each task."""
    return 100 * np.array([grade for of_task in point["text"].values() for grade in of_task[:most]], dtype=float)


def text_at(points: Sequence[Mapping], level: float, most: int) -> np.ndarray | None:
    """The sentences of a run where it first reads `level` percent of the pictures, between its checkpoints on a
    straight line; None if it never does."""
    before = points[0]
    for after in points:
        if (reached := pictures_of(after)) >= level:
            now = sentences_of(after, most)
            if after is points[0]:
                return now
            share = (level - pictures_of(before)) / (reached - pictures_of(before))
            return (1 - share) * sentences_of(before, most) + share * now
        before = after
    return None


def kept(points: Sequence[Mapping], most: int) -> float:
    """The text (0 to 1) of a run at MAIN_LEVEL, on the sentences that choose rates; 0 if it does not get there."""
    text = text_at(points, MAIN_LEVEL, most)
    return 0.0 if text is None else float(text[::2].mean()) / 100


def compare_at_levels(
    row: Sequence[Sequence[Mapping]], control: Sequence[Sequence[Mapping]], most: int
) -> dict[str, dict]:
    """By level: text of the row and of its control with intervals, and the difference, paired by seed and sentence.

    row, control: by seed, the points of a run. "reached": how many seeds of both get to the level. Where some do not,
    the difference is that of the seeds in which both do, if these are at least three; it has no verdict, since runs
    that learn badly are left out of it.
    """
    found = {}
    for level in LEVELS:
        both = [[text_at(points, level, most) for points in runs] for runs in (row, control)]
        reached = [sum(text is not None for text in of_row) for of_row in both]
        found[str(level)] = result = {"reached": reached, "seeds": len(row)}
        pairs = [
            (own[1::2], other[1::2]) for own, other in zip(*both, strict=True) if not (own is None or other is None)
        ]
        if len(pairs) >= min(TUNING_SEEDS, len(row)):
            own, other = map(np.array, zip(*pairs, strict=True))
            result |= {"text": describe(own), "control": describe(other), "difference": difference(own, other)}
    return found


def is_whole(found: Mapping) -> bool:
    """Whether all seeds of a row and its control get to a level."""
    return min(found["reached"]) == found["seeds"]


def main_gain(row: Sequence[Sequence[Mapping]], control: Sequence[Sequence[Mapping]], most: int) -> list[Estimate]:
    """The difference at MAIN_LEVEL, as `compare_at_levels` has it; none if a seed does not get there."""
    found = compare_at_levels(row, control, most)[str(MAIN_LEVEL)]
    return [_estimate(found)] if is_whole(found) else []


def _estimate(found: Mapping[str, Mapping]) -> Estimate:
    return Estimate(*(found["difference"][field] for field in Estimate._fields))


def judge_levels(by_row: Mapping[str, Mapping[str, dict]]) -> None:
    """Put the verdicts, see `train.studies.rules.judge`, beside all differences of a table, by row and level."""
    places = {(row, level): found for row, levels in by_row.items() for level, found in levels.items()}
    gains = {place: _estimate(found) for place, found in places.items() if is_whole(found)}
    for place, judged in judge(gains, seeds={place: places[place]["seeds"] for place in gains}).items():
        places[place] |= judged
