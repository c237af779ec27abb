"""MMNeedle's response files and its measures.

In: responses (a file, or records). Out: existence, index and exact accuracy, and exact accuracy by place.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from eval.data import NeedleTest, check, check_unique, read, text
from model.common import quoted

PLACE = r"(0, 0, 0|[1-9][0-9]?, [1-9][0-9]?, [1-9][0-9]?)"  # absent, or counted from 1
TRUTH = re.compile(f"{PLACE}(; {PLACE})*")


def response_record(test: NeedleTest, response: str | None) -> dict:
    """One record of a response file: the response and the truth, places counted from 1, 0 for an absent needle."""
    truth = "; ".join(", ".join(str(number + 1) for number in place) for place in test.places)
    targets, captions = [Path(target).name for target in test.targets], list(test.captions)
    if len(captions) == 1:
        (targets,), (captions,) = targets, captions
    return {"id": test.id, "response": response, "ground_truth": truth, "target_path": targets, "caption": captions}


def read_responses(path: str | Path) -> list[dict]:
    """Read a response file, MMNeedle's or ours. Raises UserError for a malformed record or an id that occurs twice."""

    def response(record: dict) -> dict:
        truth = text(record, "ground_truth")
        expected = "'index, row, column', each from 1 to 99, or '0, 0, 0', joined by '; '"
        check(bool(TRUTH.fullmatch(truth)), f"ground_truth is {quoted(truth)}, expected {expected}")
        check(isinstance(record["id"], int | str), f"id is {quoted(record['id'])}, expected a number or a text")
        check(isinstance(record["response"], str | None), "response is no text")
        return record

    records = read(path, response)
    check_unique((record["id"] for record in records), path)
    return records


def answers_of(record: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(true answers, given answers), one per needle, "-1" for an absent one; none for a record without response.

    A response is read without newlines, without spaces and periods at its ends, and split at ";". Of several needles
    MMNeedle reads these as "none is there": -1, -1; -1, -1, -1, -1-1, and -1, -1, -1; -1, -1, -1.
    """
    if record["response"] is None:
        return (), ()
    truth = tuple("-1" if part.startswith("0, ") else part for part in record["ground_truth"].split("; "))
    given, count = record["response"].replace("\n", "").strip().strip(".").strip(), len(truth)
    if count == 1:
        return truth, (given,)
    parts = tuple(part.strip() for part in given.split("; "))
    none = {"-1", "; ".join(["-1, -1, -1"] * count), *(mark.join(["-1"] * count) for mark in ("", ", ", "; "))}
    return truth, ("-1",) * count if "; ".join(parts) in none else parts


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


def accuracy_by_place(records: Iterable[dict]) -> dict[tuple[int, int], float]:
    """Exact accuracy of the needles by their row and column, from 1.

    With one needle a test and side 2 these are the paper's quadrants, and their mean is its "index accuracy".
    """
    hits: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for record in records:
        truth, given = answers_of(record)
        for at, part in enumerate(truth):
            if part != "-1":
                _, row, col = map(int, part.split(", "))
                hits[row, col].append(given[at : at + 1] == (part,))
    return {place: sum(hits[place]) / len(hits[place]) for place in sorted(hits)}
