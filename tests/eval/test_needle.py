"""MMNeedle's command: what is asked about the embedded scenes and COCO's pictures, and the
responses it writes."""

import json
from argparse import Namespace
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from eval import answer, needle
from eval.bench import parser_of
from eval.data import scenes
from model.processor import Processor
from tests.files import read_json, write_json, write_mmneedle
from tests.runs import refused

FAST = ["--max-new-tokens", "3", "--batch-size", "8", "--json"]


@pytest.mark.long
@pytest.mark.parametrize("kind", scenes.NEEDLES)
@pytest.mark.parametrize(("needles", "absent"), [(1, False), (2, False), (2, True)])
def test_embedded_trials_ask_what_is_trained(kind, needles, absent):
    """A model is asked in other words than it learned, right answers do not count, or half a place
    does."""
    for number, test in enumerate(needle.embedded_tests(kind, 20, needles=needles, absent=absent)):
        samples = scenes.needle(kind, "test", number, needles=needles, negative=absent).samples
        free = needle.asks_of([test], "paper")
        said = [s.suffix for s in samples]
        assert [q.prefix for q in free] == [s.prefix for s in samples]
        assert not free[0].choices
        assert np.array_equal(free[0].images()[0], samples[0].scene.render())
        assert needle.judge(needle.response_record(test, needle.respond(test, said, "paper")))[2]
        if not absent:
            chosen = needle.asks_of([test], "constrained")
            assert all(
                s.prefix == q.prefix and s.suffix in q.choices
                for s, q in zip(samples, chosen, strict=True)
            )
            (row,) = needle.Needle().rows(free, [*said[:-1], "here"])
            assert [*row.scores.values()] == [0]


@pytest.mark.long
@pytest.mark.parametrize("protocol", needle.PROTOCOLS)
def test_needle_command(source, workplace, capsys, protocol):
    """The response file scores otherwise than the command printed, or a figure is missing."""
    needle.main(
        ["--model", source, "--protocol", protocol, *"--limit 8 --kind n2o1 n4o1".split(), *FAST]
    )
    text = capsys.readouterr().out
    assert "NaN" not in text  # eight tests leave places without a needle, and JSON has no NaN
    printed = json.loads(text)["random"]
    out = workplace / "runs/eval/random/needle"
    for kind, side in (("n2o1", 2), ("n4o1", 4)):
        needle.main(["--results", str(out / f"responses-{kind}.json"), "--json"])
        (scored,) = json.loads(capsys.readouterr().out).values()
        assert (
            scored["summary"][f"responses-{kind}"] | {"chance": 100 / side**2}
            == printed["summary"][kind]
        )
        assert printed["measures"][f"exact, {kind}"]["questions"] == 8
        assert Image.open(out / f"sheet-{kind}.png").width > 500
    named = {"paper": 0, "constrained": 100}  # a random model names no place, unless it must
    assert printed["summary"]["n2o1"]["existence"] == named.get(
        protocol, printed["summary"]["n2o1"]["existence"]
    )
    assert Image.open(out / "heatmap.png").width > 1000


def test_the_embedded_accuracy_of_a_training_run(model, processor):
    """The constrained protocol does not always name a place, or answers of one test are counted for
    another."""
    asked = needle.asks_of(needle.embedded_tests("n2o1", 4), "constrained")
    rows = needle.Needle().rows(asked, answer.ask_all(model, processor, asked))
    assert len(rows) == 4
    assert not any("-1" in row.answer["response"] for row in rows)
    right = [
        s.suffix for number in range(20) for s in scenes.needle("n2o1", "test", number).samples
    ]
    for wrong_every, accuracy in ((10**6, 95.0), (2, 0.0), (4, 50.0)):
        said = ["neither" if at % wrong_every == 0 else suffix for at, suffix in enumerate(right)]
        assert (
            needle.evaluate_embedded(
                None, None, "n2o1", 20, ask_all=lambda *_, said=said, **__: said
            )
            == accuracy
        )


def test_the_number_of_tests_is_its_own_flag():
    """Breaks when the benchmarks' --limit hides this one's, and a call without flags has no
    number."""
    assert parser_of(needle.Needle()).parse_args([]).limit == needle.LIMIT


@pytest.fixture
def coco(tmp_path):
    return write_mmneedle(tmp_path)


@pytest.fixture
def ask(coco, source, capsys):
    """A function that runs the command on COCO's pictures: what it prints, and the response file of
    a kind."""

    def run(flags: str, kind: str = "1_2_2"):
        files = ["--coco", str(coco), "--captions", str(coco / "C"), "--out", str(coco / "out")]
        needle.main(
            ["--model", source, *files, *FAST, *flags.replace("META", f"--metadata {coco}").split()]
        )
        printed = json.loads(capsys.readouterr().out)["random"]
        return printed, read_json(coco / "out" / f"responses-{kind}.json")

    return run


@pytest.mark.long
def test_official_and_drawn_tests(ask):
    """MMNeedle's own tests are read, sampled or written otherwise than published; drawn ones are
    not as balanced."""
    corners = dict.fromkeys(("1, 1, 1", "1, 1, 2", "1, 2, 1", "1, 2, 2"), 1)
    printed, records = ask("META --limit 4")
    assert printed["measures"]["exact, 1_2_2"]["questions"] == 4
    assert Counter(r["ground_truth"] for r in records) == corners
    for record in records:
        number = int(record["target_path"][-6:-4])
        assert record["caption"] == f"picture {number}"
        assert record["id"] == number
    printed, records = ask("META --limit 2 --negatives")
    assert [r["id"] for r in records][2:] == [5000, 5001]
    assert len(records) == 4
    halves = [
        printed["summary"][f"  {half}, 1_2_2"]["existence"] for half in ("positives", "negatives")
    ]
    assert halves == [0, 100]  # a random model names no place
    printed, records = ask("--limit 8")
    assert [r["id"] for r in records] == [*range(8)]
    assert Counter(r["ground_truth"] for r in records) == {place: 2 for place in corners}


@pytest.mark.long
def test_tests_of_many_pictures_and_needles(ask, coco, monkeypatch):
    """M pictures and K needles: the prompt, the pictures and the truth do not belong together."""
    seen = []
    layout = Processor.layout
    monkeypatch.setattr(
        Processor,
        "layout",
        lambda self, n, turns, marks: (
            seen.append((n, turns[-1][0])) or layout(self, n, turns, marks)
        ),
    )
    grids = read_json(coco / "2_2.json")
    places = [[(0, 0, 0), (1, 1, 0)], [(1, 0, 1), (1, 1, 1)], [(0, 1, 1), (0, 0, 1)]]
    tests = [
        {
            "id": number,
            "image_ids": [*grids],
            "target": [[*grids.values()][i][f"{r}_{c}"] for i, r, c in of],
        }
        | {name: [place[at] for place in of] for at, name in enumerate(("index", "row", "col"))}
        for number, of in enumerate(places)
    ]
    write_json(coco / "2_annotations_2_2_2.json", tests)
    printed, records = ask("META --pictures 2 --needles 2 --limit 3 --protocol official", "2_2_2_2")
    assert printed["summary"]["2_2_2_2"]["chance"] == pytest.approx(
        100 / (8 * 7)
    )  # two distinct ones of eight places
    assert {n for n, _ in seen} == {2}
    assert len(records) == 3
    for record in records:
        assert len(record["caption"]) == 2
        assert record["ground_truth"].count(";") == 1
        assert any(all(caption in prompt for caption in record["caption"]) for _, prompt in seen)


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
    (coco / name).write_bytes((coco / "val2014" / name).read_bytes())
    tests = needle.drawn_tests(coco, coco / "C", 8)
    assert all(len({path.name for path in test.files}) == 4 for test in tests)
    args = Namespace(
        coco=str(coco), captions=str(coco / "C"), metadata=str(coco), pictures=1, side=2, needles=1
    )
    args = Namespace(**vars(args), negatives=False, limit=8, kind=[], protocol="official")
    assert len({question.key for question in needle.Needle().questions(args)}) == 2
    refused(
        lambda: needle.asks_of([replace(tests[0], pictures=tests[0].pictures * 2)], "paper"),
        "take official",
    )
    args.metadata = None
    args.negatives = True
    refused(lambda: needle.Needle().questions(args), "give --metadata too")
    refused(
        lambda: needle.drawn_tests(coco / "gone", coco / "C", 8),
        "--captions: 0 of its pictures are in --coco",
    )
