"""Readers: the published layouts are read as published, and a file that breaks its format is named."""

import json

import pytest
from PIL import Image

from eval import datasets, needle_files, own_files
from model.common import UserError


def write(path, value, end="\n"):
    text = value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(text.replace("\n", end).encode())
    return path


def lines(*records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


# A user's own examples


def picture(path):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (2, 2)).save(path)


def test_examples_are_read_beside_their_pictures(tmp_path):
    """Paths are taken from where the command runs instead of from where the file lies."""
    picture(tmp_path / "p/a.png")
    first, second = ("what?", "é\u2028x"), ("and?", "y")
    rows = lines(*({"image": "p/a.png", "prefix": prefix, "suffix": suffix} for prefix, suffix in (first, second)))
    for end in ("\n", "\r\n"):
        examples = own_files.read_examples(write(tmp_path / "d.jsonl", "\ufeff" + rows + "\n", end))
        assert examples[0] == own_files.Example(":1", (tmp_path / "p/a.png",), (("what?", "é\u2028x"),))
        assert len(examples) == 2
    assert own_files.read_examples(tmp_path / "d.jsonl", tmp_path / "p")[0].pictures == (tmp_path / "p/a.png",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lines({"image": "a.png", "prefix": "q"}), "d.jsonl:1: suffix is missing"),
        (
            lines({"image": "a.png", "prefix": "q", "suffix": "s"}, {"image": "b.png", "prefix": "q", "suffix": "s"}),
            "d.jsonl:2: picture 'b.png' is not in",
        ),
        (lines({"image": "a.png", "prefix": 3, "suffix": "s"}), "d.jsonl:1: prefix is 3, expected a text"),
        (lines({"image": True, "prefix": "q", "suffix": "s"}), "d.jsonl:1: image is True"),
        ('{"image": "a.png"\n', "d.jsonl:1: not valid JSON"),
        ('\n\n["a.png"]\n', "d.jsonl[0]: expected an object, found text"),
        ('{"image": "a.png", "prefix": "q", "suffix": "s"}\n[]\n', "d.jsonl:2: holds a JSON list"),
        ('{"image": "a.png", "prefix": "q", "suffix": "s"} {}\n', "d.jsonl:1: not valid JSON (Extra data"),
        ("\n", "d.jsonl: holds no records"),
    ],
)
def test_bad_examples_are_numbered(tmp_path, content, expected):
    """One broken line in a user's file cannot be found, or is skipped without a word."""
    picture(tmp_path / "a.png")
    with pytest.raises(UserError) as caught:
        own_files.read_examples(write(tmp_path / "d.jsonl", content))
    assert f"{tmp_path}/{expected}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "expected"), [(None, "not found"), (b"\xff\xfe", "UTF-8")])
def test_unreadable_files_are_named(tmp_path, content, expected):
    """A wrong path or a binary file ends in a traceback."""
    path = tmp_path / "x.json"
    if content:
        path.write_bytes(content)
    for read in (datasets.read_pope, own_files.read_examples, datasets.read_questions, needle_files.read_captions):
        with pytest.raises(UserError, match=expected):
            read(path)
    with pytest.raises(UserError):
        datasets.read_questions(tmp_path)


# VQAv2 and its relatives


@pytest.mark.parametrize(
    ("subset", "image_id", "image"),
    [
        ("train2014", 458752, "train2014/COCO_train2014_000000458752.jpg"),
        ("val2014", 42, "val2014/COCO_val2014_000000000042.jpg"),
        ("test2015", 1, "test2015/COCO_test2015_000000000001.jpg"),
        ("test-dev2015", 1, "test2015/COCO_test2015_000000000001.jpg"),
        ("", 12, "12.jpg"),
    ],
)
def test_vqav2_pictures(tmp_path, subset, image_id, image):
    """The official name of a picture: twelve digits, the split twice; test-dev asks about test's pictures."""
    questions = [{"image_id": image_id, "question": "What?", "question_id": 9}]
    path = write(tmp_path / "q.json", {"info": {}, "data_subtype": subset, "questions": questions})
    assert datasets.read_questions(path) == [datasets.Question(9, image, "What?")]


def test_vqav2_annotations(tmp_path):
    """The ten records stay whole, since the scorer compares them whole."""
    answers = [{"answer": "net", "answer_confidence": "maybe", "answer_id": n} for n in range(1, 11)]
    full = {
        "question_id": 9,
        "image_id": 4,
        "question_type": "what is",
        "answer_type": "other",
        "multiple_choice_answer": "mesh",
        "answers": answers,
    }
    path = write(tmp_path / "a.json", {"annotations": [full, {"question_id": 10, "answers": ["x", "net", "net"]}]})
    one, bare = datasets.read_annotations(path)
    assert one == datasets.Annotation(9, tuple(answers), "mesh", "other", "what is")
    assert (bare.answer, bare.answer_type, bare.question_type) == ("net", None, None)


def test_relatives_of_vqav2(tmp_path):
    """GQA's, TextVQA's and VizWiz's own ids, picture names and answers."""
    gqa = {
        "07": {
            "question": "Is it?",
            "imageId": "n7",
            "answer": "no",
            "isBalanced": False,
            "types": {"structural": "query"},
        }
    }
    path = write(tmp_path / "gqa.json", gqa)
    assert datasets.read_questions(path) == [datasets.Question("07", "n7.jpg", "Is it?")]
    assert datasets.read_annotations(path) == [
        datasets.Annotation("07", ({"answer": "no"},), "no", "open", "query", balanced=False)
    ]
    gqa["07"]["types"]["structural"] = "logical"
    assert datasets.read_annotations(write(path, gqa))[0].answer_type == "binary"
    textvqa = {"question_id": 3, "image_id": "0f", "question": "Who?", "answers": ["x", "y"]}
    path = write(tmp_path / "t.json", {"data": [textvqa]})
    assert datasets.read_questions(path) == [datasets.Question(3, "0f.jpg", "Who?")]
    assert datasets.read_annotations(path)[0].answers == ({"answer": "x"}, {"answer": "y"})
    path = write(tmp_path / "v.json", [{"image": "v.jpg", "question": "?", "answers": [{"answer": "x"}]}])
    assert datasets.read_questions(path) == [datasets.Question("v.jpg", "v.jpg", "?")]
    assert datasets.read_annotations(path)[0].question_id == "v.jpg"


def test_pictures_are_found_in_either_layout_and_counted_when_absent(tmp_path):
    """COCO's folder may hold val2014/ or be it; pictures that are in neither are named before a long run begins."""
    picture(tmp_path / "val2014/a.png")
    picture(tmp_path / "b.png")
    assert datasets.find_image(tmp_path, "val2014/a.png") == tmp_path / "val2014/a.png"
    assert datasets.find_image(tmp_path, "val2014/b.png") == tmp_path / "b.png"
    datasets.find_images(["val2014/a.png", "val2014/b.png"], tmp_path, "q.json")
    with pytest.raises(UserError, match=r"q.json: 2 of its 3 pictures are not in .* \('c.png', 'd.png'\)"):
        datasets.find_images(["b.png", "c.png", "d.png", "c.png"], tmp_path, "q.json")


# MMNeedle

GRIDS = {f"s_{n}.jpg": {f"{r}_{c}": f"val2014/{n}{r}{c}.jpg" for r in (0, 1) for c in (0, 1)} for n in range(3)}
CAPTIONS = {f"{n}{r}{c}.jpg": f"caption {n}{r}{c}" for n in range(4) for r in (0, 1) for c in (0, 1)}


def annotation(**changes):
    return {
        "id": 0,
        "image_ids": ["images_stitched/2_2/s_0.jpg", "images_stitched/2_2/s_2.jpg"],
        "index": 1,
        "row": 0,
        "col": 1,
        "target": "val2014/201.jpg",
    } | changes


NEGATIVE = {"id": 5000, "index": -1, "row": -1, "col": -1, "target": "val2014/311.jpg"}
TWO = {"id": 1, "index": [0, 1], "row": [1, 0], "col": [0, 1], "target": ["val2014/010.jpg", "val2014/201.jpg"]}


def read(tmp_path, records, grids=GRIDS, captions=CAPTIONS):
    files = (("2_2.json", grids), ("annotations.json", records), ("captions.json", captions))
    return needle_files.read_needle_tests(*(write(tmp_path / name, value) for name, value in files))


def test_needle_tests(tmp_path):
    """Row-major sub-images, places counted from 0, negatives, and several needles as lists."""
    one, negative, two = read(tmp_path, [annotation(), annotation(**NEGATIVE), annotation(**TWO)])
    grid = ("val2014/200.jpg", "val2014/201.jpg", "val2014/210.jpg", "val2014/211.jpg")
    assert one.haystack[1] == grid and one.side == 2
    assert (one.places, one.targets, one.captions) == (((1, 0, 1),), ("val2014/201.jpg",), ("caption 201",))
    assert negative.places == (needle_files.ABSENT,) and negative.captions == ("caption 311",)
    assert two.places == ((0, 1, 0), (1, 0, 1)) and two.captions == ("caption 010", "caption 201")


def test_captions_of_coco_the_last_counts(tmp_path):
    """MMNeedle's caption of a picture is the last one that COCO lists; another one is another test."""
    coco = {
        "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}, {"id": 3, "file_name": "c.jpg"}],
        "annotations": [
            {"image_id": 1, "caption": "first"},
            {"image_id": 2, "caption": "only"},
            {"image_id": 1, "caption": "last "},
        ],
    }
    assert needle_files.read_captions(write(tmp_path / "c.json", coco)) == {"a.jpg": "last ", "b.jpg": "only"}
    with pytest.raises(UserError, match="c.json: expected"):
        needle_files.read_captions(write(tmp_path / "c.json", ["a.jpg"]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"image_ids": ["s_9.jpg"]}, "annotations.json[0]: image_ids ('s_9.jpg') not in"),
        ({"image_ids": []}, "annotations.json[0]: image_ids is [], expected a list of at least 1"),
        ({"row": 2}, "annotations.json[0]: place (1, 2, 1) is outside 2 picture(s) of 2 by 2"),
        ({"index": 2}, "place (2, 0, 1) is outside"),
        ({"row": -1}, "place (1, -1, 1) is outside"),
        ({"col": 0}, "'val2014/201.jpg' is not at its place (1, 0, 0)"),
        (NEGATIVE | {"target": "val2014/201.jpg"}, "'val2014/201.jpg' is given as absent but is in the haystack"),
        ({"target": ["val2014/201.jpg"]}, "differ in length"),
        (TWO | {"row": [0]}, "differ in length"),
        ({"target": "val2014/999.jpg"}, "captions.json has no caption for 'val2014/999.jpg'"),
        ({"index": None}, "index is None, expected an integer"),
    ],
)
def test_contradicting_needle_files_are_named(tmp_path, change, expected):
    """Metadata, annotations and captions of different releases are run together and score at chance."""
    with pytest.raises(UserError) as caught:
        read(tmp_path, [annotation(**change)])
    assert expected in str(caught.value)


@pytest.mark.parametrize("grids", [{}, [], {"s.jpg": {"0_0": "a.jpg", "0_1": "b.jpg"}}, {"s.jpg": {"0_1": "a.jpg"}}])
def test_metadata_must_be_square(tmp_path, grids):
    """Half a grid would be stitched into a wrong picture."""
    with pytest.raises(UserError, match="2_2.json"):
        read(tmp_path, [annotation()], grids=grids)


def test_duplicate_needle_ids_are_named(tmp_path):
    """A file joined twice would weigh its tests twice."""
    with pytest.raises(UserError, match=r"annotations.json: 1 duplicate id\(s\) \(0\)"):
        read(tmp_path, [annotation(), annotation()])
