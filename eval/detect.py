"""Detection: a model's boxes, and its masks, scored as COCO does.

    python -m eval.detect     the newest run, or the embedded base, on the embedded scenes
    python -m eval.detect --data coco:instances_val2017.json --images DIR --model SRC --adapter RUN
    python -m eval.detect --data jsonl:_annotations.test.jsonl --model SRC --adapter RUN
    python -m eval.detect --data coco-masks:FILE --images DIR --masks vae-oid.npz --model SRC
    python -m eval.detect --results results.json

In: pictures with true boxes, and a model, which is asked `detect a ; b` for the classes that are
there, or `segment a` for each of them; or an earlier results.json. Out: AP and AR, also by class,
the share of malformed boxes, results.json, and detect.png with true and found boxes. The score of a
box is the product of the probabilities of its four locations; of an earlier results.json without
scores it is 1.

With --masks the same measures of masks, and mIoU: the mean over prompts of the overlap of the true
masks and of as many that the answer names, the first ones; without a valid one it is 0. A prompt
with one object is scored as in big_vision.

Source: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014; the rules are those of
its evaluation code (https://cocodataset.org/#detection-eval), to the tie. mIoU: big_vision,
evaluators/proj/paligemma/transfers/segmentation.py.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL.Image import Image

from eval import figures
from eval.bench import (
    Benchmark,
    Row,
    certainties_of,
    certainty_fields,
    check_no_images,
    read_rows,
    run,
    write_json,
)
from eval.command import MASKS_HELP
from eval.data.files import check, text_at
from eval.data.masks import checked_mask, mask_of
from eval.data.record import Box, Detection, Record
from eval.data.records import embedded_records, read_data
from eval.masks import answer_overlap, mask_overlaps, masks_of
from eval.question import Question, question_of, read_certainty
from model.boxes import Said, parse_objects
from model.common import UserError, run_command, shown
from model.images import load_image
from weights.masks import load_mask_coder

BY_DEFAULT = 300  # pictures, by default
DRAWN = 12  # of them, on the sheet
THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of the overlap (IoU)
RECALLS = np.linspace(0, 1, 101)
SIZES = {  # area, both ends
    "": (0, 1e10),
    " small": (0, 32**2),
    " medium": (32**2, 96**2),
    " large": (96**2, 1e10),
}
TOKENS = re.compile(r"\s*(<loc\d{4}>){4}(<seg\d{3}>){16}")  # of a mask in its box
MOST = 100  # detections of one class in one picture
SOUND = ""  # a part of an answer without a problem


class Found(NamedTuple):
    """A box that a model has named: x and y of its upper left corner, in pixels. said: as in the
    answer, with the codes of its mask."""

    label: str
    x: float
    y: float
    width: float
    height: float
    score: float = 1.0
    said: Said | None = None

    @property
    def area(self) -> float:
        return self.width * self.height


class Detect(Benchmark):
    """An answer is a text, and the score of each of its parts between semicolons; without scores
    all are 1."""

    name = "detect"
    max_new_tokens = 256
    coder: Any = None  # a `MaskCoder`, where masks are scored
    flags = {
        "--data": dict(
            help="coco:ANNOTATIONS.json, coco-masks:ANNOTATIONS.json, jsonl:FILE with boxes in its "
            "answers, as Roboflow's, or embedded (default: embedded)",
            metavar="SRC",
        ),
        "--images": dict(
            help="folder of the pictures of --data (default: that of its file)", metavar="DIR"
        ),
        "--masks": dict(
            help=f"score masks too, with the coder of the model: {MASKS_HELP}", metavar="FILE"
        ),
    }
    limit = (
        f"pictures, or prompts for masks, the first N (default: all of a file, {BY_DEFAULT} of the "
        "embedded scenes)"
    )

    def questions(self, args):
        if args.data in (None, "embedded"):
            check_no_images(args)
            records = embedded_records(("detect",), "test", args.limit or BY_DEFAULT)
        else:
            records = read_data(args.data, args.images, masks=args.masks)[: args.limit]
        questions = [question_of(record, truth=truth_of(record)) for record in records]
        self.open_coder(questions, args)
        return questions

    def rows(self, questions, answers, sure: Mapping = {}):
        rows = []
        for question, said in zip(questions, answers, strict=True):
            if said is not None:
                certain = certainties_of(sure, question)
                scores = certain[0].scores if certain else []
                rows.append(self.with_overlap(Row(question, (said, scores), {}, certain)))
        return rows

    def read(self, file, args):
        if args.data:
            raise UserError("--results holds the true boxes, too: leave --data out")
        rows = read_rows(file, row_of)
        self.open_coder([row.question for row in rows], args)
        return list(map(self.with_overlap, rows))

    def open_coder(self, questions: Sequence[Question], args) -> None:
        """The coder of --masks. Raises UserError for questions without masks."""
        self.coder = load_mask_coder(args.masks)
        if self.coder and not all(map(asks_masks, questions)):
            raise UserError(
                f"--masks {shown(args.masks)}: some prompts ask for boxes alone: give --data "
                "coco-masks:FILE"
            )

    def with_overlap(self, row: Row) -> Row:
        """The row with big_vision's IoU, where masks are scored."""
        if not self.coder:
            return row
        return row._replace(scores={"mIoU": overlap_of(row, self.coder)})

    def summary(self, rows):
        found, problems = zip(*map(boxes_of, rows), strict=True)
        truths = [row.question.truth for row in rows]
        true_boxes = [truth.boxes for truth in truths]
        values = score_boxes(true_boxes, found)
        classes = values.pop("classes")
        if self.coder:
            pairs = zip(found, truths, strict=True)
            masks = (masks_of(boxes, truth, self.coder) for boxes, truth in pairs)
            of_masks = score_boxes(true_boxes, masks, mask_overlaps)
            of_masks.pop("classes")
            values |= {f"masks: {line}": value for line, value in of_masks.items()}
        # the malformed parts, in all and by problem
        counts = sum(problems, Counter())
        sound = counts.pop(SOUND, 0)
        parts = max(1, sound + counts.total())
        values["malformed"] = counts.total() / parts
        for problem, count in counts.items():
            values[f"  {problem}"] = count / parts
        without = sum(not of_row for of_row in problems)
        values["answers without a box"] = without / len(rows)
        values |= {f"  AP, {label}": value for label, value in classes.items()}
        summary = {}
        for line, value in values.items():
            summary[line] = {"COCO": None if value is None else 100 * value}
        return summary

    def write(self, rows, out, subject):
        results = []
        for row in rows:
            question, (answer, scores), *_ = row
            results.append(
                {
                    "question_id": question.id,
                    "picture": question.key,
                    "question": question.prefix,
                    "answer": answer,
                    **asdict(question.truth),
                    "scores": scores,
                    **certainty_fields(row),
                }
            )
        write_json(out / "results.json", results)
        title = f"{subject.title}: true boxes green, found ones orange"
        figures.save(draw_sheet(rows, title, self.coder), out / "detect.png")


def truth_of(record: Record) -> Detection | None:
    """The boxes of a record, or those that its answer names, as in Roboflow's files; None where it
    cannot be used. Raises UserError for a record without boxes."""
    if record.detection or not record.turns:
        return record.detection
    asks_boxes = record.prefix.startswith("detect ") and len(record.pictures) == 1
    size = load_image(record.pictures[0]).size if asks_boxes else (1, 1)
    truth = Detection(*size, ())
    # the right answer is read as a model's would be
    as_said = Row(question_of(record, truth=truth), (record.suffix, []), {})
    found, problems = boxes_of(as_said)
    if not asks_boxes or problems.keys() != {SOUND}:
        raise UserError(
            f"{shown(record.name)} has no boxes: give coco:ANNOTATIONS.json, or `detect a` with its "
            "boxes as the answer"
        )
    return replace(truth, boxes=tuple(Box(*box[:5], box.area) for box in found))


def row_of(record: dict) -> Row:
    """The row of an entry of results.json. Raises LookupError, TypeError and ValueError."""
    boxes = tuple(Box(**box) for box in record["boxes"])
    truth = Detection(record["width"], record["height"], boxes)
    id_ = text_at(record, "question_id")
    prefix = text_at(record, "question")
    answer = text_at(record, "answer")
    scores = record["scores"]
    is_finite = math.isfinite(sum(scores) + truth.width + truth.height)
    check(is_finite and min(truth.width, truth.height) > 0, "a score or a side is no number")
    parts = len(answer.split(";"))
    check(len(scores) in (0, parts), "scores: give one for each part of the answer, or none")
    picture = str(record.get("picture", id_))
    question = Question(id_, picture, (), prefix, truth=truth)
    if asks_masks(question):
        for box in boxes:
            checked_mask(box, truth.height, truth.width)
    certain = read_certainty(record)
    return Row(question, (answer, scores), {}, [certain] if certain else ())


def asks_masks(question: Question) -> bool:
    return question.prefix.startswith("segment ")


def boxes_of(row: Row) -> tuple[list[Found], Counter]:
    """The boxes of an answer, and how many of its parts have which problem (SOUND: none). A part
    without four locations gives no box. A part with another problem gives one, which is wrong: the
    box is empty, or its name was not asked for, or its mask is missing."""
    answer, scores = row.answer
    truth = row.question.truth
    _, _, listed = row.question.prefix.partition(" ")
    classes = listed.split(" ; ")
    names = {name.lower(): name for name in classes}
    names |= {name: name for name in classes}  # some differ by case alone
    found = []
    problems = Counter()
    for number, part in enumerate(answer.split(";")):
        if not part.strip():
            continue
        problem = "not four locations and a name"
        score = scores[number] if scores else 1.0
        for said in parse_objects(part, truth.width, truth.height, as_said=True):
            label = said.label
            left, top, right, bottom = said.box
            name = names.get(label, names.get(label.lower()))
            problem = SOUND if name else "a name that was not asked for"
            if asks_masks(row.question) and not said.codes:
                problem = "no mask of 16 codes"
            if right <= left or bottom <= top:
                problem = "an empty box"
            size = right - left, bottom - top
            found.append(Found(name or label, left, top, *size, score, said))
        problems[problem] += 1
    return found, problems


def overlap_of(row: Row, coder: Any) -> float:
    """The IoU of a prompt's true masks with as many masks of its answer, the first ones. Text after
    the 20 tokens of a mask is ignored, a name too."""
    truth = row.question.truth
    count = sum(not box.is_crowd for box in truth.boxes)
    answer, _ = row.answer
    tokens = [TOKENS.match(part) for part in answer.split(";")[:count]]
    first = ";".join(match[0] for match in tokens if match)
    found, _ = boxes_of(row._replace(answer=(first, [])))
    return answer_overlap(masks_of(found, truth, coder), truth)


def draw_sheet(rows: Sequence[Row], title: str, coder: Any):
    """Some pictures with their true and found boxes, and masks."""
    count = min(DRAWN, len(rows))
    cells = [draw_row(rows[number * len(rows) // count], coder) for number in range(count)]
    return figures.contact_sheet(*zip(*cells, strict=True), title=title, size=224)


def draw_row(row: Row, coder: Any) -> tuple[Image, str, bool]:
    """A picture with its true and found boxes, and masks with a coder. Its caption counts the boxes
    with an IoU of ½ or more; the last value says whether all are right."""
    truth = row.question.truth
    truths = [box for box in truth.boxes if not box.is_crowd]
    found, _ = boxes_of(row)
    image = load_image(row.question.images()[0])
    if coder is not None and asks_masks(row.question):
        masks = [mask_of(box.segmentation, truth.height, truth.width) for box in truths]
        image = figures.draw_masks(image, masks, [figures.HIT] * len(masks))
        masks = [said.mask for said in masks_of(found, truth, coder)]
        image = figures.draw_masks(image, masks, [figures.MISS] * len(masks))
    true_corners = corners(truths, image, truth)
    enlarged = figures.draw_boxes(
        image,
        true_corners,
        colors=[figures.HIT],
        width=5,
        least=448,
    )
    labels = [box.label for box in found]
    found_corners = corners(found, enlarged, truth)
    drawn = figures.draw_boxes(enlarged, found_corners, labels, colors=[figures.SERIES[1]])
    matched = 0
    for label in set(labels):
        true, said = labelled(truths, label), labelled(found, label)
        matches = match(true, said, overlaps(said, true))
        matched += int(matches.hit[0].sum())
    caption = f"{row.question.prefix}: {matched} of {len(truths)}, {len(found)} found"
    return drawn, caption, matched == len(truths) == len(found)


def labelled(boxes: Sequence, label: str) -> list:
    return [box for box in boxes if box.label == label]


def corners(boxes: Sequence[Box | Found], image, size: Detection) -> list[list[float]]:
    """The boxes as [left, top, right, bottom] in the pixels of `image`, which may have another size
    than annotated."""
    ends = sides_of(boxes).T.reshape(-1, 2, 2)
    ends[:, 1] += ends[:, 0]
    ends *= image.width / size.width, image.height / size.height
    return np.sort(ends, axis=1).reshape(-1, 4).tolist()  # an answer may swap corners


# COCO's measures


class Matches(NamedTuple):
    """What became of the detections D of one class, in one picture or in all."""

    score: np.ndarray  # (D,)
    rank: np.ndarray  # (D,) in its picture
    hit: np.ndarray  # (thresholds, D)
    ignored: np.ndarray  # (thresholds, D)
    truths: int  # how many there are to find


def score_boxes(
    truths: Sequence[Sequence[Box]],
    found: Iterable[Sequence[Any]],
    overlap: Callable[[Sequence, Sequence], np.ndarray] | None = None,
) -> dict:
    """COCO's table, as fractions, and "classes", the AP of each; truths and detections of one
    picture after the other. The order of the pictures decides between equal scores: COCO's is that
    of their ids. None: no truth of that size. overlap: of masks, by default `overlaps` of boxes."""
    # 1. by size and class, what becomes of the best detections of each picture
    names = dict.fromkeys(truth.label for of_picture in truths for truth in of_picture)
    matched = {}
    for size in SIZES:
        matched[size] = {name: [] for name in names}
    for of_picture, detections in zip(truths, found, strict=True):
        labels = {box.label for box in (*of_picture, *detections)}
        for label in labels & names.keys():
            true = labelled(of_picture, label)
            best = sorted(labelled(detections, label), key=lambda box: -box.score)[:MOST]
            iou = (overlap or overlaps)(best, true)
            for size, limits in SIZES.items():
                matched[size][label].append(match(true, best, iou, limits))
    # 2. the measures by size
    result = {}
    by_class = {}
    for size, of_size in matched.items():
        pooled = {}
        for label, of_class in of_size.items():
            matches = pool(of_class)
            if matches.truths:
                pooled[label] = matches
        precision = np.array(list(map(average_precision, pooled.values())))
        precision = precision.reshape(-1, len(THRESHOLDS))
        result[f"AP{size}"] = mean(precision)
        if not size:
            result["AP50"] = mean(precision[:, 0])
            result["AP75"] = mean(precision[:, 5])
            means = precision.mean(axis=1).tolist()
            by_class = dict(zip(pooled, means, strict=True))
        for most in (MOST,) if size else (1, 10, MOST):
            recalls = []
            for matches in pooled.values():
                hits = matches.hit[:, matches.rank < most].sum(axis=1)
                recalls.append(float(hits.mean() / matches.truths))
            result[f"AR{size or most}"] = mean(recalls)
    return result | {"classes": by_class}


def mean(values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def match(
    truths: Sequence[Box],
    found: Sequence[Any],
    iou: np.ndarray,
    limits: tuple[float, float] = SIZES[""],
) -> Matches:
    """Detections of one class in one picture, best first, each to the free truth with the largest
    overlap, iou (found, truths). At equal overlap the later truth is taken, and a real one before
    one that is ignored: a crowd, which many may match, or a truth of another size. Detections of
    ignored truths, and those of another size without a truth, are ignored."""
    low, high = limits
    crowd = np.array([truth.is_crowd for truth in truths], bool)
    other_truths = [not low <= truth.area <= high for truth in truths]
    ignored_truths = crowd | np.array(other_truths, bool)
    other_found = [not low <= box.area <= high for box in found]
    hit = np.zeros((len(THRESHOLDS), len(found)), bool)
    ignored = hit | np.array(other_found, bool)
    for at, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(truths), bool)
        for number in range(len(found)):
            fits = (free | crowd) & (iou[number] >= threshold)
            if not fits.any():
                continue
            if (fits & ~ignored_truths).any():
                fits &= ~ignored_truths
            is_best = iou[number] == iou[number][fits].max()
            best = np.flatnonzero(fits & is_best)[-1]
            free[best] = False
            hit[at, number] = not ignored_truths[best]
            ignored[at, number] = ignored_truths[best]
    scores = np.array([box.score for box in found], np.float64)
    to_find = (~ignored_truths).sum()
    return Matches(scores, np.arange(len(found)), hit, ignored, to_find)


def overlaps(found: Sequence[Found], truths: Sequence[Box]) -> np.ndarray:
    """IoU (found, truths); with a crowd, the share of the found box that lies in it."""
    left, top, width, height = sides_of(found)[..., None]
    true_left, true_top, true_width, true_height = sides_of(truths)
    right = np.minimum(left + width, true_left + true_width)
    bottom = np.minimum(top + height, true_top + true_height)
    across = right - np.maximum(left, true_left)
    down = bottom - np.maximum(top, true_top)
    common = np.where((across > 0) & (down > 0), across * down, 0.0)
    area = width * height
    union = area + true_width * true_height - common
    whole = np.where([truth.is_crowd for truth in truths], area, union)
    return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


def sides_of(boxes: Sequence[Box | Found]) -> np.ndarray:
    """x, y, width and height (4, boxes)."""
    sides = [(box.x, box.y, box.width, box.height) for box in boxes]
    return np.array(sides, np.float64).reshape(-1, 4).T


def pool(matches: Iterable[Matches]) -> Matches:
    """The detections of all pictures, best first; of equal ones the earlier."""
    *fields, truths = zip(*matches, strict=True)
    score, *others = [np.concatenate(field, axis=-1) for field in fields]
    order = np.argsort(-score, kind="stable")
    best_first = [field[..., order] for field in (score, *others)]
    return Matches(*best_first, truths=sum(truths))


def average_precision(matches: Matches) -> np.ndarray:
    """(thresholds,) mean over 101 recalls r of the largest precision at a recall of r or more, 0
    where none is."""
    hits = np.cumsum(matches.hit, axis=1)
    misses = np.cumsum(~matches.hit & ~matches.ignored, axis=1)
    precision = hits / (hits + misses + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    result = []
    for row, found in zip(precision, hits, strict=True):
        reached = np.searchsorted(found / matches.truths, RECALLS)
        result.append(np.append(row, 0.0)[reached].mean())
    return np.array(result)


main = partial(run, Detect())

if __name__ == "__main__":
    run_command(main)
