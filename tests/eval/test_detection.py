"""Detection: COCO's measures against its own evaluation code, the answers that are parsed, and the command."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from PIL import Image
from pycocotools import coco
from pycocotools.cocoeval import COCOeval

from eval import detect, detection_scoring
from eval.detection_scoring import Found
from eval.own_files import Box
from eval.question import question_of
from eval.records import embedded_records, read_data
from model.common import UserError

STATS = "AP AP50 AP75 AP-small AP-medium AP-large AR1 AR10 AR100 AR-small AR-medium AR-large".split()


def sides(box: Box | Found) -> list[float]:
    return [box.x, box.y, box.width, box.height]


def drawn_case(seed: int) -> tuple[list[list[Box]], list[list[Found]]]:
    """Pictures with truths and detections near them, on a coarse raster, with few scores: overlaps and scores tie."""
    dice = random.Random(seed)
    labels = [f"c{number}" for number in range(dice.choice((1, 2, 5, 12)))]
    raster, scores = dice.choice((1, 4, 10)), dice.choice(([1.0], [0.2, 0.5, 0.9], None))

    def box(near=None):
        if near is not None and dice.random() < 0.7:
            return tuple(max(0, value + dice.randrange(-1, 2) * raster) for value in near)
        return tuple(dice.randrange(0, 160, raster) / (1 if near is None else 1.5) for _ in range(4))

    truths, found = [], []
    for _ in range(dice.randrange(1, 9)):
        true = []
        for _ in range(dice.choice((0, 1, 3, 8))):
            x, y, width, height = box()
            area = width * height * dice.choice((0.6, 1.0))
            true.append(Box(dice.choice(labels), x, y, width, height, area, dice.random() < 0.15))
        said = []
        for _ in range(dice.choice((0, 1, 6, 140 if seed % 10 == 0 else 12))):
            near = dice.choice(true) if true else None
            label = near.label if near and dice.random() < 0.8 else dice.choice([*labels, "never true"])
            score = dice.choice(scores) if scores else dice.random()
            said.append(Found(label, *box(sides(near) if near else None), score))
        truths.append(true)
        found.append(said)
    return truths, found


def by_pycocotools(truths, found) -> list[float]:
    ids = {label: n for n, label in enumerate(sorted({b.label for part in (*truths, *found) for b in part}), start=1)}
    dataset, results = coco.COCO(), []
    dataset.dataset = {
        "images": [{"id": number} for number in range(len(truths))],
        "categories": [{"id": id_} for id_ in ids.values()],
        "annotations": [
            {"image_id": n, "category_id": ids[t.label], "bbox": sides(t), "area": t.area, "iscrowd": int(t.is_crowd)}
            for n, of_picture in enumerate(truths)
            for t in of_picture
        ],
    }
    for number, annotation in enumerate(dataset.dataset["annotations"], start=1):
        annotation["id"] = number
    dataset.createIndex()
    for n, of_picture in enumerate(found):
        results += [
            {"image_id": n, "category_id": ids[f.label], "bbox": sides(f), "score": f.score} for f in of_picture
        ]
    return summary_of(dataset, dataset.loadRes(results))


def summary_of(truths: coco.COCO, found: coco.COCO) -> list[float]:
    evaluation = COCOeval(truths, found, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats.tolist()


def test_the_measures_are_those_of_coco(capsys):
    """Any rule of COCO's is another: ties, crowds, sizes, ranks, classes without truth, empty pictures."""
    compared = 0
    for seed in range(16):
        truths, found = drawn_case(seed)
        if not any(truths) or not any(found):  # pycocotools itself takes no empty result
            continue
        ours = detection_scoring.score_boxes(truths, found)
        named = [ours[name.replace("-", " ")] for name in STATS]
        expected = by_pycocotools(truths, found)
        assert [-1 if value is None else value for value in named] == pytest.approx(expected, abs=1e-6), seed
        compared += 0 < (ours["AP"] or 0) < 1
    assert compared > 8


def loc(*places: int) -> str:
    return "".join(f"<loc{place:04d}>" for place in places)


@pytest.mark.parametrize(
    ("text", "boxes", "malformed", "problems"),
    [
        # y1 x1 y2 x2 of 1023, in a picture of 200 × 100 pixels
        (f"{loc(0, 0, 1023, 1023)} cat", [("cat", 0, 0, 200, 100)], 0, {}),
        (f"{loc(341, 0, 682, 1023)} Dog ; {loc(0, 341, 341, 682)}dog;", "two", 0, {}),
        (f"{loc(0, 0, 1023, 1023)}<seg001><seg002> cat", [("cat", 0, 0, 200, 100)], 0, {}),
        ("", [], 0, {}),
        ("no cat here", [], 1, {"not four locations and a name": 1}),
        (f"{loc(0, 0, 9)} cat ; {loc(0, 0, 9, 9, 9)} cat ; {loc(0, 0, 9, 1024)} cat", [], 3, {"not four": 3}),
        (f"cat {loc(0, 0, 1023, 1023)}", [], 1, {"not four": 1}),
        (f"{loc(0, 0, 1023, 1023)} cow", [("cow", 0, 0, 200, 100)], 1, {"not asked for": 1}),
        (f"{loc(682, 0, 341, 1023)} cat", [("cat", 0, 200 / 3, 200, 0)], 1, {"an empty box": 1}),
        (f"{loc(5, 5, 5, 5)} ; <loc0001", [("", 1, 0.5, 0, 0)], 2, {"not asked": 1, "an empty box": 1, "not four": 1}),
    ],
)
def test_answers_are_parsed_strictly(text, boxes, malformed, problems):
    """A malformed answer raises, is drawn somewhere, or is not counted; or a place is not y1 x1 y2 x2 of 1023."""
    said = detect.parse(text, 200, 100, ["cat", "dog"])
    if boxes == "two":
        boxes = [("dog", 0, 100 / 3, 200, 100 / 3), ("dog", 200 / 3, 0, 200 / 3, 100 / 3)]
    assert [found.label for found in said.found] == [label for label, *_ in boxes]
    for found, (_, *expected) in zip(said.found, boxes, strict=True):
        assert sides(found) == pytest.approx(expected, abs=0.1 if not found.label else 1e-9)
    assert said.malformed == malformed and sum(said.problems.values()) == sum(problems.values())
    for kind, count in problems.items():
        assert sum(n for problem, n in said.problems.items() if kind in problem) == count


def test_names_may_differ_by_case_alone():
    """Every box of the first of two such classes is taken for the other one's."""
    text = " ; ".join(f"{loc(0, 0, 1023, 1023)} {name}" for name in ("Apple", "apple", "APPLE"))
    assert [one.label for one in detect.parse(text, 9, 9, ["Apple", "apple"]).found] == ["Apple", "apple", "apple"]


def test_confidence_is_the_mean_over_a_name():
    """Locations or separators count, or the score of one box goes to another."""
    tokens = [
        ("<loc0001>", 0.1),
        ("\u2581fire", 0.9),
        ("truck", 0.4),
        ("\u2581;", 0.5),
        ("<loc0001>", 0.1),
        ("\u2581", 0.3),
    ]
    assert detect.confidences([*tokens, ("<0x3B>", 0.2), ("cat", 0.7)]) == pytest.approx([0.6, 0, 0.7])
    said = detect.parse(f"{loc(0, 0, 9, 9)} cat ; ; {loc(0, 0, 9, 9)} dog", 10, 10, ["cat", "dog"], [0.6, 0, 0.7])
    assert [found.score for found in said.found] == [0.6, 0.7]


@torch.no_grad()
@pytest.mark.parametrize("before", [(), (("what is it? <image>", "a street"),)])
def test_token_probabilities_by_hand(model, processor, before):
    """The probability is that of the next token, or of the end; or earlier turns, or the place of a picture, differ
    from what the model was asked."""
    question = replace(question_of(embedded_records(("detect",), "test", 1)[0]), before=before)
    said = f"{loc(1, 2, 3, 4)} fire truck"
    found = detect.token_probabilities(model, processor, question, said)
    assert "".join(piece for piece, _ in found).replace("\u2581", " ") == said
    turns = tuple((prefix.removesuffix(" <image>"), text) for prefix, text in before)
    batch = processor.pad([processor.layout(1, question.prefix, said, turns)], question.images())
    logits = model(batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask)[0].double()
    first = batch.input_ids.shape[1] - len(found) - 1
    for number, (_, probability) in enumerate(found):
        row, token = logits[first + number - 1], batch.input_ids[0, first + number]
        assert math.log(probability) == pytest.approx(float(row[token] - row.exp().sum().log()), abs=1e-4)


def test_the_command_on_the_embedded_scenes(source, workplace, monkeypatch, capsys):
    """Right answers do not score 100, or the results file scores otherwise than the command has printed."""
    records = embedded_records(("detect",), "test", 14)
    right = {record.name: record.suffix for record in records}
    wrong = {record.name: "no such thing" for record in records[:3]} | {records[3].name: ""}

    def ask_all(model, processor, asks, *, left_out, progress, **options):
        if "blind" in progress:
            return [""] * len(asks)
        left_out["detect/test/13"] = "cannot be read"
        return [None if ask.id in left_out else (right | wrong)[ask.id] for ask in asks]

    monkeypatch.setattr("eval.answer.ask_all", ask_all)
    monkeypatch.setattr(detect, "DRAWN", 2)
    detect.main(["--model", source, *"--limit 14 --blind --confidence --json".split()])
    printed = {title: of["summary"] for title, of in json.loads(capsys.readouterr().out).items()}
    seeing, blind = ({line: v["COCO"] for line, v in of.items()} for of in printed.values())
    assert blind["AP"] == 0 and blind["answers without a box"] == 100
    assert seeing["answers without a box"] == pytest.approx(100 / 13) and 0 < seeing["AP"] < 100
    parts = sum(record.suffix.count(";") + 1 for record in records[4:13]) + 3
    assert seeing["malformed"] == seeing["  not four locations and a name"] == pytest.approx(300 / parts)
    lost = {label for record in records[:4] for label in detect.names_of(record.prefix)}
    classes = {line.removeprefix("  AP, "): value for line, value in seeing.items() if "  AP, " in line}
    assert all(value > 100 - 1e-9 for label, value in classes.items() if label not in lost)
    out = workplace / "runs" / "eval" / "random" / "detect"
    assert Image.open(out / "detect.png").width > 900
    detect.main(["--results", str(out / "results.json"), "--json"])
    (scored,) = json.loads(capsys.readouterr().out).values()
    assert scored["summary"] == printed["random"]
    (workplace / "bad.json").write_text(json.dumps([{"question_id": "a", "boxes": [{"label": "cat", "x": "left"}]}]))
    with pytest.raises(UserError, match=r"bad.json\[0\]: "):
        detect.main(["--results", "bad.json"])


def test_a_coco_file_scores_as_in_pycocotools(source, tmp_path, monkeypatch, capsys):
    """Boxes lose their picture, class or size on the way, or are in another order: it decides between ties."""
    monkeypatch.chdir(tmp_path)
    dice, images, annotations = random.Random(3), [], []
    for id_ in (40, 7, 300, 12, 9, 55):
        Image.new("RGB", (64, 48)).save(f"{id_}.png")  # annotated at another size
        images.append({"id": id_, "file_name": f"{id_}.png", "width": 640, "height": 480})
        for _ in range(3):
            corner = [dice.randrange(300), dice.randrange(200), dice.randrange(20, 300), dice.randrange(20, 250)]
            common = {"id": len(annotations) + 1, "image_id": id_, "area": corner[2] * corner[3] / 2}
            annotations.append(common | {"category_id": dice.choice((3, 5)), "bbox": corner, "iscrowd": 0})
    categories = [{"id": 3, "name": "dog"}, {"id": 5, "name": "fire truck"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "coco.json").write_text(json.dumps(content))
    names = {f"coco.json:images[{number}]": image["id"] for number, image in enumerate(images)}

    def ask_all(model, processor, asks, **options):
        boxes = "<loc0100><loc0050><loc0600><loc0400> dog ; "  # nearly always wrong, and first
        return [(boxes if names[ask.id] in (40, 300) else "") + right[ask.id] for ask in asks]

    records = read_data("coco:coco.json")
    right = {record.name: record.suffix for record in records}
    monkeypatch.setattr("eval.answer.ask_all", ask_all)
    monkeypatch.setattr(detect, "DRAWN", 1)
    detect.main(["--model", source, "--data", "coco:coco.json", "--json"])
    (printed,) = json.loads(capsys.readouterr().out).values()
    ours = {line: value["COCO"] for line, value in printed["summary"].items()}
    numbers = {"dog": 3, "fire truck": 5}
    results = [
        {"image_id": names[record.name], "category_id": numbers[f.label], "bbox": sides(f), "score": 1.0}
        for record in records
        for f in detect.parse(ask_all(None, None, [question_of(record)])[0], 640, 480, numbers).found
    ]
    dataset = coco.COCO("coco.json")
    expected = summary_of(dataset, dataset.loadRes(results))
    found = [ours[name.replace("-", " ")] for name in STATS]
    assert [-1 if value is None else value / 100 for value in found] == pytest.approx(expected, abs=1e-6)
    assert 50 < ours["AP"] < 99
