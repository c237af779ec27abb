"""Detection: a model's boxes, scored as COCO does.

    python -m eval.detect                       the newest run, or the embedded base, on the embedded scenes
    python -m eval.detect --data coco:instances_val2017.json --images DIR --model SRC --adapter RUN
    python -m eval.detect --results results.json

In: pictures with true boxes, and a model, which is asked `detect a ; b` for the classes that are there; or an earlier
results.json. Out: AP and AR (`eval/detection_scoring.py`), also by class, the share of malformed boxes, results.json,
and detect.png with true and found boxes.

PaliGemma answers `<locY1><locX1><locY2><locX2> a ; …`; place p of 0 … 1023 is p/1023 of the side. An answer has no
score: it is 1 for every box, or with --confidence the geometric mean of the probabilities of its name's tokens.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch

from eval import figures
from eval.answer import layout
from eval.bench import Benchmark, limit_flag, run
from eval.data import check, read, text
from eval.detection_scoring import Found, match, score_boxes
from eval.own_files import Box
from eval.question import Question, question_of
from eval.records import embedded_records, read_data
from eval.report import Row
from model.common import UserError, run_command, shown, write_text
from model.generate import check_finite
from model.images import load_image
from model.paligemma import PaliGemma
from model.processor import Processor

LOCATION = re.compile(r"<loc(\d{4})>")
PART = re.compile(r"(?:\s*<loc\d{4}>)*(?:<seg\d{3}>)*([^<>]*)")
EMBEDDED = 300  # pictures, by default
DRAWN = 12  # of them, on the sheet


class Detect(Benchmark):
    name = "detect"
    max_new_tokens = 256
    flags = {
        "--data": dict(help="coco:ANNOTATIONS.json or embedded (default: embedded)", metavar="SRC"),
        "--images": dict(help="folder of the pictures of --data (default: that of its file)", metavar="DIR"),
        "--confidence": dict(
            help="score boxes by the probability of their names, in one more pass; without it every score is 1",
            default=False,
        ),
        "--limit": limit_flag(f"pictures, the first N (default: all of a file, {EMBEDDED} of the embedded scenes)"),
    }

    def questions(self, args):
        if args.data in (None, "embedded"):
            records = embedded_records(("detect",), "test", args.limit or EMBEDDED)
        else:
            records = read_data(args.data, images=args.images)[: args.limit]
            if bare := [record.name for record in records if record.turns and record.detection is None]:
                raise UserError(f"{shown(args.data)}: {shown(bare[0])} has no boxes: give coco:ANNOTATIONS.json")
        return [question_of(record, truth=record.detection) for record in records]

    def refine(self, model, processor, questions, answers, args):
        said = []
        for question, answer in zip(questions, answers, strict=True):
            is_scored = args.confidence and answer and answer.strip()
            tokens = token_probabilities(model, processor, question, answer) if is_scored else []
            said.append(None if answer is None else (answer, confidences(tokens) if is_scored else []))
        return said

    def rows(self, questions, answers):
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            truth, name = question.truth, (question.id, question.prefix)
            said = answer and Answer(*name, answer[0], truth.width, truth.height, truth.boxes, answer[1])
            rows.append(Row(question, said or None, {}))
        return rows

    def read(self, file, args):
        return [Row(Question(a.question_id, a.question_id, (), a.question), a, {}) for a in read(file, answer_of)]

    def summary(self, rows):
        answers = [row.answer for row in rows if row.answer]
        values = measure(answers)
        classes = {f"  AP, {name}": value for name, value in values.pop("classes").items()}
        return {line: {"COCO": v if v is None else 100 * v} for line, v in (values | classes).items()}

    def write(self, rows, out, subject):
        answered = [row for row in rows if row.answer]
        results = [r.answer._asdict() | {"boxes": [box.__dict__ for box in r.answer.boxes]} for r in answered]
        write_text(out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
        title = f"{subject.title}: true boxes green, found ones orange"
        figures.save(draw_sheet(answered, title), out / "detect.png")


@torch.no_grad()
def token_probabilities(
    model: PaliGemma, processor: Processor, question: Question, answer: str
) -> list[tuple[str, float]]:
    """The tokens of an answer, as text, and the probability of each after those before it. Raises NonFiniteError."""
    images, device = question.images(), next(model.parameters()).device
    batch = processor.pad([layout(processor, question, len(images), answer)], images).to(device)
    places = (batch.labels[0] != -100).nonzero()[-len(processor.encode(answer)) - 1 : -1, 0]  # without the end token
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    logits = model(*inputs, positions_to_keep=places[None] - 1)
    check_finite(logits, f"question {question.id}")
    ids = batch.input_ids[0, places]
    probabilities = logits[0].float().softmax(-1).gather(-1, ids[:, None])[:, 0].tolist()
    return list(zip(map(processor.tokenizer.id_to_piece, ids.tolist()), probabilities, strict=True))


class Answer(NamedTuple):
    """What was asked and said about one picture, as it stands in results.json; scores: of each part of the answer."""

    question_id: str
    question: str
    answer: str
    width: float
    height: float
    boxes: Sequence[Box]
    scores: Sequence[float]

    def said(self) -> "Said":
        return parse(self.answer, self.width, self.height, names_of(self.question), self.scores)


def answer_of(record: dict) -> Answer:
    """An entry of results.json. Raises LookupError, TypeError and ValueError."""
    boxes = [Box(**box) for box in record["boxes"]]
    texts, scores = [text(record, key) for key in ("question_id", "question", "answer")], record.get("scores", [])
    numbers = [n for box in boxes for n in (box.x, box.y, box.width, box.height, box.area)] + scores
    check(all(isinstance(box.label, str) for box in boxes), "a label is no text")
    check(math.isfinite(sum(numbers) + record["width"] + record["height"]), "a number is not finite")
    check(len(scores) in (0, len(texts[2].split(";"))), f"{len(scores)} scores: give one for each part, or none")
    return Answer(*texts, record["width"], record["height"], boxes, scores)


def measure(answers: Sequence[Answer]) -> dict:
    """COCO's measures, as fractions, by "classes" too; and the share of the answers' parts that are malformed."""
    said = [answer.said() for answer in answers]
    parts = max(1, sum(s.parts for s in said))
    problems = sum((s.problems for s in said), Counter())
    values = score_boxes([answer.boxes for answer in answers], [s.found for s in said])
    values["malformed"] = sum(s.malformed for s in said) / parts
    values |= {f"  {problem}": count / parts for problem, count in problems.items()}
    return values | {"answers without a box": sum(s.parts == 0 for s in said) / max(1, len(said))}


class Said(NamedTuple):
    """The boxes of an answer; how many parts it has, how many of these are malformed, and in what way."""

    found: list[Found]
    parts: int
    malformed: int
    problems: Counter


def parse(text: str, width: float, height: float, asked: Collection[str], scores: Sequence[float] = ()) -> Said:
    """The boxes of an answer about a picture of width × height pixels. scores: of each part between semicolons.

    A part without four locations is no box; an empty box, or a name that was not asked for, is one that is wrong.
    """
    names = {name.lower(): name for name in asked} | {name: name for name in asked}  # some differ by case alone
    found, parts, malformed, problems = [], 0, 0, Counter()
    for number, part in enumerate(text.split(";")):
        if not part.strip():
            continue
        match, places = PART.fullmatch(part.strip()), [int(place) / 1023 for place in LOCATION.findall(part)]
        wrong = ["not four locations and a name"]
        if match and len(places) == 4 and max(places) <= 1:
            top, left, bottom, right = places
            label = names.get(match[1].strip(), names.get(match[1].strip().lower()))
            wrong = ["a name that was not asked for"] * (label is None)
            wrong += ["an empty box"] * (bottom <= top or right <= left)
            box = left * width, top * height, max(0, right - left) * width, max(0, bottom - top) * height
            found.append(Found(label or match[1].strip(), *box, scores[number] if scores else 1.0))
        parts += 1
        malformed += bool(wrong)
        problems.update(wrong)
    return Said(found, parts, malformed, problems)


def confidences(tokens: Sequence[tuple[str, float]]) -> list[float]:
    """Of each part between semicolons, the geometric mean of the probabilities of its name's tokens; 0 without one."""
    parts: list[list[float]] = [[]]
    for piece, probability in tokens:
        piece = ";" if piece == "<0x3B>" else piece  # a byte, in a vocabulary without semicolon
        parts += [[] for _ in range(piece.count(";"))]
        if ";" not in piece and not LOCATION.fullmatch(piece) and piece.strip(" \u2581"):
            parts[-1].append(math.log(max(probability, 1e-30)))
    return [math.exp(sum(part) / len(part)) if part else 0.0 for part in parts]


def names_of(prompt: str) -> list[str]:
    """The classes that a prompt asks for."""
    return prompt.removeprefix("detect ").split(" ; ")


def draw_sheet(rows: Sequence[Row], title: str):
    """Some pictures with their true and found boxes; hits are those whose boxes agree by half, each with one."""
    drawn, captions, hits = [], [], []
    count = min(DRAWN, len(rows))
    for question, answer, _ in (rows[number * len(rows) // count] for number in range(count)):
        found, truths = answer.said().found, [box for box in answer.boxes if not box.is_crowd]
        image = load_image(question.images()[0])
        sheet = figures.draw_boxes(image, corners(truths, image, answer), colors=[figures.HIT], width=5, least=448)
        labels = [box.label for box in found]
        drawn.append(figures.draw_boxes(sheet, corners(found, sheet, answer), labels, colors=[figures.SERIES[1]]))
        matched = sum(
            int(match([t for t in truths if t.label == label], [f for f in found if f.label == label]).hit[0].sum())
            for label in {truth.label for truth in truths}
        )
        hits.append(matched == len(truths) == len(found))
        captions.append(f"{question.prefix}: {matched} of {len(truths)}, {len(found)} found")
    return figures.contact_sheet(drawn, captions, hits, title=title, size=224)


def corners(boxes: Sequence[Box | Found], image, answer: Answer) -> list[tuple[float, float, float, float]]:
    """The boxes as (left, top, right, bottom) in the pixels of `image`, which may have another size than annotated."""
    x, y = image.width / answer.width, image.height / answer.height
    return [(b.x * x, b.y * y, (b.x + b.width) * x, (b.y + b.height) * y) for b in boxes]


main = partial(run, Detect())

if __name__ == "__main__":
    run_command(main)
