"""`eval.vqa` on official files and on a user's own: what is asked, scored, left out, resumed, and
asked blind."""

from eval import answer, vqa
from eval.bench import parser_of
from eval.data.records import read_data
from eval.question import question_of
from tests.eval.test_eval_commands import FAST, count_asked, noise
from tests.files import read_json, read_lines, table, write_json, write_lines, write_vqav2
from tests.runs import refuses, words


def test_an_empty_answer_is_never_right(tmp_path):
    """Breaks when a model that says nothing is right, or a record without an answer is asked."""
    (tmp_path / "own.jsonl").write_text("""{"prefix": "what", "suffix": " "}
{"prefix": "what", "answers": ["", ""]}
{"prefix": "what", "answers": ["a", ""]}""")
    records = read_data(f"jsonl:{tmp_path / 'own.jsonl'}")
    assert sorted(len(record.turns) for record in records) == [0, 0, 1]
    assert (
        vqa.Vqa().score(question_of(records[0], truth=records[0]), "") == {}
    )  # no model is asked it


def test_own_examples(source, workplace, monkeypatch, told):
    """The pictures, prompts and truths of a JSONL file are mixed up, or blind answers depend on the
    picture."""
    lines = []
    for number in range(6):
        noise(90 + number).save(f"{number // 2}.png")
        kind = ("cat", "dog")[number % 2]
        lines.append({"image": f"{number // 2}.png", "prefix": f"count {kind}", "type": kind})
    lines[5] |= {"image": ["link.png"]}  # another name of a picture is not another picture
    (workplace / "link.png").symlink_to("2.png")
    own = workplace / "own.jsonl"
    write_lines(own, (line | {"suffix": "?"} for line in lines))
    flags = f"--model {source} --data jsonl:own.jsonl --blind {FAST}"
    printed = told(vqa, flags)
    out = workplace / "runs/eval/random/vqa"
    results = read_json(out / "results.json")
    assert [r["question"] for r in results] == [line["prefix"] for line in lines]
    logged = read_lines(out / "answers.jsonl")
    pairs = [(entry["answer"], int(entry["id"][-1]) % 2) for entry in logged]
    said, gray = {*pairs[:6]}, {*pairs[6:]}
    assert len(logged) == 12
    assert len(gray) == 2 < len(said)  # gray: one answer a prompt
    assert printed["random"]["measures"]["exact_match"]["mean"] == 0
    assert set(printed["random"]["summary"]) == {"overall", "cat", "dog"}
    assert printed["random, blind"]["measures"]["exact_match"]["questions"] == 6
    # now every answer is right, in capitals
    right = [f" {result['answer'].upper()}\n" for result in results]
    write_lines(own, (line | {"suffix": said} for line, said in zip(lines, right, strict=True)))
    monkeypatch.setattr(answer, "generate_texts", None)  # all is in the log
    assert told(vqa, flags)["random"]["measures"]["exact_match"]["mean"] == 100
    (of_four,) = told(vqa, flags, "--limit 4")["random"]["measures"].values()
    assert of_four["questions"] == 4
    write_lines(own, (line | {"suffix": "?"} for line in lines))
    again = f"--data jsonl:own.jsonl --results {out}/results.json"
    refuses(vqa, again, "results.json[0]", "the data has changed")


def test_official_files_without_annotations_and_with_a_broken_picture(
    tmp_path, source, capsys, monkeypatch
):
    """One broken file of 40,000 ends a run of hours, or is passed over in silence, or not asked
    when it is repaired."""
    (tmp_path / "val2014").mkdir()
    paths = [tmp_path / f"val2014/COCO_val2014_{number:012d}.jpg" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        noise(number).save(path)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:300])
    asked = [
        {"image_id": n // 2 + 1, "question": f"What is {n}?", "question_id": n} for n in range(6)
    ]
    write_json(tmp_path / "Q", {"data_subtype": "val2014", "questions": asked})
    out = tmp_path / "out"
    flags = f"--model {source} --questions {tmp_path}/Q --images {tmp_path} --out {out} {FAST}"

    def ids():
        return [r["question_id"] for r in read_json(out / "results.json")]

    vqa.main(words(flags))
    printed, report = capsys.readouterr()
    assert "nothing is scored" in printed
    assert "left out 2 of 6 questions" in report
    assert paths[1].name in report
    assert [*read_json(out / "scores.json")["left_out"]] == ["2", "3"]
    assert ids() == [0, 1, 4, 5]
    paths[1].write_bytes(whole)
    sizes = count_asked(monkeypatch)
    vqa.main(words(flags))
    assert sum(sizes) == 2
    assert len(ids()) == 6
    for path in paths:
        path.write_bytes(whole[:300])
    refuses(vqa, flags, "none of 6 questions could be asked", "COCO_val2014")


def test_what_cannot_be_asked(workplace):
    """A mistake is reported after the model was read, or guessed at."""
    for subset in ("train2014", "val2014"):
        write_vqav2(workplace / "V", 2, subset)
    args = parser_of(vqa.Vqa()).parse_args(["--data", "vqav2:V"])
    args.template = vqa.PROMPT
    assert {q.key[:7] for q in vqa.Vqa().questions(args)} == {"val2014"}  # not those of training
    wrong = """--data own.jsonl | does not say what kind
        --data jsonl:own.jsonl --questions Q | leave --data out
        --data jsonl:own.jsonl --prompt {question} | no --prompt
        --images . | --images go together
        --data embedded --images . | --images is of other data
        --annotations A | give both"""
    for flags, message in table(wrong):
        refuses(vqa, f"--model nowhere {flags}", message)
