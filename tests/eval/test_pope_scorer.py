"""POPE: the answer parse, the measures and the files, against cases worked out by hand."""

import json
from argparse import Namespace
from dataclasses import replace

import pytest
from PIL import Image

from eval import pope
from eval.question import Question
from tests.files import write_json
from tests.runs import refused

PARSED = {
    # only the first sentence counts; "noyes" is a word, since the comma goes; three spellings;
    # words end at spaces
    "no": [
        "No",
        "No, there is not.",
        "There is no dog in the image.",
        "There is not a dog.",
        "yes, no",
    ],
    "yes": ["yes", "Yes. There is no cat, though.", "no,yes", "**Yes**, it is", "NO", "**No**"],
}
PARSED["yes"] += ["nothing", "no\n", "", ". no", "Maybe", "eyes. Yes"]
NEITHER = PARSED["yes"][4:]


def test_answers_by_hand():
    """The published parse, its oddities included, decides every published number."""
    for answer, texts in PARSED.items():
        assert [pope.parse_answer(text) for text in texts] == [answer] * len(texts)
        assert [text for text in texts if pope.is_neither(text)] == NEITHER * (answer == "yes")


@pytest.mark.parametrize(
    (
        "true_yes",
        "false_yes",
        "true_no",
        "false_no",
        "measures",
    ),  # accuracy, precision, recall, F1, share of yes
    [
        (3, 1, 4, 2, (70, 75, 60, 200 / 3, 40)),
        (0, 0, 5, 5, (50, 0, 0, 0, 0)),  # never yes: precision is 0/0
        (5, 5, 0, 0, (50, 50, 100, 200 / 3, 100)),  # always yes
        (0, 0, 4, 0, (100, 0, 0, 0, 0)),  # nothing to find: recall is 0/0
    ],
)
def test_measures_by_hand(true_yes, false_yes, true_no, false_no, measures):
    """A measure mixes up its denominator, or an empty one ends in a ZeroDivisionError."""
    pairs = [("yes", "yes")] * true_yes + [("no", "yes")] * false_yes + [("no", "no")] * true_no
    assert tuple(pope.score_answers(pairs + [("yes", "no")] * false_no).values()) == pytest.approx(
        measures
    )


THINGS = [("dog", "yes"), ("cat", "no"), ("car", "yes"), ("bus", "no")]
QUESTIONS = [
    {"question_id": n, "image": f"{n % 2}.jpg", "text": f"Is there a {thing}?", "label": label}
    for n, (thing, label) in enumerate(THINGS, start=1)
]
ANSWERS = [
    {"question_id": n, "answer": text}
    for n, text in ((2, "Yes."), (1, "yes"), (4, "No"), (3, "There is no."))
]


@pytest.fixture
def score(workplace, capsys):
    """A function that scores a file of answers to QUESTIONS."""
    (workplace / "P").mkdir()
    for number in range(2):
        Image.effect_noise((40, 30), 90 + number).save(f"P/{number}.jpg")
    (workplace / "Q").write_bytes("".join(json.dumps(q) + "\r\n" for q in QUESTIONS).encode())

    def run(answers):
        (workplace / "A").write_text("".join(json.dumps(record) + "\n" for record in answers))
        pope.main("--questions Q --results A --json".split())
        return json.loads(capsys.readouterr().out)["A"]

    return run


def test_a_file_of_answers(score):
    """Answers are matched by place, CRLF (in one file of POPE) matters, or the script's files
    without ids fail."""
    values = score(ANSWERS)  # right: 1 and 4; said yes: 1 and 2; are yes: 1 and 3
    assert values["summary"] == {
        "Q": dict.fromkeys(("accuracy", "precision", "recall", "F1", "yes"), 50) | {"neither": 0}
    }
    assert values["measures"]["accuracy, Q"]["mean"] == 50
    by_order = [{"question": q["text"].lower(), "answer": "yes"} for q in QUESTIONS]
    assert score(by_order)["summary"]["Q"]["recall"] == 100
    by_order[2]["answer"] = "Maybe"
    assert score(by_order)["summary"]["Q"]["neither"] == 25
    refused(lambda: score(ANSWERS[:3]), "A: 1 questions have no answer")
    refused(lambda: score([*ANSWERS, {"question_id": 9, "answer": "x"}]), "A:5: id 9")
    refused(
        lambda: score([{"question": "Is it?", "answer": "no"}] * 4), "A:1: "
    )  # POPE's files share their ids


def test_probabilities_sets_and_limits_by_hand(score):
    """P(yes) is read as P(no), or a tie as no; sets are mixed, or their mean is another; or --limit
    is not of each."""
    benchmark = pope.Pope()
    likely = Question("q", "k", (), "p", ("yes", "no"), scored=True, kind="A")
    for truth, scores, right in (
        ("yes", (-1, -2), 1),
        ("yes", (-2, -1), 0),
        ("yes", (-1, -1), 1),
        ("no", (-1, -1), 0),
    ):
        assert benchmark.score(replace(likely, truth=truth), scores) == {"P(yes), A": right}
    said = [("A", "yes", "yes"), ("A", "no", None), ("B", "yes", "no"), ("B", "no", "no")]
    asked = [Question("q", "k", (), "p", truth=truth, kind=kind) for kind, truth, _ in said]
    benchmark.kinds = ["A", "B"]
    summary = benchmark.summary(benchmark.rows(asked, [answer for *_, answer in said]))
    assert {kind: line["accuracy"] for kind, line in summary.items()} == {
        "A": 100,
        "B": 50,
        "mean": 75,
    }
    for files, count in (
        ({"questions": ["Q"], "images": "P"}, 3),
        ({"questions": None, "images": None}, 9),
    ):
        given = Namespace(**files, limit=3, probability=False, template="{question}")
        assert len(benchmark.questions(given)) == count


@pytest.mark.long
def test_the_embedded_scenes_and_files(score, source, workplace, capsys):
    """A strategy is missing, the results are not those that were printed, or two files of a name
    become one set."""
    flags = ["--model", source, *"--max-new-tokens 2 --json --probability".split()]
    pope.main([*flags, *"--limit 18".split()])
    printed = json.loads(capsys.readouterr().out)["random"]
    assert (*printed["summary"],) == ("random", "popular", "adversarial", "mean")
    pope.main(
        "--limit 18 --json --probability --results runs/eval/random/pope/results.json".split()
    )
    assert next(iter(json.loads(capsys.readouterr().out).values())) == printed
    write_json(workplace / "R", QUESTIONS[0])
    pope.main([*flags, *"--images P --questions Q R".split()])
    printed = json.loads(capsys.readouterr().out)["random"]["summary"]
    assert list(printed) == ["Q", "R", "mean"]
    assert 0 <= printed["Q"]["P(yes)"] <= 100
    refused(lambda: pope.main([*flags, *"--images P --questions Q ./Q".split()]), "4 duplicate")
    refused(lambda: pope.main("--results A --blind".split()), "--results", "leave --model")
    for given in ("--questions Q", "--images .", "--results A --images ."):
        refused(lambda given=given: pope.main(given.split()), "--images go together")
