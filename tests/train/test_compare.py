"""The attention study: fair controls, measures that share no picture, and cells that are done once."""

import json
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from eval import scenes
from eval.records import own_records
from eval.vqa_scoring import official
from model.common import UserError
from tests.files import write_vqav2
from tests.runs import read_cells
from train import compare
from train.optim import count, trainable
from train.settings import Settings
from train.studies import cells, measures
from train.studies.attention import PLAIN, ROWS, control_by_size
from train.systems.open import load_base, open_model

CPU = torch.device("cpu")
BASE = Settings(base="tiny", device="cpu", samples=32, batch_size=16, tasks="vqa,n2o1,n2o2,n4o1", **PLAIN)
FLAGS = "--seeds 2 --samples 32 --batch-size 16 --limit 16 --rates 1e-2 --no-positive --jobs 1 --warmup 0".split()


@pytest.mark.long
def test_the_command_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Breaks when a table, a control, a seed or an interval is missing, or a finished cell is trained again."""
    monkeypatch.setattr(measures, "DOSES", (0, 15))
    command = ["--rows", "fine-tuned", "dex", "--device", "cpu", *FLAGS, "--out", str(tmp_path)]
    compare.main(command)
    text = capsys.readouterr().out
    assert "## Minus the mean of all plain rows" in text and "LoRA r18" in text and "## Range" in text
    lines = read_cells(tmp_path / "comparison.csv")
    counted = Counter((line.row, line.split, line.seed) for line in lines)
    assert all(counted[row, "test", seed] == 5 + 2 for row in ("fine-tuned", "dex", "LoRA r18") for seed in (0, 1))
    assert all(counted[row, "validation", seed] == 5 for row in ("fine-tuned", "dex", "LoRA r18") for seed in (0, 1))
    table = json.loads((tmp_path / "comparison.json").read_text())["tables"]["the mean of all plain rows"]
    assert [gap["measure"] for gap in table] == ["mean", "VQA", "n2o2", "n3d8", "n4o1", "e16", "dose"]
    monkeypatch.setattr(cells, "train_on", None)
    compare.main(command)
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", [name for name in ROWS if name != "fine-tuned"])
def test_the_control_is_the_smallest_that_is_large_enough(name):
    """Breaks when a control has fewer trainable parameters than its row, or a needlessly larger rank."""

    def parameters(changes):
        return count(trainable(open_model(replace(BASE, **changes), torch.device("meta"))[0]).values())

    title, control = control_by_size(BASE, ROWS[name])
    smaller = control | {"r": control["r"] - 1}
    assert parameters(control) >= parameters(ROWS[name]) > parameters(smaller) and title == f"LoRA r{control['r']}"
    assert control["alpha"] / control["r"] == BASE.alpha / BASE.r and control.items() >= PLAIN.items()


def test_rows_of_a_seed_learn_from_the_same():
    """Breaks when a row and its control see other data, or all seeds of the embedded scenes see the same."""

    def learned(seed, **changes):
        return measures.training_records(replace(BASE, seed=seed, **changes), 0)

    records = learned(0)
    assert learned(0, attention="twin", lr=1.0) is records and records[0].pictures[0]() is records[0].pictures[0]()
    tasks = Counter(record.name.partition("/")[0] for record in records)
    assert tasks == dict.fromkeys(("vqa", "n2o1", "n2o2", "n4o1"), 8)
    assert [record.suffix for record in learned(1)] != [record.suffix for record in records]


# --- data on disk -----------------------------------------------------------------------------------------------------


def write_jsonl(folder, pictures, answer="yes"):
    lines = []
    for number in range(pictures):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        lines += [json.dumps({"image": f"{number}.png", "prefix": f"what {i}", "suffix": answer}) for i in range(2)]
    (folder / "own.jsonl").write_text("\n".join(lines) + "\n")
    return f"jsonl:{folder / 'own.jsonl'}"


def on_disk(*data, **changes):
    measures._training_records.cache_clear()  # what a new process would not have
    measures._held_out.cache_clear()
    return replace(BASE, data=data, **changes)


@pytest.mark.parametrize("kind", ["vqav2", "jsonl"])
def test_no_picture_is_in_two_splits_of_any_seed(kind, processor, tmp_path):
    """Breaks when what one seed is tested on, another seed, or the choice of a rate, has seen."""
    if kind == "vqav2":
        write_vqav2(tmp_path)
    base = on_disk(f"vqav2:{tmp_path}" if kind == "vqav2" else write_jsonl(tmp_path, 20), validation=0.3)
    validation, test = (measures.vqa_task(base, split, 100) for split in ("validation", "test"))
    held_out = {*validation.groups, *test.groups}
    assert len(set(validation.groups)) == len(set(test.groups)) == 3 and len(held_out) == 6
    for seed in range(3):
        learned = {record.key for record in measures.training_records(replace(base, seed=seed), base.seed)}
        assert len(learned) == 14 and not learned & held_out
    scores = cells.ask(load_base(base, CPU), processor, base, {"VQA": test}, tmp_path)
    assert len(scores["VQA"]) == len(test.groups) == (9 if kind == "vqav2" else 6)


def test_val2014_is_the_test_split_where_it_is(tmp_path):
    """Breaks when VQAv2's validation files lie in the folder and something else is reported."""
    write_vqav2(tmp_path)
    write_vqav2(tmp_path, subset="val2014")
    task = measures.vqa_task(on_disk(f"vqav2:{tmp_path}", validation=0.3), "test", 100)
    assert len(task.groups) == 60 and all(name.startswith("val2014/") for name in task.groups)


def test_data_on_disk_are_part_of_a_cell(tmp_path):
    """Breaks when a changed answer or picture of a user's file is answered from finished cells."""

    def marks(answer="yes", blue=0):
        base = on_disk(write_jsonl(tmp_path, 10, answer), validation=0.3)
        for number in range(10):
            Image.new("RGB", (8, 8), (number, 0, blue)).save(tmp_path / f"{number}.png")
        return measures.data_mark(base), measures.vqa_task(base, "test", 10).mark

    first = marks()
    assert marks() == first and marks(blue=7)[0] != first[0]
    assert all(old != new for old, new in zip(first, marks("no"), strict=True))


def test_own_examples_are_asked_and_scored_in_full(tmp_path):
    """Breaks when an earlier turn, a second picture or one of several right answers is lost, or text alone crashes."""
    says = [{"from": role, "value": text} for role, text in zip(("human", "gpt") * 2, "abcd", strict=True)]
    rows = [
        {"image": ["0.png", "1.png"], "prefix": "which", "suffix": "one"},
        {"prefix": "text", "suffix": "alone"},
        {"image": "0.png", "conversations": says},
        {"image": "0.png", "prefix": "colour", "answers": ["red"] * 9 + ["blue"]},
        {"image": "0.png", "prefix": "shade", "answers": ["dark", "light"]},
    ]
    write_jsonl(tmp_path, 2)
    (tmp_path / "own.json").write_text(json.dumps(rows))
    questions = measures.own_questions(own_records(tmp_path / "own.json"))
    asked = {question.prefix: (len(question.images()), question.before) for question in questions}
    before = (("a", "b"),)
    assert asked == {"which": (2, ()), "text": (0, ()), "c": (1, before), "colour": (1, ()), "shade": (1, ())}
    for said, scores in (("one alone d red light", [1, 1, 1, 1, 1]), ("two ALONE c blue black", [0, 0, 0, 0.3, 0])):
        found = [official(q.truth, text) for q, text in zip(questions, said.split(), strict=True)]
        assert found == pytest.approx(scores)


def test_a_study_reads_tar_shards(tmp_path, monkeypatch):
    """Breaks when a damaged sample of tar shards ends a study."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path, 1)
    with tarfile.open("s.tar", "w") as tar:
        for name in "abcdef":
            Path(f"{name}.json").write_text('{"prefix": "what", "suffix": "yes"}' if name != "b" else "{")
            tar.add("0.png", f"{name}.png")
            tar.add(f"{name}.json")
    base = on_disk("shards:s.tar", validation=0.9)
    assert measures.vqa_task(base, "test", 10).groups and len(measures.data_mark(base)) == 16


def test_pictures_that_are_all_gone_are_no_score(tmp_path, processor, capsys):
    """Breaks when a folder of pictures that is not there is stored as a score of 0."""
    base = on_disk(write_jsonl(tmp_path, 4), validation=0.9)
    model, task = load_base(base, CPU), measures.vqa_task(base, "test", None)
    first, second = sorted(Path(name) for name in set(task.groups))
    first.unlink()
    (tmp_path / "cell").mkdir()
    asked = model, processor, base, {"VQA": task}, tmp_path / "cell"
    assert len(cells.ask(*asked)["VQA"]) == 4
    assert capsys.readouterr().err.count("2 questions count as wrong") == 1
    second.unlink()
    with pytest.raises(UserError, match="none of the 4 questions can be asked.*png"):
        cells.ask(*asked)


def test_tasks_of_the_embedded_scenes_are_even():
    """Breaks when a needle is in one place more often than in another, or a dose has other distractors than it says."""
    tasks = measures.embedded_tasks("test", 32, "constrained")
    assert [tasks[name].chance for name in ("n2o2", "n4o1", "e16")] == [25, 6.25, 50]
    assert Counter(tasks["n4o1"].labels) == {str(divmod(place, 4)): 1 for place in range(16)}
    assert Counter(tasks["dose"].rungs) == {str(dose): 16 for dose in measures.DOSES}
    for rung, group in zip(tasks["dose"].rungs, tasks["dose"].groups, strict=True):
        assert group.startswith(f"{rung}/")
    assert all(len(scenes.needle(f"n4d{dose}", "test", 0).scene.objects) == dose + 1 for dose in measures.DOSES)
    gap = tasks["dose"].view(torch.arange(96.0).numpy() // 16 * 3)  # scores that grow by 3 from dose to dose
    assert gap.mean() == pytest.approx(10.9 / 0.78593, rel=1e-4)  # the least-squares line, by hand


# --- flags ------------------------------------------------------------------------------------------------------------


TOLD = {"--lr 1": "--lr", "--no-evaluate": "evaluate", "--coco x": "--coco", "--data jsonl:x": "x"}


@pytest.mark.parametrize("flags", TOLD)
def test_mistakes_are_told_before_anything_is_trained(flags, tmp_path, monkeypatch):
    """Breaks when a wrong flag costs a comparison, or is passed over in silence."""
    monkeypatch.setattr(cells, "train_on", None)
    with pytest.raises(UserError, match=TOLD[flags]):
        compare.main(["--base", "tiny", "--device", "cpu", "--out", str(tmp_path), *flags.split()])


def test_held_out_pictures_must_be_there(tmp_path):
    """Breaks when nothing is held out and the comparison starts all the same."""
    with pytest.raises(UserError, match="validation"):
        measures.vqa_task(on_disk(write_jsonl(tmp_path, 4), validation=0.2), "test", 10)
