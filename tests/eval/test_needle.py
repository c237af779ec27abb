"""MMNeedle's command: what is asked about the embedded scenes and COCO's pictures, and the responses it writes."""

import json
from argparse import Namespace
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from eval import answer, haystacks, needle, needle_scoring, pictures, scenes
from eval.data import ABSENT, NeedleTest, read_needle_tests
from model.common import UserError
from model.processor import Processor
from tests.files import write_mmneedle
from tests.runs import refused

FAST = ["--max-new-tokens", "3", "--batch-size", "8"]


CASES = [(kind, needles, absent) for kind in scenes.NEEDLES for needles, absent in ((1, False), (2, False), (2, True))]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "needles", "absent"), CASES)
def test_embedded_trials_ask_what_is_trained(kind, needles, absent):
    """A model is asked in other words than it was trained on, or right answers do not count as right."""
    for number, (test, (draw,), _) in enumerate(needle.embedded_trials(kind, 20, needles, absent=absent)):
        samples = scenes.needle(kind, "test", number, needles=needles, negative=absent).samples()
        assert [prompt for prompt, _ in needle.prompts_of(test, "paper")] == [s.prefix for s in samples]
        assert np.array_equal(draw(), samples[0].scene.render())
        right = needle_scoring.response_record(test, needle.respond(test, [s.suffix for s in samples], "paper"))
        assert needle_scoring.judge(right) == (True, True, True)
        if not absent:
            wrong = needle.respond(test, [samples[0].suffix] * (len(samples) - 1) + ["here"], "paper")
            assert needle_scoring.judge(needle_scoring.response_record(test, wrong))[2] is False
            choices = [choices for _, choices in needle.prompts_of(test, "constrained")]
            assert all(s.suffix in words for s, words in zip(samples, choices, strict=True))


def test_embedded_trials_are_of_the_test_split_and_take_turns():
    """Needles are looked for in training scenes, or some places are asked about more often."""
    trials = needle.embedded_trials("n4o1", 32)
    places = [trial.test.places[0][1:] for trial in trials]
    assert sorted(places) == sorted(2 * [(row, col) for row in range(4) for col in range(4)])
    assert all(pictures.split_of(scenes.needle("n4o1", "test", n).scene.squares) == "test" for n in range(32))


def test_places_of_larger_grids_are_parsed_strictly():
    """A sentence around the place counts as the place."""
    assert needle.parse_place(["row 2 column 3"], 4) == (0, 1, 2)
    assert needle.parse_place([" Row 4 Column 1\n"], 4) == (0, 3, 0)
    for said in ("row 2 column 5", "row 2, column 3", "it is row 2 column 3", "none", ""):
        assert needle.parse_place([said], 4) == ABSENT
    assert needle.parse_place(["top", "right"], 2) == (0, 0, 1)


@pytest.mark.parametrize(("wrong_every", "accuracy"), [(10**6, 95.0), (2, 0.0), (4, 50.0)])
def test_accuracy_needs_all_questions_of_a_test(wrong_every, accuracy):
    """Half a place counts as a hit: the first question of all is wrong, or one of each test, or of every other one."""

    def ask_all(model, processor, questions, **options):
        samples = [scenes.needle("n2o1", "test", number).samples() for number in range(20)]
        suffixes = [sample.suffix for of_test in samples for sample in of_test]
        return ["neither" if at % wrong_every == 0 else suffix for at, suffix in enumerate(suffixes)]

    assert needle.evaluate_embedded(None, None, "n2o1", 20, ask_all=ask_all) == accuracy


def test_the_constrained_protocol_always_names_a_place(model, processor):
    """The accuracy counts format failures although it is asked not to."""
    trials, accuracies = needle.embedded_trials("n2o1", 4), (0, 25, 50, 75, 100)
    for protocol, choices in (("paper", {()}), ("constrained", {("top", "bottom"), ("left", "right")})):
        assert {question.choices for question in needle.asks_of(trials, protocol)} == choices
    options = {"ask_all": answer.ask_all, "protocol": "constrained"}
    assert needle.evaluate_embedded(model, processor, "n2o1", 4, **options) in accuracies


@pytest.mark.long
@pytest.mark.parametrize("protocol", needle.PROTOCOLS)
def test_needle_command(source, workplace, capsys, protocol):
    """The response file scores otherwise than the command printed, or a figure is missing."""
    has_halves = protocol != "constrained"
    flags = ["--model", source, "--protocol", protocol, "--limit", "8", "--kind", "n2o1", "n4o1", *FAST]
    needle.main([*flags, "--json", *["--negatives"] * has_halves])
    text = capsys.readouterr().out
    assert "NaN" not in text  # eight tests leave places without a needle, and JSON has no NaN
    printed = json.loads(text)["random"]
    out = workplace / "runs" / "eval" / "random" / "needle"
    for kind, side in (("n2o1", 2), ("n4o1", 4)):
        needle.main(["--results", str(out / f"responses-{kind}.json"), "--json"])
        (scored,) = json.loads(capsys.readouterr().out).values()
        line = printed["summary"][kind]
        assert scored["summary"][f"responses-{kind}"] | {"chance": 100 / side**2} == line
        assert printed["measures"][f"exact, {kind}"]["questions"] == 8 * (1 + has_halves)
        assert (f"  positives, {kind}" in printed["summary"]) == has_halves
        assert Image.open(out / f"sheet-{kind}.png").width > 500
    if protocol == "paper":  # a random model names no place
        assert [printed["summary"][f"  {half}, n2o1"]["existence"] for half in ("positives", "negatives")] == [0, 100]
    if protocol == "constrained":  # a place is always named
        assert printed["summary"]["n2o1"]["existence"] == 100
    assert Image.open(out / "heatmap.png").width > 1000


@pytest.fixture
def coco(tmp_path):
    return write_mmneedle(tmp_path)


def coco_flags(coco, source, *more):
    files = ["--coco", str(coco), "--captions", str(coco / "C"), "--out", str(coco / "out")]
    return ["--model", source, *files, *FAST, "--json", *more]


@pytest.mark.long
def test_official_metadata(coco, source, capsys):
    """MMNeedle's own tests are read, sampled or written otherwise than published."""
    needle.main(coco_flags(coco, source, "--metadata", str(coco), "--limit", "4"))
    printed = json.loads(capsys.readouterr().out)["random"]["measures"]["exact, 1_2_2"]
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert printed["questions"] == 4 and sorted(r["ground_truth"] for r in records) == [
        "1, 1, 1",
        "1, 1, 2",
        "1, 2, 1",
        "1, 2, 2",
    ]
    for record in records:
        number = int(record["target_path"][-6:-4])
        assert record["caption"] == f"picture {number}" and record["id"] == number
    needle.main(coco_flags(coco, source, "--limit", "8", "--negatives"))  # drawn tests are as balanced
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert [r["id"] for r in records] == [*range(8), *range(5000, 5008)]
    records = records[:8]
    assert Counter(r["ground_truth"] for r in records) == dict.fromkeys(("1, 1, 1", "1, 1, 2", "1, 2, 1", "1, 2, 2"), 2)
    needle.main(coco_flags(coco, source, "--metadata", str(coco), "--limit", "2", "--negatives", "--protocol=official"))
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert [r["id"] for r in records][2:] == [5000, 5001] and len(records) == 4


def test_pictures_and_haystacks_are_counted_once(coco, monkeypatch):
    """A picture that lies flat and in val2014 is drawn as two, or tests of one haystack count as independent."""
    name = "COCO_val2014_000000000001.jpg"
    (coco / name).write_bytes((coco / "val2014" / name).read_bytes())
    args = Namespace(coco=str(coco), captions=str(coco / "C"), metadata=None, pictures=1, side=2, needles=1)
    args = Namespace(**vars(args), negatives=False, seed=42, limit=8, kind=[], protocol="paper")
    drawn, benchmark = [], needle.Needle()
    with monkeypatch.context() as patch:
        patch.setattr(needle, "draw_tests", lambda captions, *_, **options: drawn.extend(captions) or [])
        benchmark.questions(args)
    assert sorted(drawn) == sorted(f"val2014/{path.name}" for path in (coco / "val2014").iterdir())
    args.coco = str(coco / "val2014" / "deeper")
    refused(lambda: benchmark.questions(args), str(coco / "C"), "deeper", "give the folder")
    args.coco, args.metadata = str(coco), str(coco)
    questions = benchmark.questions(args)
    rows = benchmark.rows(questions, ["top"] * len(questions))
    assert len(rows) == 8 and len({row.question.key for row in rows}) == 2


@pytest.mark.long
def test_drawn_tests_of_many_pictures_and_needles(coco, source, capsys, monkeypatch):
    """M pictures and K needles: the prompt, the pictures and the truth do not belong together."""
    seen, layout = [], Processor.layout
    monkeypatch.setattr(Processor, "layout", lambda self, n, *text: seen.append((n, text[0])) or layout(self, n, *text))
    more = ["--pictures", "2", "--needles", "2", "--limit", "3", "--protocol", "official"]
    needle.main(coco_flags(coco, source, *more))
    chance = json.loads(capsys.readouterr().out)["random"]["summary"]["2_2_2_2"]["chance"]
    assert chance == pytest.approx(100 / (8 * 7))  # two needles are at two of eight places
    records = json.loads((coco / "out" / "responses-2_2_2_2.json").read_text())
    assert {n for n, _ in seen} == {2} and len(records) == 3
    for record in records:
        assert len(record["caption"]) == 2 and record["ground_truth"].count(";") == 1
        assert any(all(caption in prompt for caption in record["caption"]) for _, prompt in seen)


@pytest.mark.long
def test_a_needle_test_without_its_picture_has_no_response(coco, source, capsys):
    """A test on an unreadable picture counts as wrong, or ends the run."""
    (coco / "val2014" / "COCO_val2014_000000000005.jpg").write_bytes(b"not a picture")
    needle.main(coco_flags(coco, source, "--metadata", str(coco), "--limit", "8"))
    printed, report = capsys.readouterr()
    printed = json.loads(printed)
    assert printed["random"]["measures"]["exact, 1_2_2"]["questions"] == 4
    left_out = json.loads((coco / "out" / "scores.json").read_text())["left_out"]
    assert len(left_out) == 8  # two questions each
    assert "COCO_val2014_000000000005.jpg" in report
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert [r["response"] is None for r in records] == [False] * 4 + [True] * 4


def test_choose_is_balanced_over_places_or_drawn(coco):
    """The paper's 50 tests a quadrant; of other grids, and of negatives, a plain sample."""
    tests = read_needle_tests(coco / "2_2.json", coco / "annotations_1_2_2.json", coco / "C")
    positives, negatives = tests[:8], tests[8:]
    assert [t.places[0][1:] for t in haystacks.choose(positives, 4, 1)] != []
    assert sorted(t.places[0][1:] for t in haystacks.choose(positives, 5, 1)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(haystacks.choose(positives, 3, 1)) == 3 and len(haystacks.choose(negatives, 2, 1)) == 2
    with pytest.raises(UserError, match="but 2 are of this kind"):
        haystacks.choose(negatives, 3, 1)


@pytest.mark.parametrize("protocol", ["paper", "constrained"])
def test_a_protocol_that_cannot_ask_says_so(protocol):
    """Several pictures are asked about with a question for one."""
    test = NeedleTest(0, (("a",) * 4, ("b",) * 4), ((1, 0, 0),), ("b",), ("a cat",))
    with pytest.raises(UserError, match="take official"):
        needle.prompts_of(test, protocol)
    assert len(needle.prompts_of(test, "official")) == 1
