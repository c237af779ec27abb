"""The comparison of language models: fair to both, done once, and careful in its words."""

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.text.corpus import open_corpus
from model.common import UserError
from model.text import new_model
from train import compare, reproduce
from train.signals import Interrupted
from train.studies import engine
from train.studies import text as study_text
from train.studies.engine import finish_cell
from train.studies.text import Job, choose_rungs, gains, main, read_arguments
from train.studies.text_report import KINDS, MAIN, equal_loss, fit_share, to_markdown
from train.systems.text import TextSettings

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
        "--most-seeds",
        "2",
        "--out",
        str(out),
        "--no-positive",
        *more,
    ]


def test_the_comparison_runs_end_to_end_and_only_once(text_folder, tmp_path, capsys, monkeypatch):
    """Breaks when `--rows text` does not reach the study, results are computed again, or the report lacks a
    measurement, a picture, an interval or the distance to the published claim."""
    out = tmp_path / "out"
    monkeypatch.setattr(study_text, "paired_ratio", lambda steps: 1.5 + sum(loss().item() < 0 for loss, _ in steps))
    given = ["--rows", "text", "--processes", "1", *flags(text_folder, out, "--seeds", "1")]
    compare.main(given)
    printed = capsys.readouterr().out
    summary, report = json.loads((out / "comparison.json").read_text()), (out / "comparison.md").read_text()
    assert report in printed
    rows = [f"{kind}, nano" for kind in KINDS]
    assert {row: len(runs) for row, runs in summary["rows"].items()} == dict.fromkeys(rows, 1)
    assert summary["settings"]["tokens"] == 1600
    plain, ours = (summary["rows"][row][0]["parameters"] for row in rows)
    assert plain < ours < 1.01 * plain
    names = "nll recall needle needle-map attention attention-noise examples examples-margin".split()
    for name in {"scaling", "curve", *names}:
        assert (out / f"{name}.png").stat().st_size > 1000 and f"({name}.png)" in report
    assert "65 % of the parameters" in report and "neither confirms nor refutes" in report
    assert len(re.findall(r"\| all +\|", report)) == len(names) and "fewer than 5 decide nothing" in report
    assert "plain, nano: one seed in loss, recall, needle, examples, order, mean of those in range." in report
    assert [point[0] for point in summary["rows"][rows[0]][0]["curve"]] == [512, 1024, 1536]  # 3 steps of 2 rows
    assert {one["share"] for one in summary["scaling"]} == {1.0, 0.25, 0.5}
    trained = [json.loads(file.read_text())["tokens"] for file in out.glob("cells/*/result.json")]
    assert sorted(trained) == [512, 512, 1024, 1024, 1536, 1536, 2560]  # the last: plain, as long as differential
    assert list(summary["timed"]) == ["nano, 1.5 × tokens"] and "minus plain attention trained as long" in report
    for folder in (out / summary["rows"][row][0]["folder"] for row in rows):
        assert str(folder) in report.rpartition("all")[2]

    def never(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(study_text, "learn", never)
    main(given[2:])
    assert (out / "comparison.md").read_text() == report
    again = [folder for line in re.findall(r"`python -m eval.text \w+ (.*)`", report) for folder in line.split()]
    assert len(again) == 2 and all((Path(folder) / "model" / "config.json").exists() for folder in again)
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


def cell(own, loss: float, nats: list[float], right: float) -> dict:
    """A result without training: nats of two windows, and `right` of 8 tests of each difficulty."""
    panel = {"title": "", "x_label": "x", "y_label": "y", "better": 1, "labels": [4] * 8 + [64] * 8}
    panel |= {"groups": list(range(16)), "values": [float(n < 8 * right) for n in range(8)] * 2}
    nll = {"title": "likelihood", "labels": [16, 32, 64, 128, 256] * 2, "groups": ["a"] * 5 + ["b"] * 5}
    ladder = {"4": 99.0, "64": 100 * right}
    return {
        "parameters": 1000 + 2 * (own.attention != "plain"),
        "tokens": own.tokens,
        "loss": loss,
        "curve": [[own.tokens / 2, loss + 1], [own.tokens, loss]],
        "lambda": [0.2] if own.attention == "differential" else [],
        "folder": "cells/x",
        "cpu_seconds": 1.0,
        "ladders": {name: ladder for name in study_text.LADDERS} | {"examples": {"4": 30.0, "64": 60.0}},
        "panels": {
            "nll": panel | nll | {"better": -1, "values": [value for value in nats for _ in range(5)]},
            **{name: panel for name in ("recall", "needle", "examples")},
            "examples-margin": panel | {"better": -1},
        },
    }


def fake(monkeypatch, loss, nats=lambda own: [1.0, 2.0], right=lambda own: 0.5) -> list:
    """Cells without training. Returns the list of what was asked."""
    asked = []

    def run_cells(jobs, processes):
        asked.extend(jobs)
        return [cell(own, loss(own), nats(own), right(own)) for own in (job.settings for job in jobs)]

    monkeypatch.setattr(study_text, "run_cells", run_cells)
    monkeypatch.setattr(study_text.Runs, "step_ratio", lambda runs: 1.0)
    return asked


def run(text_folder: Path, out: Path, *more: str) -> tuple[dict, str]:
    summary = study_text.compare(*read_arguments(flags(text_folder, out, *more)))
    return summary, to_markdown(summary, out)


def decided(job: Job) -> tuple:
    own = job.settings
    return own.attention, own.lr, own.seed, own.tokens, job.limit


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
    """Breaks when a kind tries other rates, is searched on other seeds or for longer, trains at another's rate, or a
    grid ends at a row's best."""
    best = {"plain": 1e-3, "differential": 4e-3}
    asked = fake(monkeypatch, lambda own: abs(own.lr - best[own.attention]) * 100)
    summary, _ = run(text_folder, tmp_path, "--rates", "1e-3,2e-3,4e-3", "--search", "0.5")
    grid = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    search = [decided(job) for job in asked if job.limit == 0]
    assert set(search) == {(kind, rate, seed, 800, 0) for kind in KINDS for rate in grid for seed in (0, 1)}
    final = [decided(job) for job in asked if job.limit]
    assert final[:4] == [(kind, best[kind], seed, 1600, 5) for seed in (0, 1) for kind in KINDS]
    shares = [(kind, best[kind], seed, count, 5) for count in (400, 800) for seed in (0, 1) for kind in KINDS]
    common = [(kind, 1e-3, seed, 1600, 5) for seed in (0, 1) for kind in KINDS]
    assert final[4:] == shares + common and not summary["edges"] and summary["common"]["nano"]
    assert summary["rates"]["plain, nano"]["chosen"] == 1e-3
    asked.clear()
    summary, text = run(text_folder, tmp_path, "--rates", "2e-3")  # one rate: nothing to search
    assert len(asked) == 12 and {job.settings.lr for job in asked} == {2e-3} and "may lie beyond" not in text
    assert not summary["common"]
    asked.clear()
    run(text_folder, tmp_path, "--rates", "5e-4,1e-3,2e-3,4e-3,8e-3", "--search", "1")
    assert {job.limit for job in asked} == {5}  # whole runs are results, and counted once
    assert len(set(asked)) == 5 * 2 * 2 + 2 * 2 * 2


def test_seeds_are_added_while_the_main_difference_is_unsure(text_folder, tmp_path, monkeypatch):
    """Breaks when a study stops before it knows, or trains other sizes with more seeds too."""
    more = ("--most-seeds", "4", "--sizes", "nano")
    asked = fake(monkeypatch, lambda own: 1.0, right=lambda own: 0.25 + 0.5 * ((own.seed + len(own.attention)) % 2))
    summary, text = run(text_folder, tmp_path, *more)
    assert (
        summary["seeds"] == 4 and "2 seeds, of nano 4" in text and {job.settings.seed for job in asked} == {0, 1, 2, 3}
    )
    fake(monkeypatch, lambda own: 1.0)
    assert run(text_folder, tmp_path, *more)[0]["seeds"] == 2


@pytest.mark.parametrize(
    ("gain", "words"), [(-0.5, "better in loss"), (0.5, "worse in loss"), (0, "equivalent in loss")]
)
def test_words_follow_intervals(text_folder, tmp_path, monkeypatch, gain, words):
    """Breaks when less loss is called worse, or a difference whose interval holds 0 is claimed."""
    fake(
        monkeypatch,
        lambda own: 1.0,
        lambda own: [2 + gain * (own.attention == "differential"), 1.0 * 1 + gain * (own.attention == "differential")],
    )
    summary, text = run(text_folder, tmp_path)
    assert words in text and summary["judged"]["nano"]["loss"]["mean"] == pytest.approx(-100 * gain)
    fake(monkeypatch, lambda own: 1.0, lambda own: [2 + (own.attention == "plain") * (own.seed - 0.5)] * 2)
    assert "undecided in loss (±" in run(text_folder, tmp_path)[1]
    fake(monkeypatch, lambda own: 1.0, right=lambda own: 0.125)
    assert "out of range in recall, needle." in run(text_folder, tmp_path)[1]


def test_a_measure_counts_at_a_difficulty_that_plain_attention_is_in_range_of():
    """Breaks when a difficulty is chosen that the control solves or guesses, more examples count as harder, or the
    wrong tests are compared."""
    own = {kind: TextSettings(attention=kind) for kind in KINDS}
    rungs = choose_rungs([cell(own["plain"], 1.0, [1.0, 2.0], 0.5)])
    assert {name: one["chosen"] for name, one in rungs.items()} == {"recall": 64, "needle": 64, "examples": 64}
    assert rungs["examples"]["chance"] == 25 and rungs["needle"]["chance"] == pytest.approx(100 * (1 / 64 + 63 / 512))
    assert all(one["inside"] for one in rungs.values())
    lost = choose_rungs([cell(own["plain"], 1.0, [1.0, 2.0], 0.125)])
    assert lost["recall"]["chosen"] == 4 and not lost["recall"]["inside"]  # 99 and 12.5 %: neither measures
    pair = {kind: [cell(one, 1.0, [1.0, 2.0], 0.5 + 0.25 * (kind != "plain"))] for kind, one in own.items()}
    for cells in pair.values():  # only the tests of 64 differ
        for name in ("recall", "needle"):
            values = cells[0]["panels"][name] = dict(cells[0]["panels"][name])
            values["values"] = [0.0] * 8 + values["values"][8:]
    found = gains(pair, rungs)
    assert found["recall"].mean == found["needle"].mean == found[MAIN].mean == 25 and found["order"].mean == -25
    assert gains(pair, rungs | {"recall": rungs["recall"] | {"chosen": 4}})["recall"].mean == 0


def test_the_loss_is_that_of_a_token():
    """Breaks when the few tokens with little context weigh as much as all others, so that the verdict is of another
    loss than the one in the table of losses."""
    pair = {kind: [cell(TextSettings(attention=kind), 1.0, [1.0, 2.0], 0.5)] for kind in KINDS}
    values = pair["differential"][0]["panels"]["nll"]["values"]
    values[0], values[5] = values[0] + 1, values[5] + 3  # of 16 in 256 tokens, in two windows
    point = study_text.scaling_point("nano", 1.0, pair)
    plain, ours = (np.array(point["losses"][kind]) for kind in KINDS)
    assert plain.tolist() == [[1.0, 2.0]] and ours.tolist() == [[1 + 1 / 16, 2 + 3 / 16]]
    assert point["documents"] == ["a", "b"]
    assert gains(pair, choose_rungs(pair["plain"]))["loss"].mean == pytest.approx(-100 * 2 / 16)


@pytest.mark.parametrize("preset", ["nano", "0.2m"])
def test_a_pair_starts_with_the_same_weights(preset):
    """Breaks when a pair differs in more than its attention: any weight that both kinds have is equal to the bit."""
    plain, ours = (new_model(preset, differential, seed=3).state_dict() for differential in (False, True))
    only = {name.rpartition(".")[2] if "lambda" in name else name.split(".")[-2] for name in ours.keys() - plain.keys()}
    assert only == {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "subln"} and plain.keys() < ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in plain.items())
    assert not torch.equal(
        new_model(preset, False, seed=4).state_dict()["language_model.embed_tokens.weight"],
        plain["language_model.embed_tokens.weight"],
    )


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
        (scaling(0.6, 0.2), "is worth more than all parameters tried, from the fewest to 4.0 times as many (800 % ["),
    ],
)
def test_a_share_for_equal_loss_needs_losses_that_support_it(points, words):
    """Breaks when a gap is turned into another share, or into one where size does not matter or beyond all sizes."""
    assert words in equal_loss(points, "parameters")


def test_a_gap_that_closes_is_worth_nothing():
    """Breaks when a lead of the smaller models counts for the largest, which has none."""
    points = scaling(-0.1, 0.2)
    points[-1]["losses"]["differential"] = points[-1]["losses"]["plain"]
    assert "takes 100 % [100, 100] of plain attention's parameters, n.s." in equal_loss(points, "parameters")


def test_the_interval_of_a_share_knows_the_slope():
    """Breaks when the share's interval takes the slope of the loss as known."""
    points = scaling(-0.1, 0.2)
    assert fit_share(points, "parameters")[0] == pytest.approx((2**-0.5,) * 3)
    for number, point in enumerate(points):  # how fast the loss falls differs by document
        point["losses"] = {
            kind: (np.array(own) + number * np.array([0.1, -0.1])).tolist() for kind, own in point["losses"].items()
        }
    share, slope = fit_share(points, "parameters")
    assert share.mean == pytest.approx(2**-0.5) and share.low < 0.67 and slope.low < slope.mean < slope.high < 0


def test_a_share_has_an_interval_where_a_few_samples_have_no_slope():
    """Breaks when an interval is no number since in a few samples of the runs the loss does not fall."""
    points = scaling(-0.1, 0.2)
    # five runs fall by 1, 1, 1, 1 and rise by 0.6: in 0.7 % of the samples, four times the last, the loss rises
    falls = np.array([[1.0], [1.0], [1.0], [1.0], [-0.6]]) * math.log(2)
    for step, point in enumerate(points):
        plain = 9 - step * falls + np.zeros(2)
        point["losses"] = {"plain": plain.tolist(), "differential": (plain + 0.01).tolist()}
    share, slope = fit_share(points, "parameters")
    assert slope.high == pytest.approx(-0.04) and share.high == pytest.approx(math.exp(0.01 / 0.04))
    assert "takes 101 % [101, 128] of plain" in equal_loss(points, "parameters")


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
    assert (
        "Each kind has 2 such runs of a size" in printed
        and "of nano 1.5 more" in printed
        and "⟦" in printed
        and not list(tmp_path.iterdir())
    )


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
