"""Bad input of an evaluation is one line that names the file, the record and the remedy; nothing is scored silently."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from PIL import Image

from eval import ask, attention, datasets, needle, needle_files, own_files, pope, shift, vqa
from eval.command import Ask
from eval.needle_scoring import read_responses
from eval.run import ask_all, read_log
from model.common import UserError
from tests.eval.test_vqa_scorer import TEXTVQA
from weights.load import load_model

FAST = ["--limit", "2", "--max-new-tokens", "1"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (112, 112), (10, 200, 90)).save("p.png")
    return tmp_path


def one_line(call, *parts: str) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and message.isprintable() and len(message) < 1000, message
    assert all(part in message for part in parts), message
    return message


def write(name: str, value) -> str:
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(value if isinstance(value, str) else json.dumps(value))
    return name


# Ids and answers


def question(id_, text="What?", image="p.png", **more):
    return {"question_id": id_, "image": image, "question": text} | more


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "b", "a"), (0, "00", "0")])
def test_ids_that_a_log_cannot_tell_apart_are_refused(ids):
    """Breaks when the answer to question 1 is that to question "1"."""
    write("Q", {"questions": [question(id_) for id_ in ids]})
    one_line(lambda: datasets.read_questions("Q"), "Q: 1 duplicate id(s)")
    write(
        "P", "".join(json.dumps({"question_id": i, "image": "p.png", "text": "?", "label": "no"}) + "\n" for i in ids)
    )
    one_line(lambda: datasets.read_pope("P"), "P: 1 duplicate id(s)")


def test_questions_of_one_id_keep_their_own_answers(processor):
    """Breaks when answers are kept by id: two kinds of needle tests, or two files, may have the same ones."""
    model = load_model("embedded").eval()
    picture = Image.open("p.png")
    asks = [Ask("same", "key", picture, prompt) for prompt in ("count dog", "caption en", "exist cat")]
    single = [ask_all(model, processor, [one], max_new_tokens=4)[0] for one in asks]
    assert ask_all(model, processor, asks, max_new_tokens=4) == single and len(set(single)) == 3


@pytest.mark.parametrize(
    "line",
    [
        '{"mark": "x", "answer": null}',
        '{"mark": "x", "answer": 7}',
        '{"mark": ["x"], "answer": "y"}',
        '{"mark": 1, "answer": "y"}',
        '{"answer": "y"}',
        "7",
        "[]",
        "null",
        "{",
        '{"mark": "x", "answer": "\\ud800"}',
        "[" * 100_000,
        '{"mark": "x", "answer": "y", "id": ' + "9" * 10_000 + "}",
    ],
)
def test_a_log_of_something_else_is_refused(line, tmp_path):
    """Breaks when an answer null drops a question, or a broken line is a traceback."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"mark": "m", "answer": "a"}\n' + line + "\n")
    one_line(lambda: read_log(path), "answers.jsonl:2: ", "delete")
    path.write_text('{"mark": "m", "answer": "a"}\n' + line)  # cut short: the process ended
    assert read_log(path) == {"m": "a"} and path.read_text().count("\n") == 1


@pytest.mark.parametrize(
    "truth",
    [
        "1, 0, 0",
        "0, 1, 1",
        "0, 0, 1",
        "-1",
        "1, 1, 1;2, 2, 2",
        "١, 1, 1",
        "100, 1, 1",
        "1, 1, 99999999",
        "01, 1, 1",
        "",
    ],
)
def test_truths_are_places(truth, tmp_path):
    """Breaks when half a negative counts as a place, or a heatmap of 10⁸ rows is drawn."""
    path = tmp_path / "F.json"
    record = {"id": 0, "response": "1, 1, 1", "ground_truth": truth, "target_path": "x", "caption": "x"}
    path.write_text(json.dumps([record]))
    one_line(lambda: read_responses(path), "F.json[0]: ground_truth")
    path.write_text(json.dumps([record | {"ground_truth": "1, 2, 1; 0, 0, 0"}]))
    assert len(read_responses(path)) == 1


# Every field of every file

VQA = {"data_subtype": "val2014", "questions": [{"image_id": 7, "question": "Is it?", "question_id": 70}]}
ANNOTATED = {
    "annotations": [
        {
            "question_id": 70,
            "question_type": "is",
            "answer_type": "yes/no",
            "multiple_choice_answer": "yes",
            "answers": [{"answer": "yes", "answer_id": 1}, {"answer": "no", "answer_id": 2}],
        }
    ]
}
GQA = {"1": {"question": "Is it?", "imageId": "7", "answer": "yes", "isBalanced": True, "types": {"structural": "x"}}}
POPE = {"question_id": 1, "image": "p.png", "text": "Is it?", "label": "yes"}
GRIDS = {"s.jpg": {"0_0": "a.jpg", "0_1": "b.jpg", "1_0": "c.jpg", "1_1": "d.jpg"}}
NEEDLES = [{"id": 0, "image_ids": ["s.jpg"], "index": 0, "row": 0, "col": 1, "target": "b.jpg"}]
CAPTIONS = {"images": [{"id": 1, "file_name": "b.jpg"}], "annotations": [{"image_id": 1, "caption": "a cat"}]}
RESPONSES = [{"id": 0, "response": "1, 1, 1", "ground_truth": "1, 1, 1"}]
EXAMPLE = {"image": "p.png", "prefix": "a", "suffix": "b"}


def read_needles(**changed):
    for name, value in ({"G": GRIDS, "N": NEEDLES, "C": CAPTIONS} | changed).items():
        write(name, value)
    return needle_files.read_needle_tests("G", "N", "C")


READERS = {
    "questions": (VQA, lambda value: datasets.read_questions(write("F", value))),
    "annotations": (ANNOTATED, lambda value: datasets.read_annotations(write("F", value))),
    "gqa questions": (GQA, lambda value: datasets.read_questions(write("F", value))),
    "gqa annotations": (GQA, lambda value: datasets.read_annotations(write("F", value))),
    "textvqa": (TEXTVQA, lambda value: datasets.read_annotations(write("F", value))),
    "pope": (POPE, lambda value: datasets.read_pope(write("F", json.dumps(value)))),
    "examples": (EXAMPLE, lambda value: own_files.read_examples(write("F", json.dumps(value)))),
    "grids": (GRIDS, lambda value: read_needles(G=value)),
    "needles": (NEEDLES, lambda value: read_needles(N=value)),
    "captions": (CAPTIONS, lambda value: read_needles(C=value)),
    "responses": (RESPONSES, lambda value: read_responses(write("F", value))),
}
HOSTILE = [
    None,
    True,
    -5,
    2**70,
    1.5,
    "",
    "x" * 5000,
    "\ud800",
    "../../etc/passwd",
    "\0",
    [],
    [None],
    {},
    {"a": None},
    [[]],
]


def places(value, path=()):
    """The paths of all values within a JSON value, itself included."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", READERS)
def test_any_value_anywhere_is_read_or_refused_in_one_line(name):
    """Breaks when a value of another type or range, at any place of a file, ends in a traceback."""
    good, read = READERS[name]
    read(good)
    refused = 0
    for path in places(good):
        for value in HOSTILE:
            try:
                read(changed(good, path, value))
            except UserError as error:
                message = str(error)
                assert "\n" not in message and message.isprintable() and len(message) < 1000, (path, value, message)
                refused += 1
    assert refused > len(HOSTILE)


# Scorings


def vqa_files(answers: int, ids: bool = True, questions: int = 3) -> list[str]:
    write("Q", {"questions": [question(n, f"What is {n}?") for n in range(questions)]})
    given = [{"answer": "cat"} | ({"answer_id": n} if ids else {}) for n in range(answers)]
    write("A", {"annotations": [{"question_id": n, "answers": given} for n in range(questions)]})
    write("R", [{"question_id": n, "answer": "cat"} for n in range(questions)])
    return ["score", "--questions", "Q", "--annotations", "A", "--results", "R"]


@pytest.mark.parametrize("scoring", ["official", "textvqa", "vizwiz"])
def test_a_scoring_that_cannot_apply_says_so(scoring):
    """Breaks when right answers to a file with one answer per question score 0.00 without a word."""
    flags = vqa_files(1)
    one_line(
        lambda: vqa.main([*flags, "--scoring", scoring]), "A: ", f"{scoring} scoring cannot apply", "--scoring gqa"
    )


def test_the_default_scoring_fits_the_file(capsys):
    """Breaks when the default is the official one, whatever the annotations are."""
    for answers, scoring in ((1, "gqa"), (10, "official")):
        vqa.main(vqa_files(answers))
        assert f"{scoring} scoring" in (printed := capsys.readouterr().out) and "100.00" in printed
    one_line(lambda: vqa.main([*vqa_files(10, ids=False), "--scoring", "official"]), "answer_id")
    write("T", TEXTVQA)
    write("R", [{"question_id": 1, "answer": "joe's"}])
    vqa.main(["score", "--questions", "T", "--results", "R"])
    assert "textvqa scoring" in capsys.readouterr().out
    vqa.main([*vqa_files(2), "--scoring", "official"])
    assert "best possible accuracy is 33.33 %" in capsys.readouterr().err


@pytest.mark.parametrize("scoring", [[], ["--scoring", "official"], ["--scoring", "paper"]])
def test_what_is_not_scored_is_said(scoring, capsys):
    """Breaks when, without --annotations, nothing is printed but the files."""
    vqa_files(1)
    asked = ["--model", "embedded", "--questions", "Q", "--images", ".", *FAST, "--out", "out", *scoring]
    vqa.main(asked)
    assert "Q has no answers: without --annotations nothing is scored" in capsys.readouterr().err
    write("Q", {"questions": [question(n, answers=["cat"] * 10) for n in range(3)]})
    if scoring != ["--scoring", "official"]:  # which cannot apply to texts without ids
        vqa.main(asked)
        assert "VQA accuracy (%)" in capsys.readouterr().out


def test_pictures_of_vizwiz_are_found():
    """Breaks when VizWiz_val_00000000.jpg is looked for as VizWiz_val_00000000.jpg.jpg."""
    name = "VizWiz_val_00000000.jpg"
    write("V", {"data_subtype": "val", "questions": [{"image_id": name, "question": "?", "question_id": 0}]})
    assert datasets.read_questions("V")[0].image == name
    write("T", {"data": [{"image_id": "0f3a.b", "question": "?", "question_id": 0}]})
    assert datasets.read_questions("T")[0].image == "0f3a.b.jpg"


# Paths, names and numbers

ASK = ["--image", "p.png", "--prompt", "count dog", "--max-new-tokens", "1"]
OUT = {
    "vqa": (vqa, FAST, "--out", ""),
    "pope": (pope, FAST, "--out", ""),
    "needle": (needle, FAST, "--out", ""),
    "shift": (shift, ["--limit", "2"], "--out", ""),
    "attention": (attention, ASK[:4], "--out", ""),
    "ask": (ask, ASK, "--draw", "/x.png"),
}
BAD_PATHS = ["p.png/a", "/proc/self/none", "/sys/none", "a\0b", "x" * 300, "dangling", "\x1b[31mred/" + "y" * 300]


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("name", OUT)
def test_an_output_that_cannot_be_written_is_refused_at_once(name, path, monkeypatch):
    """Breaks when a path costs an hour of asking before it is refused, or ends in a traceback."""
    command, flags, flag, suffix = OUT[name]
    os.symlink("nowhere", "dangling")

    def never(*args, **options):
        raise AssertionError("a model is read")

    monkeypatch.setattr("eval.session.load_model", never)
    before = sorted(os.listdir())
    one_line(lambda: command.main(["--model", "embedded", *flags, flag, path + suffix]))
    assert sorted(os.listdir()) == before


def test_a_drawing_over_a_folder_or_without_suffix_is_refused():
    """Breaks when the answers are printed and then the drawing fails."""
    os.mkdir("d.png")
    for path in ("d.png", "boxes", "boxes.txt"):
        one_line(lambda path=path: ask.main(["--model", "embedded", *ASK, "--draw", path]), path)


@pytest.mark.parametrize("path", ["gone.png", ".", "p.png/x", "a\0b", "x" * 300, "/dev/null", "pipe", "\x1b[31m.png"])
def test_a_picture_that_cannot_be_read_is_one_line(path):
    """Breaks when a pipe blocks for ever, or a name colors the terminal."""
    os.mkfifo("pipe")
    for command, flags in ((ask, ASK[2:]), (attention, ASK[2:4])):
        one_line(lambda command=command, flags=flags: command.main(["--model", "embedded", "--image", path, *flags]))


OUTSIDE = ["../secret.png", "/etc/passwd", "a/../../secret.png"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_stay_inside_the_folder(name, tmp_path):
    """Breaks when a data file makes an evaluation open pictures elsewhere, unless that is allowed."""
    folder = tmp_path / "data"
    (folder / "a").mkdir(parents=True)
    os.chdir(folder)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    write("Q", {"questions": [question(1, image=name)]})
    write("P", json.dumps(POPE | {"image": name}))
    write("E", json.dumps(EXAMPLE | {"image": name}))
    write("C", {name: "a cat", "b.jpg": "b"})
    data = {
        vqa: ["--questions", "Q", "--images", "."],
        pope: ["--questions", "P", "--images", "."],
        shift: ["--data", "E"],
        needle: ["--coco", ".", "--captions", "C"],
    }
    for command, flags in data.items():
        one_line(lambda command=command, flags=flags: command.main(["--model", "embedded", *flags]), "--allow-outside")
    if name.endswith(".png"):
        vqa.main(["--model", "embedded", *data[vqa], "--allow-outside", *FAST, "--out", "out"])
        assert json.loads((folder / "out" / "results.json").read_text())[0]["question_id"] == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"config.json": "{", "summary.json": "{}"},
        {"config.json": "[]", "summary.json": "{}"},
        {"config.json": "\xff", "summary.json": "{}"},
        {"config.json": '{"base": "embedded"}', "summary.json": "{}"},
        {"config.json": '{"base": "embedded"}', "summary.json": "{}", "adapter_config.json": "["},
        {"config.json": None, "summary.json": "{}"},
    ],
)
def test_one_broken_run_does_not_break_the_others(broken, capsys):
    """Breaks when `eval.ask` without flags ends because some other run was cut short."""
    os.makedirs("runs/broken")
    for name, text in broken.items():
        if text is None:
            os.mkdir(f"runs/broken/{name}")
        else:
            with open(f"runs/broken/{name}", "wb") as file:
                file.write(text.encode("latin-1"))
    os.utime("runs/broken/summary.json", (time.time() + 100,) * 2)
    ask.main(ASK)
    printed = capsys.readouterr()
    assert printed.out.startswith("p.png | count dog | ")
    assert re.fullmatch("skipped runs/broken: .*\nembedded answers\n", printed.err)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (ask, [*ASK[:4], "--max-new-tokens", "9000"]),
        (ask, [*ASK[:4], "--max-new-tokens", "10", "--max-length", "9"]),
        (ask, ["--image", "p.png", "--prompt", "cat " * 9000]),
        (ask, [*ASK, "--temperature", "-1"]),
        (ask, [*ASK, "--temperature", "nan"]),
        (ask, [*ASK, "--temperature", "inf"]),
        (ask, [*ASK, "--top-p", "nan"]),
        (vqa, ["--limit", "1", "--max-new-tokens", "100000"]),
        (attention, [*ASK[:4], "--token", "99999"]),
        (attention, [*ASK[:4], "--token", "9" * 30]),
    ],
)
def test_numbers_out_of_range_are_one_line(command, flags):
    """Breaks when a number fills the memory, samples from NaN, or ends in a traceback."""
    one_line(lambda: command.main(["--model", "embedded", *flags]))


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("ask", [*ASK, "--seed", "1" + "0" * 30]),
        ("ask", [*ASK, "--max-new-tokens", "0"]),
        ("vqa", ["--limit", "1" + "0" * 5000]),
        ("vqa", ["--batch-size", "1e3"]),
        ("needle", ["--side", "0"]),
        ("needle", ["--needles", "-1"]),
    ],
)
def test_flags_out_of_range_exit_with_2(module, flags, capsys):
    """Breaks when a flag's value is taken that no command can work with."""
    with pytest.raises(SystemExit) as caught:
        {"ask": ask, "vqa": vqa, "needle": needle, "attention": attention}[module].main(flags)
    assert caught.value.code == 2 and "expected a whole number" in capsys.readouterr().err


def test_names_are_escaped_and_shortened_on_a_terminal(capsys):
    """Breaks when a name from a file or a model's words reach the terminal as control characters."""
    flags = vqa_files(10)
    annotations = json.loads(pathlib.Path("A").read_text())
    for record in annotations["annotations"]:
        record["question_type"] = "\x1b[2J\r" + "x" * 100_000
    write("A", annotations)
    vqa.main(flags)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[2J\\r" in out and max(map(len, out.splitlines())) < 20_000
    os.rename("p.png", "\x1b[31mp\n.png")
    done = subprocess.run(
        [sys.executable, "-m", "eval.ask", "--model", "embedded", "--image", "\x1b[31mp\n.png", *ASK[2:]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(vqa.__file__))},
    )
    assert done.returncode == 0 and re.match(r"\\x1b\[31mp\\n.png \| count dog \| \w*\n$", done.stdout), done
