"""What all studies share: seconds that are counted once, cells that go on after a signal, verdicts by families."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from eval.statistics import estimate
from model.common import UserError
from train import compare
from train.signals import Interrupted
from train.studies import attention_report, engine, rules, wings_front
from train.studies.engine import difference, finish_cell


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_seconds_are_counted_once(tmp_path):
    """Breaks when a study's seconds miss what a cell took for other questions, such as its training, or count a cell
    that another one needed twice."""

    def needed(folder):  # by a process of its own, as samples of a data loader are
        subprocess.run([sys.executable, "-S", "-c", "sum(range(10**7))"], check=True)
        return {}

    def outer(folder):
        burn(0.02)
        finish_cell(tmp_path / "needed" / "result.json", "needed", needed)
        return {}

    def find():
        finish_cell(tmp_path / "cell" / "test-b.json", "cell", outer)
        finish_cell(tmp_path / "cell" / "test-b.json", "cell", outer)
        return {}

    old = tmp_path / "cell" / "validation-a.json"  # of an earlier protocol
    finish_cell(old, "cell", lambda folder: {})
    old.write_text('{"cpu_seconds": 7}')
    (tmp_path / "cell" / ".test-b-x.json").write_text("{")  # of a write that was killed
    (tmp_path / "cell" / "config.json").write_text("{}")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "result.json").write_text('{"cpu_seconds": 9}')
    finish_cell(tmp_path / "another" / "result.json", "of an earlier study", lambda folder: {})
    engine.run_study(tmp_path, find, lambda summary: "", lambda summary: {})
    inner, own = (json.loads((tmp_path / name).read_text()) for name in ("needed/result.json", "cell/test-b.json"))
    assert inner["cpu_seconds"] >= 0.05 > own["cpu_seconds"] >= 0.02
    summary = json.loads((tmp_path / "comparison.json").read_text())
    assert summary["cpu_seconds"] == 7 == round(engine.seconds_in(engine.USED))
    assert {tmp_path / "cell", tmp_path / "needed"} == engine.USED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_outside_training_keeps_the_seconds(number, tmp_path, monkeypatch):
    """Breaks when a process that is grading, whose model is trained, loses what the training took."""
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(engine, "ENDED", [])

    def grade(folder):
        burn(0.02)
        os.kill(os.getpid(), number)
        burn(1)

    try:
        engine.prepare_process(threads)
        with pytest.raises(Interrupted):
            engine.work_unless_ended(lambda file: finish_cell(file, "cell", grade), tmp_path / "result.json")
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        torch.set_num_threads(threads)
    assert float((tmp_path / "result.seconds").read_text()) >= 0.02 and engine.ENDED


def row(mean: float, error: float):
    return estimate(mean + error * 5**0.5 * np.array([[-1.2649], [-0.6325], [0], [0.6325], [1.2649]]))


def test_verdicts_of_a_table_with_measures_out_of_range():
    """Breaks when what is out of range weakens the other verdicts, one seed decides, or more of what is worse is
    called better."""
    gains = {name: row(4, 1.08) for name in "abcd"}  # p 0.02 alone, 0.08 among four
    inside = dict.fromkeys(gains, False) | {"a": True}
    found = {name: one["verdict"] for name, one in rules.judge(gains, inside).items()}
    assert found == dict.fromkeys(gains, "out of range") | {"a": "better"}
    assert rules.judge({"a": row(4, 1.08)}, seeds={"a": 1})["a"]["verdict"] == "one seed"
    assert rules.judge({"a": row(9, 1)}, less_is_better=["a"])["a"]["verdict"] == "worse"
    assert rules.judge({"a": row(-9, 1)}, less_is_better=["a"])["a"]["verdict"] == "better"


def test_verdicts_on_text_at_equal_pictures_are_those_of_the_whole_table():
    """Breaks when p-values are corrected for the levels of one pair of rows alone, or one seed decides."""

    def level(mean, error, seeds=5):
        return {"reached": [seeds, seeds], "seeds": seeds, "difference": engine.verdict(row(mean, error))}

    table = {name: {"50": level(4, 1.08), "90": {"reached": [3, 5], "seeds": 5}} for name in "abcd"}
    wings_front.judge_levels(table)
    assert {one["50"]["verdict"] for one in table.values()} == {"undecided"}
    assert "verdict" not in table["a"]["90"]
    alone = {"a": {"50": level(4, 1.08), "80": level(9, 1, seeds=1)}}
    wings_front.judge_levels(alone)
    assert [one["verdict"] for one in alone["a"].values()] == ["better", "one seed"]


def test_a_report_names_the_fewest_seeds():
    """Breaks when rows that stopped after a few seeds hide behind those that got more."""
    judged = difference(np.zeros((3, 4)), np.zeros((3, 4))) | {"verdict": "equivalent"}
    rows = [
        {"name": name, "seeds": seeds, "trainable": 1, "control": "c", "control_trainable": 1, "settings": {}}
        | {"diverged": [], "difference": {"VQA": judged}}
        for name, seeds in (("dex", 3), ("twin", 10))
    ]
    summary = {"measures": [{"name": "VQA", "title": "VQA", "chance": None}], "rows": rows, "edges": []}
    sentences = attention_report.conclusions(summary | {"seeds": list(range(10)), "protocol": "paper"})
    assert "3 seed(s): fewer than 5 decide nothing." in sentences


@pytest.mark.parametrize("rows", ["", *compare.STUDIES])
def test_every_study_takes_the_same_flags_of_its_plan(rows, tmp_path):
    """Breaks when a study lacks --quick or --full, or trains when both are given."""
    names = ["--rows", rows] if rows else []
    with pytest.raises(UserError, match="--quick and --full exclude each other"):
        compare.main([*names, "--quick", "--full", "--out", str(tmp_path / "study")])
    assert not (tmp_path / "study").exists()
