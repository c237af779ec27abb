"""Detection: COCO's measures against its own evaluation code, the answers that are parsed, and the
command."""

import json
import random

import numpy as np
import pytest
from PIL import Image
from pycocotools import coco, mask
from pycocotools.cocoeval import COCOeval

from eval import detect
from eval.bench import Row
from eval.data.records import Box, Detection, embedded_records
from eval.detect import Found
from eval.question import Question
from tests.files import json_lines, table, write_json
from tests.runs import refuses

STATS = "AP|AP50|AP75|AP small|AP medium|AP large|AR1|AR10|AR100|AR small|AR medium|AR large"
STATS = STATS.split("|")


def sides(box):
    return [box.x, box.y, box.width, box.height]


def drawn_case(seed):
    """Pictures with truths and detections near them, on a coarse raster, with few scores: overlaps
    and scores tie."""
    dice = random.Random(seed)
    labels = [f"c{number}" for number in range(dice.choice((1, 2, 5, 12)))]
    raster = dice.choice((1, 4, 10))
    scores = dice.choice(([1.0], [0.2, 0.5, 0.9], None))

    def box(near=None):
        if near is not None and dice.random() < 0.7:
            return tuple(max(0, value + dice.randrange(-1, 2) * raster) for value in near)
        return tuple(
            dice.randrange(0, 160, raster) / (1 if near is None else 1.5) for _ in range(4)
        )

    truths = []
    found = []
    for _ in range(dice.randrange(1, 9)):
        true = []
        said = []
        for _ in range(dice.choice((0, 1, 3, 8))):
            x, y, width, height = box(sides(true[-1]) if true and dice.random() < 0.5 else None)
            area = width * height * dice.choice((0.6, 1.0))
            true.append(Box(dice.choice(labels), x, y, width, height, area, dice.random() < 0.15))
        for _ in range(dice.choice((0, 1, 6, 140 if seed % 10 == 0 else 12))):
            near = dice.choice(true) if true else None
            label = dice.choice([*labels, "never true"])
            if near and dice.random() < 0.8:
                label = near.label
            score = dice.choice(scores) if scores else dice.random()
            said.append(Found(label, *box(sides(near) if near else None), score))
        truths.append(true)
        found.append(said)
    return truths, found


def shape_of(box):
    """A box, or the mask of an object, as COCO's files have it."""
    if hasattr(box, "mask"):
        return {"segmentation": mask.encode(np.asfortranarray(box.mask.astype(np.uint8)))}
    outline = getattr(box, "segmentation", None)
    return {"segmentation": outline} if outline else {"bbox": sides(box)}


def by_pycocotools(truths, found, are_masks=False):
    """STATS of boxes, or of masks in pictures of 160 pixels."""
    labels = {b.label for part in (*truths, *found) for b in part}
    ids = {label: n for n, label in enumerate(sorted(labels), start=1)}

    def rows(boxes, **names):
        pairs = [(n, box) for n, of_picture in enumerate(boxes) for box in of_picture]
        rows = [{"image_id": n, "category_id": ids[b.label], **shape_of(b)} for n, b in pairs]
        for number, (row, (_, b)) in enumerate(zip(rows, pairs, strict=True), start=1):
            row |= {"id": number} | {name: getattr(b, of) for name, of in names.items()}
        return rows

    dataset = coco.COCO()
    dataset.dataset = {"annotations": rows(truths, area="area", iscrowd="is_crowd")}
    size = {"width": 160, "height": 160}
    dataset.dataset |= {"images": [{"id": n} | size for n in range(len(truths))]}
    dataset.dataset |= {"categories": [{"id": id_} for id_ in ids.values()]}
    dataset.createIndex()
    evaluation = COCOeval(
        dataset, dataset.loadRes(rows(found, score="score")), "segm" if are_masks else "bbox"
    )
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats.tolist()


def test_the_measures_are_those_of_coco(printed):
    """Any rule of COCO's is another: ties, crowds, sizes, ranks, classes without truth, empty
    pictures."""
    compared = 0
    pair = [Box("a", x, 0, 10, 10, 100) for x in (0, 2)]
    ties = []
    for x in (0, 2):
        ties.append(([pair], [[Found("a", 1, 0, 10, 10, 1), Found("a", x, 0, 10, 10, 0.5)]]))
    # of small, medium and large, both inclusive
    bounds = [[Box("a", at, at, at, at, at * at) for at in (32, 96)]]
    wrong = [[Found("a", *[32] * 4, 0.9)]]
    for place in (0, 300):
        wrong[0] += [Found("a", place, 0, at, at) for at in (32, 96)]
    at = []
    for hit in range(4):
        boxes = [Found("a", 99, 0, 10, 10, 0.9 if n < 2 else 0.5) for n in range(5)]
        boxes[hit] = boxes[hit]._replace(x=0)
        at.append(boxes)
    hit = Found("a", 0, 0, 10, 10, 0.5)
    last = [[hit._replace(x=99, score=0.9)] * n + [hit] for n in (99, 100)]  # a hundred count
    cases = [*map(drawn_case, range(24)), *ties, (bounds, wrong), ([pair] * 4, at)]
    cases.append(([pair] * 2, last))
    for seed, (truths, found) in enumerate(cases):
        if any(truths) and any(found):  # pycocotools itself takes no empty result
            ours = detect.score_boxes(truths, found)
            named = [-1 if ours[name] is None else ours[name] for name in STATS]
            assert named == pytest.approx(by_pycocotools(truths, found), abs=1e-6), seed
            compared += 0 < (ours["AP"] or 0) < 1
    assert compared > 8


WHOLE = "<loc0000><loc0000><loc1023><loc1023>"
FORMAT = "not four locations and a name"
# what is said of `detect cat ; Dog ; dog`, y1 x1 y2 x2 of 1023; the boxes, x y width height in a
# picture of 200 × 100 pixels; how many parts are wrong, and how
PARSED = """
    WHOLE cat | cat 0 0 200 100
    <loc0341><loc0000><loc0682><loc1023>CAT; | cat 0 33 200 33
    WHOLE<seg001> Dog ; WHOLE dog | Dog 0 0 200 100, dog 0 0 200 100
    |
    no cat here ; cat WHOLE ; <loc0001 | | 3 not four locations and a name
    <loc0000><loc0000><loc0009> cat | | 1 not four locations and a name
    <loc0000><loc0000><loc0009><loc0009><loc0009> cat | | 1 not four locations and a name
    <loc0000><loc0000><loc0009><loc1024> cat | | 1 not four locations and a name
    WHOLE cow | cow 0 0 200 100 | 1 a name that was not asked for
    <loc0000><loc1023><loc1023><loc1023> cat | cat 200 0 0 100 | 1 an empty box"""


def parsed(text, scores=()):
    question = Question("a", "a", (), "detect cat ; Dog ; dog", truth=Detection(200, 100, ()))
    return detect.boxes_of(Row(question, (text.replace("WHOLE", WHOLE), scores), {}))


@pytest.mark.parametrize("case", table(PARSED))
def test_answers_are_parsed_strictly(case):
    """A malformed answer raises, is drawn somewhere, or is not counted; or a place is not y1 x1 y2
    x2 of 1023."""
    text, boxes, *wrong = case
    found, problems = parsed(text)
    named = [" ".join(map(str, (box.label, *map(round, sides(box))))) for box in found]
    assert ", ".join(named) == boxes
    sound = problems.pop("", 0)
    assert [f"{count} {problem}" for problem, count in problems.items()] == wrong[-1:]
    assert sound == (0 if wrong else len(found))


def test_scores_of_a_results_file_are_those_of_its_boxes():
    """A score goes to another part of its answer."""
    found, _ = parsed("WHOLE cat ; ; WHOLE dog", [0.6, 0, 0.7])
    assert [box.score for box in found] == [0.6, 0.7]


def test_the_command_on_the_embedded_scenes(source, workplace, monkeypatch, told, told_of_one):
    """Right answers do not score 100, or the results file scores otherwise than the command has
    printed."""
    records = embedded_records(("detect",), "test", 14)
    right = {record.name: record.suffix for record in records}
    wrong = {record.name: "no such thing" for record in records[:3]} | {records[3].name: ""}

    def ask_all(model, processor, asks, *, left_out, progress, **options):
        left_out["detect/test/13"] = "cannot be read"
        said = dict.fromkeys(right, "") if "blind" in progress else right | wrong
        return [None if ask.id in left_out else said[ask.id] for ask in asks]

    monkeypatch.setattr("eval.answer.ask_all", ask_all)
    monkeypatch.setattr(detect, "DRAWN", 2)
    printed = told(detect, "--model", source, "--limit 14 --blind")
    columns = []
    for values in printed.values():
        columns.append({line: of["COCO"] for line, of in values["summary"].items()})
    seeing, blind = columns
    assert blind["AP"] == 0
    assert blind["answers without a box"] == 100
    assert seeing["answers without a box"] == pytest.approx(100 / 13)
    assert 0 < seeing["AP"] < 100
    parts = sum(record.suffix.count(";") + 1 for record in records[4:13]) + 3
    assert seeing["malformed"] == seeing[f"  {FORMAT}"] == pytest.approx(300 / parts)
    lost = {f"  AP, {record.prefix.removeprefix('detect ')}" for record in records[:4]}
    for line in seeing.keys() - lost:
        assert "  AP, " not in line or seeing[line] > 100 - 1e-9
    out = workplace / "runs/eval/random/detect"
    assert Image.open(out / "detect.png").width > 900
    scored = told_of_one(detect, "--results", out / "results.json")
    assert scored["summary"] == printed["random"]["summary"]


RESULT = json.loads("""{"question_id": "a", "question": "detect cat", "answer": "", "scores": [],
    "width": 20, "height": 10,
    "boxes": [{"label": "cat", "x": 1, "y": 2, "width": 3, "height": 4, "area": 12}]}""")
# of a box, then of the picture
UNSOUND = """[{"x": "left"}, {"area": NaN}, {"width": -1}, {"label": 5}, {"is_crowd": "0"}]
[{"width": 0}, {"scores": ["1"]}]"""


def test_bad_results_are_named(workplace):
    """Breaks when a picture counts twice, or a number that is none, a name or a crowd is scored."""
    of_box, of_picture = json_lines(UNSOUND)
    for change in of_box:
        of_picture.append({"boxes": [RESULT["boxes"][0] | change]})
    write_json(workplace / "R", [RESULT])
    detect.main(["--results", "R"])
    for change in of_picture:
        write_json(workplace / "R", [RESULT | change])
        refuses(detect, "--results R", "R[0]: ")
    write_json(workplace / "R", [RESULT] * 2)
    refuses(detect, "--results R", "R: 1 duplicate")
    refuses(detect, "--results R --out O", "leave --model, --adapter, --blind and --out")
    refuses(detect, "--results R --data coco:R", "leave --data out")
    refuses(detect, "--images I", "--images is of other data")
