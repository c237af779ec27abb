"""Detection: a model's boxes, scored as COCO does.

    python -m eval.detect                       the newest run, or the embedded base, on the embedded scenes
    python -m eval.detect --data coco:instances_val2017.json --images DIR --model SRC --adapter RUN
    python -m eval.detect --results results.json

In: pictures with true boxes, and a model, which is asked `detect a ; b` for the classes that are there; or an earlier
results.json. Out: AP and AR (`eval/detection_scoring.py`), also by class, the share of malformed boxes, results.json,
and detect.png with true and found boxes. An answer has no score: it is 1 for every box, unless results.json has others.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from eval import figures
from eval.bench import Benchmark, limit_flag, run
from eval.data import check, read, text
from eval.detection_scoring import Found, match, score_boxes
from eval.question import Question, question_of
from eval.records import Box, Detection, embedded_records, read_data
from eval.report import Row
from model.common import UserError, run_command, shown, write_text
from model.images import load_image
from model.processor import parse_boxes

EMBEDDED = 300  # pictures, by default
DRAWN = 12  # of them, on the sheet


class Detect(Benchmark):
    """An answer is a text, and the score of each of its parts between semicolons; without scores all are 1."""

    name = "detect"
    max_new_tokens = 256
    flags = {
        "--data": dict(help="coco:ANNOTATIONS.json or embedded (default: embedded)", metavar="SRC"),
        "--images": dict(help="folder of the pictures of --data (default: that of its file)", metavar="DIR"),
        "--limit": limit_flag(f"pictures, the first N (default: all of a file, {EMBEDDED} of the embedded scenes)"),
    }

    def questions(self, args):
        if args.data in (None, "embedded"):
            records = embedded_records(("detect",), "test", args.limit or EMBEDDED)
        else:
            records = read_data(args.data, args.images)[: args.limit]
        if bare := [record.name for record in records if record.turns and record.detection is None]:
            raise UserError(f"{shown(args.data)}: {shown(bare[0])} has no boxes: give coco:ANNOTATIONS.json")
        return [question_of(record, truth=record.detection) for record in records]

    def rows(self, questions, answers):
        return [Row(q, a if a is None else (a, []), {}) for q, a in zip(questions, answers, strict=True)]

    def read(self, file, args):
        return read(file, row_of)

    def summary(self, rows):
        answered = [row for row in rows if row.answer]
        found, problems = zip(*map(boxes_of, answered), strict=True)
        values = score_boxes([row.question.truth.boxes for row in answered], found)
        classes = {f"  AP, {name}": value for name, value in values.pop("classes").items()}
        counts = sum(problems, Counter())
        parts, _ = max(1, counts.total()), counts.pop("", 0)
        values |= {"malformed": counts.total() / parts} | {f"  {name}": n / parts for name, n in counts.items()}
        values["answers without a box"] = problems.count(Counter()) / len(answered)
        return {line: {"COCO": v if v is None else 100 * v} for line, v in (values | classes).items()}

    def write(self, rows, out, subject):
        answered, results = [row for row in rows if row.answer], []
        for question, (answer, scores), _ in answered:
            result = {"question_id": question.id, "question": question.prefix, "answer": answer}
            results.append(result | asdict(question.truth) | {"scores": scores})
        write_text(out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
        title = f"{subject.title}: true boxes green, found ones orange"
        figures.save(draw_sheet(answered, title), out / "detect.png")


def row_of(record: dict) -> Row:
    """The row of an entry of results.json. Raises LookupError, TypeError and ValueError."""
    truth = Detection(record["width"], record["height"], tuple(Box(**box) for box in record["boxes"]))
    id_, prefix, answer = (text(record, name) for name in ("question_id", "question", "answer"))
    numbers = [n for box in truth.boxes for n in (box.x, box.y, box.width, box.height, box.area)] + record["scores"]
    check(math.isfinite(sum(numbers) + truth.width + truth.height), "a number is not finite")
    check(len(record["scores"]) in (0, len(answer.split(";"))), "scores: give one for each part of the answer, or none")
    return Row(Question(id_, id_, (), prefix, truth=truth), (answer, record["scores"]), {})


def boxes_of(row: Row) -> tuple[list[Found], Counter]:
    """The boxes of an answer, and the number of its parts by problem, "" where there is none.

    A part without four locations is no box; an empty box, or a name that was not asked for, is one that is wrong.
    """
    (answer, scores), truth, found, problems = row.answer, row.question.truth, [], Counter()
    asked = row.question.prefix.removeprefix("detect ").split(" ; ")
    names = {name.lower(): name for name in asked} | {name: name for name in asked}  # some differ by case alone
    for number, part in enumerate(answer.split(";")):
        problem = "not four locations and a name" if part.strip() else None
        for label, (left, top, right, bottom) in parse_boxes(part, truth.width, truth.height, as_said=True):
            name = names.get(label, names.get(label.lower()))
            problem = "" if name else "a name that was not asked for"
            problem = problem if right > left and bottom > top else "an empty box"
            box = left, top, right - left, bottom - top
            found.append(Found(name or label, *box, scores[number] if scores else 1.0))
        problems.update([] if problem is None else [problem])
    return found, problems


def draw_sheet(rows: Sequence[Row], title: str):
    """Some pictures with their true and found boxes; hits are those whose boxes agree by half, each with one."""
    drawn, captions, hits = [], [], []
    count = min(DRAWN, len(rows))
    for row in (rows[number * len(rows) // count] for number in range(count)):
        size, found = row.question.truth, boxes_of(row)[0]
        truths = [box for box in size.boxes if not box.is_crowd]
        image = load_image(row.question.images()[0])
        sheet = figures.draw_boxes(image, corners(truths, image, size), colors=[figures.HIT], width=5, least=448)
        names = [box.label for box in found]
        drawn.append(figures.draw_boxes(sheet, corners(found, sheet, size), names, colors=[figures.SERIES[1]]))
        pairs = (([t for t in truths if t.label == name], [f for f in found if f.label == name]) for name in {*names})
        matched = sum(int(match(*pair).hit[0].sum()) for pair in pairs)
        hits.append(matched == len(truths) == len(found))
        captions.append(f"{row.question.prefix}: {matched} of {len(truths)}, {len(found)} found")
    return figures.contact_sheet(drawn, captions, hits, title=title, size=224)


def corners(boxes: Sequence[Box | Found], image, size: Detection) -> list[tuple[float, float, float, float]]:
    """The boxes as (left, top, right, bottom) in the pixels of `image`, which may have another size than annotated."""
    x, y = image.width / size.width, image.height / size.height
    return [(b.x * x, b.y * y, (b.x + b.width) * x, (b.y + b.height) * y) for b in boxes]


main = partial(run, Detect())

if __name__ == "__main__":
    run_command(main)
