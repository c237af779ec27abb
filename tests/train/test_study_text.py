"""The comparison of language models: fair to both, done once, and careful in its words."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.text.corpus import open_corpus
from eval.text.measures import PANELS, Scores
from model.common import UserError
from train import compare, reproduce
from train.signals import Interrupted
from train.studies import engine
from train.studies import text as study_text
from train.studies.engine import finish_cell
from train.studies.text import Job, main, read_arguments
from train.studies.text_report import KINDS, at_chance, equal_loss, to_markdown

pytestmark = pytest.mark.long


def flags(text_folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "--text",
        str(text_folder),
        "--preset",
        "nano",
        "--length",
        "256",
        "--batch-size",
        "2",
        "--rates",
        "1e-3",
        "--tokens",
        "8000",
        "--scale",
        "0.2",
        "--search",
        "0.25",
        "--limit",
        "5",
        "--seeds",
        "2",
        "--out",
        str(out),
        *more,
    ]


def test_the_comparison_runs_end_to_end_and_only_once(text_folder, tmp_path, capsys, monkeypatch):
    """Breaks when `--rows text` does not reach the study, results are computed again, or the report lacks a
    measurement, a picture, an interval or the distance to the published claim."""
    out = tmp_path / "out"
    given = ["--rows", "text", "--processes", "1", *flags(text_folder, out, "--seeds", "1")]
    compare.main(given)
    printed = capsys.readouterr().out
    summary, report = json.loads((out / "comparison.json").read_text()), (out / "comparison.md").read_text()
    assert report in printed
    rows = [f"{kind}, {mixture}" for mixture in ("text", "tasks") for kind in KINDS]
    assert {row: len(runs) for row, runs in summary["rows"].items()} == dict.fromkeys(rows, 1)
    assert summary["settings"]["tokens"] == 1600
    plain, ours = (summary["rows"][row][0]["parameters"] for row in rows[:2])
    assert plain < ours < 1.01 * plain
    names = {"nll-tasks", *(name for names in PANELS.values() for name in names)}
    for name in {"scaling", *names}:
        assert (out / f"{name}.png").stat().st_size > 1000 and f"({name}.png)" in report
    assert "65 % of the parameters" in report and "neither confirms nor refutes" in report
    assert len(re.findall(r"\| all +\|", report)) == len(names) and "One seed" in report
    assert "these panels measure nothing here" in report
    assert re.search(r"\| 6/2 +\| +0.183 \| +0.55 \| +0.85 \|", report)  # chance, and Table 2
    for folder in (out / summary["rows"][row][0]["folder"] for row in rows):
        learned = json.loads((folder / "config.json").read_text())
        assert (learned["needles"] > 0) == (learned["examples"] > 0) == (str(folder) in report.rpartition("all")[2])

    def never(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(study_text, "learn", never)
    main(given[2:])
    assert (out / "comparison.md").read_text() == report
    again = [folder for line in re.findall(r"`python -m eval.text \w+ (.*)`", report) for folder in line.split()]
    assert len(again) == 4 and all((Path(folder) / "model" / "config.json").exists() for folder in again)
    assert not any((Path(folder) / "checkpoints").exists() for folder in again)
    with pytest.raises(AssertionError, match="trained again"):
        main([*given[2:], "--limit", "6"])


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="starts processes: set RUN_SLOW=1")
def test_cells_side_by_side_are_cells_in_turn(text_folder, tmp_path):
    """Breaks when a process of its own computes another result."""
    _, settings = read_arguments(flags(text_folder, tmp_path))
    settings = replace(settings, corpus=str(tmp_path / "corpus"), text=(str(text_folder),))
    results = []
    open_corpus(tmp_path / "corpus", [text_folder], settings.vocab_size)
    for processes in (1, 2):
        jobs = [Job(tmp_path / str(processes), replace(settings, attention=kind), 0) for kind in KINDS]
        torch.set_num_threads(1)
        results.append([run | {"seconds": 0, "cpu_seconds": 0} for run in study_text.run_cells(jobs, processes)])
    assert results[0] == results[1]


def fake(monkeypatch, loss, panel) -> list:
    """Cells without training: `loss` of settings, `panel` values of settings. Returns the list of what was asked."""
    asked = []

    def run_cells(jobs, processes):
        asked.extend(jobs)
        scores = {
            "title": "likelihood",
            "x_label": "x",
            "y_label": "y",
            "better": -1,
            "labels": [16, 32, 64, 128, 256] * 2,
            "groups": ["a"] * 5 + ["b"] * 5,
        }
        return [
            {
                "parameters": 100,
                "tokens": own.tokens,
                "loss": loss(own),
                "lambda": [0.2] if own.attention == "differential" else [],
                "folder": "cells/x",
                "cpu_seconds": 1.0,
                "panels": {"nll": scores | {"values": [value for value in panel(own) for _ in range(5)]}},
            }
            for own in (job.settings for job in jobs)
        ]

    monkeypatch.setattr(study_text, "run_cells", run_cells)
    return asked


def run(text_folder: Path, out: Path, *more: str) -> tuple[dict, str]:
    summary = study_text.compare(*read_arguments(flags(text_folder, out, *more)))
    return summary, to_markdown(summary, out)


def decided(job: Job) -> tuple:
    own = job.settings
    return job.mixture, own.attention, own.lr, own.seed, own.tokens, job.limit


def test_a_cell_counts_the_seconds_of_calls_that_were_interrupted(tmp_path):
    """Breaks when a study that was interrupted says that it took less than it did."""

    def work(folder: Path) -> dict:
        end, begun = time.process_time() + 0.05, folder / "begun"
        while time.process_time() < end:
            pass
        if not begun.exists():
            begun.touch()
            raise KeyboardInterrupt
        return {}

    file = tmp_path / "cell" / "result.json"
    with pytest.raises(KeyboardInterrupt):
        finish_cell(file, "cell", work)
    assert 0.1 <= finish_cell(file, "cell", work)["cpu_seconds"] < 1
    assert {path.name for path in file.parent.iterdir()} == {"begun", "result.json"}


def test_no_cell_is_begun_after_a_signal(monkeypatch):
    """Breaks when an interrupted study computes the cells that its processes already hold, for hours."""
    begun = []

    def work(job: int) -> dict:
        begun.append(job)
        raise Interrupted(15)

    monkeypatch.setattr(engine, "ENDED", [])
    for job in (1, 2):
        with pytest.raises(Interrupted):
            engine.work_unless_ended(work, job)
    assert begun == [1]


def test_both_kinds_get_the_same_search(text_folder, tmp_path, monkeypatch):
    """Breaks when a kind tries other rates, is searched on other seeds or for longer, or trains at another's rate."""
    best = {"plain": 1e-3, "differential": 4e-3}
    asked = fake(monkeypatch, lambda own: abs(own.lr - best[own.attention]), lambda own: [1.0, 2.0])
    summary, text = run(text_folder, tmp_path, "--rates", "1e-3,2e-3,4e-3", "--search", "0.5")
    search, final = asked[:12], asked[12:]
    rows = [(mixture, kind) for mixture in ("text", "tasks") for kind in KINDS]
    assert set(map(decided, search)) == {(*row, rate, 0, 800, 0) for row in rows for rate in (1e-3, 2e-3, 4e-3)}
    tokens = {"text": (1600, 400, 800), "tasks": (1600,)}
    assert list(map(decided, final)) == [
        (*row, best[row[1]], seed, count, 5) for row in rows for count in tokens[row[0]] for seed in (0, 1)
    ]
    assert "a better one may lie beyond, for: plain, text, differential, text" in text
    tried = {"0.001": 0.0, "0.002": 0.001, "0.004": 0.003}
    assert summary["rates"]["plain, text"] == {"chosen": 1e-3, "validation": tried}
    asked.clear()
    summary, text = run(text_folder, tmp_path, "--rates", "2e-3")  # one rate: nothing to search
    assert len(asked) == 16 and {job.settings.lr for job in asked} == {2e-3} and "may lie beyond" not in text
    asked.clear()
    summary, text = run(text_folder, tmp_path, "--rates", "1e-3,2e-3", "--search", "1")  # whole runs are results
    found = [decided(job) for job in asked[:8] if job in asked[8:]]
    chosen = (("text", "plain", 1e-3), ("tasks", "plain", 1e-3))
    chosen += (("text", "differential", 2e-3), ("tasks", "differential", 2e-3))
    assert found == [(*row, 0, 1600, 5) for row in chosen]
    assert summary["cpu_seconds"] == 8 + 16 - 4


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (-0.5, "better in likelihood (-0.500 [-0.500, -0.500] *)"),
        (0.5, "worse in likelihood (+0.500 [+0.500, +0.500] *)"),
        (0, "no significant"),
    ],
)
def test_words_follow_intervals(text_folder, tmp_path, monkeypatch, gain, words):
    """Breaks when less loss is called worse, or a difference whose interval holds 0 is claimed."""
    fake(
        monkeypatch,
        lambda own: 1.0,
        lambda own: [2 + gain * (own.attention == "differential"), 1 + gain * (own.attention == "differential")],
    )
    assert words in run(text_folder, tmp_path)[1]
    fake(monkeypatch, lambda own: 1.0, lambda own: [2 + (own.attention == "plain") * (own.seed - 0.5)] * 2)
    assert "no significant difference" in run(text_folder, tmp_path)[1]


def scaling(gap: float, falls: float, spread: float = 0.0) -> list[dict]:
    """Two runs of two windows at 1, 2 and 4 M parameters: plain loss falls by `falls` from each to the next."""
    plain = [np.array([[5.0, 3.0], [5.0, 3.0]]) - falls * step for step in range(3)]
    noise = np.array([[spread, -spread], [-spread, spread]])
    return [
        {
            "parameters": dict.fromkeys(KINDS, 1_000_000 * 2**step),
            "tokens": 1,
            "documents": ["a", "b"],
            "losses": {"plain": loss.tolist(), "differential": (loss + gap + noise).tolist()},
        }
        for step, loss in enumerate(plain)
    ]


@pytest.mark.parametrize(
    ("points", "words"),
    [
        # the loss falls by 0.2 from a size to the next: 0.2 more is worth twice the parameters, 0.1 less 2 ** -0.5
        (scaling(0.2, 0.2), "takes 200 % [200, 200] of plain attention's parameters (published"),
        (scaling(-0.1, 0.2), "takes 71 % [71, 71] of plain attention's parameters (published"),
        (scaling(0.0, 0.2, 0.1), "of plain attention's parameters, n.s. (published"),
        (scaling(0.2, 0.0), "The loss does not fall with parameters"),
        (scaling(0.6, 0.2), "is worth more than all parameters tried, from the fewest to 4.0 times as many"),
    ],
)
def test_a_share_for_equal_loss_needs_losses_that_support_it(points, words):
    """Breaks when a gap is turned into another share, or into one where size does not matter or beyond all sizes."""
    assert words in equal_loss(points, "parameters")


def test_retrieval_at_chance_is_called_nothing():
    """Breaks when a model that repeats any answer of the text seems to retrieve, or one that retrieves does not."""

    def found(share: float) -> dict:
        values = [1.0] * 40 + [float(n < 40 * share) for n in range(40)]  # one needle is found by repeating it
        scores = Scores("needles", "x", "y", 1, ["1/1"] * 40 + ["6/2"] * 40, list(range(80)), values)
        return {"needle": {"plain": [scores], "differential": [scores]}}

    assert "(6/2: 0.20 plain, 0.20 differential, chance 0.18): these panels measure" in at_chance(found(0.2))["needle"]
    assert not at_chance(found(0.5))


def test_a_plan_trains_nothing(text_folder, tmp_path, monkeypatch, capsys):
    """Breaks when --plan trains, writes, or counts other operations than the products of a step."""
    monkeypatch.setattr(study_text, "learn", None)
    reproduce.main(["text", *flags(text_folder, tmp_path / "out"), "--plan"])
    printed = capsys.readouterr().out
    cells = [line.split("|") for line in printed.splitlines() if line.startswith("| nano")]
    assert [cell[1].strip() for cell in cells] == ["nano, plain", "nano, differential"]
    (parameters, tokens, plain), (_, _, ours) = (
        [float(cell[n].replace(",", "")) for n in (2, 6, 13)] for cell in cells
    )
    # a weight takes 2 operations forward and 4 backward, a map of 2 layers 4 and 10 for each key and channel
    assert tokens == 3 * 2 * 256 and plain == pytest.approx(tokens * (6 * parameters + 2 * 14 * 256 * 48), rel=0.02)
    assert plain < ours < 1.4 * plain
    assert "5.5 such runs" in printed and "⟦" in printed and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--sizes", "tiny"), "--sizes tiny: has another vocabulary than --preset nano"),
        (("--seeds", "0"), "--seeds is 0, expected an integer from 1"),
        (("--limit", "2"), "--limit is 2, expected an integer from 5"),
        (("--scale", "0"), "--scale is 0.0, expected a number of at least 1e-06"),
        (("--search", "0"), "--search is 0.0, expected a share above 0"),
        (("--search", "2"), "--search is 2.0, expected a number from 0 to 1"),
        (("--length", "8"), "--length is 8, expected an integer from 64"),
        (("--text", "/nowhere"), "--text /nowhere: no such file"),
    ],
)
def test_mistakes_are_told(text_folder, tmp_path, more, message):
    """Breaks when a wrong flag ends in a traceback."""
    with pytest.raises(UserError, match=message):
        main(flags(text_folder, tmp_path, *more))


def test_rates_that_are_no_numbers_are_refused(text_folder, tmp_path, capsys):
    """Breaks when a wrong --rates ends in a traceback."""
    with pytest.raises(SystemExit):
        main(flags(text_folder, tmp_path, "--rates", "fast"))
    assert "argument --rates: 'fast', expected positive numbers" in capsys.readouterr().err
