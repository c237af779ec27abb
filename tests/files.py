"""Files of several tests: the official layouts of VQAv2, COCO's captions and MMNeedle, plain text,
and a picture."""

import json
import random
import re
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


def json_lines(text: str) -> list:
    """The values that a text of JSON lines holds."""
    return list(map(json.loads, text.splitlines()))


def read_lines(path: Path) -> list:
    """The values that a file of JSON lines holds."""
    return json_lines(path.read_text(encoding="utf-8"))


def read_json(path: Path):
    """The value that a file of JSON holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def table(text: str) -> list[list[str]]:
    """The cells of each line of a text, between bars."""
    return [re.split(r" *\| *", line.strip()) for line in text.strip().splitlines()]


def draw(path: Path, color="black", size=(8, 8)) -> Path:
    """A picture of one color in `path`, which is returned."""
    Image.new("RGB", size, color).save(path)
    return path


def write_vqav2(folder: Path, images: int = 20, subset: str = "train2014") -> None:
    """The questions, annotations and pictures of a subset: three questions on each picture."""
    questions = []
    annotations = []
    (folder / subset).mkdir(parents=True)
    said = ["yes"] * 7 + ["no"] * 3
    answers = [
        {"answer": text, "answer_confidence": "yes", "answer_id": n}
        for n, text in enumerate(said, start=1)
    ]
    types = {"question_type": "what is", "answer_type": "other", "multiple_choice_answer": "yes"}
    for image_id in range(1, images + 1):
        file = folder / f"{subset}/COCO_{subset}_{image_id:012d}.jpg"
        draw(file, (image_id * 10, 0, 0), size=(30, 20))
        for number in range(3):
            about = {"image_id": image_id, "question_id": image_id * 1000 + number}
            questions.append(about | {"question": f"What is {number}?"})
            annotations.append(about | {"answers": answers} | types)
    head = {"info": {}, "license": {}, "data_type": "mscoco", "data_subtype": subset}
    head["task_type"] = "Open-Ended"
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
    grids = {}
    tests = []

    def add(id_: int, stitched: str, index: int, row: int, col: int, target: str) -> None:
        where = {"index": index, "row": row, "col": col, "target": target}
        tests.append({"id": id_, "image_ids": [f"images_stitched/2_2/{stitched}"]} | where)

    for n in (0, 1):
        stitched = f"COCO_val2014_stitched_{n:04d}.jpg"
        grids[stitched] = {}
        for place in range(4):
            row, col = divmod(place, 2)
            target = f"val2014/{names[4 * n + place]}"
            grids[stitched][f"{row}_{col}"] = target
            add(4 * n + place, stitched, 0, row, col, target)
    for n, stitched in enumerate(grids):
        add(5000 + n, stitched, -1, -1, -1, f"val2014/{names[8 + n]}")
    write_json(folder / "2_2.json", grids)
    write_json(folder / "annotations_1_2_2.json", tests)
    return folder


def prose(seed: int, lines: int = 60) -> str:
    """Lines of made-up words, some indented, a number at each end."""
    dice = random.Random(seed)
    made = []
    for _ in range(lines):
        indent = " " * dice.choice((0, 0, 4, 8))
        words = []
        for _ in range(dice.randint(3, 9)):
            words.append("".join(dice.choices(SYLLABLES, k=dice.randint(1, 3))))
        made.append(f"{indent}{' '.join(words)} {dice.randrange(10_000)}\n")
    return "".join(made)


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
