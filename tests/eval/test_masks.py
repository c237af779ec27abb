"""Masks: annotations against pycocotools, answers in PaliGemma's format, measures against COCO's and
big_vision's, and the command."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from pycocotools import mask as official

from eval import detect, figures
from eval.bench import Row
from eval.data.masks import checked_mask, mask_of, runs_within
from eval.data.record import Box, Detection
from eval.data.records import read_coco, read_data
from eval.masks import FoundMask, mask_overlaps, masks_of
from eval.question import Question
from model.masks import MaskCoder, crop
from tests.eval.test_detection import RESULT, STATS, by_pycocotools, sides
from tests.eval.test_detection import drawn_case as drawn_boxes
from tests.files import draw, table, write_json, write_lines
from tests.runs import refused, refuses


def written(mask, is_text=True):
    """Run lengths of a mask by pycocotools, as a text, or as numbers counted here."""
    height, width = mask.shape
    if is_text:
        counts = official.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
    else:
        flat = mask.T.reshape(-1)
        ends = np.flatnonzero(np.diff(flat.astype(int))) + 1
        begin = [0, 0] if flat[0] else [0]
        counts = np.diff([*begin, *ends, flat.size]).tolist()
    return {"size": [height, width], "counts": counts}


def drawn_polygon(dice, height, width):
    """Corners on a coarse or a fine raster, some doubled, some out of the picture."""
    raster = dice.choice((1, 0.5, 0.1, 0.01, None))
    reach = dice.choice((0, 0.3))
    numbers = []
    for _ in range(dice.choice((3, 4, 5, 9, 30))):
        for side in (width, height):
            value = dice.uniform(-reach * side, (1 + reach) * side)
            numbers.append(round(value / raster) * raster if raster else value)
        if dice.random() < 0.1:
            numbers += numbers[-2:]
    return numbers


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of pycocotools
def test_polygons_are_those_of_pycocotools():
    """Breaks when a pixel at an edge, a tie of rounding, a union or a corner out of the picture is
    another."""
    filled = 0
    for seed in range(600):
        dice = random.Random(seed)
        height, width = dice.choice(((1, 1), (7, 40), (64, 48), (33, 90)))
        polygons = [drawn_polygon(dice, height, width) for _ in range(dice.choice((1, 1, 3)))]
        expected = official.decode(official.merge(official.frPyObjects(polygons, height, width)))
        ours = mask_of(polygons, height, width)
        assert ours.shape == (height, width)
        assert np.array_equal(ours, expected), seed
        filled += 0 < ours.sum() < ours.size
    drawn = runs_within.cache_info().misses
    assert np.array_equal(mask_of(polygons, height, width), ours)
    assert runs_within.cache_info().misses == drawn  # an outline is drawn once
    assert filled > 300


def test_run_lengths_are_those_of_pycocotools():
    """Breaks when a text has another sign, difference or order of letters, or rows come first."""
    for seed in range(60):
        dice = np.random.default_rng(seed)
        height, width = dice.integers(1, 90, 2)
        mask = dice.random((height, width)) < dice.choice((0, 0.02, 0.5, 1.0))
        if seed % 2:
            mask = mask.cumsum(0) % 2 == 1  # long runs
        for is_text in (True, False):
            found = mask_of(written(mask, is_text), int(height), int(width))
            assert np.array_equal(found, mask), seed


SQUARE = [2, 2, 6, 2, 6, 6, 2, 6]


BAD = """
    [[3, 4]] | a polygon has 2 numbers
    [[2, 2, 6, 2, 6, 6, 2, 6], [1, 2, 3, 4, 5, 6, 7]] | a polygon has 7 numbers
    [[1, 2, 3, 4]] | a polygon has 4 numbers
    [[[2, 2, 6, 2, 6, 6, 2, 6]]] | a polygon has 8 numbers
    [[1, 2, 900, 4, 5, 6]] | a polygon leaves the picture, 8×10 pixels
    [[1, 2, NaN, 4, 5, 6]] | a polygon leaves the picture
    [] | segmentation is []
    null | segmentation is None
    "a" | segmentation is 'a'
    {"size": [8, 10], "counts": [80]} | the mask's size is [8, 10], expected [10, 8]
    {"size": [10, 8], "counts": [40, 39]} | do not sum up to 80 pixels
    {"size": [10, 8], "counts": [81, -1]} | do not sum up
    {"size": [10, 8], "counts": [40.0, 40]} | do not sum up
    {"size": [10, 8], "counts": "P3"} | do not sum up
    {"size": [10, 8], "counts": "`"} | counts end within a number
    {"size": [10, 8], "counts": "1 2"} | counts hold ' '
    {"size": [10, 8], "counts": "oooooooooooooooooooo"} | counts hold 'o'
    {"size": [10, 8]} | 'counts' is missing
    [[5, 7, 7.9, 7, 7.9, 9.9, 5, 9.9]] | the bbox of cat holds 0 of the 9 pixels
    [[0.1, 0.1, 0.6, 0.1, 0.6, 0.6]] | the bbox of cat holds 0 of the 0 pixels"""


@pytest.mark.parametrize("segmentation, part", table(BAD))
def test_bad_masks_are_named(segmentation, part, tmp_path):
    """Breaks when a mask that is none is learned or scored, or raises a traceback."""
    value = layout(tmp_path, json.loads(segmentation), size=(8, 10), bbox=[2, 2, 3, 3])
    file = write_json(tmp_path / "a.json", value)
    refused(lambda: read_coco(file, coder=MaskCoder(1, 2)), "a.json:images[0] cat: ", part)


def layout(folder, *segmentations, size=(40, 30), bbox=None, names=("cat",)):
    """One picture, whose objects have these masks, the classes in turn."""
    draw(folder / "a.png", size=size)
    width, height = size
    annotations = []
    for number, segmentation in enumerate(segmentations):
        entry = {"image_id": 1, "category_id": number % len(names), "segmentation": segmentation}
        if bbox is None:
            entry["bbox"] = box_of_mask(mask_of(segmentation, height, width))
        annotations.append({"bbox": bbox} | entry)
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    image = {"id": 1, "file_name": "a.png", "width": width, "height": height}
    return {"images": [image], "annotations": annotations, "categories": categories}


def box_of_mask(mask):
    left, top, right, bottom = Image.fromarray(mask).getbbox()
    return [left, top, right - left, bottom - top]


@pytest.fixture(scope="module")
def coder():
    """A coder whose codes are what the encoder says of other masks."""
    torch.manual_seed(0)
    coder = MaskCoder(2, 4).requires_grad_(False)
    coder._vq_vae._embedding.data = coder.to_vectors(torch.rand(8, 64, 64)).flatten(0, 1)
    return coder


def ellipse(box, size):
    image = Image.new("1", size)
    ImageDraw.Draw(image).ellipse(box, fill=1)
    return np.asarray(image)


def test_answers_are_paligemma_s(tmp_path, coder):
    """Breaks when the order of tokens, classes or objects is another, a code is of another part of
    the picture, or a crowd is to be answered."""
    first = ellipse((4, 3, 19, 12), (40, 30))
    second = ellipse((20, 15, 35, 28), (40, 30))
    parts = [written(second), [SQUARE], written(first, is_text=False)]
    value = layout(tmp_path, *parts, names=("cat", "dog"))
    for category in (0, 2):
        crowd = {"image_id": 1, "bbox": [0, 0, 40, 30], "iscrowd": 1, "category_id": category}
        crowd["segmentation"] = written(np.ones((30, 40), bool))
        value["annotations"].append(crowd)
    value["categories"].append({"id": 2, "name": "cow"})
    file = write_json(tmp_path / "b.json", value)
    cats, dogs = read_coco(file, coder=coder)
    for record, name in ((cats, "cat"), (dogs, "dog")):
        assert record.name == f"b.json:images[0] {name}"
        assert record.prefix == f"segment {name}"
        assert record.key == cats.key  # one picture, encoded once
    texts = []
    for mask, (x, y, width, height) in ((first, (4, 3, 16, 10)), (second, (20, 15, 16, 14))):
        places = [y / 30, x / 40, (y + height) / 30, (x + width) / 40]
        text = "".join(f"<loc{round(1023 * place):04d}>" for place in places)
        codes = coder.encode(crop(mask, (x, y, x + width, y + height))[None])[0]
        text += "".join(f"<seg{code:03d}>" for code in codes.tolist())
        texts.append(f"{text} cat")
    assert cats.suffix == " ; ".join(texts)
    assert len(set(re.findall(r"<seg\d+>", cats.suffix))) > 3
    assert [box.is_crowd for box in cats.detection.boxes] == [False, False, True]
    refused(lambda: read_data(f"coco-masks:{file}"), "b.json", "--masks FILE", "vae-oid.npz")
    (boxes,) = read_data(f"coco:{file}")
    assert boxes.prefix == "detect cat ; dog"
    assert boxes.detection.boxes[0].segmentation is None


def test_objects_at_the_edge_have_masks(coder):
    """Breaks when a box without a whole pixel, or one that leaves the picture, has no crop."""
    mask = np.ones((30, 40), bool)
    for box in ((39.6, 29.6, 40, 30), (10.2, 5.1, 10.4, 5.2), (-3, -3, 50, 50), (0, 29, 40, 30)):
        assert len(re.findall(r"<seg\d{3}>", coder.to_text(mask, box))) == 16
    half = np.random.default_rng(0).random((30, 40)) < 0.5
    assert coder.to_text(half, (1.6, 2.7, 30.8, 25.9)) == coder.to_text(half, (2, 3, 31, 26))
    thin = Box("cat", 5, 5, 30, 0.1, 3, False, [[5, 5, 35, 5, 35, 5.1]])  # has no pixel's middle
    assert not checked_mask(thin, 30, 40).any()


# Measures


def drawn_case(seed):
    """Those of boxes as masks in pictures of 160 pixels: truths are two polygons, or run lengths,
    as all crowds."""
    dice = random.Random(seed)
    truths, found = drawn_boxes(seed)
    for true in truths:
        for at, box in enumerate(true):
            left, top, right, bottom = box.x, box.y, box.x + box.width, box.y + box.height
            polygon = [left, top, right, top, right, bottom, left, bottom - box.height / 10]
            outline = [polygon, [n + 1 for n in polygon]]
            if box.is_crowd or dice.random() < 0.3:
                outline = written(mask_of([polygon], 160, 160))
            true[at] = replace(box, segmentation=outline)
    for said in found:
        for at, box in enumerate(said):
            mask = np.zeros((160, 160), bool)
            left, top, width, height = map(int, sides(box))
            mask[top : top + height, left : left + width] = True
            said[at] = FoundMask(box.label, mask, box.score)
    return truths, found


@pytest.mark.long
def test_the_measures_are_those_of_coco(printed):
    """Breaks when masks tie, crowd, have sizes or overlap otherwise than in COCO's scorer."""
    compared = 0
    for seed in range(30):
        truths, found = drawn_case(seed)
        if any(truths) and any(found):
            ours = detect.score_boxes(truths, iter(found), mask_overlaps)
            named = [-1 if ours[name] is None else ours[name] for name in STATS]
            theirs = by_pycocotools(truths, found, are_masks=True)
            assert named == pytest.approx(theirs, abs=1e-6), seed
            compared += 0 < (ours["AP"] or 0) < 1
    assert compared > 12


def big_vision_iou(answer, true, coder):
    """The IoU of one example, after the published evaluator: the first 4 + 16 tokens count."""
    tokens = re.findall(r"<(loc|seg)(\d+)>", answer)[:20]
    height, width = true.shape
    numbers = [int(number) for _, number in tokens]
    kinds = [kind for kind, _ in tokens]
    if kinds != ["loc"] * 4 + ["seg"] * 16 or max(numbers[:4]) > 1023 or max(numbers[4:]) > 127:
        return 0.0
    places = np.array(numbers[:4]) / 1023 * [height, width, height, width]
    y1, x1, y2, x2 = places.astype(int)
    if x2 <= x1 or y2 <= y1:
        return 0.0
    with torch.no_grad():
        mask = coder.decode(torch.tensor([numbers[4:]]))[0].numpy()
    said = Image.fromarray(mask).resize([x2 - x1, y2 - y1], Image.Resampling.BILINEAR)
    said = np.asarray(said) > 0
    common = (true[y1:y2, x1:x2] & said).sum()
    return common / (true.sum() + said.sum() - common)


def drawn_answer(dice):
    """The tokens of an object, seldom of none: a place or a code is too large, or one is missing."""
    places = sorted(dice.randrange(1024) for _ in range(4))
    codes = [dice.randrange(128) for _ in range(16)]
    change = dice.randrange(12)
    if change == 0:
        places[dice.randrange(4)] = 1024
    elif change == 1:
        codes[dice.randrange(16)] = 128
    elif change == 2:
        places = places[::-1]
    elif change == 3:
        places = places[1:]
    elif change == 4:
        codes = codes[1:]
    elif change == 5:
        codes.append(5)  # the published scorer ignores it
    said = "".join(f"<loc{place:04d}>" for place in places)
    return said + "".join(f"<seg{code:03d}>" for code in codes)


def test_the_overlap_is_big_vision_s(coder):
    """Breaks when a mask is pasted, rounded or compared otherwise, or an answer that is none
    counts."""
    overlaps = []
    for seed in range(300):
        dice = random.Random(seed)
        width, height = dice.choice(((64, 48), (33, 100), (5, 4)))
        true = ellipse((0, 0, width * 0.8, height * 0.7), (width, height))
        box = Box("cat", 0, 0, width, height, 9, False, written(true))
        answer = f"{drawn_answer(dice)} cat"
        if seed % 3 == 0:
            answer = f"{answer}{dice.choice((' ; ', ''))}{drawn_answer(dice)} cat"
        truth = Detection(width, height, (box,))
        row = Row(Question("a", "a", (), "segment cat", truth=truth), (answer, []), {})
        overlaps.append(detect.overlap_of(row, coder))
        assert overlaps[-1] == pytest.approx(big_vision_iou(answer, true, coder), abs=1e-12), seed
    assert sum(0 < overlap < 1 for overlap in overlaps) > 50
    assert overlaps.count(0) > 50


def test_several_objects_overlap_together(coder):
    """Breaks when the masks of one prompt are not scored as one, or a crowd is asked for."""
    with torch.no_grad():
        everything = (coder.decode(torch.arange(128)[:, None].repeat(1, 16)) > 0).all((1, 2))
    seg = f"<seg{int(everything.nonzero()[0]):03d}>" * 16
    left, right = (f"<loc0000><loc{x:04d}><loc1023><loc{x + 341:04d}>{seg}" for x in (0, 341))
    boxes = []
    for x, is_crowd in ((0, False), (20, False), (40, True)):
        mask = np.zeros((30, 60), bool)
        mask[:, x : x + 20] = True
        boxes.append(Box("cat", x, 0, 20, 30, 600, is_crowd, written(mask)))
    truth = Detection(60, 30, tuple(boxes))
    question = Question("a", "a", (), "segment cat", truth=truth)
    overlaps = []
    for answer in (f"{left} cat", f"{right} cat ; {left} cat", f"no ; {left} cat ; {right} cat"):
        overlaps.append(detect.overlap_of(Row(question, (answer, []), {}), coder))
    assert overlaps == pytest.approx([0.5, 1, 0.5], abs=0.06)
    answer = f"{left.removesuffix(seg)} cat ; {left} cat"
    found, problems = detect.boxes_of(Row(question, (answer, []), {}))
    assert len(masks_of(found, truth, coder)) == 1
    assert problems == {"": 1, "no mask of 16 codes": 1}


# The command


@pytest.fixture
def data(workplace, coder):
    """A source of two pictures, and a coder in a file."""
    masks = [ellipse((4, 3, 24, 20), (40, 30)), ellipse((22, 12, 38, 28), (40, 30))]
    write_json(workplace / "a.json", layout(workplace, *map(written, masks), names=("cat", "dog")))
    np.savez("coder.npz", **coder.state_dict())
    return "--data coco-masks:a.json --masks coder.npz"


def test_the_command_scores_masks(data, coder, source, monkeypatch, told_of_one):
    """Breaks when a results file scores otherwise than the command has printed, needs the model, or
    masks are no longer drawn."""
    records = read_coco("a.json", coder=coder)
    cat = records[0].suffix
    dog = records[1].suffix.replace("<seg", "<sig", 1)

    def ask_all(model, processor, asks, **options):
        return [cat, dog][: len(asks)]

    monkeypatch.setattr("eval.answer.ask_all", ask_all)
    printed = told_of_one(detect, "--model", source, data)
    summary = {line: value["COCO"] for line, value in printed["summary"].items()}
    decoded = big_vision_iou(
        cat, mask_of(records[0].detection.boxes[0].segmentation, 30, 40), coder
    )
    assert printed["measures"]["mIoU"]["mean"] == pytest.approx(50 * decoded)
    assert summary["AP50"] == pytest.approx(50)  # of boxes
    assert decoded > 0.5
    assert summary["masks: AP50"] == pytest.approx(50)
    assert summary["malformed"] == 50
    out = "runs/eval/random/detect"
    assert has_color(f"{out}/detect.png", figures.HIT)  # the dog is not found
    assert has_color(f"{out}/detect.png", figures.MISS, figures.HIT)
    results = f"--results {out}/results.json"
    assert told_of_one(detect, results, "--masks coder.npz") == printed
    scored = told_of_one(detect, results)
    boxes = {line: value["COCO"] for line, value in scored["summary"].items()}
    assert boxes == {line: value for line, value in summary.items() if "masks" not in line}
    assert not scored["measures"]


def has_color(path, *colors):
    """Whether a picture on black has a large part in these colors, each half transparent, one over
    another."""
    expected = np.zeros(3)
    for color in colors[::-1]:
        expected = (expected + color) / 2
    pixels = np.asarray(Image.open(path).convert("RGB"), np.float64)
    return (abs(pixels - expected) < 5).all(-1).sum() > 1000


def test_masks_that_cannot_be_scored_are_refused(data, source, workplace):
    """Breaks when boxes are scored as masks, or a results file with another mask is."""
    refuses(detect, f"--model {source} --masks coder.npz", "--masks", "boxes")
    refuses(detect, f"--model {source} --data coco-masks:a.json", "a.json", "--masks FILE")
    result = RESULT | {"question": "segment cat"}
    for segmentation, part in ((None, "segmentation is None"), ([[1, 2]], "2 numbers")):
        boxes = [RESULT["boxes"][0] | {"segmentation": segmentation}]
        write_json(workplace / "R", [result | {"boxes": boxes}])
        refuses(detect, "--results R", "R[0]: ", part)


def test_boxes_of_roboflow_s_answers_are_those_of_coco(data, source, monkeypatch, told_of_one):
    """Breaks when boxes that an answer names are others than COCO's file has, or one that is none
    is no mistake."""
    (record,) = read_data("coco:a.json")
    row = {"image": "a.png", "prefix": record.prefix, "suffix": record.suffix}
    cat, dog = record.suffix.split(" ; ")
    said = f"{cat} ; <loc0300>{dog[9:]}"
    monkeypatch.setattr("eval.answer.ask_all", lambda *_, **__: [said])
    own = write_lines(Path("r.jsonl"), [row])
    summaries = []
    for source_of in ("coco:a.json", "jsonl:r.jsonl"):
        summaries.append(told_of_one(detect, "--model", source, "--data", source_of)["summary"])
    assert summaries[0] == summaries[1]
    assert 50 < summaries[0]["AP"]["COCO"] < 100
    for change in ({"suffix": f"{cat} ; none"}, {"prefix": "answer en a"}, {"image": None}):
        write_lines(own, [row | change])
        refuses(detect, "--data jsonl:r.jsonl", "r.jsonl:1 has no boxes")
