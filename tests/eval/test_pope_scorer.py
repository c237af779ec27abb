"""POPE: the answer parse, the measures and the files, against cases worked out by hand."""

import json
from dataclasses import replace

import pytest

from eval import pope
from eval.datasets import read_pope
from model.common import UserError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no", "no"),
        ("No", "no"),
        ("No, there is not.", "no"),
        ("No.", "no"),
        ("No, it is a cat.", "no"),
        ("There is no dog in the image.", "no"),
        ("There is not a dog.", "no"),
        ("yes", "yes"),
        ("Yes, there is.", "yes"),
        ("Yes. There is no cat, though.", "yes"),  # only the first sentence counts
        ("no,yes", "yes"),  # the comma goes without a space: one word, "noyes"
        ("yes, no", "no"),
        ("NO", "yes"),  # three spellings only
        ("Not a dog", "yes"),
        ("nothing", "yes"),
        ("no\n", "yes"),  # words are split at spaces alone
        ("", "yes"),
        (". no", "yes"),
        ("maybe", "yes"),
    ],
)
def test_answers_by_hand(text, answer):
    """The published parse, its oddities included, decides every published number."""
    assert pope.parse_answer(text) == answer


@pytest.mark.parametrize(
    ("true_yes", "false_yes", "true_no", "false_no", "measures"),  # accuracy, precision, recall, F1, yes-ratio
    [
        (3, 1, 4, 2, (0.7, 0.75, 0.6, 2 / 3, 0.4)),
        (5, 0, 5, 0, (1, 1, 1, 1, 0.5)),
        (0, 0, 5, 5, (0.5, 0, 0, 0, 0)),  # never yes: precision is 0/0
        (5, 5, 0, 0, (0.5, 0.5, 1, 2 / 3, 1)),  # always yes
        (0, 0, 4, 0, (1, 0, 0, 0, 0)),  # nothing to find: recall is 0/0
        (0, 2, 0, 2, (0, 0, 0, 0, 0.5)),
        (0, 0, 0, 0, (0, 0, 0, 0, 0)),
    ],
)
def test_measures_by_hand(true_yes, false_yes, true_no, false_no, measures):
    """A measure mixes up its denominator, or an empty one ends in a ZeroDivisionError."""
    labels = ["yes"] * true_yes + ["no"] * (false_yes + true_no) + ["yes"] * false_no
    answers = ["yes"] * (true_yes + false_yes) + ["no"] * (true_no + false_no)
    result = pope.score_answers(labels, answers)
    assert list(result) == ["accuracy", "precision", "recall", "f1", "yes_ratio"]
    assert tuple(result.values()) == pytest.approx(measures)


QUESTIONS = [
    {"question_id": n, "image": f"{n}.jpg", "text": f"Is there a {thing} in the image?", "label": label}
    for n, (thing, label) in enumerate([("dog", "yes"), ("cat", "no"), ("car", "yes"), ("bus", "no")], start=1)
]
ANSWERS = [
    {"question_id": 2, "answer": "Yes."},
    {"question_id": 1, "answer": "yes"},
    {"question_id": 4, "answer": "No"},
    {"question_id": 3, "answer": "There is no car."},
]


def write(path, records, end="\n"):
    path.write_bytes("".join(json.dumps(record) + end for record in records).encode())
    return str(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_score_json(tmp_path, capsys, end):
    """Answers are matched by place instead of id, or CRLF line ends (one of POPE's files has them) matter."""
    paths = write(tmp_path / "Q", QUESTIONS, end), write(tmp_path / "A", ANSWERS, end)
    pope.main(["score", "--questions", paths[0], "--answers", paths[1], "--json"])
    # right: 1 and 4; said yes: 1 and 2; are yes: 1 and 3
    assert json.loads(capsys.readouterr().out) == {
        "accuracy": 0.5,
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
        "yes_ratio": 0.5,
    }


def test_score_table(tmp_path, capsys):
    """Without --json a reader gets the five measures in percent."""
    pope.main(["score", "--questions", write(tmp_path / "Q", QUESTIONS), "--answers", write(tmp_path / "A", ANSWERS)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "POPE (%), 4 questions" and lines[1].split() == ["accuracy", "50.00"] and len(lines) == 6


def test_published_answer_files_go_by_order(tmp_path, capsys):
    """The published script's files hold question and answer, no ids; other evaluators call the answer "text"."""
    by_order = [{"question": q["text"].lower(), "answer": a} for q, a in zip(QUESTIONS, ["yes"] * 4, strict=True)]
    for answers in (by_order, [{"question_id": q["question_id"], "text": "yes"} for q in QUESTIONS]):
        paths = write(tmp_path / "Q", QUESTIONS), write(tmp_path / "A", answers)
        pope.main(["score", "--questions", paths[0], "--answers", paths[1], "--json"])
        assert json.loads(capsys.readouterr().out)["recall"] == 1.0


def test_written_answers_are_read_back(tmp_path):
    """Our own answers file must be one that our scorer reads."""
    questions = read_pope(write(tmp_path / "Q", QUESTIONS))
    said = list(zip(questions, ["é", "b", "c", "d"], strict=True))
    pope.write_answers(tmp_path / "A", said[::-1])
    assert pope.read_answers(tmp_path / "A", questions, "Q") == ["é", "b", "c", "d"]


def test_answers_to_another_of_the_files_are_refused(tmp_path):
    """POPE's three files have the same ids: answers to one of them are scored by another's labels."""
    questions = read_pope(write(tmp_path / "Q", QUESTIONS))
    pope.write_answers(tmp_path / "A", [(q, "yes") for q in questions[::-1]])
    others = [*questions[:3], replace(questions[3], question="Is there a zebra?")]
    with pytest.raises(UserError, match="A:1: answers .* where Q asks 'Is there a zebra"):
        pope.read_answers(tmp_path / "A", others, "Q")


@pytest.mark.parametrize(
    ("questions", "answers", "expected"),
    [
        (QUESTIONS, ANSWERS[:3], "A: 1 missing id(s) (3)"),
        (QUESTIONS, [*ANSWERS, {"question_id": 9, "answer": "x"}], "A: 1 extra id(s) (9)"),
        (QUESTIONS, [*ANSWERS, ANSWERS[0]], "A: 1 duplicate id(s) (2)"),
        (QUESTIONS, [*ANSWERS[:3], {"question_id": 3}], "A:4: answer is missing"),
        (QUESTIONS, [*ANSWERS[:3], {"answer": "no"}], "A:4: question_id is missing"),
        (QUESTIONS, [*ANSWERS[:3], {"question_id": 3, "answer": None}], "A:4: answer is None"),
        (QUESTIONS, [{"answer": "no"}] * 3, "A: 3 answers without question_id to the 4 questions"),
        (QUESTIONS, [{"question": "Is it?", "answer": "no"}] * 4, "A:1: answers 'Is it?'"),
        (QUESTIONS, [3], "A:1: holds a JSON int"),
        (QUESTIONS, [], "A: holds no records"),
        ([*QUESTIONS[:3], QUESTIONS[3] | {"label": "No"}], ANSWERS, "Q:4: label is 'No'"),
        ([*QUESTIONS, QUESTIONS[0]], ANSWERS, "Q: 1 duplicate id(s) (1)"),
        ([QUESTIONS[0] | {"question_id": True}], ANSWERS, "Q:1: question_id is True"),
        ([{"question_id": 1, "text": "?", "label": "no"}], ANSWERS, "Q:1: image is missing"),
    ],
)
def test_bad_files_are_named(tmp_path, questions, answers, expected):
    """A wrong file is scored, or its user is left without the file, the line and the remedy."""
    paths = write(tmp_path / "Q", questions), write(tmp_path / "A", answers)
    with pytest.raises(UserError) as caught:
        pope.main(["score", "--questions", paths[0], "--answers", paths[1]])
    assert f"{tmp_path}/{expected}" in str(caught.value) and "\n" not in str(caught.value)


def test_malformed_line_is_numbered(tmp_path):
    """In a file of thousands of lines only the number finds the broken one; a blank line before it counts."""
    (tmp_path / "Q").write_text(json.dumps(QUESTIONS[0]) + "\r\n\r\n{'question_id': 2}\r\n")
    with pytest.raises(UserError, match=r"Q:3: not valid JSON \(.* at column 2\)"):
        pope.main(["score", "--questions", str(tmp_path / "Q"), "--answers", "none"])
