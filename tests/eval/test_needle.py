"""MMNeedle's command: what is asked about the embedded scenes and COCO's pictures, and the
responses it writes."""

import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from eval import needle
from eval.bench import parser_of
from eval.data import haystacks
from model.processor import Processor
from tests.files import read_json, write_json, write_mmneedle
from tests.runs import refused, refuses, words

FAST = "--max-new-tokens 3 --batch-size 8"


@pytest.mark.long
@pytest.mark.parametrize("kind", haystacks.NEEDLES)
@pytest.mark.parametrize("needles, absent", [(1, False), (2, False), (2, True)])
def test_embedded_trials_ask_what_is_trained(kind, needles, absent):
    """A model is asked in other words than it learned, right answers do not count, or half a place
    does."""
    for number, test in enumerate(needle.embedded_tests(kind, 20, needles=needles, absent=absent)):
        samples = haystacks.haystack(kind, "test", number, needles=needles, negative=absent).samples
        free = needle.asks_of([test], "paper")
        said = [s.suffix for s in samples]
        assert [q.prefix for q in free] == [s.prefix for s in samples]
        assert not free[0].choices
        assert np.array_equal(free[0].images()[0], samples[0].scene.render())
        assert needle.judge(needle.response_record(test, needle.respond(test, said, "paper")))[2]
        if not absent:
            chosen = needle.asks_of([test], "constrained")
            assert [q.prefix for q in chosen] == [s.prefix for s in samples]
            assert all(text in q.choices for text, q in zip(said, chosen, strict=True))
            (row,) = needle.Needle().rows(free, [*said[:-1], "here"])
            assert [*row.scores.values()] == [0]


@pytest.mark.long
@pytest.mark.parametrize("protocol", needle.PROTOCOLS)
def test_needle_command(source, workplace, told_of_one, protocol, monkeypatch):
    """The response file scores otherwise than the command printed, or a figure is missing."""
    framed, drawn = Mock(wraps=needle.draw_boxes), Mock(wraps=needle.heatmaps)
    monkeypatch.setattr(needle, "draw_boxes", framed)
    monkeypatch.setattr(needle, "heatmaps", drawn)
    flags = f"--model {source} --protocol {protocol} --limit 8 --kind n2o1 n4o1"
    printed = told_of_one(needle, flags, FAST)
    ((left, top, *_),) = framed.call_args_list[-2].args[1]  # of 4×4: the seventh, 2nd row
    grid = np.array(drawn.call_args.args[0][haystacks.NEEDLE_TITLES["n4o1"]])
    if protocol == "paper":  # all are misses, in their order
        assert (left, top) == (256, 128)
    assert np.isnan(grid).all(1).tolist() == [False, False, True, True]
    # eight tests leave places without a needle, and JSON has no NaN
    assert "nan" not in str(printed)
    out = workplace / "runs/eval/random/needle"
    for kind, side in (("n2o1", 2), ("n4o1", 4)):
        scored = told_of_one(needle, "--results", out / f"responses-{kind}.json")
        again = scored["summary"][f"responses-{kind}"] | {"chance": 100 / side**2}
        assert again == printed["summary"][kind]
        assert printed["measures"][f"exact, {kind}"]["questions"] == 8
        assert Image.open(out / f"sheet-{kind}.png").width > 500
    existence = printed["summary"]["n2o1"]["existence"]
    if protocol == "paper":
        assert existence == 0  # a random model names no place,
    if protocol == "constrained":
        assert existence == 100  # unless it must
    assert Image.open(out / "heatmap.png").width > 1000


def test_the_embedded_accuracy_of_a_training_run():
    """Answers of one test are counted for another."""
    right = [s.suffix for n in range(20) for s in haystacks.haystack("n2o1", "test", n).samples]
    for wrong_every, accuracy in ((10**6, 95.0), (2, 0.0), (4, 50.0)):
        said = [suffix if at % wrong_every else "no" for at, suffix in enumerate(right)]
        ask_all = Mock(return_value=said)
        assert needle.evaluate_embedded(None, None, "n2o1", 20, ask_all=ask_all) == accuracy


def test_the_number_of_tests_is_its_own_flag():
    """Breaks when the benchmarks' --limit hides this one's, and a call without flags has no
    number."""
    assert parser_of(needle.Needle()).parse_args([]).limit == needle.LIMIT


@pytest.fixture
def coco(tmp_path):
    return write_mmneedle(tmp_path)


@pytest.fixture
def ask(coco, source, told_of_one):
    """A function that runs the command on COCO's pictures: what it prints, and the response file of
    a kind."""

    def run(flags, kind="1_2_2"):
        flags = flags.replace("META", f"--metadata {coco}")
        files = f"--model {source} --coco {coco} --captions {coco}/C --out {coco}/out"
        printed = told_of_one(needle, files, FAST, flags)
        return printed, read_json(coco / f"out/responses-{kind}.json")

    return run


@pytest.mark.long
def test_official_and_drawn_tests(ask):
    """MMNeedle's own tests are read, sampled or written otherwise than published; drawn ones are
    not as balanced."""
    corners = ["1, 1, 1", "1, 1, 2", "1, 2, 1", "1, 2, 2"]
    printed, records = ask("META --limit 4")
    assert printed["measures"]["exact, 1_2_2"]["questions"] == 4
    assert sorted(r["ground_truth"] for r in records) == corners
    for record in records:
        number = int(record["target_path"][-6:-4])
        assert record["caption"] == f"picture {number}"
        assert record["id"] == number
    printed, records = ask("META --limit 2 --negatives")
    assert [r["id"] for r in records][2:] == [5000, 5001]
    assert len(records) == 4
    summary = printed["summary"]
    assert summary["  positives, 1_2_2"]["existence"] == 0  # a random model names no place
    assert summary["  negatives, 1_2_2"]["existence"] == 100
    assert "chance" not in summary["1_2_2"]
    printed, records = ask("--limit 8")
    assert [r["id"] for r in records] == [*range(8)]
    assert sorted(r["ground_truth"] for r in records) == sorted(corners * 2)


@pytest.mark.long
def test_tests_of_many_pictures_and_needles(ask, coco, monkeypatch):
    """M pictures and K needles: the prompt, the pictures and the truth do not belong together."""
    seen = []
    layout = Processor.layout

    def watched(self, n, turns, marks):
        seen.append((n, turns[-1][0]))
        return layout(self, n, turns, marks)

    monkeypatch.setattr(Processor, "layout", watched)
    grids = read_json(coco / "2_2.json")
    names = [*grids]
    tests = []
    for first, second in (("000", "110"), ("101", "111"), ("011", "001")):
        index, row, col = ([int(a), int(b)] for a, b in zip(first, second, strict=True))
        target = [grids[names[int(i)]][f"{r}_{c}"] for i, r, c in (first, second)]
        test = {"id": len(tests), "image_ids": names, "target": target}
        tests.append(test | {"index": index, "row": row, "col": col})
    write_json(coco / "2_annotations_2_2_2.json", tests)
    printed, records = ask("META --pictures 2 --needles 2 --limit 3 --protocol official", "2_2_2_2")
    # two distinct ones of eight places
    assert printed["summary"]["2_2_2_2"]["chance"] == pytest.approx(100 / (8 * 7))
    assert {n for n, _ in seen} == {2}
    assert len(records) == 3
    for record in records:
        first, second = record["caption"]
        assert record["ground_truth"].count(";") == 1
        assert any(first in prompt and second in prompt for _, prompt in seen)


@pytest.mark.long
def test_a_needle_test_without_its_picture_has_no_response(ask, coco):
    """A test on an unreadable picture counts as wrong, or ends the run."""
    (coco / "val2014/COCO_val2014_000000000005.jpg").write_bytes(b"not a picture")
    printed, records = ask("META --limit 8")
    assert printed["measures"]["exact, 1_2_2"]["questions"] == 4
    left_out = read_json(coco / "out/scores.json")["left_out"]
    assert len(left_out) == 8
    assert all("COCO_val2014_000000000005.jpg" in reason for reason in left_out.values())
    assert [r["response"] is None for r in records] == [False] * 4 + [True] * 4


def test_pictures_and_haystacks_are_counted_once(coco):
    """A picture that lies flat and in val2014 is drawn as two, or tests of one haystack count as
    independent."""
    name = "COCO_val2014_000000000001.jpg"
    shutil.copy(coco / "val2014" / name, coco)
    tests = needle.drawn_tests(coco, coco / "C", 8)
    for test in tests:
        assert len({path.name for path in test.files}) == 4
    files = f"--coco {coco} --captions {coco}/C --limit 8 --protocol official"
    args = parser_of(needle.Needle()).parse_args(words(files, "--metadata", coco))
    assert len({question.key for question in needle.Needle().questions(args)}) == 2
    doubled = tests[0]._replace(pictures=tests[0].pictures * 2)
    refused(lambda: needle.asks_of([doubled], "paper"), "take official")
    refuses(needle, f"{files} --negatives --model embedded", "give --metadata too")
    refused(
        lambda: needle.drawn_tests(coco / "gone", coco / "C", 8),
        "--captions: 0 of its pictures are in --coco",
    )
