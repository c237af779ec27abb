"""MMNeedle: parsing, measures, prompts, pictures and samples, against cases worked out by hand."""

import json
import math

import pytest
from PIL import Image

from eval import haystacks, needle, needle_scoring, scenes
from eval.data import ABSENT, NeedleTest
from model.common import UserError


def record(truth, response, id_=0):
    return {"id": id_, "response": response, "ground_truth": truth, "target_path": "x.jpg", "caption": "x"}


# Measures


@pytest.mark.parametrize(
    ("truth", "response", "verdict"),  # right in (existence, index, exact)
    [
        ("1, 2, 1", "1, 2, 1", (True, True, True)),
        ("1, 2, 1", "1, 2, 2", (True, True, False)),
        ("1, 2, 1", "2, 2, 1", (True, False, False)),
        ("10, 2, 1", "1, 2, 1", (True, False, False)),
        ("1, 2, 1", "1", (True, True, False)),
        ("1, 2, 1", "1, 2, 1, 1", (True, True, False)),
        ("1, 2, 1", "top left", (True, False, False)),
        ("1, 2, 1", "", (True, False, False)),
        ("1, 2, 1", "-1", (False, False, False)),
        # what is cleaned, and what is not
        ("1, 2, 1", "1, 2, 1.", (True, True, True)),
        ("1, 2, 1", " 1, 2, 1 .\n", (True, True, True)),
        ("1, 2, 1", "...1, 2, 1", (True, True, True)),
        ("1, 2, 1", "1,\n 2, 1", (True, True, True)),
        ("1, 2, 1", "1,2,1", (True, False, False)),
        ("1, 2, 1", "'1, 2, 1'", (True, False, False)),
        ("1, 2, 1", "1, 2, 1; 1, 2, 1", (True, True, False)),
        # negatives: "0, 0, 0" becomes "-1"
        ("0, 0, 0", "-1", (True, True, True)),
        ("0, 0, 0", "-1.", (True, True, True)),
        ("0, 0, 0", "0, 0, 0", (False, False, False)),
        ("0, 0, 0", "-1, -1, -1", (False, True, False)),
        ("0, 0, 0", "1, 1, 1", (False, False, False)),
        ("0, 0, 0", "", (False, False, False)),
        # several needles: the whole list must agree
        ("1, 2, 1; 3, 1, 1", "1, 2, 1; 3, 1, 1", (True, True, True)),
        ("1, 2, 1; 3, 1, 1", " 1, 2, 1;  3, 1, 1.", (True, True, True)),
        ("1, 2, 1; 3, 1, 1", "1, 2, 1; 3, 1, 2", (True, True, False)),
        ("1, 2, 1; 3, 1, 1", "3, 1, 1; 1, 2, 1", (True, False, False)),
        ("1, 2, 1; 3, 1, 1", "1, 2, 1", (True, False, False)),
        ("1, 2, 1; 3, 1, 1", "1, 2, 1; 3, 1, 1; 3, 1, 1", (True, False, False)),
        ("1, 2, 1; 3, 1, 1", "1, 2, 1; -1", (True, False, False)),
        ("1, 2, 1; 3, 1, 1", "-1", (False, False, False)),
        ("1, 2, 1; 3, 1, 1", "-1; -1", (False, False, False)),
        # several negatives, in each way to say so
        ("0, 0, 0; 0, 0, 0", "-1", (True, True, True)),
        ("0, 0, 0; 0, 0, 0", "-1; -1", (True, True, True)),
        ("0, 0, 0; 0, 0, 0", "-1, -1", (True, True, True)),
        ("0, 0, 0; 0, 0, 0", "-1-1", (True, True, True)),
        ("0, 0, 0; 0, 0, 0", "-1, -1, -1; -1, -1, -1", (True, True, True)),
        ("0, 0, 0; 0, 0, 0", "-1; 1, 1, 1", (False, False, False)),
        ("0, 0, 0; 0, 0, 0", "-1; -1; -1", (False, False, False)),
        ("0, 0, 0; 0, 0, 0; 0, 0, 0; 0, 0, 0; 0, 0, 0", "-1; -1; -1; -1; -1", (True, True, True)),
        # no response
        ("1, 2, 1", None, None),
        ("0, 0, 0", None, None),
    ],
)
def test_verdicts_by_hand(truth, response, verdict):
    """A rule of MMNeedle's parsing or of one of its three accuracies is broken."""
    assert needle_scoring.judge(record(truth, response)) == verdict


def test_a_missing_response_leaves_the_denominator():
    """Counting a failed request as a miss is not what MMNeedle publishes."""
    pairs = [
        ("1, 1, 1", "1, 1, 1"),
        ("1, 1, 1", None),
        ("1, 1, 2", "1, 1, 1"),
        ("0, 0, 0", "-1"),
        ("0, 0, 0", "2, 1, 1"),
    ]
    records = [record(truth, response) for truth, response in pairs]
    assert needle_scoring.score_responses(records) == {"existence": 3 / 4, "index": 3 / 4, "exact": 2 / 4}


def test_no_response_at_all_scores_zero():
    """An empty denominator must not end a long evaluation with a traceback."""
    nothing = {"existence": 0.0, "index": 0.0, "exact": 0.0}
    assert needle_scoring.score_responses([record("1, 1, 1", None)]) == nothing
    assert math.isnan(needle_scoring.mean_over_places(needle_scoring.accuracy_by_place([record("1, 1, 1", None)])))


def test_accuracy_by_place():
    """A cell of the heatmap counts another place, swaps rows and columns, or counts negatives or missing responses."""
    pairs = [("1, 1, 2", "1, 1, 2"), ("1, 1, 2", "1, 2, 1"), ("1, 2, 1", "-1"), ("1, 2, 2", None), ("0, 0, 0", "-1")]
    records = [record(*pair) for pair in [*pairs, ("2, 1, 1; 1, 1, 2", "2, 1, 1; 2, 1, 2")]]
    grid = needle_scoring.accuracy_by_place(records)
    assert grid[0] == [1.0, 1 / 3] and grid[1][0] == 0.0 and math.isnan(grid[1][1])
    assert needle_scoring.mean_over_places(grid) == pytest.approx((1 + 1 / 3 + 0) / 3)  # of places, not responses
    assert len(needle_scoring.accuracy_by_place(records, side=4)) == 4


# Prompts and answers


@pytest.mark.parametrize(
    ("vertical", "horizontal", "place"),
    [
        ("Top", "left", (0, 0, 0)),
        (" top\n", "RIGHT", (0, 0, 1)),
        ("bottom", "left", (0, 1, 0)),
        ("Bottom", "Right", (0, 1, 1)),
        ("top.", "left", ABSENT),
        ("top left", "left", ABSENT),
        ("", "left", ABSENT),
        ("top", "bottom", ABSENT),
        ("left", "top", ABSENT),
    ],
)
def test_strict_parse(vertical, horizontal, place):
    """The paper accepts just the word; one invalid answer makes both -1. Leniency would hide format failures."""
    assert needle.parse_place([vertical, horizontal], 2) == place


def test_several_answers_are_one_response():
    """Truth and answers count from 1, metadata from 0; a needle that is not placed is -1."""
    test = NeedleTest(0, (tuple("abcd"),), ((0, 1, 0), (0, 0, 1)), ("c", "b"), ("x", "y"))
    assert needle.respond(test, ["bottom", "left", "top", "right"], "paper") == "1, 2, 1; 1, 1, 2"
    assert needle.respond(test, ["bottom", "left", "top", "top"], "paper") == "1, 2, 1; -1"
    assert needle.respond(test, ["bottom", "left", "top", None], "paper") is None


def test_chance_is_that_of_distinct_places():
    """Breaks when two needles may be guessed at one place: K of P places are drawn without repetition."""
    ids, captions = tuple("abcdefghi"), tuple("xyz")
    for count, expected in ((1, 1 / 18), (2, 1 / (18 * 17)), (3, 1 / (18 * 17 * 16))):
        test = NeedleTest(0, (ids, ids), ((0, 0, 0),) * count, ids[:count], captions[:count])
        assert needle.chance(test) == pytest.approx(expected)


def test_paper_prompts():
    """The prompts of the paper's protocol are part of what is measured."""
    assert [prompt for prompt, _ in scenes.place_questions("A dog", 2)] == [
        "Caption: A dog. Where is the caption? Top or Bottom?",
        "Caption: A dog. Where is the caption? Left or Right?",
    ]


def test_official_prompts():
    """MMNeedle's published numbers hold for its own words: singular and plural, and a format for each needle."""
    one = needle.official_prompt(["A dog."], 1, 2)
    assert one.startswith("Given 1 image indexed from 1 to 1, each divided into 2*2 subimages, identify the subimage ")
    assert one.endswith("If no match is found, respond only with '-1'.\nCaption: A dog.")
    assert "divided into 1*1 subimage," in needle.official_prompt(["A dog."], 10, 1)
    two = needle.official_prompt(["A dog.", "A cat."], 10, 8)
    assert two.startswith("Given 10 images indexed from 1 to 10, each divided into 8*8 subimages, identify the ")
    assert "provided 2 captions. Respond in the format: index_1, row_1, column_1; index_2, row_2, column_2. Only" in two
    assert two.endswith("respond with '-1' for that caption.\nCaption_1: A dog.\nCaption_2: A cat.")


# Pictures and samples

COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


def test_stitch_is_row_major_and_square():
    """The needle's picture is not at its row and column, or aspect is kept, or the size is not 256 px a sub-image."""
    images = [Image.new("RGB", (30 + 40 * n, 50), color) for n, color in enumerate(COLORS)]
    stitched = haystacks.stitch(images)
    assert stitched.size == (512, 512)
    corners = [(0, 0), (511, 0), (0, 511), (511, 511)]  # (x, y)
    assert [stitched.getpixel(at) for at in corners] == COLORS
    assert stitched.getpixel((255, 255)) == COLORS[0] and stitched.getpixel((256, 255)) == COLORS[1]
    assert haystacks.stitch([Image.new("L", (5, 5), 9)]).getpixel((0, 0)) == (9, 9, 9)


def test_haystack_is_built_from_files(tmp_path):
    """The pictures of the metadata are not those that are stitched."""
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path, color in zip(paths, COLORS, strict=True):
        Image.new("RGB", (8, 8), color).save(path)
    assert haystacks.stitch(paths, size=4).getpixel((0, 7)) == COLORS[2]


def placed_at(places):
    return [NeedleTest(n, (tuple("abcd"),), (place,), ("a",), ("x",)) for n, place in enumerate(places)]


def test_sample_has_each_place_equally_often():
    """The paper draws 50 of each quadrant with a seed."""
    tests = placed_at([(0, n // 2 % 2, n % 2) for n in range(80)])
    chosen = haystacks.choose(tests, 20, 42)
    assert [sum(t.places[0] == (0, r, c) for t in chosen) for r in (0, 1) for c in (0, 1)] == [5, 5, 5, 5]
    assert len(chosen) == 20
    assert chosen == haystacks.choose(tests, 22, 42) != haystacks.choose(tests, 20, 43)
    assert [t.id for t in chosen] == sorted(t.id for t in chosen)
    with pytest.raises(UserError, match=r"21 tests are asked for, but 20 have their needle at \(0, 0, 0\)"):
        haystacks.choose(tests, 84, 42)


@pytest.mark.parametrize(("pictures", "side", "needles"), [(1, 1, 1), (1, 2, 2), (10, 2, 5), (2, 4, 1)])
def test_drawn_tests_are_true(pictures, side, needles):
    """A needle drawn from a user's own pictures is not where the truth says, or an absent one is there."""
    captions = {f"{n}.jpg": f"caption {n}" for n in range(60)}
    for test in haystacks.draw_tests(captions, 20, pictures, side, needles, seed=1):
        assert len(test.haystack) == pictures and test.side == side and len(set(test.places)) == needles
        assert len({name for cells in test.haystack for name in cells}) == pictures * side**2
        for (index, row, col), target, caption in zip(test.places, test.targets, test.captions, strict=True):
            assert test.haystack[index][row * side + col] == target and captions[target] == caption
    for test in haystacks.draw_tests(captions, 20, pictures, side, needles, absent=True, seed=1):
        assert test.id >= 5000 and test.places == (ABSENT,) * needles
        assert not set(test.targets) & {name for cells in test.haystack for name in cells}


def test_drawn_tests_are_reproducible_and_refuse_too_few_pictures():
    """The same seed must give the same haystacks in every run that is compared."""
    captions = {f"{n}.jpg": "x" for n in range(4)}
    assert haystacks.draw_tests(captions, 3, seed=1) == haystacks.draw_tests(
        dict(reversed(captions.items())), 3, seed=1
    )
    assert haystacks.draw_tests(captions, 3, seed=1) != haystacks.draw_tests(captions, 3, seed=2)
    with pytest.raises(UserError, match="4 captioned pictures are too few"):
        haystacks.draw_tests(captions, 1, absent=True)


# Response files and the command


def test_response_records_are_mmneedles_own():
    """The field names, the 1-based truth and the bare file names that MMNeedle's evaluators read."""
    one = NeedleTest(7, (tuple("abcd"),), ((0, 1, 0),), ("val2014/c.jpg",), ("a cat",))
    assert needle_scoring.response_record(one, "1, 2, 1") == {
        "id": 7,
        "response": "1, 2, 1",
        "ground_truth": "1, 2, 1",
        "target_path": "c.jpg",
        "caption": "a cat",
    }
    two = NeedleTest(5001, (tuple("abcd"),), (ABSENT, ABSENT), ("v/c.jpg", "v/e.jpg"), ("a cat", "an eel"))
    assert needle_scoring.response_record(two, None) == {
        "id": 5001,
        "response": None,
        "ground_truth": "0, 0, 0; 0, 0, 0",
        "target_path": ["c.jpg", "e.jpg"],
        "caption": ["a cat", "an eel"],
    }


def test_a_response_file_is_scored(tmp_path, capsys):
    """The accuracies, the grid or the JSON-only stdout that other programs read have changed."""
    rows = [("1, 1, 1", "1, 1, 1", 0), ("1, 2, 2", "1, 1, 2", 1), ("1, 1, 2", None, 2), ("0, 0, 0", "1, 1, 1", 5000)]
    needle_scoring.write_responses(tmp_path / "F.json", [record(*row) for row in rows])
    needle.main(["--results", str(tmp_path / "F.json"), "--out", str(tmp_path), "--json"])
    (values,) = json.loads(capsys.readouterr().out).values()
    third = pytest.approx(100 / 3)
    assert values["summary"]["F"] == {
        "existence": pytest.approx(200 / 3),
        "index": pytest.approx(200 / 3),
        "exact": third,
        "exact, mean over places": 50,
    }
    assert values["summary"]["  F, row 1, column 1"] == {"exact": 100}
    assert values["measures"]["exact, F"]["mean"] == third and values["measures"]["exact, F"]["questions"] == 3
    assert Image.open(tmp_path / "heatmap-F.png").width > 200


@pytest.mark.parametrize(
    "records",
    [
        [record("1, 1, 1", "1")] * 2,
        [record("1, 1, 1", 1)],
        *([record(truth, "1")] for truth in ("1,1,1", "1, 1", "1, 0, 0", "0, 0, 1", "-1", "1, 1, 99999999", "")),
        [{"id": 0, "ground_truth": "1, 1, 1"}],
        [{"response": "1", "ground_truth": "1, 1, 1"}],
    ],
)
def test_bad_response_files_are_named(tmp_path, records):
    """Half a negative counts as a place, a heatmap of 10⁸ rows is drawn, or a test counts twice."""
    (tmp_path / "F.json").write_text(json.dumps(records))
    with pytest.raises(UserError, match=r"F.json"):
        needle.main(["--results", str(tmp_path / "F.json")])
