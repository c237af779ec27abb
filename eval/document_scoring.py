"""The published scores of answers about documents and charts, and of captions: ANLS, relaxed
accuracy, CIDEr.

In: the right answers to each question, and what was said. Out: a score of each, 0 to 1, of CIDEr
0 to 10.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from model.common import UserError

THRESHOLD = 0.5  # of ANLS, below which an answer is another one, not a misread one
LONGEST = 10_000  # letters of a text that is compared: the distance of two takes some seconds
TOLERANCE = 0.05  # of relaxed accuracy
WORD = re.compile(r"'s\b|\w+(?:-\w+)*")
TITLES = {"anls": "ANLS", "relaxed": "relaxed accuracy", "cider": "CIDEr"}


def document_scores(
    name: str, truths: Mapping[Any, Sequence[str]], answers: Mapping[Any, str]
) -> dict[Any, float]:
    """The score `name`, one of TITLES, of each answer to a question with right ones, by the same
    keys. Raises UserError."""
    known = {key: texts for key, texts in truths.items() if texts}
    if name == "cider":
        return cider(known, answers)
    score = anls if name == "anls" else relaxed
    return {key: score(texts, answers[key]) for key, texts in known.items()}


def metric(name: str) -> Callable[[list[str], list], float]:
    """The mean of a score in percent, as one of the `metrics` of `train.finetune.finetune`."""

    def percent(answers: list[str], truths: list) -> float:
        texts = [[truth] if isinstance(truth, str) else truth for truth in truths]
        scores = document_scores(name, dict(enumerate(texts)), dict(enumerate(answers)))
        return 100 * sum(scores.values()) / len(scores)

    return percent


# ANLS


def anls(truths: Sequence[str], answer: str) -> float:
    """Normalized Levenshtein similarity to the nearest of the right answers; its mean over the
    questions is ANLS.

    As the script of DocVQA and InfographicVQA (https://rrc.cvc.uab.es/?ch=17) has it: without case,
    a run of blanks is one, and a similarity below ½ counts 0. Its length is that of the longer text
    as given, with all blanks. In the paper (Biten et al., ICCV 2019) and in big_vision ½ itself
    counts 0, and blanks are letters.
    """
    said = " ".join(answer.lower().split())
    best = 0.0
    for truth in truths:
        right = " ".join(truth.lower().split())
        length = max(len(truth.upper()), len(answer.upper()))
        gap = abs(len(right) - len(said))  # the distance is no smaller
        if right == said:
            return 1.0
        if 2 * gap <= length:
            best = max(best, 1 - edit_distance(right, said) / length)
    return best if best >= THRESHOLD else 0.0


def edit_distance(a: str, b: str) -> int:
    """How many letters must be inserted, left out or replaced (Levenshtein 1966), a row of the
    table at once. Raises UserError for texts of more than LONGEST letters."""
    if max(len(a), len(b)) > LONGEST:
        raise UserError(
            f"texts of {len(a)} and {len(b)} letters: ANLS compares up to {LONGEST}: cut them"
        )
    letters = np.array([ord(letter) for letter in b], dtype=int)
    places = np.arange(len(b) + 1)
    row = places
    for number, letter in enumerate(a, 1):
        # replaced or kept, or left out
        cost = np.where(letters == ord(letter), 0, 1)
        best = np.minimum(row[:-1] + cost, row[1:] + 1)
        # then inserted: row[j] is the least of best[i] + j - i
        best = np.insert(best, 0, number)
        row = np.minimum.accumulate(best - places) + places
    return int(row[-1])


# Relaxed accuracy


def relaxed(truths: Sequence[str], answer: str) -> float:
    """Whether an answer is a right one, as ChartQA is scored (Masry et al. 2022, section 5.1; the
    scorer of Pix2Struct, which big_vision and lmms-eval have too): a number within 5 % of the right
    one, which is not 0; else the same text, without case.

    A percentage is its share of 1, on both sides; years have no rule of their own, and 1,000 with a
    comma is a text. Other than there, blanks at the ends are left out, and nan and inf are texts.
    """
    said = answer.strip().lower()
    value = number_in(said)
    for truth in truths:
        right = truth.strip().lower()
        expected = number_in(right)
        is_right = said == right
        if value is not None and expected:
            is_right = abs(value - expected) / abs(expected) <= TOLERANCE
        if is_right:
            return 1.0
    return 0.0


def number_in(text: str) -> float | None:
    """The finite number that a text is, a percentage as its share of 1; else None."""
    with suppress(ValueError):
        value = float(text.rstrip("%"))
        if math.isfinite(value):
            return value / 100 if text.endswith("%") else value
    return None


# CIDEr


def cider_scorer() -> type:
    """The class of the scorer. Raises UserError without its package."""
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError:
        raise UserError("CIDEr needs a package: pip install pycocoevalcap") from None
    return Cider


def cider(truths: Mapping[Any, Sequence[str]], answers: Mapping[Any, str]) -> dict[Any, float]:
    """CIDEr-D (Vedantam et al., CVPR 2015) of captions by COCO's code, 0 to 10; how rare words are
    is counted in the right captions of all questions, so of one question alone it is 0.

    Words are found here by `WORD`, in lower case. Published numbers have the Penn Treebank's words,
    which need Java; these differ in contractions (do n't) and in numbers with marks (3.5).
    """
    if not truths:
        return {}
    right = {key: list(map(caption_words, texts)) for key, texts in truths.items()}
    said = {key: [caption_words(answers[key])] for key in truths}
    _, scores = cider_scorer()().compute_score(right, said)
    return dict(zip(truths, map(float, scores), strict=True))


def caption_words(text: str) -> str:
    """The words of a caption in lower case, with a blank between two; of none the text itself."""
    return " ".join(WORD.findall(text.lower())) or text
