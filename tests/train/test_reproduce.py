"""The paper's experiment in one command: its plan, its choice, its tables beside the published figures, done once."""

import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from model.common import UserError
from tests.files import write_captions, write_mmneedle, write_vqav2
from train import reproduce, supervised
from train.recipes import RECIPES
from train.settings import Settings
from train.studies import cells, paper, paper_report
from train.studies.attention_data import training_records
from train.studies.cells import PLAIN

SMALL = ["--samples", "20", "--vqa-limit", "12", "--needle-limit", "6", "--device", "cpu"]


def run(out: Path, *flags: str) -> tuple[dict, str]:
    reproduce.main(["paligemma", *flags, "--out", str(out)])
    return json.loads((out / "reproduction.json").read_text()), (out / "reproduction.md").read_text()


@pytest.fixture
def trainings(monkeypatch):
    """What is trained, in order, and how often a model learns from a batch."""
    done, train = [], cells.train_on

    def noted(records, model, optimizer, processor, settings, *rest):
        done.append((settings.attention, len(records), settings.fraction))
        return train(records, model, optimizer, processor, settings, *rest)

    monkeypatch.setattr(cells, "train_on", noted)
    return done


@pytest.mark.long
def test_the_plan_in_miniature_is_interrupted_and_goes_on(tmp_path, trainings, monkeypatch, capsys):
    """Breaks when a part, a table, a figure or a published number is missing, a signal loses cells, or the choice is
    not by the scores of Part 1."""
    steps, loss = [], supervised.supervised_loss

    def interrupted(*args):
        steps.append(1)
        if len(steps) == 5:  # the first of the third model: two steps each
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*args)

    monkeypatch.setattr(supervised, "supervised_loss", interrupted)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, *SMALL)
    assert stopped.value.code == 128 + signal.SIGTERM
    summary, text = run(tmp_path, *SMALL)
    assert len(steps) == 5 * 2 + 2 * 5  # no step is taken twice
    kinds = ["softmax", "shared", "softmax", "softmax", "shared", "split"]  # the interrupted one twice
    assert [kind for kind, *_ in trainings[:6]] == kinds and {count for _, count, _ in trainings[:6]} == {8}
    assert [(count, share) for _, count, share in trainings[6:]] == [(20, 1.0)] * 2
    scores = {one["name"]: one["score"]["mean"] for one in summary["part_1"]}
    assert summary["chosen"] == {
        "without": max(("paper-1", "paper-3"), key=scores.get),
        "with": max(("paper-2", "paper-4", "paper-5"), key=scores.get),
    }
    assert [one["name"] for one in summary["part_2"].values()] == [f"{n}-full" for n in summary["chosen"].values()]
    assert list(summary["needles"]) == ["baseline", "without", "with"]
    for published in ("53.21", "51.91", "35.72", "33.91", "41.32", "28.75", "30.42", "34.72"):
        assert f" {published} |" in text
    for one in [*summary["part_1"], *summary["part_2"].values()]:
        assert one["run"]["tokens"] > 20 * one["run"]["samples"] > 0
        assert one["run"]["seconds"] > 0 and one["run"]["peak_bytes"] > 1e6 and one["run"]["curve"]
        assert one["settings"]["diff_in"] == "both" and one["settings"]["step_batch"] == 4
    panels, curves = (Image.open(tmp_path / name) for name in ("figure2.png", "learning.png"))
    assert panels.width > 3 * panels.height / 2 and curves.width > 1000
    assert text in capsys.readouterr().out

    monkeypatch.setattr(cells, "train_on", None)  # nothing is trained or asked again
    monkeypatch.setattr("eval.vqa.answer", None)
    assert run(tmp_path, *SMALL) == (summary, text)


@pytest.mark.long
def test_official_files_and_finished_runs(tmp_path, trainings, capsys):
    """Breaks when the official layouts are read otherwise than by the commands, a flag does not override a recipe,
    or a finished run is trained again."""
    write_vqav2(tmp_path / "vqa", images=6)
    write_vqav2(tmp_path / "vqa", images=6, subset="val2014")
    coco = write_mmneedle(tmp_path / "coco")
    flags = ["--data", f"vqav2:{tmp_path / 'vqa'}", "--coco", str(coco), "--captions", str(coco / "C")]
    flags += ["--metadata", str(coco), "--vqa-limit", "4", "--needle-limit", "4", "--rows", "baseline,paper-1,paper-4"]
    flags += ["--diff-in", "decoder", "--device", "cpu", "--epochs", "1"]
    summary, text = run(tmp_path / "a", *flags)
    first, second = summary["part_1"]
    assert [count for _, count, _ in trainings] == [6, 6, 18, 18]  # 40 % of six pictures, three questions each; all
    assert second["settings"]["diff_in"] == "decoder" and second["settings"]["optimizer"] == "adam"
    assert summary["examples"] == {"vqa": 4, "needles": 4} and set(summary["needles"]["with"]["by"]) == {
        f"({row}, {column})" for row in (0, 1) for column in (0, 1)
    }
    names = json.loads((Path(first["run"]["folder"]) / "answers-VQA.jsonl").read_text().splitlines()[0])
    assert str(names["id"]).isdigit()

    trainings.clear()
    folders = [one["run"]["folder"] for one in (first, *summary["part_2"].values())]
    again, _ = run(tmp_path / "b", *flags, "--from", *folders)
    assert [kind for kind, *_ in trainings] == ["shared"]  # the one that was not given
    assert [one["score"] for one in again["part_1"]] == [one["score"] for one in summary["part_1"]]
    assert again["needles"]["with"]["score"] == summary["needles"]["with"]["score"]
    assert set(again["from"]) == {"paper-1", "paper-1-full", "paper-4-full"}
    with pytest.raises(UserError, match="trained on another base than --base tiny"):
        run(tmp_path / "c", *flags, "--base", "tiny", "--from", folders[0])
    only, _ = run(tmp_path / "c", *flags, "--rows", "baseline", "--from", f"paper-4-full={folders[2]}")
    assert len(trainings) == 1 and list(only["needles"]) == ["baseline", "with"] and not only["part_1"]
    assert only["needles"]["with"]["score"] == summary["needles"]["with"]["score"]
    (Path(folders[0]) / "config.json").write_text(json.dumps({"lr": 1}))
    with pytest.raises(UserError, match="no model of Table 1: say which it stands for, paper-1="):
        run(tmp_path / "d", *flags, "--from", folders[0])


def test_needles_are_drawn_from_cocos_own_captions(tmp_path):
    """Breaks when COCO's captions_val2014.json is not read, a needle has the caption of another picture, or a picture
    that is not there, or has no caption, is stitched in."""
    write_vqav2(tmp_path / "vqa", images=4, subset="train2014")
    write_vqav2(tmp_path / "vqa", images=4, subset="val2014")
    coco = write_mmneedle(tmp_path / "coco")
    names = sorted(path.name for path in (coco / "val2014").iterdir())
    captions = write_captions(coco / "captions_val2014.json", [*names[:10], "COCO_val2014_000000000099.jpg"])
    flags = ["--data", f"vqav2:{tmp_path / 'vqa'}", "--coco", str(coco), "--captions", str(captions)]
    call = paper.read_arguments([*flags, "--needle-limit", "8", "--vqa-limit", "4", "--device", "cpu"])
    (needles,) = paper.make_measures(call.base, call.options)["needles"]
    tests = [test for _, test in needles.examples]
    assert Counter(needles.labels) == dict.fromkeys(((0, 0), (0, 1), (1, 0), (1, 1)), 2)
    for test in tests:
        (row, column), (target,), (grid,) = test.places[0][1:], test.targets, test.haystack
        number = int(target.rpartition("_")[2].removesuffix(".jpg"))
        assert test.captions == (f"Caption 2 of {number}. ",) and grid[2 * row + column] == target  # the last one
        assert {Path(name).name for name in grid} <= set(names[:10]) and len(set(grid)) == 4


def test_finished_runs_of_part_2_stand_where_part_1_has_none(monkeypatch, capsys):
    """Breaks when a run of --from is dropped without a word, or a worse one takes part."""
    scores = {"paper-1": 9.0, "paper-2": 5.0, "paper-4-full": 3.0, "paper-5-full": 4.0, "paper-1-full": 1.0}

    def result(work, row, split):
        own = {"name": row.name, "settings": row.changes, "run": {"cpu_seconds": 0}, "scores": ()}
        return own | {"score": {"mean": scores.get(row.name, 0)}}

    monkeypatch.setattr(paper.Reproduction, "result", result)
    monkeypatch.setattr(paper, "stored_settings", lambda run: {})
    measures = {"vqa": [SimpleNamespace(examples=[], chance=None, pictures=[])], "needles": []}
    base = Settings(device="cpu", **PLAIN)
    study = SimpleNamespace(base=base, measures=measures, fingerprint="", world=SimpleNamespace(device="cpu"))
    monkeypatch.setattr(paper, "difference", lambda *arguments: {})
    runs = {"paper-4-full": Path("four"), "paper-5-full": Path("five")}

    def chosen(rows: str) -> dict:
        call = paper.Call(paper.PaperOptions(rows=rows), base, set(), runs, None)
        return paper.reproduce(paper.Reproduction(study, call))["chosen"]

    assert chosen("paper-1") == {"without": "paper-1", "with": "paper-5"}
    assert capsys.readouterr().err == "--from four: left out: paper-5 scores better\n"
    assert chosen("paper-1,paper-2") == {"without": "paper-1", "with": "paper-2"}
    assert capsys.readouterr().err.count("left out: paper-2 scores better") == 2
    del runs["paper-5-full"]
    assert chosen("paper-1") == {"without": "paper-1", "with": "paper-4"} and not capsys.readouterr().err
    assert chosen("baseline") == {"with": "paper-4"}


def test_a_plan_trains_nothing(tmp_path, trainings, capsys):
    """Breaks when --plan trains, writes, leaves out a run, or counts another share of the data."""
    more = ["--out", str(tmp_path / "out"), "--show-batch", str(tmp_path / "batch.png")]
    reproduce.main(["paligemma", *SMALL, "--plan", "--gpu", "L4", "--rows", "paper-1,paper-2"] + more)
    printed = capsys.readouterr().out
    lines = [line.split("|") for line in printed.splitlines() if line.startswith("| paper")]
    found = {line[1].strip(): (line[3].strip(), line[4].strip(), line[5].strip()) for line in lines}
    assert found == {
        "paper-1": ("4", "8", "2"),
        "paper-2": ("4", "8", "2"),
        "paper-1-full": ("4", "20", "5"),
        "paper-2-full": ("4", "20", "5"),
    }
    assert "answer en" in printed and "⟦" in printed
    assert not trainings and [path.name for path in tmp_path.iterdir()] == ["batch.png"]


def test_training_and_evaluation_ask_in_the_same_words(tmp_path):
    """Breaks when a fine-tuned model is asked in words that it has not learned."""
    write_vqav2(tmp_path, images=8)
    asked = []
    for data in (f"vqav2:{tmp_path}", "embedded"):
        base = Settings(device="cpu", data=data, samples=4, tasks="vqa", validation=0.5, **PLAIN)
        settings = replace(base, **(RECIPES["paper-1"] | {"prompt": "say {question}", "samples": 4}))
        records, _ = training_records(settings, 0)
        measure = paper.vqa_measure(base, "test", 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eval.vqa.ask_model", lambda *args, **more: asked.extend(args[2]) or [""] * len(args[2]))
            measure.grade(None, None, settings, tmp_path)
        heads = {" ".join(record.prefix.split()[:1]) for record in records}
        assert {ask.prefix.split()[0] for ask in asked} == heads == ({"say"} if data != "embedded" else {"answer"})
        asked.clear()


def test_a_scoring_has_results_of_its_own():
    """Breaks when --scoring paper is answered with the official scores of the same folder."""
    base = Settings(device="cpu", **PLAIN)
    official, other = (paper.vqa_measure(base, "test", 4, scoring) for scoring in ("official", "paper"))
    assert official.examples == paper.vqa_measure(base, "test", 4).examples != other.examples
    assert len(official.examples) == len(other.examples) == 4


def test_a_learning_curve_ends_with_a_mean_of_as_many_steps():
    """Breaks when the last point of a curve is a single step, or stands at another number of examples."""
    assert paper.smooth([1.0, 3.0, 5.0, 5.0, 2.0], 4.0, points=2) == [(12, 3.0), (20, 3.5)]


def test_index_accuracy_is_the_mean_over_places():
    """Breaks when a place with more tests counts more: the paper's figure is a mean over the four places."""
    labels = [(0, 0)] * 3 + [(0, 1)] * 2 + [(1, 0), (1, 1)]
    scores = np.array([1, 0, 0, 1, 1, 0, 1.0])
    assert (scores * paper.place_weights(labels)).mean() == pytest.approx((1 / 3 + 1 + 0 + 1) / 4)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rows", "paper-9"], "--rows paper-9: choose of baseline, paper-1"),
        (["--lr", "1e-3"], "--lr: the study decides that itself"),
        (["--captions", "C"], "--captions and --metadata belong to --coco"),
        (["--coco", "C"], "--coco goes with --data on disk"),
        (["--from", "/nowhere"], "--from /nowhere: holds no adapter_config.json"),
        (["--samples", "nine"], None),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(flags, told, tmp_path, trainings):
    """Breaks when a wrong flag costs hours, or leaves a folder."""
    with pytest.raises(SystemExit if told is None else UserError, match=told):
        run(tmp_path / "out", *flags, "--device", "cpu")
    assert not trainings and not (tmp_path / "out").exists()


def test_every_open_choice_names_a_flag():
    """Breaks when the table of what the paper leaves open names a setting that is none."""
    known = Settings.__dataclass_fields__.keys()
    assert {setting for *_, setting in paper_report.OPEN} <= known
