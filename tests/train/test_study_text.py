"""The comparison of language models: fair to both, done once, and careful in its words."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.common import UserError
from train import compare
from train.studies import text as study_text
from train.studies.text import KINDS, Job, main, read_arguments, to_markdown

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
    given = ["--rows", "text", "--processes", "1", *flags(text_folder, out)]
    compare.main(given)
    printed = capsys.readouterr().out
    summary, report = json.loads((out / "comparison.json").read_text()), (out / "comparison.md").read_text()
    assert report in printed
    assert {len(summary["rows"][kind]) for kind in KINDS} == {2}
    assert summary["settings"]["tokens"] == 1600
    plain, ours = (summary["rows"][kind][0]["parameters"] for kind in KINDS)
    assert plain < ours < 1.01 * plain
    for name in ("nll", "needle", "needle-depth", "attention", "attention-noise", "examples", "examples-margin"):
        assert (out / f"{name}.png").stat().st_size > 1000 and f"({name}.png)" in report
    assert "65 % of the parameters" in report and "neither confirms nor refutes" in report
    assert len(re.findall(r"\| all +\|", report)) == 7 and "rather too narrow" in report

    def never(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(study_text, "learn", never)
    main(given[2:])
    assert (out / "comparison.md").read_text() == report
    again = re.search(r"`python -m eval.text all (.*)`", report)[1].split()
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
            "labels": [1, 1],
            "groups": ["a", "b"],
        }
        return [
            {
                "parameters": 100,
                "loss": loss(own),
                "lambda": [0.2] if own.attention == "differential" else [],
                "folder": "cells/x",
                "cpu_seconds": 1.0,
                "panels": {"nll": scores | {"values": panel(own)}},
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
    return own.attention, own.lr, own.seed, own.tokens, job.limit


def test_both_kinds_get_the_same_search(text_folder, tmp_path, monkeypatch):
    """Breaks when a kind tries other rates, is searched on other seeds or for longer, or trains at another's rate."""
    best = {"plain": 1e-3, "differential": 4e-3}
    asked = fake(monkeypatch, lambda own: abs(own.lr - best[own.attention]), lambda own: [1.0, 2.0])
    summary, text = run(text_folder, tmp_path, "--rates", "1e-3,2e-3,4e-3", "--search", "0.5")
    search, final = asked[:6], asked[6:]
    assert set(map(decided, search)) == {(kind, rate, 0, 800, 0) for kind in KINDS for rate in (1e-3, 2e-3, 4e-3)}
    assert list(map(decided, final)) == [(kind, best[kind], seed, 1600, 5) for seed in (0, 1) for kind in KINDS]
    assert "a better one may lie beyond, for: plain, differential" in text
    assert summary["rates"]["plain"] == {"chosen": 1e-3, "validation": {"0.001": 0.0, "0.002": 0.001, "0.004": 0.003}}
    asked.clear()
    summary, text = run(text_folder, tmp_path, "--rates", "2e-3")  # one rate: nothing to search
    assert len(asked) == 4 and {job.settings.lr for job in asked} == {2e-3} and "may lie beyond" not in text
    asked.clear()
    summary, text = run(text_folder, tmp_path, "--rates", "1e-3,2e-3", "--search", "1")  # whole runs are results
    assert [job for job in asked[:4] if job in asked[4:]] == [
        Job(tmp_path, replace(asked[0].settings, attention=kind, lr=rate), 5)
        for kind, rate in (("plain", 1e-3), ("differential", 2e-3))
    ]
    assert summary["cpu_seconds"] == 6


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (-0.5, "better in likelihood (-0.500 [-0.500, -0.500] *)."),
        (0.5, "worse in likelihood (+0.500 [+0.500, +0.500] *)."),
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
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
