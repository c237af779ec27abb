"""Readers: the published layouts are read as published, and a file that breaks its format is
named."""

import json

import pytest

from eval.data import mmneedle, published
from eval.data.files import find_picture
from eval.data.published import Annotation
from tests.files import table
from tests.runs import refused


def write(path, value):
    if not isinstance(value, str):
        value = json.dumps(value)
    path.write_text(value)
    return path


# COCO's subset, the picture's id, and its name
NAMES = """
    train2014 | 458752 | train2014/COCO_train2014_000000458752.jpg
    | 12 | 12.jpg
    test-dev2015 | 1 | test2015/COCO_test2015_000000000001.jpg
    | "0f3a" | 0f3a.jpg"""


@pytest.mark.parametrize("subset, image_id, image", table(NAMES))
def test_names_of_pictures(tmp_path, subset, image_id, image):
    """COCO's name has twelve digits, the split twice; test-dev asks about test's pictures."""
    questions = [{"image_id": json.loads(image_id), "question": "What?", "question_id": 9}]
    path = write(tmp_path / "q.json", {"info": {}, "data_subtype": subset, "questions": questions})
    assert published.read_vqa(path)[1] == [Annotation(9, question="What?", image=image)]


def test_vqav2_annotations(tmp_path):
    """The ten records stay whole, since the scorer compares them whole; a question without answers
    is named."""
    same = {"answer": "net", "answer_confidence": "maybe"}
    answers = [same | {"answer_id": n} for n in range(10)]
    full, bare = json.loads("""[{"question_id": 9, "question_type": "what is",
        "answer_type": "other", "multiple_choice_answer": "mesh"},
        {"question_id": 10, "answers": ["x", "net", "net"]}]""")
    asked = [{"question_id": n, "image_id": 4, "question": "?"} for n in (9, 10)]
    questions = write(tmp_path / "q.json", {"questions": asked})

    def read(*annotations):
        file = write(tmp_path / "a.json", {"annotations": annotations})
        return published.read_vqa(questions, file)

    layout, made = read(full | {"answers": answers}, bare)
    assert layout == "official"
    assert made[0] == Annotation(
        9, tuple(answers), "mesh", "other", "what is", question="?", image="4.jpg"
    )
    assert (made[1].answer, made[1].answer_type, made[1].question_type) == ("net", None, None)
    refused(lambda: read(bare), "q.json: questions[0]: question 9 has no answers in", "a.json")


X = {"answer": "x"}
Y = {"answer": "y"}
VIZWIZ = """[{"image": "v.jpg", "question": "?", "answers": [{"answer": "x"}, {"answer": "x"}],
    "answerable": 1}]"""


RELATIVES = {
    "gqa": (
        """{"07": {"question": "?", "imageId": "n7", "answer": "no", "isBalanced": false,
            "types": {"structural": "query"}}}""",
        Annotation(
            "07", ({"answer": "no"},), "no", "open", "query", balanced=False, image="n7.jpg"
        ),
    ),
    "textvqa": (
        """{"data": [{"question_id": 3, "image_id": "0f", "question": "?",
            "answers": ["x", "x", "y"]}]}""",
        Annotation(3, (X, X, Y), "x", image="0f.jpg"),
    ),
    "vizwiz": (VIZWIZ, Annotation("v.jpg", (X, X), "x", answerable=1, image="v.jpg")),
}


@pytest.mark.parametrize("layout", RELATIVES)
def test_relatives_of_vqav2(layout, tmp_path):
    """GQA's, TextVQA's and VizWiz's own ids, picture names, answers and scoring, in one file."""
    text, expected = RELATIVES[layout]
    found = published.read_vqa(write(tmp_path / "q.json", text))
    assert found == (layout, [expected._replace(question="?")])


@pytest.mark.parametrize(
    "change", [{"answers": "xxx"}, {"answers": {"answer": "x"}}, {"answerable": "0"}]
)
def test_answers_that_are_no_list_are_refused(change, tmp_path):
    """Breaks when letters of a text are ten answers, or a text "0" says that all can be answered."""
    (question,) = json.loads(VIZWIZ)
    file = write(tmp_path / "q.json", [question | change])
    refused(lambda: published.read_vqa(file), "q.json[0]: ")


def test_a_question_without_answers_is_no_question_with_many(tmp_path):
    """Breaks when one such question changes how all others are scored."""
    about = {"question_id": 0, "image": "a", "question": "?"}
    asked = [about, about | {"question_id": 1, "answers": ["x"]}]
    assert published.read_vqa(write(tmp_path / "q.json", {"data": asked}))[0] == "gqa"


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "b", "a")])
def test_ids_that_a_log_cannot_tell_apart_are_refused(ids, tmp_path):
    """Breaks when the answer to question 1 is that to question "1"."""
    asked = [{"question_id": i, "image": "a.png", "question": "?"} for i in ids]
    file = write(tmp_path / "q.json", {"questions": asked})
    refused(lambda: published.read_vqa(file), "q.json: 1 duplicate")


def test_coco_s_pictures_may_lie_flat(tmp_path):
    """COCO's folder may hold val2014/ or be it; links, and pictures elsewhere, are pictures."""
    data = tmp_path / "data"
    for name in ("val2014/COCO_a.png", "COCO_b.png", "c.png"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    (data / "link.png").symlink_to(data / "c.png")
    for name in ("val2014/COCO_a.png", "link.png", "../data/c.png"):
        assert find_picture(data, name) == data / name
    assert find_picture(data, "val2014/COCO_b.png") == data / "COCO_b.png"
    lost = "val2014/c.png"
    refused(lambda: find_picture(tmp_path, lost), f"'{lost}' is not in", "--images")


PLACES = "00 01 10 11".split()
GRIDS = {}
for number in range(3):
    cells = {f"{row}_{column}": f"val2014/{number}{row}{column}.jpg" for row, column in PLACES}
    GRIDS[f"s_{number}.jpg"] = cells
CAPTIONS = {f"{n}{at}.jpg": f"caption {n}{at}" for n in range(4) for at in PLACES}
TEST, NEGATIVE, TWO = json.loads("""[
    {"id": 0, "index": 1, "row": 0, "col": 1, "target": "val2014/201.jpg"},
    {"id": 5000, "index": -1, "row": -1, "col": -1, "target": "val2014/311.jpg"},
    {"id": 1, "index": [0, 1], "row": [1, 0], "col": [0, 1],
        "target": ["val2014/010.jpg", "val2014/201.jpg"]}]""")
for test in (TEST, NEGATIVE, TWO):
    test["image_ids"] = ["images_stitched/2_2/s_0.jpg", "images_stitched/2_2/s_2.jpg"]


def read(tmp_path, records, grids=GRIDS):
    values = {"2_2.json": grids, "annotations.json": records, "captions.json": CAPTIONS}
    return mmneedle.read_needle_tests(*(write(tmp_path / n, value) for n, value in values.items()))


def test_needle_tests(tmp_path):
    """Row-major sub-images, places counted from 0, negatives, and several needles as lists."""
    test, negative, two = read(tmp_path, [TEST, NEGATIVE, TWO])
    grid = ("val2014/200.jpg", "val2014/201.jpg", "val2014/210.jpg", "val2014/211.jpg")
    assert test.haystack[1] == grid
    assert test.side == 2
    assert test.places == ((1, 0, 1),)
    assert test.targets == ("val2014/201.jpg",)
    assert test.captions == ("caption 201",)
    assert negative.places == (mmneedle.ABSENT,)
    assert negative.captions == ("caption 311",)
    assert two.places == ((0, 1, 0), (1, 0, 1))
    assert two.captions == ("caption 010", "caption 201")


def test_captions_of_coco_the_last_counts(tmp_path):
    """MMNeedle's caption of a picture is the last one that COCO lists; another one is another
    test."""
    text = """{"images": [{"id": 0, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"},
        {"id": 2, "file_name": "c.jpg"}], "annotations": [{"image_id": 0, "caption": "first"},
        {"image_id": 1, "caption": "only"}, {"image_id": 0, "caption": "last "}]}"""
    found = mmneedle.read_captions(write(tmp_path / "c.json", text))
    assert found == {"a.jpg": "last ", "b.jpg": "only"}


LOST = """
{"image_ids": ["s_9.jpg"]}
{"row": -1}
{"row": 0.0}
{"col": true}
{"id": true}
{"row": 0, "col": 2}
{"id": 5000, "index": -1, "row": -1, "col": -1}
{"target": ["a", "b"]}
"""


@pytest.mark.parametrize("change", LOST.strip().splitlines())
def test_contradicting_needle_annotations_are_named(tmp_path, change):
    """Metadata and annotations of different releases are run together and score at chance."""
    refused(lambda: read(tmp_path, [TEST | json.loads(change)]), "annotations.json[0]: ")


@pytest.mark.parametrize("grids", [{"s.jpg": {"0_0": "a", "0_1": "b"}}, GRIDS | {"s.jpg": {}}])
def test_needle_grids_are_square(tmp_path, grids):
    """A haystack that is no square is asked about."""
    refused(lambda: read(tmp_path, [TEST], grids), "2_2.json: 's.jpg'")
