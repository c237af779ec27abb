"""`eval.vqa --data`: a user's own examples are asked, scored, resumed, and compared with the model on gray pictures."""

import json

import pytest
from PIL import Image

from eval import run, vqa, vqa_data, vqa_scoring
from eval.records import Record, read_data
from model.common import UserError


def test_vqa_accuracy_needs_several_annotators():
    """A question with two spellings of its answer is scored as if two of ten people had given them."""
    assert vqa_scoring.vqa_accuracy("red", ["red"] * 3) is None
    assert vqa_scoring.vqa_accuracy("red", ["red"] * 4) == 1
    assert vqa_scoring.vqa_accuracy("red", ["red"] * 3 + ["blue"] * 7) == pytest.approx(0.9)


def test_every_question_is_scored_by_what_its_data_has():
    """Questions with one truth and with ten are averaged in one measure, or one without an answer counts as wrong."""

    def record(name, suffix, answers=()):
        return Record(name, name, (), (("what?", suffix),), answers)

    records = [record("a", "Red"), record("b", "x", ("one", "two")), record("c", "yes", ("yes",) * 9 + ("no",))]
    scores = vqa_data.score([*records, record("d", "y")], ["red ", "TWO", "no", None])
    assert scores == {"exact_match": {"a": 1, "b": 1, "c": 1}, "vqa_accuracy": {"c": pytest.approx(0.3)}}
    assert vqa_data.score(records[:2], ["blue", "y"]) == {"exact_match": {"a": 0, "b": 0}}
    assert vqa_data.truths_of(records[1]) == ["one", "two", "x"] and len(vqa_data.truths_of(records[2])) == 10


def test_an_empty_answer_is_never_right(tmp_path):
    """Breaks when a model that says nothing is right where a file lacks the answer, which training refuses."""
    lines = [{"prefix": "what", **given} for given in ({"suffix": " "}, {"answers": ["", ""]}, {"answers": ["a", ""]})]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    records = read_data(f"jsonl:{tmp_path / 'own.jsonl'}")
    assert sorted(len(record.turns) for record in records) == [0, 0, 1]
    assert vqa_data.score(records[:1], [""])["exact_match"] == {"own.jsonl:3": 0}


def test_questions_on_one_picture_belong_together(source, tmp_path, monkeypatch, capsys):
    """An interval is too narrow, since two names of a file, or one picture of several, are taken for two pictures."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 9)).save("a.png")
    (tmp_path / "b.png").symlink_to("a.png")
    rows = [{"image": name, "prefix": "caption en", "suffix": "?"} for name in ("a.png", "b.png", ["b.png", "a.png"])]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("eval.session.ask_all", lambda model, processor, asks, **_: ["?"] * len(asks))
    vqa.main(["--model", source, "--data", "jsonl:own.jsonl"])
    assert "3 questions, 95 % intervals over pictures" in capsys.readouterr().out


def test_own_examples(source, tmp_path, monkeypatch, capsys):
    """The pictures, prompts and truths of a JSONL file are mixed up, or blind answers depend on the picture."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for number in range(6):
        Image.effect_noise((40, 30), 90 + number).save(f"{number // 2}.png")
        lines.append(
            {"image": f"{number // 2}.png", "prefix": ("count cat", "count dog dog")[number % 2], "suffix": "?"}
        )
    tmp_path.joinpath("own.jsonl").write_text("\n".join(map(json.dumps, [*lines, lines[0] | {"image": "gone.png"}])))
    flags = ["--model", source, "--max-new-tokens", "3", "--data", "jsonl:own.jsonl", "--blind"]
    vqa.main(flags)
    assert "the picture was not used" in capsys.readouterr().out
    vqa.main([*flags, "--json"])
    printed, report = capsys.readouterr()
    assert "left out 1 questions" in report and "gone.png" in report
    out = tmp_path / "runs" / "eval" / "random" / "vqa"
    results = json.loads((out / "results.json").read_text())
    assert [r["question"] for r in results] == [line["prefix"] for line in lines]
    logged = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    said = {(entry["answer"], int(entry["id"][-1]) % 2) for entry in logged[:6]}
    gray = {(entry["answer"], int(entry["id"][-1]) % 2) for entry in logged[6:]}
    assert len(logged) == 12 and len(gray) == 2 < len(said)  # gray: one answer a prompt
    assert json.loads(printed)["random"]["exact_match"]["mean"] == 0
    assert json.loads(printed)["random, blind"]["exact_match"]["questions"] == 6

    for line, result in zip(lines, results, strict=True):  # now every answer is right, in capitals
        line["suffix"] = f" {result['answer'].upper()}\n"
    tmp_path.joinpath("own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(run, "generate", None)  # all is in the log
    vqa.main(flags)
    table = capsys.readouterr().out
    assert "the picture was not used" not in table  # as it was while every answer was wrong
    assert "| random        | 100.00 [100.00, 100.00] |" in table and table.splitlines()[-1] == (
        "in runs/eval/random/vqa: results.json, answers.jsonl"
    )


def test_gray_pictures_of_published_questions(source, tmp_path, monkeypatch, capsys):
    """--data embedded asks others than the default, or the gray column is that of the pictures."""
    monkeypatch.chdir(tmp_path)
    asked = {}

    def ask_all(model, processor, asks, *, progress, **options):
        asked[progress.split(",")[0]] = [(ask.prefix, len({str(a.picture) for a in asks})) for ask in asks]
        return [answers[ask.id] if "vqa" in progress else "nothing" for ask in asks]

    monkeypatch.setattr("eval.session.ask_all", ask_all)
    answers = {str(a.question_id): a.answer for a in vqa.embedded(12).annotations}
    vqa.main(["--model", source, "--data", "embedded", "--limit", "12", "--blind", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["overall"] == 100 and printed["gray"]["overall"] == 0 < printed["blind"]["overall"] < 100
    assert [prefix for prefix, _ in asked["gray"]] == [prefix for prefix, _ in asked["vqa"]]
    assert asked["gray"][0][1] == 1 and asked["vqa"][0][1] == 2
    vqa.main(["--model", source, "--limit", "12", "--json"])
    assert "gray" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "own.jsonl"], "did you mean jsonl:own.jsonl"),
        (["--data", "jsonl:gone.jsonl"], "gone.jsonl"),
        (["--data", "jsonl:own.jsonl", "--questions", "Q"], "leave --data out"),
        (["--data", "jsonl:own.jsonl", "--blind", "Q", "A"], "takes no files"),
        (["--data", "jsonl:own.jsonl", "--prompt", "answer en {question}"], "has complete prompts"),
        (["--data", "vqav2:."], "v2_OpenEnded_mscoco_train2014_questions.json: not found"),
        (["--images", "."], "go together"),
    ],
)
def test_what_cannot_be_asked(flags, message, tmp_path, monkeypatch):
    """A mistake is reported after the model was read, or guessed at."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        vqa.main(["--model", "nowhere", *flags])
