"""MMNeedle: parsing, measures, prompts, pictures and samples, against cases worked out by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest

from eval import needle
from eval.data.haystacks import place_questions
from eval.data.mmneedle import ABSENT, NeedleTest
from tests.files import draw, write_json
from tests.runs import refused, refuses


def record(truth, response, id_=0):
    record = {"id": id_, "response": response, "ground_truth": truth}
    return record | {"target_path": "x.jpg", "caption": "x"}


# the truth: right in existence, index and exactly, and the responses, between bars, that are so
VERDICTS = r"""
1, 2, 1: yes yes yes: 1, 2, 1 | 1, 2, 1. |  1, 2, 1 . \n | ...1, 2, 1 | 1,\n 2, 1
1, 2, 1: yes yes no: 1, 2, 2 | 1 | 1, 2, 1, 1 | 1, 2, 1; 1, 2, 1
1, 2, 1: yes no no: 2, 2, 1 | top left | | 1,2,1 | '1, 2, 1'
10, 2, 1: yes no no: 1, 2, 1
1, 2, 1: no no no: -1
# negatives: "0, 0, 0" becomes "-1"
0, 0, 0: yes yes yes: -1 | -1.
0, 0, 0: no yes no: -1, -1, -1
0, 0, 0: no no no: 0, 0, 0 | 1, 1, 1 |
# several needles: the whole list must agree
1, 2, 1; 3, 1, 1: yes yes yes: 1, 2, 1; 3, 1, 1 |  1, 2, 1;  3, 1, 1.
1, 2, 1; 3, 1, 1: yes yes no: 1, 2, 1; 3, 1, 2
1, 2, 1; 3, 1, 1: yes no no: 3, 1, 1; 1, 2, 1 | 1, 2, 1 | 1, 2, 1; 3, 1, 1; 3, 1, 1 | 1, 2, 1; -1
1, 2, 1; 3, 1, 1: no no no: -1 | -1; -1
# several negatives, in each way to say so
0, 0, 0; 0, 0, 0: yes yes yes: -1 | -1; -1 | -1, -1 | -1-1 | -1, -1, -1; -1, -1, -1
0, 0, 0; 0, 0, 0: no no no: -1; 1, 1, 1 | -1; -1; -1
0, 0, 0; 0, 0, 0; 0, 0, 0; 0, 0, 0; 0, 0, 0: yes yes yes: -1; -1; -1; -1; -1
"""


def test_verdicts_by_hand():
    """A rule of MMNeedle's parsing or of one of its three accuracies is broken."""
    for line in VERDICTS.strip().splitlines():
        if not line.startswith("#"):
            truth, right, responses = line.split(": ", 2)
            verdict = tuple(word == "yes" for word in right.split())
            for response in responses.split("|"):
                said = response.removeprefix(" ").removesuffix(" ").replace("\\n", "\n")
                assert needle.judge(record(truth, said)) == verdict, line
    for truth in ("1, 2, 1", "0, 0, 0"):
        assert needle.judge(record(truth, None)) is None


def test_a_missing_response_leaves_the_denominator():
    """Counting a failed request as a miss is not what MMNeedle publishes; or without any a long run
    ends in a crash."""
    pairs = [("1, 1, 1", "1, 1, 1"), ("1, 1, 1", None), ("1, 1, 2", "1, 1, 1")]
    pairs += [("0, 0, 0", "-1"), ("0, 0, 0", "2, 1, 1")]
    values = needle.score_responses(record(*pair) for pair in pairs)
    assert values == {"existence": 75.0, "index": 75.0, "exact": 50.0}
    assert set(needle.score_responses([record("1, 1, 1", None)]).values()) == {0}


def test_accuracy_by_place():
    """A cell of the heatmap counts another place or needle, swaps rows and columns, or counts
    negatives or silence."""
    said = """1, 1, 2: 1, 1, 2 / 1, 1, 2: 1, 2, 1 / 1, 2, 1: -1 / 0, 0, 0: -1
        / 2, 1, 1; 1, 1, 2; 1, 2, 2: 2, 1, 1; 1, 2, 2; 1, 1, 2"""
    records = [record(*pair.strip().split(": ")) for pair in said.split("/")]
    records.append(record("1, 2, 2", None))
    assert needle.accuracy_by_place(records) == {(1, 1): 1, (1, 2): 1 / 3, (2, 1): 0, (2, 2): 0}


# the response: what is said, between bars
SAID = r"""
1, 1, 1: Top, left
1, 1, 2:  top\n,RIGHT
1, 4, 1:  Row 4 Column 1\n
1, 2, 1; 1, 1, 2: bottom,left,top,right
1, 2, 1; -1: bottom,left,top,top
-1: top., left|top left, left|, left|top, bottom|left, top|row 2 column 5|it is row 2 column 3|none|
"""


def test_strict_parse():
    """The paper accepts just the word; one invalid answer makes the place -1. Leniency would hide
    format failures."""
    for line in SAID.strip().splitlines():
        response, _, texts = line.partition(": ")
        for text in texts.split("|"):
            said = text.replace("\\n", "\n").split(",")
            side, count = (4, 1) if len(said) == 1 else (2, len(said) // 2)
            names = ("a",) * count
            test = NeedleTest(0, (("a",) * side**2,), (ABSENT,) * count, names, names)
            assert needle.respond(test, said, "paper") == response, text
            assert needle.respond(test, [*said[1:], None], "paper") is None


def test_prompts():
    """MMNeedle's and the paper's words, with singular, plural and a format for each needle, are
    what is measured."""
    sides = [text for text, _ in place_questions("A dog", 2)]
    assert sides == [
        "Caption: A dog. Where is the caption? Top or Bottom?",
        "Caption: A dog. Where is the caption? Left or Right?",
    ]
    one = needle.official_prompt(["A dog."], 1, 2)
    assert one.startswith(
        "Given 1 image indexed from 1 to 1, each divided into 2*2 subimages, identify the subimage "
    )
    assert one.endswith("If no match is found, respond only with '-1'.\nCaption: A dog.")
    assert "divided into 1*1 subimage," in needle.official_prompt(["A dog."], 10, 1)
    two = needle.official_prompt(["A dog.", "A cat."], 10, 8)
    begin = "Given 10 images indexed from 1 to 10, each divided into 8*8 subimages, identify the "
    form = "Respond in the format: index_1, row_1, column_1; index_2, row_2, column_2. Only"
    assert two.startswith(begin)
    assert f"provided 2 captions. {form}" in two
    assert two.endswith("respond with '-1' for that caption.\nCaption_1: A dog.\nCaption_2: A cat.")


def test_stitch_is_row_major_and_square(tmp_path):
    """The needle's picture is not at its row and column, or aspect is kept, or the size is not 256
    px a sub-image."""
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    files = [tmp_path / f"{n}.png" for n in range(4)]
    for n, color in enumerate(colors):
        draw(files[n], color, size=(30 + 40 * n, 50))
    stitched = needle.Stitched(files)()
    assert stitched.size == (512, 512)
    assert [stitched.getpixel((x, y)) for y in (0, 511) for x in (0, 511)] == colors
    assert stitched.getpixel((255, 255)) == colors[0]
    assert stitched.getpixel((256, 255)) == colors[1]


def test_sample_has_each_place_equally_often():
    """The paper draws 50 of each quadrant with a seed; of larger grids, and of negatives, a plain
    sample."""
    tests = []
    for n in range(80):
        place = 0, n // 2 % 2, n % 2
        tests.append(NeedleTest(n, (tuple("abcd"),), (place,), ("a",), ("x",)))
    chosen = needle.sampled(tests, 20)
    assert [*Counter(test.places[0] for test in chosen).values()] == [5] * 4
    assert chosen == needle.sampled(tests, 22)
    assert [t.id for t in chosen] == sorted(t.id for t in chosen)
    assert len(needle.sampled(tests, 3)) == 3
    refused(lambda: needle.sampled(tests, 84), "21 tests of a place are asked for, 20 are there")


def test_drawn_tests_are_true(tmp_path):
    """A needle drawn from a user's own pictures is not where the truth says, or the same seed gives
    other haystacks."""
    captions = {f"{n}.jpg": f"caption {n}" for n in range(60)}
    (tmp_path / "val2014").mkdir()
    for name in captions:
        (tmp_path / "val2014" / name).touch()
    tests, others = [], []
    for drawn, listed in ((tests, captions), (others, dict(reversed(captions.items())))):
        drawn += needle.drawn_tests(tmp_path, write_json(tmp_path / "C", listed), 20)
    assert [test.haystack for test in tests] == [test.haystack for test in others]
    for number, test in enumerate(tests):
        row = number // 2 % 2
        column = number % 2
        assert test.places == ((0, row, column),)
        (haystack,) = test.haystack
        (target,) = test.targets
        assert len({*haystack}) == 4
        assert haystack[row * 2 + column] == target
        assert test.captions == (captions[Path(target).name],)
        assert [path.name for path in test.files] == [Path(name).name for name in haystack]


def test_response_records_are_mmneedles_own():
    """The field names, the 1-based truth and the bare file names that MMNeedle's evaluators
    read."""
    abcd = (tuple("abcd"),)
    one = NeedleTest(7, abcd, ((0, 1, 0),), ("val2014/c.jpg",), ("a cat",))
    two = NeedleTest(5001, abcd, (ABSENT, ABSENT), ("v/c.jpg", "v/e.jpg"), ("a cat", "an eel"))
    records = [needle.response_record(one, "1, 2, 1"), needle.response_record(two, None)]
    assert records == json.loads("""[
        {"id": 7, "response": "1, 2, 1", "ground_truth": "1, 2, 1",
            "target_path": "c.jpg", "caption": "a cat"},
        {"id": 5001, "response": null, "ground_truth": "0, 0, 0; 0, 0, 0",
            "target_path": ["c.jpg", "e.jpg"], "caption": ["a cat", "an eel"]}]""")


def test_a_response_file_is_scored(tmp_path, told_of_one):
    """The accuracies, the grid or the JSON-only stdout that other programs read have changed."""
    rows = [("1, 1, 1", "1, 1, 1"), ("1, 2, 2", "1, 1, 2"), ("1, 1, 2", None)]
    rows.append(("0, 0, 0", "1, 1, 1"))
    records = [record(*row, number) for number, row in enumerate(rows)]
    values = told_of_one(needle, "--results", write_json(tmp_path / "F.json", records))
    expected = {"existence": 200 / 3, "index": 200 / 3, "exact": 100 / 3}
    expected["exact, mean over places"] = 50
    assert values["summary"]["F"] == pytest.approx(expected)
    assert values["summary"]["  F, row 1, column 1"] == {"exact": 100}
    assert values["measures"]["exact, F"]["questions"] == 3


def test_bad_response_files_are_named(tmp_path):
    """Half a negative counts as a place, a heatmap of 10⁸ rows is drawn, or a test counts twice."""
    truths = ["1,1,1", "1, 1", "1, 0, 0", "0, 0, 1", "-1", "1, 1, 99999999", ""]
    wrong = [[record(truth, "1")] for truth in truths]
    for records in ([record("1, 1, 1", "1")] * 2, [record("1, 1, 1", 1)], *wrong):
        refuses(needle, f"--results {write_json(tmp_path / 'F.json', records)}", "F.json")
