"""MMNeedle's response files and its measures.

In: responses (a file, or records). Out: existence, index and exact accuracy, and exact accuracy by place.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isnan, nan
from pathlib import Path

from eval.data import NeedleTest, check, check_unique, read, text
from model.common import quoted, write_text

PLACE = r"(0, 0, 0|[1-9][0-9]?, [1-9][0-9]?, [1-9][0-9]?)"  # absent, or counted from 1
TRUTH = re.compile(f"{PLACE}(; {PLACE})*")


def response_record(test: NeedleTest, response: str | None) -> dict:
    """One record of a response file: the response and the truth, places counted from 1, 0 for an absent needle."""
    truth = "; ".join(", ".join(str(number + 1) for number in place) for place in test.places)
    targets, captions = [Path(target).name for target in test.targets], list(test.captions)
    record = {"id": test.id, "response": response, "ground_truth": truth}
    return record | {
        "target_path": targets if len(targets) > 1 else targets[0],
        "caption": captions if len(captions) > 1 else captions[0],
    }


def write_responses(path: str | Path, records: Sequence[dict]) -> None:
    """Write a response file, a JSON list of `response_record`s."""
    write_text(path, json.dumps(records, ensure_ascii=False, indent=1) + "\n")


def read_responses(path: str | Path) -> list[dict]:
    """Read a response file, MMNeedle's or ours. Raises UserError for a malformed record or an id that occurs twice."""

    def response(record: dict) -> dict:
        truth = text(record, "ground_truth")
        expected = "'index, row, column', each from 1 to 99, or '0, 0, 0', joined by '; '"
        check(bool(TRUTH.fullmatch(truth)), f"ground_truth is {quoted(truth)}, expected {expected}")
        check(isinstance(record["id"], int | str), f"id is {quoted(record['id'])}, expected a number or a text")
        if record["response"] is not None:
            text(record, "response")
        return record

    records = read(path, response)
    check_unique((record["id"] for record in records), path)
    return records


def parse_response(text: str, needles: int = 1) -> tuple[str, ...]:
    """The answers of a response: without newlines, without spaces and periods at its ends, split at ";".

    With several needles, MMNeedle reads these as "none is there", here ("-1",) * needles: -1, -1; -1, -1, -1, -1-1,
    and -1, -1, -1; -1, -1, -1.
    """
    text = text.replace("\n", "").strip().strip(".").strip()
    if needles == 1:
        return (text,)
    parts = tuple(part.strip() for part in text.split("; "))
    none = {"-1", "; ".join(["-1, -1, -1"] * needles), *(mark.join(["-1"] * needles) for mark in ("", ", ", "; "))}
    return ("-1",) * needles if "; ".join(parts) in none else parts


def answers_of(record: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(true answers, given answers), one per needle; none for a record without response."""
    if record["response"] is None:
        return (), ()
    truth = tuple("-1" if part.startswith("0, ") else part for part in record["ground_truth"].split("; "))
    return truth, parse_response(record["response"], len(truth))


def judge(record: dict) -> tuple[bool, bool, bool] | None:
    """Whether a response is right in (existence, index, exact); None if there is no response.

    Existence: the answer is "-1" exactly if no needle is there. Index: the parts before the first ", " agree. Exact:
    all agrees. With several needles the whole list must agree.
    """
    truth, given = answers_of(record)
    if not truth:
        return None
    nothing = ("-1",) * len(truth)
    index = [part.split(", ")[0] for part in truth] == [part.split(", ")[0] for part in given]
    return (truth == nothing) == (given == nothing), index, truth == given


def score_responses(records: Iterable[dict]) -> dict[str, float]:
    """Accuracies "existence", "index" and "exact", fractions of the responses that are not None; 0 without any."""
    verdicts = [verdict for record in records if (verdict := judge(record)) is not None] or [(False,) * 3]
    means = (sum(column) / len(verdicts) for column in zip(*verdicts, strict=True))
    return dict(zip(("existence", "index", "exact"), means, strict=True))


def accuracy_by_place(records: Iterable[dict], side: int | None = None) -> list[list[float]]:
    """Exact accuracy of each needle by its row and column, side×side (by default the largest place); NaN: no needle.

    With one needle a test and side 2 these are the paper's quadrants, and their mean is its "index accuracy".
    """
    hits: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for record in records:
        truth, given = answers_of(record)
        for at, part in enumerate(truth):
            if part != "-1":
                _, row, col = map(int, part.split(", "))
                hits[row - 1, col - 1].append(given[at : at + 1] == (part,))
    side = side or max((max(place) + 1 for place in hits), default=1)
    means = {place: sum(of_place) / len(of_place) for place, of_place in hits.items()}
    return [[means.get((row, col), nan) for col in range(side)] for row in range(side)]


def mean_over_places(grid: list[list[float]]) -> float:
    """Unweighted mean over the places that had a needle; NaN if none had."""
    values = [value for row in grid for value in row if not isnan(value)]
    return sum(values) / len(values) if values else nan
