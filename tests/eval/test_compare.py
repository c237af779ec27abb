"""Several models in one call: one table, with intervals and paired differences."""

import json
import re

import pytest
import torch

from eval import pope, session
from eval.command import Report, command_parser
from eval.compare import compare
from eval.session import Subject
from lora.adapter import lora_layers
from model.common import UserError

SMALL = ["--limit", "6", "--max-new-tokens", "2", "--json"]


def report(scores: dict[str, float], **more) -> Report:
    pictures = {id_: f"picture {int(id_) // 2}" for id_ in scores}
    return Report({}, [], scores={"accuracy": scores}, pictures=pictures, **more)


def test_differences_are_paired():
    """Questions that one model could not be asked count, or a difference is that of two means."""
    first = {str(n): float(n % 2) for n in range(40)}
    better = {id_: 1.0 for id_ in first if int(id_) >= 20}
    values, lines = compare({"a": report(first), "b": report(better, blind={"accuracy": {"0": 0.0, "1": 1.0}})})
    assert values["a"]["accuracy"]["mean"] == 50 and "difference" not in values["a"]["accuracy"]
    assert values["b"]["accuracy"]["mean"] == 100 and values["b"]["accuracy"]["questions"] == 20
    assert values["b"]["accuracy"]["difference"] == {"mean": 50, "low": 50, "high": 50}  # each picture: one of two
    assert values["b, blind"]["accuracy"]["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert lines[0].startswith("40 questions, ") and "gray pictures" in lines[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert rows[0] == ["%", "accuracy", "difference"] and [row[0] for row in rows[2:]] == ["a", "b", "b, blind"]
    both, (head, *_) = compare({"a": report(first)._replace(scores={"exact": first, "vqa": first})})
    assert head.startswith("40 questions, ") and "difference" not in head and both["a"]["vqa"]["mean"] == 50
    assert compare({"a": Report({}, []), "b": Report({}, [])})[0] == {"a": {}, "b": {}}  # nothing to score
    assert rows[2][2] == "" and rows[3][2].endswith("*") and rows[4][2].endswith("n.s.")


def test_models_that_answered_other_questions():
    """A mean over fewer questions looks like one over all, or a measure that the first model lacks is a crash."""
    every = {"0": 1.0, "1": 0.0, "2": 1.0}
    a, b = report({"0": 1.0}), report(every)._replace(scores={"accuracy": every, "vqa": every})
    values, lines = compare({"a": a, "b": b})
    assert lines[0].startswith("3 questions, ") and lines[0].endswith("; a has answered only 1 of them")
    assert values["a"].keys() == {"accuracy"} and "difference" not in values["b"]["vqa"]
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_a_model_in_few_bits_is_one_of_the_table(source, twin, tmp_path, monkeypatch, capsys):
    """--quantize changes the answers of the whole model too, is not in bf16, or forgets the adapter."""
    opened = []
    original = session.open_model
    monkeypatch.setattr(session, "open_model", lambda *args: opened.append(original(*args)) or opened[-1])
    monkeypatch.chdir(tmp_path)
    pope.main(
        ["--model", source, "--adapter", twin, "--quantize", "none", "--quantize", "int8", "--device", "cpu", *SMALL]
    )
    assert list(json.loads(capsys.readouterr().out)["models"]) == ["twin", "twin-int8"]
    (whole, _), (small, _) = opened
    assert whole.quantized is None and small.quantized == "int8" and small.grafts == whole.grafts
    assert {layer.base_layer.dtype for layer in lora_layers(small).values()} == {torch.bfloat16}
    assert len(lora_layers(small)) == len(lora_layers(whole)) > 0
    plain = session.open_plain(Subject(source, None, "plain", quantize="int8"), next(small.parameters()))
    assert plain.quantized == "int8" and next(plain.parameters()).dtype == torch.bfloat16


@pytest.mark.long
def test_several_models_are_one_table(source, twin, tmp_path, monkeypatch, capsys):
    """The base alone and an adapter on it are asked as one model, or share their files."""
    monkeypatch.chdir(tmp_path)
    pope.main(["--model", source, "--adapter", "none", "--adapter", twin, *SMALL])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["models"]) == ["random", "twin"]
    for title, values in printed["models"].items():
        found = printed["comparison"][title]["accuracy, random"]
        assert found["mean"] == 100 * values["random"]["accuracy"] and found["questions"] == 6
        assert (tmp_path / "runs" / "eval" / title / "pope" / "answers.jsonl").is_file()
    pope.main(["--model", source, "--adapter", twin, "--adapter", "none", "--out", "out", *SMALL[:-1]])
    table = capsys.readouterr().out
    assert re.search(r"in out/twin: .*\nin out/random: .*\n18 questions", table) and table.count("| random ") == 1
    assert (tmp_path / "out" / "twin" / "answers-popular.jsonl").is_file()


def test_models_that_cannot_be_told_apart(source, twin, tmp_path, monkeypatch):
    """Two runs of one name write over each other, or a call that means nothing is guessed at."""
    monkeypatch.chdir(tmp_path)

    def models(*flags):
        parser = command_parser("test", "")
        session.add_model_flags(parser, many=True)
        return session.models_of(parser.parse_args(flags))

    titles = [subject.title for subject in models("--model", "a/x", "--model", "b/x", "--model", "c")]
    assert titles == ["a_x", "b_x", "c"]
    kinds = models("--model", "a", "--quantize", "none", "--quantize", "int4")
    assert [(subject.title, subject.quantize) for subject in kinds] == [("a", None), ("a-int4", "int4")]
    with pytest.raises(UserError, match="named twice"):
        models("--adapter", twin, "--adapter", twin)
    with pytest.raises(UserError, match="--adapter with several --model"):
        models("--model", "a", "--model", "b", "--adapter", twin)
