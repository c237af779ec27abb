"""Files of several tests: the official layouts of VQAv2, COCO's captions and MMNeedle, plain text,
and a picture."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


def write_json(path: Path, value: object) -> Path:
    """Write `value` as JSON to `path`, which is returned."""
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_lines(path: Path, rows: Iterable) -> Path:
    """Write each row as a line of JSON to `path`, which is returned."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_json(path: Path):
    """The value that a file of JSON holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def draw(path: Path, color="black", size=(8, 8)) -> Path:
    """A picture of one color in `path`, which is returned."""
    Image.new("RGB", size, color).save(path)
    return path


def write_vqav2(folder: Path, images: int = 20, subset: str = "train2014") -> None:
    """The questions, annotations and pictures of a subset: three questions on each picture."""
    questions = []
    annotations = []
    (folder / subset).mkdir(parents=True)
    for image_id in range(1, images + 1):
        Image.new("RGB", (30, 20), (image_id * 10, 0, 0)).save(
            folder / f"{subset}/COCO_{subset}_{image_id:012d}.jpg"
        )
        for number in range(3):
            qid = image_id * 1000 + number
            questions.append(
                {"image_id": image_id, "question": f"What is {number}?", "question_id": qid}
            )
            answers = [
                {"answer": "yes" if i < 7 else "no", "answer_confidence": "yes", "answer_id": i + 1}
                for i in range(10)
            ]
            types = {
                "question_type": "what is",
                "answer_type": "other",
                "multiple_choice_answer": "yes",
            }
            annotations.append(
                {"question_id": qid, "image_id": image_id, "answers": answers} | types
            )
    head = {
        "info": {},
        "license": {},
        "data_type": "mscoco",
        "data_subtype": subset,
        "task_type": "Open-Ended",
    }
    write_json(
        folder / f"v2_OpenEnded_mscoco_{subset}_questions.json", head | {"questions": questions}
    )
    write_json(folder / f"v2_mscoco_{subset}_annotations.json", head | {"annotations": annotations})


def write_mmneedle(folder: Path) -> Path:
    """Pictures, captions and metadata as MMNeedle publishes them: 8 tests of one picture of 2×2,
    and 2 negatives."""
    (folder / "val2014").mkdir(parents=True)
    names = [f"COCO_val2014_{number:012d}.jpg" for number in range(12)]
    for number, name in enumerate(names):
        noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "val2014" / name)
    write_json(folder / "C", {name: f"picture {number}" for number, name in enumerate(names)})
    places = [(row, col) for row in (0, 1) for col in (0, 1)]
    stitched = [f"COCO_val2014_stitched_{n:04d}.jpg" for n in (0, 1)]
    grids = {
        name: {f"{row}_{col}": f"val2014/{names[4 * n + 2 * row + col]}" for row, col in places}
        for n, name in enumerate(stitched)
    }
    write_json(folder / "2_2.json", grids)

    def test(number: int, n: int, index: int, row: int, col: int, target: int) -> dict:
        where = {
            "image_ids": [f"images_stitched/2_2/{stitched[n]}"],
            "index": index,
            "row": row,
            "col": col,
        }
        return {"id": number, **where, "target": f"val2014/{names[target]}"}

    tests = [
        test(4 * n + 2 * r + c, n, 0, r, c, 4 * n + 2 * r + c) for n in (0, 1) for r, c in places
    ]
    tests += [test(5000 + n, n, -1, -1, -1, 8 + n) for n in (0, 1)]
    write_json(folder / "annotations_1_2_2.json", tests)
    return folder


def write_captions(path: Path, names: list[str], each: int = 3) -> Path:
    """Captions of pictures as COCO publishes captions_val2014.json: `each` of them for a picture,
    in no order."""
    numbers = {name: int(name.rpartition("_")[2].removesuffix(".jpg")) for name in names}
    images = [
        {
            "license": 3,
            "file_name": name,
            "coco_url": f"http://images.cocodataset.org/val2014/{name}",
            "height": 64,
        }
        | {
            "width": 64,
            "date_captured": "2013-11-14 11:18:45",
            "flickr_url": "http://flickr.com/x.jpg",
            "id": number,
        }
        for name, number in numbers.items()
    ]
    annotations = [
        {"image_id": number, "id": 10 * number + place, "caption": f"Caption {place} of {number}. "}
        for place in range(each)
        for number in reversed(numbers.values())
    ]
    licenses = [
        {
            "url": "http://creativecommons.org/licenses/by-nc/2.0/",
            "id": 2,
            "name": "Attribution-NonCommercial",
        }
    ]
    head = {
        "info": {"description": "2014 MS COCO dataset", "version": "1.0", "year": 2014},
        "images": images,
    }
    write_json(path, head | {"licenses": licenses, "annotations": annotations})
    return path


def prose(seed: int, lines: int = 60) -> str:
    """Lines of made-up words, some indented, a number at each end."""
    dice = random.Random(seed)
    return "".join(
        " " * dice.choice((0, 0, 4, 8))
        + " ".join(
            "".join(dice.choices(SYLLABLES, k=dice.randint(1, 3)))
            for _ in range(dice.randint(3, 9))
        )
        + f" {dice.randrange(10_000)}\n"
        for _ in range(lines)
    )


def write_prose(folder: Path) -> Path:
    """Forty files of `prose`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number}.txt").write_text(prose(number))
    return folder


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Noise over a gradient, so that filters, channels and orientations all show."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    ramp = np.linspace(0, 135, width).astype(int)[None, :, None]
    return Image.fromarray((noise + ramp).astype(np.uint8))
