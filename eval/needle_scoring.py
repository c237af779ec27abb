"""MMNeedle's response files and its measures.

In: responses (a file, or records). Out: existence, index and exact accuracy, and exact accuracy by place.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230.
"""

import json
import re
from collections.abc import Iterable, Sequence
from math import isnan, nan
from pathlib import Path

from eval.data import NeedleTest
from eval.datasets import TEXT, check_unique, read_id, records_of
from model.common import UserError, quoted, read_field, read_json, shown, write_text

PLACE = r"(0, 0, 0|[1-9][0-9]?, [1-9][0-9]?, [1-9][0-9]?)"  # absent, or counted from 1
TRUTH = re.compile(f"{PLACE}(; {PLACE})*")

# Response files


def response_record(test: NeedleTest, response: str | None) -> dict:
    """One record of a response file: the response and the truth, places counted from 1, 0 for an absent needle."""
    truth = "; ".join(", ".join(str(number + 1) for number in place) for place in test.places)
    targets, captions = [Path(target).name for target in test.targets], list(test.captions)
    return {
        "id": test.id,
        "response": response,
        "ground_truth": truth,
        "target_path": targets if len(targets) > 1 else targets[0],
        "caption": captions if len(captions) > 1 else captions[0],
    }


def write_responses(path: str | Path, records: Sequence[dict]) -> None:
    """Write a response file, a JSON list of `response_record`s."""
    write_text(path, json.dumps(records, ensure_ascii=False, indent=1) + "\n")


def read_responses(path: str | Path) -> list[dict]:
    """Read a response file, MMNeedle's or ours. Raises UserError for a malformed record or an id that occurs twice."""
    records = records_of(read_json(path, object), shown(path))
    for where, record in records:
        read_id(record, "id", where)
        truth = read_field(record, "ground_truth", TEXT, where)
        if not TRUTH.fullmatch(truth):
            raise UserError(
                f"{where}: ground_truth is {quoted(truth)}, expected 'index, row, column', each from 1 to 99, or "
                "'0, 0, 0', joined by '; ': correct the record"
            )
        if record.get("response", "") is not None:
            read_field(record, "response", TEXT, where)
    check_unique((record["id"] for _, record in records), path)
    return [record for _, record in records]


# Measures


def parse_response(text: str, needles: int = 1) -> tuple[str, ...]:
    """The answers of a response: without newlines, without spaces and periods at its ends, split at ";".

    With several needles, MMNeedle reads these as "none is there", here ("-1",) * needles: -1, -1; -1, -1, -1, -1-1,
    and -1, -1, -1; -1, -1, -1.
    """
    text = text.replace("\n", "").strip().strip(".").strip()
    if needles == 1:
        return (text,)
    parts = tuple(part.strip() for part in text.split("; "))
    none = {
        "-1",
        "-1" * needles,
        *(mark.join(["-1"] * needles) for mark in (", ", "; ")),
        "; ".join(["-1, -1, -1"] * needles),
    }
    return ("-1",) * needles if "; ".join(parts) in none else parts


def _answers(record: dict) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(true answers, given answers), one per needle; None for a record without response, which is not scored."""
    if record["response"] is None:
        return None
    truth = tuple("-1" if part.startswith("0, ") else part for part in record["ground_truth"].split("; "))
    return truth, parse_response(record["response"], len(truth))


def judge(record: dict) -> tuple[bool, bool, bool] | None:
    """Whether a response is right in (existence, index, exact); None if there is no response.

    Existence: the answer is "-1" exactly if no needle is there. Index: the parts before the first ", " agree. Exact:
    all agrees. With several needles the whole list must agree.
    """
    answers = _answers(record)
    if answers is None:
        return None
    truth, given = answers
    nothing = ("-1",) * len(truth)
    index = [part.split(", ")[0] for part in truth] == [part.split(", ")[0] for part in given]
    return (truth == nothing) == (given == nothing), index, truth == given


def score_responses(records: Iterable[dict]) -> dict[str, float]:
    """{"existence_accuracy", "index_accuracy", "exact_accuracy"} as fractions of the responses that are not None.

    Without any, all are 0.
    """
    verdicts = [verdict for record in records if (verdict := judge(record)) is not None]
    names = ("existence_accuracy", "index_accuracy", "exact_accuracy")
    totals = (sum(column) for column in zip(*verdicts, strict=True)) if verdicts else (0, 0, 0)
    return {name: total / max(len(verdicts), 1) for name, total in zip(names, totals, strict=True)}


def accuracy_by_place(records: Iterable[dict], side: int | None = None) -> list[list[float]]:
    """Exact accuracy of each needle by its row and column, side×side (by default the largest place); NaN: no needle.

    With one needle a test and side 2 these are the paper's quadrants, and their mean is its "index accuracy".
    """
    hits: dict[tuple[int, int], list[bool]] = {}
    for record in records:
        truth, given = _answers(record) or ((), ())
        for at, part in enumerate(truth):
            if part != "-1":
                _, row, col = map(int, part.split(", "))
                hits.setdefault((row - 1, col - 1), []).append(at < len(given) and given[at] == part)
    side = side or max((max(place) + 1 for place in hits), default=1)
    return [
        [sum(found) / len(found) if (found := hits.get((row, col))) else nan for col in range(side)]
        for row in range(side)
    ]


def mean_over_places(grid: list[list[float]]) -> float:
    """Unweighted mean over the places that had a needle; NaN if none had."""
    values = [value for row in grid for value in row if not isnan(value)]
    return sum(values) / len(values) if values else nan
