"""POPE: the answer parse, the measures and the files, against cases worked out by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from eval import pope
from eval.bench import parser_of
from eval.question import Question
from model.device import DTYPES
from tests.files import table, write_json, write_lines
from tests.runs import refused, refuses, words
from weights.quantize import KINDS

# only the first sentence counts; "noyes" is a word, since the comma goes; three spellings; words
# end at spaces
PARSED = {
    "no": r"No|No, there is not.|There is no dog in the image.|There is not a dog.|yes, no",
    "yes": r"yes|Yes. There is no cat, though.|no,yes|**Yes**, it is",
    # neither word, and counted as yes
    "neither": "NO|**No**|nothing|no\n||. no|Maybe|eyes. Yes",
}


def test_answers_by_hand():
    """The published parse, its oddities included, decides every published number."""
    for said, texts in PARSED.items():
        for text in texts.split("|"):
            assert pope.parse_answer(text) == ("no" if said == "no" else "yes"), text
            assert pope.is_neither(text) == (said == "neither"), text


# true yes, false yes, true no, false no: accuracy, precision, recall, F1, share of yes
MEASURES = """
    3 1 4 2 | 70 75 60 66.667 40
    0 0 5 5 | 50 0 0 0 0             | never yes: precision is 0/0
    5 5 0 0 | 50 50 100 66.667 100   | always yes
    0 0 4 0 | 100 0 0 0 0            | nothing to find: recall is 0/0"""


def test_measures_by_hand():
    """A measure mixes up its denominator, or an empty one ends in a ZeroDivisionError."""
    kinds = [("yes", "yes"), ("no", "yes"), ("no", "no"), ("yes", "no")]
    for counts, measures, *_ in table(MEASURES):
        pairs = []
        for kind, count in zip(kinds, counts.split(), strict=True):
            pairs += [kind] * int(count)
        found = list(pope.score_answers(pairs).values())
        assert found == pytest.approx(list(map(float, measures.split())), abs=1e-3)


QUESTIONS = json.loads("""[
    {"question_id": 1, "image": "1.jpg", "text": "Is there a dog?", "label": "yes"},
    {"question_id": 2, "image": "0.jpg", "text": "Is there a cat?", "label": "no"},
    {"question_id": 3, "image": "1.jpg", "text": "Is there a car?", "label": "yes"},
    {"question_id": 4, "image": "0.jpg", "text": "Is there a bus?", "label": "no"}]""")
SAID = {2: "Yes.", 1: "yes", 4: "No", 3: "There is no."}
ANSWERS = [{"question_id": n, "answer": text} for n, text in SAID.items()]


@pytest.fixture
def score(workplace, told_of_one):
    """A function that scores a file of answers to QUESTIONS."""
    (workplace / "P").mkdir()
    for number in range(2):
        Image.effect_noise((40, 30), 90 + number).save(f"P/{number}.jpg")
    lines = write_lines(workplace / "Q", QUESTIONS)
    lines.write_bytes(lines.read_bytes().replace(b"\n", b"\r\n"))

    def run(answers):
        write_lines(workplace / "A", answers)
        return told_of_one(pope, "--questions Q --results A")

    return run


def test_a_file_of_answers(score):
    """Answers are matched by place, CRLF (in one file of POPE) matters, or the script's files
    without ids fail."""
    values = score(ANSWERS)  # right: 1 and 4; said yes: 1 and 2; are yes: 1 and 3
    halves = dict.fromkeys("accuracy precision recall F1 yes".split(), 50)
    assert values["summary"] == {"Q": halves | {"neither": 0}}
    assert values["measures"]["accuracy, Q"]["mean"] == 50
    by_order = [{"question": q["text"].lower(), "answer": "yes"} for q in QUESTIONS]
    assert score(by_order)["summary"]["Q"]["recall"] == 100
    by_order[2]["answer"] = "Maybe"
    assert score(by_order)["summary"]["Q"]["neither"] == 25
    refused(lambda: score(ANSWERS[:3]), "A: 1 questions have no answer")
    refused(lambda: score([*ANSWERS, {"question_id": 9, "answer": "x"}]), "A:5: id 9")
    other = {"question": "Is it?", "answer": "no"}
    refused(lambda: score([other] * 4), "A:1: ")  # POPE's files share their ids


def test_a_file_is_scored_without_torch(score):
    """Breaks when a file of answers waits for torch, of any benchmark whose scorer is used so, or a
    flag lacks a kind of weights."""
    score(ANSWERS)
    without = (
        "import sys; sys.modules['torch'] = None; from eval import mmbench, pope, vqa; pope.main()"
    )
    root = os.environ | {"PYTHONPATH": str(Path(pope.__file__).parents[1])}
    subprocess.run(
        [sys.executable, "-c", without, *words("--questions Q --results A")], env=root, check=True
    )
    choices = {action.dest: action.choices for action in parser_of(pope.Pope())._actions}
    assert choices["quantize"] == ["none", *KINDS]
    assert choices["dtype"] == [*DTYPES]


def test_probabilities_sets_and_limits_by_hand(score):
    """P(yes) is read as P(no), or a tie as no; sets are mixed, or their mean is another; or --limit
    is not of each."""
    benchmark = pope.Pope()
    likely = Question("q", "k", (), "p", ("yes", "no"), wants_log_probs=True, kind="A")
    for yes, said in ((-1, "yes"), (-2, "yes"), (-3, "no")):
        for truth in ("yes", "no"):
            scores = benchmark.score(replace(likely, truth=truth), (yes, -2))
            assert scores == {"P(yes), A": truth == said}
    said = [("A", "yes", "yes"), ("A", "no", None), ("B", "yes", "no"), ("B", "no", "no")]
    asked = [Question("q", "k", (), "p", truth=truth, kind=kind) for kind, truth, _ in said]
    benchmark.kinds = ["A", "B"]
    summary = benchmark.summary(benchmark.rows(asked, [answer for *_, answer in said]))
    accuracies = {kind: line["accuracy"] for kind, line in summary.items()}
    assert accuracies == {"A": 100, "B": 50, "mean": 75}
    for flags, count in (("--questions Q --images P", 3), ("", 9)):
        given = parser_of(benchmark).parse_args(words("--limit 3", flags))
        given.template = "{question}"
        assert len(benchmark.questions(given)) == count


@pytest.mark.long
def test_the_embedded_scenes_and_files(score, source, workplace, told_of_one):
    """A strategy is missing, the results are not those that were printed, or two files of a name
    become one set."""
    flags = f"--model {source} --max-new-tokens 2 --probability"
    asked = told_of_one(pope, flags, "--limit 18")
    assert [*asked["summary"]] == "random popular adversarial mean".split()
    file = "runs/eval/random/pope/results.json"
    assert told_of_one(pope, "--limit 18 --probability --results", file) == asked
    write_json(workplace / "R", QUESTIONS[0])
    summary = told_of_one(pope, flags, "--images P --questions Q R")["summary"]
    assert list(summary) == ["Q", "R", "mean"]
    assert 0 <= summary["Q"]["P(yes)"] <= 100
    refuses(pope, f"{flags} --images P --questions Q ./Q", "4 duplicate")
    refuses(pope, "--results A --blind", "--results", "leave --model")
    for given in ("--questions Q", "--images .", "--results A --images ."):
        refuses(pope, given, "--images go together")
