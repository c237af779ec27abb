"""Detection: a model's boxes, scored as COCO does.

    python -m eval.detect                       the newest run, or the embedded base, on the embedded scenes
    python -m eval.detect --data coco:instances_val2017.json --images DIR --model SRC --adapter RUN
    python -m eval.detect --results results.json

In: pictures with true boxes, and a model, which is asked `detect a ; b` for the classes that are there; or an earlier
results.json. Out: AP and AR, also by class, the share of malformed boxes, results.json, and detect.png with true and
found boxes. An answer has no score: it is 1 for every box, unless results.json has others.

Source: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014; the rules are those of its evaluation code
(https://cocodataset.org/#detection-eval), to the tie.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import numpy as np
from PIL.Image import Image

from eval import figures
from eval.bench import Benchmark, Row, run
from eval.data.published import check, check_unique, read, text
from eval.data.records import Box, Detection, embedded_records, read_data
from eval.question import Question, question_of
from model.common import UserError, run_command, shown, write_text
from model.images import load_image
from model.processor import parse_boxes

EMBEDDED = 300  # pictures, by default
DRAWN = 12  # of them, on the sheet
THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of the overlap (IoU)
RECALLS = np.linspace(0, 1, 101)
SIZES = {
    "": (0, 1e10),
    " small": (0, 32**2),
    " medium": (32**2, 96**2),
    " large": (96**2, 1e10),
}  # area, both ends
MOST = 100  # detections of one class in one picture


class Found(NamedTuple):
    """A box that a model has named: x and y of its upper left corner, in pixels."""

    label: str
    x: float
    y: float
    width: float
    height: float
    score: float = 1.0


class Detect(Benchmark):
    """An answer is a text, and the score of each of its parts between semicolons; without scores
    all are 1."""

    name = "detect"
    max_new_tokens = 256
    flags = {
        "--data": dict(help="coco:ANNOTATIONS.json or embedded (default: embedded)", metavar="SRC"),
        "--images": dict(
            help="folder of the pictures of --data (default: that of its file)", metavar="DIR"
        ),
    }
    limit = f"pictures, the first N (default: all of a file, {EMBEDDED} of the embedded scenes)"

    def questions(self, args):
        if args.data in (None, "embedded"):
            records = embedded_records(("detect",), "test", args.limit or EMBEDDED)
        else:
            records = read_data(args.data, args.images)[: args.limit]
        if bare := [record.name for record in records if record.turns and record.detection is None]:
            raise UserError(
                f"{shown(args.data)}: {shown(bare[0])} has no boxes: give coco:ANNOTATIONS.json"
            )
        return [question_of(record, truth=record.detection) for record in records]

    def rows(self, questions, answers):
        return [
            Row(q, (a, []), {}) for q, a in zip(questions, answers, strict=True) if a is not None
        ]

    def read(self, file, args):
        rows = read(file, row_of)
        check_unique((row.question.id for row in rows), file)
        return rows

    def summary(self, rows):
        found, problems = zip(*map(boxes_of, rows), strict=True)
        values = score_boxes([row.question.truth.boxes for row in rows], found)
        classes = {f"  AP, {name}": value for name, value in values.pop("classes").items()}
        counts = sum(problems, Counter())
        parts, _ = max(1, counts.total()), counts.pop("", 0)
        values |= {"malformed": counts.total() / parts} | {
            f"  {name}": n / parts for name, n in counts.items()
        }
        values["answers without a box"] = problems.count(Counter()) / len(rows)
        return {
            line: {"COCO": v if v is None else 100 * v} for line, v in (values | classes).items()
        }

    def write(self, rows, out, subject):
        results = []
        for question, (answer, scores), _ in rows:
            result = {"question_id": question.id, "question": question.prefix, "answer": answer}
            results.append(result | asdict(question.truth) | {"scores": scores})
        write_text(out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
        title = f"{subject.title}: true boxes green, found ones orange"
        figures.save(draw_sheet(rows, title), out / "detect.png")


def row_of(record: dict) -> Row:
    """The row of an entry of results.json. Raises LookupError, TypeError and ValueError."""
    truth = Detection(
        record["width"], record["height"], tuple(Box(**box) for box in record["boxes"])
    )
    id_, prefix, answer = (text(record, name) for name in ("question_id", "question", "answer"))
    scores = record["scores"]
    is_finite = math.isfinite(sum(scores) + truth.width + truth.height)
    check(is_finite and min(truth.width, truth.height) > 0, "a score or a side is no number")
    check(
        len(scores) in (0, len(answer.split(";"))),
        "scores: give one for each part of the answer, or none",
    )
    return Row(Question(id_, id_, (), prefix, truth=truth), (answer, scores), {})


def boxes_of(row: Row) -> tuple[list[Found], Counter]:
    """The boxes of an answer, and the number of its parts by problem, "" where there is none. A
    part without four locations is no box; an empty box, or a name that was not asked for, is one
    that is wrong."""
    (answer, scores), truth, found, problems = row.answer, row.question.truth, [], Counter()
    asked = row.question.prefix.removeprefix("detect ").split(" ; ")
    names = {name.lower(): name for name in asked} | {
        name: name for name in asked
    }  # some differ by case alone
    for number, part in enumerate(answer.split(";")):
        problem = "not four locations and a name" if part.strip() else None
        for label, (left, top, right, bottom) in parse_boxes(
            part, truth.width, truth.height, as_said=True
        ):
            name = names.get(label, names.get(label.lower()))
            problem = "" if name else "a name that was not asked for"
            problem = problem if right > left and bottom > top else "an empty box"
            box = left, top, right - left, bottom - top
            found.append(Found(name or label, *box, scores[number] if scores else 1.0))
        problems.update([] if problem is None else [problem])
    return found, problems


def draw_sheet(rows: Sequence[Row], title: str):
    """Some pictures with their true and found boxes."""
    count = min(DRAWN, len(rows))
    cells = [draw_row(rows[number * len(rows) // count]) for number in range(count)]
    return figures.contact_sheet(*zip(*cells, strict=True), title=title, size=224)


def draw_row(row: Row) -> tuple[Image, str, bool]:
    """A picture with its true and found boxes, how many agree by half, and whether these are
    all."""
    size, found = row.question.truth, boxes_of(row)[0]
    truths = [box for box in size.boxes if not box.is_crowd]
    image = load_image(row.question.images()[0])
    sheet = figures.draw_boxes(
        image, corners(truths, image, size), colors=[figures.HIT], width=5, least=448
    )
    names = [box.label for box in found]
    drawn = figures.draw_boxes(
        sheet, corners(found, sheet, size), names, colors=[figures.SERIES[1]]
    )
    pairs = (
        ([t for t in truths if t.label == name], [f for f in found if f.label == name])
        for name in {*names}
    )
    matched = sum(int(match(*pair).hit[0].sum()) for pair in pairs)
    caption = f"{row.question.prefix}: {matched} of {len(truths)}, {len(found)} found"
    return drawn, caption, matched == len(truths) == len(found)


def corners(
    boxes: Sequence[Box | Found], image, size: Detection
) -> list[tuple[float, float, float, float]]:
    """The boxes as (left, top, right, bottom) in the pixels of `image`, which may have another size
    than annotated."""
    x, y = image.width / size.width, image.height / size.height
    sides = [((b.x * x, (b.x + b.width) * x), (b.y * y, (b.y + b.height) * y)) for b in boxes]
    return [
        (min(across), min(down), max(across), max(down)) for across, down in sides
    ]  # an answer may swap corners


# COCO's measures


class Matches(NamedTuple):
    """What became of the detections D of one class, in one picture or in all: score and rank in its
    picture (D,);
    hit and ignored (thresholds, D); and how many truths there are to find."""

    score: np.ndarray
    rank: np.ndarray
    hit: np.ndarray
    ignored: np.ndarray
    truths: int


def score_boxes(truths: Sequence[Sequence[Box]], found: Sequence[Sequence[Found]]) -> dict:
    """COCO's table, as fractions, and "classes", the AP of each; truths and detections of one
    picture after the other. The order of the pictures decides between equal scores: COCO's is that
    of their ids. None: no truth of that size."""
    pairs = {truth.label: [] for of_picture in truths for truth in of_picture}
    for of_picture, detections in zip(truths, found, strict=True):
        for label in {box.label for box in (*of_picture, *detections)} & pairs.keys():
            best = sorted((f for f in detections if f.label == label), key=lambda f: -f.score)[
                :MOST
            ]
            pairs[label].append(([truth for truth in of_picture if truth.label == label], best))
    result, by_class = {}, {}
    for size, limits in SIZES.items():
        pooled = {
            label: pool(match(*pair, limits) for pair in of_class)
            for label, of_class in pairs.items()
        }
        pooled = {label: matches for label, matches in pooled.items() if matches.truths}
        precision = np.array([average_precision(matches) for matches in pooled.values()]).reshape(
            -1, len(THRESHOLDS)
        )
        result[f"AP{size}"] = _mean(precision)
        if not size:
            result |= {"AP50": _mean(precision[:, 0]), "AP75": _mean(precision[:, 5])}
            by_class = dict(zip(pooled, precision.mean(axis=1).tolist(), strict=True))
        for most in (1, 10, MOST) if not size else (MOST,):
            hits = [(m.hit[:, m.rank < most].sum(axis=1).mean(), m.truths) for m in pooled.values()]
            result[f"AR{size or most}"] = _mean([float(hit / truths) for hit, truths in hits])
    return result | {"classes": by_class}


def _mean(values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def match(
    truths: Sequence[Box], found: Sequence[Found], limits: tuple[float, float] = SIZES[""]
) -> Matches:
    """Detections of one class in one picture, best first, each to the free truth with the largest
    overlap. At equal overlap the later truth is taken, and a real one before one that is ignored: a
    crowd, which many may match, or a truth of another size. Detections of ignored truths, and those
    of another size without a truth, are ignored."""
    low, high = limits
    crowd = np.array([truth.is_crowd for truth in truths], bool)
    ignored = crowd | np.array([not low <= truth.area <= high for truth in truths], bool)
    iou = overlaps(found, truths)
    hit = np.zeros((len(THRESHOLDS), len(found)), bool)
    neither = hit | np.array([not low <= f.width * f.height <= high for f in found], bool)
    for at, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(truths), bool)
        for number in range(len(found)):
            fits = (free | crowd) & (iou[number] >= threshold)
            fits = fits & ~ignored if (fits & ~ignored).any() else fits
            if fits.any():
                best = np.flatnonzero(fits & (iou[number] == iou[number][fits].max()))[-1]
                free[best] = False
                hit[at, number], neither[at, number] = not ignored[best], ignored[best]
    scores = np.array([f.score for f in found], np.float64)
    return Matches(scores, np.arange(len(found)), hit, neither, int((~ignored).sum()))


def overlaps(found: Sequence[Found], truths: Sequence[Box]) -> np.ndarray:
    """IoU (found, truths); with a crowd, the share of the found box that lies in it."""
    boxes = ([(b.x, b.y, b.width, b.height) for b in boxes] for boxes in (found, truths))
    (left, top, width, height), true = (
        np.array(sides, np.float64).reshape(-1, 4).T[..., None] for sides in boxes
    )
    true_left, true_top, true_width, true_height = true[..., 0]
    across = np.minimum(left + width, true_left + true_width) - np.maximum(left, true_left)
    down = np.minimum(top + height, true_top + true_height) - np.maximum(top, true_top)
    common = np.where((across > 0) & (down > 0), across * down, 0.0)
    whole = np.where(
        [t.is_crowd for t in truths],
        width * height,
        width * height + true_width * true_height - common,
    )
    return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


def pool(matches: Iterable[Matches]) -> Matches:
    """The detections of all pictures, best first; of equal ones the earlier."""
    score, rank, hit, ignored, truths = zip(*matches, strict=True)
    order = np.argsort(-np.concatenate(score), kind="stable")
    both = (np.concatenate(part, axis=1)[:, order] for part in (hit, ignored))
    return Matches(np.concatenate(score)[order], np.concatenate(rank)[order], *both, sum(truths))


def average_precision(matches: Matches) -> np.ndarray:
    """(thresholds,) mean over 101 recalls r of the largest precision at a recall of r or more, 0
    where none is."""
    hits = np.cumsum(matches.hit, axis=1)
    misses = np.cumsum(~matches.hit & ~matches.ignored, axis=1)
    precision = hits / (hits + misses + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    reached = [np.searchsorted(row / matches.truths, RECALLS) for row in hits]
    return np.array(
        [np.append(row, 0.0)[at].mean() for row, at in zip(precision, reached, strict=True)]
    )


main = partial(run, Detect())

if __name__ == "__main__":
    run_command(main)
