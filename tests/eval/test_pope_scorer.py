"""POPE: the answer parse, the measures and the files, against cases worked out by hand."""

import json

import pytest
from PIL import Image

from eval import pope
from model.common import UserError
from model.processor import Processor


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("No", "no"),
        ("No, there is not.", "no"),
        ("There is no dog in the image.", "no"),
        ("There is not a dog.", "no"),
        ("yes", "yes"),
        ("Yes. There is no cat, though.", "yes"),  # only the first sentence counts
        ("no,yes", "yes"),  # the comma goes without a space: one word, "noyes"
        ("yes, no", "no"),
        ("NO", "yes"),  # three spellings only
        ("nothing", "yes"),
        ("no\n", "yes"),  # words are split at spaces alone
        ("", "yes"),
        (". no", "yes"),
    ],
)
def test_answers_by_hand(text, answer):
    """The published parse, its oddities included, decides every published number."""
    assert pope.parse_answer(text) == answer


@pytest.mark.parametrize(
    ("true_yes", "false_yes", "true_no", "false_no", "measures"),  # accuracy, precision, recall, F1, share of yes
    [
        (3, 1, 4, 2, (70, 75, 60, 200 / 3, 40)),
        (0, 0, 5, 5, (50, 0, 0, 0, 0)),  # never yes: precision is 0/0
        (5, 5, 0, 0, (50, 50, 100, 200 / 3, 100)),  # always yes
        (0, 0, 4, 0, (100, 0, 0, 0, 0)),  # nothing to find: recall is 0/0
    ],
)
def test_measures_by_hand(true_yes, false_yes, true_no, false_no, measures):
    """A measure mixes up its denominator, or an empty one ends in a ZeroDivisionError."""
    labels = ["yes"] * true_yes + ["no"] * (false_yes + true_no) + ["yes"] * false_no
    answers = ["yes"] * (true_yes + false_yes) + ["no"] * (true_no + false_no)
    assert tuple(pope.score_answers(labels, answers).values()) == pytest.approx(measures)


THINGS = [("dog", "yes"), ("cat", "no"), ("car", "yes"), ("bus", "no")]
QUESTIONS = [
    {"question_id": n, "image": f"{n % 2}.jpg", "text": f"Is there a {thing}?", "label": label}
    for n, (thing, label) in enumerate(THINGS, start=1)
]
ANSWERS = [{"question_id": n, "answer": text} for n, text in ((2, "Yes."), (1, "yes"), (4, "No"), (3, "There is no."))]


@pytest.fixture
def files(workplace):
    """A function that writes QUESTIONS and a file of answers, and returns the flags that score it."""
    for number in range(2):
        Image.effect_noise((40, 30), 90 + number).save(f"{number}.jpg")

    def write(answers, name="Q"):
        (workplace / name).write_bytes("".join(json.dumps(q) + "\r\n" for q in QUESTIONS).encode())
        (workplace / "A").write_text("".join(json.dumps(record) + "\n" for record in answers))
        return f"--questions {name} --images . --results A --json".split()

    return write


def test_a_file_of_answers(files, capsys):
    """Answers are matched by place instead of id, CRLF (one of POPE's files has it) matters, or the published script's
    own files, without ids, are refused."""
    pope.main(files(ANSWERS))
    # right: 1 and 4; said yes: 1 and 2; are yes: 1 and 3
    values = json.loads(capsys.readouterr().out)["A"]
    assert values["summary"] == {"Q": dict.fromkeys(("accuracy", "precision", "recall", "F1", "yes"), 50)}
    assert values["measures"]["accuracy, Q"]["mean"] == 50
    by_order = [{"question": q["text"].lower(), "answer": "yes"} for q in QUESTIONS]
    for answers in (by_order, [{"question_id": q["question_id"], "text": "yes"} for q in QUESTIONS]):
        pope.main(files(answers))
        assert json.loads(capsys.readouterr().out)["A"]["summary"]["Q"]["recall"] == 100


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (ANSWERS[:3], "A: 1 questions have no answer ('3')"),
        ([*ANSWERS, {"question_id": 9, "answer": "x"}], "A:5: id 9 is unknown"),
        ([*ANSWERS, ANSWERS[0]], "A:5: id 2 occurs twice"),
        ([*ANSWERS[:3], {"question_id": 3}], "A:4: answer is None"),
        ([{"answer": "no"}] * 3, "A: 1 questions have no answer"),
        ([{"question": "Is it?", "answer": "no"}] * 4, "A:1: answers 'Is it?'"),  # POPE's three files share their ids
        ([3], "A:1: expected an object"),
    ],
)
def test_bad_answers_are_named(files, answers, expected):
    """A wrong file is scored, or its user is left without the file, the line and the remedy."""
    with pytest.raises(UserError) as caught:
        pope.main(files(answers))
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


@pytest.mark.long
def test_a_model_on_files(files, source, capsys, monkeypatch, workplace):
    """POPE's own file is asked in other words, its answers cannot be read back, or a set without any has a score."""
    asked, layout = [], Processor.layout
    monkeypatch.setattr(Processor, "layout", lambda self, n, *text: asked.append(text[0]) or layout(self, n, *text))
    flags = [*files(ANSWERS)[:-3], "--model", source, *"--max-new-tokens 2 --json --out out".split()]
    pope.main([*flags, "--prompt", "Look. {question}", "--probability"])
    printed = json.loads(capsys.readouterr().out)["random"]["summary"]
    assert set(asked) == {f"Look. {q['text']}" for q in QUESTIONS} and 0 <= printed["Q"]["P(yes)"] <= 100
    for file, more in (("results.json", ["--probability"]), ("answers-Q.jsonl", [])):
        pope.main([*flags[:4], "--results", f"out/{file}", "--json", "--prompt", "Look. {question}", *more])
        again = json.loads(capsys.readouterr().out)[f"out/{file}"]["summary"]
        assert again["Q"].items() <= printed["Q"].items() and len(again["Q"]) == 5 + len(more)
    files(ANSWERS, "mean")
    (workplace / "P").write_text(json.dumps(QUESTIONS[0] | {"image": "cut.jpg"}))
    (workplace / "cut.jpg").write_bytes(b"")
    for names, message in (("Q P", "P: none of its questions"), ("Q ./Q", "taken")):
        with pytest.raises(UserError, match=message):
            pope.main(["--questions", *names.split(), *flags[2:]])


@pytest.mark.long
def test_the_embedded_scenes(source, workplace, capsys):
    """A strategy is missing, or the results are not those that were printed."""
    pope.main(["--model", source, *"--limit 18 --max-new-tokens 2 --json".split()])
    printed = json.loads(capsys.readouterr().out)["random"]
    assert list(printed["summary"]) == ["random", "popular", "adversarial", "mean"]
    assert len({tuple(q.prefix for q in pope.embedded(strategy, 18)) for strategy in list(printed["summary"])[:3]}) == 3
    pope.main("--limit 18 --json --results runs/eval/random/pope/results.json".split())
    assert next(iter(json.loads(capsys.readouterr().out).values())) == printed
