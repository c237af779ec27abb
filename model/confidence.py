"""How sure a model is of an answer that it has decoded.

In: the tokens of answers with their log-probabilities, as `generate` gives both. Out: a `Certainty`
for each answer; `ask` and all evaluations give it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from model.boxes import location_scores


class Certainty(NamedTuple):
    """Of an answer. An answer that did not end has no end token in its mean."""

    confidence: float  # exp of the mean log p of its tokens, the end token included
    ended: bool  # by an end token; else by the limit of tokens
    scores: list[float]  # of its parts between semicolons, see `location_scores`; or none


def certainties(
    answers: Sequence[Tensor],
    log_probs: Sequence[Tensor],
    ends: Collection[int],
    decode: Callable[[Any], str],
) -> list[Certainty]:
    """Of each row of `generate`: its token ids (T,) and their log p (T,), in nats. ends: the tokens
    that end an answer. decode: from ids to text."""
    found = []
    for answer, of_tokens in zip(answers, log_probs, strict=True):
        ids = answer.tolist()
        each = of_tokens.tolist()
        text = decode(ids)
        scores = []
        if "<loc" in text:
            places = [len(decode(ids[:count])) for count in range(1, len(ids) + 1)]
            scores = location_scores(text, places, each)
        mean = math.fsum(each) / len(each)
        found.append(Certainty(math.exp(mean), ids[-1] in ends, scores))
    return found
