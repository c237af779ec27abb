"""Files that several tests write: VQAv2's official layout, and plain text."""

import json
import random
from pathlib import Path

from PIL import Image

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


def write_vqav2(folder: Path, images: int = 20) -> None:
    """The questions, annotations and pictures of train2014: three questions on each picture."""
    questions, annotations = [], []
    (folder / "train2014").mkdir(parents=True)
    for image_id in range(1, images + 1):
        Image.new("RGB", (30, 20), (image_id * 10, 0, 0)).save(folder / f"train2014/COCO_train2014_{image_id:012d}.jpg")
        for number in range(3):
            qid = image_id * 1000 + number
            questions.append({"image_id": image_id, "question": f"What is {number}?", "question_id": qid})
            answers = [
                {"answer": "yes" if i < 7 else "no", "answer_confidence": "yes", "answer_id": i + 1} for i in range(10)
            ]
            types = {"question_type": "what is", "answer_type": "other", "multiple_choice_answer": "yes"}
            annotations.append({"question_id": qid, "image_id": image_id, "answers": answers} | types)
    head = {"info": {}, "license": {}, "data_type": "mscoco", "data_subtype": "train2014", "task_type": "Open-Ended"}
    (folder / "v2_OpenEnded_mscoco_train2014_questions.json").write_text(json.dumps(head | {"questions": questions}))
    (folder / "v2_mscoco_train2014_annotations.json").write_text(json.dumps(head | {"annotations": annotations}))


def prose(seed: int, lines: int = 60) -> str:
    """Lines of made-up words, some indented, a number at each end."""
    dice = random.Random(seed)
    return "".join(
        " " * dice.choice((0, 0, 4, 8))
        + " ".join("".join(dice.choices(SYLLABLES, k=dice.randint(1, 3))) for _ in range(dice.randint(3, 9)))
        + f" {dice.randrange(10_000)}\n"
        for _ in range(lines)
    )


def write_prose(folder: Path) -> Path:
    """Forty files of `prose`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number}.txt").write_text(prose(number))
    return folder
