"""`eval.vqa` on official files and on a user's own: what is asked, scored, left out, resumed, and asked blind."""

import json

import pytest
from PIL import Image

from eval import answer, vqa
from eval.question import question_of
from eval.records import Record, read_data
from model.common import UserError
from tests.eval.test_eval_commands import FAST, count_asked, noise


def test_every_question_is_scored_by_what_its_data_has(tmp_path):
    """Questions with one truth and with ten are averaged in one measure, or an empty answer is right."""

    def score(said, suffix, answers=()):
        record = Record("a", "a", (), (("what?", suffix),), answers)
        return vqa.Vqa().score(question_of(record, truth=record), said)

    assert score("red ", "Red") == {"exact_match": 1} and score("blue", "Red") == {"exact_match": 0}
    assert score("TWO", "x", ("one", "two")) == {"exact_match": 1}
    scores = score("no", "yes", ("yes",) * 9 + ("no",))
    assert scores == {"exact_match": 1, "vqa_accuracy": pytest.approx(0.3)}
    assert score("x", "x", ("x",) * 3) == {"exact_match": 1}  # of two spellings the rarer one would count 0.3
    assert score("x", "x", ("x",) * 4) == {"exact_match": 1, "vqa_accuracy": 1}
    lines = [{"prefix": "what", **given} for given in ({"suffix": " "}, {"answers": ["", ""]}, {"answers": ["a", ""]})]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    records = read_data(f"jsonl:{tmp_path / 'own.jsonl'}")
    assert sorted(len(record.turns) for record in records) == [0, 0, 1]
    assert vqa.Vqa().score(question_of(records[0], truth=records[0]), "") == {"exact_match": 0}


def test_own_examples(source, workplace, monkeypatch, capsys):
    """The pictures, prompts and truths of a JSONL file are mixed up, or blind answers depend on the picture."""
    lines = []
    for number in range(6):
        noise(90 + number).save(f"{number // 2}.png")
        prefix = ("count cat", "count dog dog")[number % 2]
        lines.append({"image": f"{number // 2}.png", "prefix": prefix, "suffix": "?"})
    lines[5] |= {"image": ["link.png"]}  # another name of a picture is not another picture
    (workplace / "link.png").symlink_to("2.png")
    (workplace / "own.jsonl").write_text("\n".join(map(json.dumps, [*lines, lines[0] | {"image": "gone.png"}])))
    flags = ["--model", source, *FAST, *"--data jsonl:own.jsonl --blind".split()]
    vqa.main(flags)
    assert "random, blind: not shown to use the picture" in capsys.readouterr().out
    vqa.main([*flags, "--json"])
    printed, report = capsys.readouterr()
    assert "left out 1 of 7 questions" in report and "gone.png" in report
    out = workplace / "runs/eval/random/vqa"
    results = json.loads((out / "results.json").read_text())
    assert [r["question"] for r in results] == [line["prefix"] for line in lines]
    logged = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    said, gray = ({(e["answer"], int(e["id"][-1]) % 2) for e in part} for part in (logged[:6], logged[6:]))
    assert len(logged) == 12 and len(gray) == 2 < len(said)  # gray: one answer a prompt
    printed = json.loads(printed)
    assert printed["random"]["measures"]["exact_match"]["mean"] == 0
    assert printed["random, blind"]["measures"]["exact_match"]["questions"] == 6

    for line, result in zip(lines, results, strict=True):  # now every answer is right, in capitals
        line["suffix"] = f" {result['answer'].upper()}\n"
    (workplace / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(answer, "generate", None)  # all is in the log
    vqa.main(flags)
    table = capsys.readouterr().out
    assert "not shown" not in table and "100.00 [100.00, 100.00]" in table
    rows = vqa.Vqa().questions(arguments(data="jsonl:own.jsonl"))
    assert rows[4].group == rows[5].group and len({row.group for row in rows}) == 3


def arguments(**given):
    names = "data questions annotations images scoring guess answerability prompt limit"
    return type("Args", (), dict.fromkeys(names.split()) | {"template": "{question}"} | given)


@pytest.fixture
def official(tmp_path, source):
    """Three pictures with two questions each in VQAv2's layout; the second is cut off. Flags, its file, its bytes."""
    folder = tmp_path / "val2014"
    folder.mkdir()
    for number in (1, 2, 3):
        noise(number).save(folder / f"COCO_val2014_{number:012d}.jpg")
    broken = folder / "COCO_val2014_000000000002.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:300])
    asked = [{"image_id": n // 2 + 1, "question": f"What is {n}?", "question_id": n} for n in range(6)]
    said = {"question_type": "what is", "answer_type": "other", "multiple_choice_answer": "cat"}
    said["answers"] = [{"answer": "cat", "answer_id": i} for i in range(10)]
    (tmp_path / "Q").write_text(json.dumps({"data_subtype": "val2014", "questions": asked}))
    (tmp_path / "A").write_text(json.dumps({"annotations": [q | said for q in asked]}))
    flags = f"--model {source} --questions {tmp_path}/Q --images {tmp_path} --out {tmp_path}/out".split() + FAST
    return flags, broken, whole


def test_unreadable_pictures_are_named_and_asked_when_repaired(official, capsys, monkeypatch):
    """One broken file of 40,000 ends a run of hours, or is passed over in silence."""
    flags, broken, whole = official
    out = broken.parent.parent / "out"
    flags += ["--annotations", str(out.parent / "A"), "--json"]
    vqa.main(flags)
    printed, report = capsys.readouterr()
    assert "left out 2 of 6 questions" in report and broken.name in report
    ids = [record["question_id"] for record in json.loads((out / "results.json").read_text())]
    assert ids == [0, 1, 4, 5] and json.loads(printed)["random"]["summary"]["overall"]["VQA accuracy"] == 0
    assert set(json.loads((out / "scores.json").read_text())["left_out"]) == {"2", "3"}
    broken.write_bytes(whole)
    sizes = count_asked(monkeypatch)
    vqa.main(flags)
    assert sum(sizes) == 2 and "left out" not in capsys.readouterr().err
    assert len(json.loads((out / "results.json").read_text())) == 6
    for path in broken.parent.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of 6 questions could be asked"):
        vqa.main([*flags, "--no-resume"])


def test_a_test_split_without_annotations_is_answered(official, capsys):
    """VQAv2's test split has no annotations: its answers go to the evaluation server."""
    flags, broken, whole = official
    broken.write_bytes(whole)
    vqa.main(flags)
    assert len(json.loads((broken.parent.parent / "out/results.json").read_text())) == 6
    assert "nothing is scored" in capsys.readouterr().out


def test_blind_and_the_text_only_guess(source, workplace, monkeypatch, capsys):
    """Gray pictures are not the only difference to the model, or the guess is called blind."""
    asked = []

    def ask_all(model, processor, questions, **options):
        asked.append([(q.prefix, q.key) for q in questions])
        return [q.truth.answer if len(asked) == 1 else "nothing" for q in questions]

    monkeypatch.setattr(answer, "ask_all", ask_all)
    vqa.main(["--model", source, *"--data embedded --limit 12 --blind --json".split()])
    printed = json.loads(capsys.readouterr().out)
    model, blind, guess = (of["summary"]["overall"]["VQA accuracy"] for of in printed.values())
    assert list(printed) == ["random", "random, blind", "text-only guess"] and model == 100 > guess > blind == 0
    assert [prefix for prefix, _ in asked[0]] == [prefix for prefix, _ in asked[1]]
    assert len({key for _, key in asked[0]}) == 2 and len({key for _, key in asked[1]}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data own.jsonl", "does not say what kind"),
        ("--data jsonl:gone.jsonl", "gone.jsonl"),
        ("--data jsonl:own.jsonl --questions Q", "leave --data out"),
        ("--data jsonl:own.jsonl --guess Q A", "no --prompt, --scoring or --guess"),
        ("--data jsonl:own.jsonl --prompt {question}", "has complete prompts"),
        ("--data vqav2:.", "v2_OpenEnded_mscoco_train2014_questions.json: not found"),
        ("--images .", "go together"),
    ],
)
def test_what_cannot_be_asked(flags, message, workplace):
    """A mistake is reported after the model was read, or guessed at."""
    Image.new("RGB", (9, 9)).save("a.png")
    with pytest.raises(UserError, match=message):
        vqa.main(["--model", "nowhere", *flags.split()])
