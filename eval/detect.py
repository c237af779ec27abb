"""Detection: a model's boxes, scored as COCO does.

    python -m eval.detect                       the last run, or the embedded base, on the embedded scenes
    python -m eval.detect --data coco:instances_val2017.json --images DIR --model SRC --adapter RUN
    python -m eval.detect score --results R

In: pictures with true boxes, and a model, which is asked `detect a ; b` for the classes that are there. Out: AP and AR
(`eval/detection_scoring.py`), how many boxes are malformed, results.json, and detect.png with true and found boxes.

PaliGemma answers `<locY1><locX1><locY2><locX2> a ; …`; place p of 0 … 1023 is p/1023 of the side. An answer has no
score: it is 1 for every box, or with --confidence the geometric mean of the probabilities of its name's tokens.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eval import figures
from eval.command import Ask, Command, Report, add_flag, ask_of
from eval.datasets import LIST, TEXT, records_of
from eval.detection_scoring import Found, match, score_boxes
from eval.entry import main_of
from eval.records import Box, Record, blind, embedded_records, read_data
from eval.report import markdown_table
from model.common import Expected, UserError, read_field, read_json, run_command, shown, write_text

LOCATION = re.compile(r"<loc(\d{4})>")
PART = re.compile(r"(?:\s*<loc\d{4}>)*(?:<seg\d{3}>)*([^<>]*)")
SIDE = Expected(float, 0, 1e9)
NUMBER = Expected(float, -1e9, 1e9)
COLUMNS = ("AP", "AP50", "AP75", "AR100", "malformed")
EMBEDDED = 300  # pictures, by default
DRAWN = 12  # of them, on the sheet


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


def load(args: argparse.Namespace) -> tuple[list[Record], dict[str, list[Ask]]]:
    """The pictures of the data, or of the embedded scenes, and what to ask. Raises UserError."""
    if args.data in (None, "embedded"):
        records = embedded_records(("detect",), "test", EMBEDDED if args.limit is None else args.limit)
    else:
        records = read_data(args.data, images=args.images)[: args.limit]
        if bare := [record.name for record in records if record.turns and record.detection is None]:
            raise UserError(f"{shown(args.data)}: {shown(bare[0])} has no boxes: give coco:ANNOTATIONS.json")
    sets = {"detect": [ask_of(record) for record in records]}
    return records, sets | ({"blind": [ask_of(record) for record in blind(records)]} if args.blind else {})


class Answer(NamedTuple):
    """What was asked and said about one picture, as it stands in results.json; scores: of each part of the answer."""

    question_id: str
    question: str
    answer: str
    width: float
    height: float
    boxes: Sequence[Box]
    scores: Sequence[float]

    def said(self) -> Said:
        return parse(self.answer, self.width, self.height, names_of(self.question), self.scores)


def finish(args: argparse.Namespace, records: list[Record], answers: dict[str, list[str | None]], session) -> Report:
    """results.json and detect.png of one model, and its measures."""
    values = {}
    for name, texts in answers.items():
        asked = [(record, text) for record, text in zip(records, texts, strict=True) if text is not None]
        results = []
        for record, text in asked:
            size = record.detection.width, record.detection.height
            scores = scores_of(record, text, session) if args.confidence and text.strip() else []
            results.append(Answer(record.name, record.prefix, text, *size, record.detection.boxes, scores))
        values[name] = measure(results)
        if name == "detect":
            as_json = [result._asdict() | {"boxes": [box.__dict__ for box in result.boxes]} for result in results]
            write_text(session.out / "results.json", json.dumps(as_json, ensure_ascii=False, indent=1) + "\n")
            title = f"{session.title}: true boxes green, found ones orange"
            sheet = draw_sheet([(record, result) for (record, _), result in zip(asked, results, strict=True)], title)
            figures.save(sheet, session.out / "detect.png")
    report = Report(values.pop("detect") | values, [], ["results.json", "detect.png", "answers.jsonl"])
    return report._replace(lines=compare({session.title: report})[1])


def scores_of(record: Record, text: str, session) -> list[float]:
    """The confidences of an answer's parts."""
    from eval.run import token_probabilities  # imports torch, which scoring does not need

    return confidences(token_probabilities(session.model, session.processor, ask_of(record), text))


def score(args: argparse.Namespace) -> Report:
    """`python -m eval.detect score`: the measures of a results file."""
    answers = []
    for where, record in records_of(read_json(args.results, object), shown(args.results)):
        boxes = []
        for place, entry in records_of(read_field(record, "boxes", LIST, where), f"{where}: boxes"):
            sides = (read_field(entry, side, NUMBER, place) for side in ("x", "y", "width", "height", "area"))
            crowd = read_field(entry, "is_crowd", Expected(bool), place, default=False)
            boxes.append(Box(read_field(entry, "label", TEXT, place), *sides, crowd))
        texts = (read_field(record, key, TEXT, where) for key in ("question_id", "question", "answer"))
        sides = (read_field(record, side, SIDE, where) for side in ("width", "height"))
        scores = read_field(record, "scores", Expected(list), where, default=[])
        scores = [read_field({"scores": one}, "scores", Expected(float, 0, 1), where) for one in scores]
        answers.append(Answer(*texts, *sides, boxes, scores))
        if scores and len(scores) != len(answers[-1].answer.split(";")):
            raise UserError(f"{where}: {len(scores)} scores: give one for each part of the answer, or none")
    values = measure(answers)
    return Report(values, compare({Path(args.results).stem: Report(values, [])})[1])


def measure(answers: Sequence[Answer]) -> dict:
    """COCO's measures, as fractions, and the share of the answers' parts that are malformed, by kind."""
    said = [answer.said() for answer in answers]
    parts, malformed = sum(one.parts for one in said), sum(one.malformed for one in said)
    return score_boxes([answer.boxes for answer in answers], [one.found for one in said]) | {
        "pictures": len(said),
        "boxes": sum(len(answer.boxes) for answer in answers),
        "found": sum(len(one.found) for one in said),
        "malformed": malformed / parts if parts else 0.0,
        "problems": dict(sum((one.problems for one in said), Counter())),
        "empty_answers": sum(one.parts == 0 for one in said),
    }


def compare(reports: Mapping[str, Report]) -> tuple[dict, list[str]]:
    """One table of the measures of several models, in percent."""
    rows = {}
    for title, report in reports.items():
        rows |= {title: report.values} | (
            {f"{title}, blind": report.values["blind"]} if "blind" in report.values else {}
        )
    first = next(iter(rows.values()))
    cells = [[name, *(percent(values[column]) for column in COLUMNS)] for name, values in rows.items()]
    lines = [f"COCO's measures, {first['pictures']} pictures, {first['boxes']} boxes", ""]
    lines += markdown_table(["%", *COLUMNS], cells)
    for name, values in rows.items():
        problems = [f"{count} × {problem}" for problem, count in values["problems"].items()]
        problems += [f"{values['empty_answers']} answers without any box"] if values["empty_answers"] else []
        lines += ["", f"{name}: {', '.join(problems)}, of {values['found']} boxes"] if problems else []
    return rows, lines


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def draw_sheet(answers: Sequence[tuple[Record, Answer]], title: str):
    """Some pictures with their true and found boxes; hits are those whose boxes agree by half, each with one."""
    from model.images import load_image  # imports torch, which scoring does not need

    drawn, captions, hits = [], [], []
    count = min(DRAWN, len(answers))
    for record, answer in (answers[number * len(answers) // count] for number in range(count)):
        found, truths = answer.said().found, [box for box in answer.boxes if not box.is_crowd]
        image = load_image(ask_of(record).images()[0])
        sheet = figures.draw_boxes(image, corners(truths, image, answer), colors=[figures.HIT], width=5, least=448)
        labels = [one.label for one in found]
        drawn.append(figures.draw_boxes(sheet, corners(found, sheet, answer), labels, colors=[figures.SERIES[1]]))
        matched = sum(
            int(match([t for t in truths if t.label == label], [f for f in found if f.label == label]).hit[0].sum())
            for label in {truth.label for truth in truths}
        )
        hits.append(matched == len(truths) == len(found))
        captions.append(f"{record.prefix}: {matched} of {len(truths)}, {len(found)} found")
    return figures.contact_sheet(drawn, captions, hits, title=title, size=224)


def corners(boxes: Sequence[Box | Found], image, answer: Answer) -> list[tuple[float, float, float, float]]:
    """The boxes as (left, top, right, bottom) in the pixels of `image`, which may have another size than annotated."""
    x, y = image.width / answer.width, image.height / answer.height
    return [(b.x * x, b.y * y, (b.x + b.width) * x, (b.y + b.height) * y) for b in boxes]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--data", "coco:ANNOTATIONS.json or embedded (default: embedded)", metavar="SRC")
    add_flag(parser, "--images", "folder of the pictures of --data (default: that of its file)", metavar="DIR")
    add_flag(parser, "--blind", "ask the same model about gray pictures too", False)
    confidence = "score boxes by the probability of their names, in one more pass; without it every score is 1"
    add_flag(parser, "--confidence", confidence, False)


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--results", "results.json of an earlier call", required=True)


LIMIT = f"pictures, the first N (default: all of a file, {EMBEDDED} of the embedded scenes)", None
main = main_of(Command("detect", __doc__, add_flags, add_score_flags, load, finish, score, LIMIT, 256, compare))

if __name__ == "__main__":
    run_command(main)
