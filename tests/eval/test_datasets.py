"""Readers: the published layouts are read as published, and a file that breaks its format is
named."""

import json
from dataclasses import replace

import pytest

from eval.data import published
from eval.data import published as data
from eval.data.published import Annotation
from tests.runs import refused


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


NAMES = [("train2014", 458752, "train2014/COCO_train2014_000000458752.jpg"), ("", 12, "12.jpg")]
NAMES += [("test-dev2015", 1, "test2015/COCO_test2015_000000000001.jpg"), ("", "0f3a", "0f3a.jpg")]


@pytest.mark.parametrize(("subset", "image_id", "image"), NAMES)
def test_names_of_pictures(tmp_path, subset, image_id, image):
    """COCO's name has twelve digits, the split twice; test-dev asks about test's pictures."""
    questions = [{"image_id": image_id, "question": "What?", "question_id": 9}]
    path = write(tmp_path / "q.json", {"info": {}, "data_subtype": subset, "questions": questions})
    assert published.read_vqa(path)[1] == [Annotation(9, question="What?", image=image)]


def test_vqav2_annotations(tmp_path):
    """The ten records stay whole, since the scorer compares them whole; a question without answers
    is named."""
    answers = [
        {"answer": "net", "answer_confidence": "maybe", "answer_id": n} for n in range(1, 11)
    ]
    full = {
        "question_id": 9,
        "question_type": "what is",
        "answer_type": "other",
        "multiple_choice_answer": "mesh",
    }
    questions = [{"question_id": n, "image_id": 4, "question": "?"} for n in (9, 10)]
    files = write(tmp_path / "q.json", {"questions": questions}), tmp_path / "a.json"
    bare = {"question_id": 10, "answers": ["x", "net", "net"]}
    layout, made = published.read_vqa(
        *files[:1], write(files[1], {"annotations": [full | {"answers": answers}, bare]})
    )
    expected = Annotation(
        9, tuple(answers), "mesh", "other", "what is", question="?", image="4.jpg"
    )
    assert layout == "official"
    assert made[0] == expected
    assert (made[1].answer, made[1].answer_type, made[1].question_type) == ("net", None, None)
    write(files[1], {"annotations": [bare]})
    refused(
        lambda: published.read_vqa(*files),
        "q.json: questions[0]: question 9 has no answers in",
        "a.json",
    )


GQA = {
    "07": {
        "question": "?",
        "imageId": "n7",
        "answer": "no",
        "isBalanced": False,
        "types": {"structural": "query"},
    }
}
TEXTVQA = {
    "data": [{"question_id": 3, "image_id": "0f", "question": "?", "answers": ["x", "x", "y"]}]
}
VIZWIZ = [
    {
        "image": "v.jpg",
        "question": "?",
        "answers": [{"answer": "x"}, {"answer": "x"}],
        "answerable": 1,
    }
]
OPEN = Annotation("07", ({"answer": "no"},), "no", "open", "query", balanced=False, image="n7.jpg")
READ = [{"answer": "x"}, {"answer": "x"}, {"answer": "y"}]


RELATIVES = [
    (GQA, "gqa", OPEN),
    (TEXTVQA, "textvqa", Annotation(3, tuple(READ), "x", image="0f.jpg")),
]
RELATIVES += [
    (VIZWIZ, "vizwiz", Annotation("v.jpg", tuple(READ[:2]), "x", answerable=1, image="v.jpg"))
]


@pytest.mark.parametrize(("value", "layout", "expected"), RELATIVES)
def test_relatives_of_vqav2(value, layout, expected, tmp_path):
    """GQA's, TextVQA's and VizWiz's own ids, picture names, answers and scoring, in one file."""
    assert published.read_vqa(write(tmp_path / "q.json", value)) == (
        layout,
        [replace(expected, question="?")],
    )


@pytest.mark.parametrize(
    "change", [{"answers": "xxx"}, {"answers": {"answer": "x"}}, {"answerable": "0"}]
)
def test_answers_that_are_no_list_are_refused(change, tmp_path):
    """Breaks when letters of a text are ten answers, or a text "0" says that all can be answered."""
    refused(lambda: data.read_vqa(write(tmp_path / "q.json", [VIZWIZ[0] | change])), "q.json[0]: ")


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "b", "a")])
def test_ids_that_a_log_cannot_tell_apart_are_refused(ids, tmp_path):
    """Breaks when the answer to question 1 is that to question "1"."""
    records = [{"question_id": i, "image": "a.png", "question": "?"} for i in ids]
    refused(
        lambda: published.read_vqa(write(tmp_path / "q.json", {"questions": records})),
        "q.json: 1 duplicate",
    )


def test_coco_s_pictures_may_lie_flat(tmp_path):
    """COCO's folder may hold val2014/ or be it; links, and pictures elsewhere, are pictures."""
    for name in ("val2014/COCO_a.png", "COCO_b.png", "c.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    (tmp_path / "data/link.png").symlink_to(tmp_path / "data/c.png")
    names = {name: name for name in ("val2014/COCO_a.png", "link.png", "../data/c.png")}
    for name, path in (names | {"val2014/COCO_b.png": "COCO_b.png"}).items():
        assert published.find_picture(tmp_path / "data", name) == tmp_path / "data" / path
    refused(
        lambda: published.find_picture(tmp_path, "val2014/c.png"),
        "'val2014/c.png' is not in",
        "--images",
    )


GRIDS = {
    f"s_{n}.jpg": {f"{r}_{c}": f"val2014/{n}{r}{c}.jpg" for r in (0, 1) for c in (0, 1)}
    for n in range(3)
}
CAPTIONS = {
    f"{n}{r}{c}.jpg": f"caption {n}{r}{c}" for n in range(4) for r in (0, 1) for c in (0, 1)
}
TEST = {"id": 0, "image_ids": ["images_stitched/2_2/s_0.jpg", "images_stitched/2_2/s_2.jpg"]}
TEST |= {"index": 1, "row": 0, "col": 1, "target": "val2014/201.jpg"}
NEGATIVE = TEST | {"id": 5000, "index": -1, "row": -1, "col": -1, "target": "val2014/311.jpg"}
TWO = {
    "id": 1,
    "index": [0, 1],
    "row": [1, 0],
    "col": [0, 1],
    "target": ["val2014/010.jpg", "val2014/201.jpg"],
}


def read(tmp_path, records, grids=GRIDS):
    files = (("2_2.json", grids), ("annotations.json", records), ("captions.json", CAPTIONS))
    return published.read_needle_tests(*(write(tmp_path / name, value) for name, value in files))


def test_needle_tests(tmp_path):
    """Row-major sub-images, places counted from 0, negatives, and several needles as lists."""
    test, negative, two = read(tmp_path, [TEST, NEGATIVE, TEST | TWO])
    grid = ("val2014/200.jpg", "val2014/201.jpg", "val2014/210.jpg", "val2014/211.jpg")
    assert test.haystack[1] == grid
    assert test.side == 2
    assert (test.places, test.targets, test.captions) == (
        ((1, 0, 1),),
        ("val2014/201.jpg",),
        ("caption 201",),
    )
    assert negative.places == (published.ABSENT,)
    assert negative.captions == ("caption 311",)
    assert two.places == ((0, 1, 0), (1, 0, 1))
    assert two.captions == ("caption 010", "caption 201")


def test_captions_of_coco_the_last_counts(tmp_path):
    """MMNeedle's caption of a picture is the last one that COCO lists; another one is another
    test."""
    value = {
        "images": [{"id": number, "file_name": f"{name}.jpg"} for number, name in enumerate("abc")]
    }
    value["annotations"] = [
        {"image_id": n, "caption": text} for n, text in ((0, "first"), (1, "only"), (0, "last "))
    ]
    assert published.read_captions(write(tmp_path / "c.json", value)) == {
        "a.jpg": "last ",
        "b.jpg": "only",
    }


ABSENT = NEGATIVE | {"target": "val2014/201.jpg"}
LOST = [
    {"image_ids": ["s_9.jpg"]},
    {"row": -1},
    {"row": 0.0},
    {"col": True},
    {"id": True},
    {"row": 0, "col": 2},
    ABSENT,
    {"target": ["a", "b"]},
]


@pytest.mark.parametrize("change", LOST)
def test_contradicting_needle_files_are_named(tmp_path, change):
    """Metadata, annotations and captions of different releases are run together and score at
    chance."""
    refused(lambda: read(tmp_path, [TEST | change]), "annotations.json[0]: ")
    refused(
        lambda: read(tmp_path, [TEST], grids={"s.jpg": {"0_0": "a.jpg", "0_1": "b.jpg"}}),
        "2_2.json: 's.jpg'",
    )
    refused(lambda: read(tmp_path, [TEST], grids=GRIDS | {"s.jpg": {}}), "2_2.json: 's.jpg'")
