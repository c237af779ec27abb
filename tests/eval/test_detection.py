"""Detection: COCO's measures against its own evaluation code, the answers that are parsed, and the command."""

import random

import pytest
from pycocotools import coco
from pycocotools.cocoeval import COCOeval

from eval import detection_scoring
from eval.detection_scoring import Found
from eval.records import Box

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
    evaluation = COCOeval(dataset, dataset.loadRes(results) if results else coco.COCO(), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats.tolist()


def test_the_measures_are_those_of_coco(capsys):
    """Any rule of COCO's is another: ties, crowds, sizes, ranks, classes without truth, empty pictures."""
    compared = 0
    for seed in range(25):
        truths, found = drawn_case(seed)
        if not any(truths) or not any(found):  # pycocotools itself takes no empty result
            continue
        ours = detection_scoring.score_boxes(truths, found)
        named = [ours[name.replace("-", " ")] for name in STATS]
        expected = by_pycocotools(truths, found)
        assert [-1 if value is None else value for value in named] == pytest.approx(expected, abs=1e-6), seed
        compared += 0 < (ours["AP"] or 0) < 1
    assert compared > 12
