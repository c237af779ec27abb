"""How sure a model is of an answer that it has decoded.

In: the tokens of answers with their log-probabilities, as `generate` gives both. Out: a `Certainty`
for each answer; `ask` and all evaluations give it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from model.boxes import location_scores


class Certainty(NamedTuple):
    """How sure a model is of an answer."""

    confidence: float  # exp of the mean log p of its tokens, an end token included
    ended: bool  # by an end token; else by the limit of tokens
    scores: list[float]  # one for each part between semicolons, see `location_scores`


def certainty(
    ids: Sequence[int],
    log_probs: Sequence[float],
    ends: Collection[int],
    decode: Callable[[Any], str],
) -> Certainty:
    """Of an answer's tokens (T,) and their log p (T,), in nats. ends: the tokens that end an
    answer. decode: from ids to text."""
    mean = math.fsum(log_probs) / len(log_probs)
    scores = location_scores([decode([id_]) for id_ in ids], log_probs)
    return Certainty(math.exp(mean), ids[-1] in ends, scores)
