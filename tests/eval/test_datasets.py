"""Readers: the published layouts are read as published, and a file that breaks its format is named."""

import json

import pytest
from PIL import Image

from eval import data
from eval.data import Annotation, Question
from model.common import UserError


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2)).save(path)


# VQAv2 and its relatives


@pytest.mark.parametrize(
    ("subset", "image_id", "image"),
    [
        ("train2014", 458752, "train2014/COCO_train2014_000000458752.jpg"),
        ("test-dev2015", 1, "test2015/COCO_test2015_000000000001.jpg"),
        ("", 12, "12.jpg"),
        ("val", "VizWiz_val_00000000.jpg", "VizWiz_val_00000000.jpg"),
        ("", "0f3a.b", "0f3a.b.jpg"),
    ],
)
def test_names_of_pictures(tmp_path, subset, image_id, image):
    """COCO's name has twelve digits, the split twice; test-dev asks about test's pictures; others give the name."""
    questions = [{"image_id": image_id, "question": "What?", "question_id": 9}]
    path = write(tmp_path / "q.json", {"info": {}, "data_subtype": subset, "questions": questions})
    assert data.read_questions(path) == [Question(9, image, "What?")]


def test_vqav2_annotations(tmp_path):
    """The ten records stay whole, since the scorer compares them whole."""
    answers = [{"answer": "net", "answer_confidence": "maybe", "answer_id": n} for n in range(1, 11)]
    full = {"question_id": 9, "image_id": 4, "question_type": "what is", "answer_type": "other"}
    full |= {"multiple_choice_answer": "mesh", "answers": answers}
    path = write(tmp_path / "a.json", {"annotations": [full, {"question_id": 10, "answers": ["x", "net", "net"]}]})
    layout, (whole, bare) = data.read_layout(path)
    assert layout == "official" and whole == Annotation(9, tuple(answers), "mesh", "other", "what is")
    assert (bare.answer, bare.answer_type, bare.question_type) == ("net", None, None)


def test_relatives_of_vqav2(tmp_path):
    """GQA's, TextVQA's and VizWiz's own ids, picture names, answers and scoring."""
    types = {"structural": "query"}
    gqa = {"07": {"question": "Is it?", "imageId": "n7", "answer": "no", "isBalanced": False, "types": types}}
    path = write(tmp_path / "gqa.json", gqa)
    assert data.read_questions(path) == [Question("07", "n7.jpg", "Is it?")] and data.holds_answers(path)
    expected = Annotation("07", ({"answer": "no"},), "no", "open", "query", balanced=False)
    assert data.read_layout(path) == ("gqa", [expected])
    types["structural"] = "logical"
    assert data.read_layout(write(path, gqa))[1][0].answer_type == "binary"
    textvqa = {"question_id": 3, "image_id": "0f", "question": "Who?", "answers": ["x", "y"]}
    path = write(tmp_path / "t.json", {"data": [textvqa]})
    assert data.read_questions(path) == [Question(3, "0f.jpg", "Who?")]
    layout, (annotation,) = data.read_layout(path)
    assert layout == "textvqa" and annotation.answers == ({"answer": "x"}, {"answer": "y"})
    vizwiz = {"image": "v.jpg", "question": "?", "answers": [{"answer": "x"}, {"answer": "x"}], "answerable": 1}
    path = write(tmp_path / "v.json", [vizwiz])
    assert data.read_questions(path) == [Question("v.jpg", "v.jpg", "?")]
    assert data.read_layout(path) == ("vizwiz", [Annotation("v.jpg", ({"answer": "x"},) * 2, "x", answerable=1)])


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "b", "a")])
def test_ids_that_a_log_cannot_tell_apart_are_refused(ids, tmp_path):
    """Breaks when the answer to question 1 is that to question "1"."""
    records = [{"question_id": i, "image": "a.png", "question": "?", "text": "?", "label": "no"} for i in ids]
    path = write(tmp_path / "q.json", {"questions": records})
    with pytest.raises(UserError, match="q.json: 1 duplicate"):
        data.read_questions(path)
    with pytest.raises(UserError, match="q.json: 1 duplicate"):
        data.read_pope(write(path, "\r\n".join(map(json.dumps, records))))


def test_a_bad_record_is_named_by_its_place(tmp_path):
    """Breaks when a wrong record in a file of thousands cannot be found."""
    good = {"question_id": 1, "image": "a.png", "text": "?", "label": "no"}
    for bad in ({"question_id": 2}, good | {"label": "maybe"}, good | {"text": 3}, [], "x"):
        with pytest.raises(UserError, match=r"p.json:3: "):
            data.read_pope(write(tmp_path / "p.json", f"{json.dumps(good)}\n\n{json.dumps(bad)}"))
    with pytest.raises(UserError, match=r"q.json: questions\[1\]: 'question' is missing"):
        data.read_questions(write(tmp_path / "q.json", {"questions": [good | {"question": "?"}, good]}))


def test_coco_s_pictures_may_lie_flat_and_absent_ones_are_counted(tmp_path):
    """COCO's folder may hold val2014/ or be it; pictures that are in neither are named before a long run begins."""
    for name in ("val2014/COCO_a.png", "COCO_b.png", "elsewhere/c.png"):
        picture(tmp_path / "data" / name)
    (tmp_path / "data/link.png").symlink_to(tmp_path / "data/elsewhere/c.png")
    names = {"val2014/COCO_a.png": "val2014/COCO_a.png", "val2014/COCO_b.png": "COCO_b.png", "link.png": "link.png"}
    names |= {"../data/link.png": "../data/link.png"}
    paths = data.find_images(names, tmp_path / "data", "q.json")
    assert paths == {name: tmp_path / "data" / path for name, path in names.items()}
    with pytest.raises(UserError, match=r"q.json: 2 of its 3 pictures are not in .* \('val2014/c.png', 'd.png'\)"):
        data.find_images(["COCO_b.png", "val2014/c.png", "d.png", "d.png"], tmp_path / "data", "q.json")


# MMNeedle

GRIDS = {f"s_{n}.jpg": {f"{r}_{c}": f"val2014/{n}{r}{c}.jpg" for r in (0, 1) for c in (0, 1)} for n in range(3)}
CAPTIONS = {f"{n}{r}{c}.jpg": f"caption {n}{r}{c}" for n in range(4) for r in (0, 1) for c in (0, 1)}
TEST = {"id": 0, "image_ids": ["images_stitched/2_2/s_0.jpg", "images_stitched/2_2/s_2.jpg"]}
TEST |= {"index": 1, "row": 0, "col": 1, "target": "val2014/201.jpg"}
NEGATIVE = TEST | {"id": 5000, "index": -1, "row": -1, "col": -1, "target": "val2014/311.jpg"}
TWO = {"id": 1, "index": [0, 1], "row": [1, 0], "col": [0, 1], "target": ["val2014/010.jpg", "val2014/201.jpg"]}


def read(tmp_path, records, grids=GRIDS):
    files = (("2_2.json", grids), ("annotations.json", records), ("captions.json", CAPTIONS))
    return data.read_needle_tests(*(write(tmp_path / name, value) for name, value in files))


def test_needle_tests(tmp_path):
    """Row-major sub-images, places counted from 0, negatives, and several needles as lists."""
    test, negative, two = read(tmp_path, [TEST, NEGATIVE, TEST | TWO])
    grid = ("val2014/200.jpg", "val2014/201.jpg", "val2014/210.jpg", "val2014/211.jpg")
    assert test.haystack[1] == grid and test.side == 2
    assert (test.places, test.targets, test.captions) == (((1, 0, 1),), ("val2014/201.jpg",), ("caption 201",))
    assert negative.places == (data.ABSENT,) and negative.captions == ("caption 311",)
    assert two.places == ((0, 1, 0), (1, 0, 1)) and two.captions == ("caption 010", "caption 201")


def test_captions_of_coco_the_last_counts(tmp_path):
    """MMNeedle's caption of a picture is the last one that COCO lists; another one is another test."""
    images = [{"id": number, "file_name": f"{name}.jpg"} for number, name in enumerate("abc")]
    captions = [{"image_id": number, "caption": text} for number, text in ((0, "first"), (1, "only"), (0, "last "))]
    path = write(tmp_path / "c.json", {"images": images, "annotations": captions})
    assert data.read_captions(path) == {"a.jpg": "last ", "b.jpg": "only"}


@pytest.mark.parametrize(
    "change",
    [
        {"image_ids": ["s_9.jpg"]},
        {"image_ids": []},
        {"index": 2},
        {"row": 2},
        {"row": -1},
        {"row": 0, "col": 2},
        {"col": 0},
        NEGATIVE | {"target": "val2014/201.jpg"},
        {"target": ["val2014/201.jpg", "val2014/200.jpg"]},
        {"target": "val2014/999.jpg"},
        {"index": None},
    ],
)
def test_contradicting_needle_files_are_named(tmp_path, change):
    """Metadata, annotations and captions of different releases are run together and score at chance."""
    with pytest.raises(UserError, match=r"annotations.json\[0\]: "):
        read(tmp_path, [TEST | change])
    with pytest.raises(UserError, match="2_2.json: 's.jpg' is no square"):
        read(tmp_path, [TEST], grids={"s.jpg": {"0_0": "a.jpg", "0_1": "b.jpg"}})
