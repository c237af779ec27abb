"""The comparison: fair controls, rates chosen without the test split, paired intervals, cells that are done once."""

import io
import json
import os
import shutil
import signal
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from eval import scenes, vqa
from eval.records import own_records
from eval.statistics import estimate
from model.common import UserError, run_command
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from model.source import BUNDLED_FOLDER
from tests.files import write_vqav2
from train import compare, supervised
from train.distributed import World
from train.loop import Diverged
from train.optim import count, trainable
from train.recipes import RECIPES
from train.settings import Settings
from train.studies import attention_data, attention_maps, attention_report, attention_rows, attention_runs, cells, rules
from train.studies.attention_data import Measure
from train.studies.attention_rows import AttentionOptions
from train.studies.attention_runs import RowResult
from train.studies.cells import PLAIN, FineTuningRow, FineTuningStudy, cell_settings
from train.studies.engine import difference, digest, tables_of
from train.systems.open import load_base, open_model
from weights.export import export_model

WORLD = World(0, 1, torch.device("cpu"))
PLAIN_BASE = Settings(
    base="tiny", device="cpu", samples=32, batch_size=16, tasks=",".join(attention_data.TASKS), **PLAIN
)
PROGRESS = {"seconds": 1.0, "samples": 32}
ROWS = {row.name: row for rows in attention_rows.GROUPS.values() for row in rows}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A base that answers differently from picture to picture, as a fresh model with a tied head does not."""
    model, folder = initialize(PaliGemma(PRESETS["tiny"]), position_std=0.5), tmp_path_factory.mktemp("base")
    with torch.no_grad():
        for layer in model.language_model.layers:
            layer.self_attn.o_proj.weight *= 6
            layer.mlp.down_proj.weight *= 6
    export_model(model, folder, companions=[BUNDLED_FOLDER / "tokenizer.model"])
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def two_doses():
    """Each dose of the needle costs as much as the whole 4×4 test; the mechanism's tests are one for each place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_data, "DOSES", (0, 15))
        patch.setattr(attention_maps, "TESTS", 4)
        yield


def fake_measure(grade=lambda settings: [0.5] * 4, name="VQA", examples=4):
    def graded(model, processor, settings, folder):
        assert not model.training  # dropout would be asked too
        return grade(settings)

    return Measure(
        name, name, list(range(examples)), [f"p{i // 2}" for i in range(examples)], ["all"] * examples, None, graded
    )


def fake_study(tmp_path, processor=None, validation=None, test=None, fingerprint="base", base=PLAIN_BASE):
    measures = {"validation": [validation or fake_measure()], "test": [test or fake_measure()]}
    return FineTuningStudy(base, tmp_path, WORLD, processor, fingerprint, measures)


def compare_rows(study, rows, seeds, rates=None, **options):
    """The rows with so many seeds, at these rates, as the study's command compares them."""
    given = {"rates": rates and tuple(rates), "grow": False, "timed": False, "most_seeds": seeds}
    return attention_runs.compare(study, rows, AttentionOptions(seeds=seeds, **(given | options)))


@pytest.fixture
def trainings(monkeypatch):
    """Training replaced by a note of what would have been trained."""
    done = []
    monkeypatch.setattr("train.studies.cells.train_on", lambda *given: done.append(given[4]) or PROGRESS)
    return done


# --- the whole command ------------------------------------------------------------------------------------------------


def arguments(source, out):
    return [
        "--base",
        source,
        "--rows",
        "baseline,fine-tuned,dex",
        "--seeds",
        "2",
        "--samples",
        "48",
        "--batch-size",
        "16",
        "--limit",
        "16",
        "--most-seeds",
        "2",
        "--rates",
        "1e-2,5e-2",
        "--no-grow",
        "--no-timed",
        "--no-positive",
        "--no-mechanism",
        "--rungs",
        "n2o2,n4o1",
        "--processes",
        "1",
        "--protocol",
        "constrained",
        "--device",
        "cpu",
        "--warmup",
        "0",
        "--out",
        str(out),
    ]


def results(folder):
    summary = json.loads((folder / "comparison.json").read_text())
    assert summary.pop("cpu_seconds") > 0
    return summary


@pytest.fixture(scope="module")
def done(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    compare.main(arguments(source, folder))
    return folder


@pytest.mark.long
def test_the_command_from_end_to_end(done, capsys):
    """Breaks when a table, a figure, a control, a seed or an interval is missing."""
    summary, text = results(done), (done / "comparison.md").read_text()
    rows = {row["name"]: row for row in summary["rows"]}
    assert list(rows) == ["baseline", "fine-tuned", "dex", "LoRA r18"]
    assert "control" not in rows["fine-tuned"] and rows["dex"]["control"] == "LoRA r18"
    assert rows["LoRA r18"]["trainable"] >= rows["dex"]["trainable"] > rows["fine-tuned"]["trainable"] > 0
    for name, row in rows.items():
        assert set(row["test"]) == {"VQA", "n2o2", "n4o1", "dose"}
        for test in row["test"].values():
            assert len(test["by_seed"]) == (1 if name == "baseline" else 2)
            assert test["low"] <= test["mean"] <= test["high"]
        if name != "baseline":
            assert list(row["validation"]) == ["0.01", "0.05"] and f"{row['settings']['lr']:g}" in row["validation"]
    assert len(rows["dex"]["test"]["n2o2"]["by"]) == 4 and len(rows["dex"]["test"]["n4o1"]["by"]) == 16
    assert {row["test"]["n2o2"]["mean"] for row in rows.values()} != {0.0}
    assert rows["dex"]["test"] != rows["LoRA r18"]["test"]
    assert len(list((done / "cells").iterdir())) == 1 + 3 * 4  # the baseline; three rows, two rates and two seeds
    assert "## Table 1: accuracy" in text and "## Table 4: as Table 2" in text and "against LoRA r18" in text
    assert set(rows["dex"]["difference"]) == {"VQA", "n2o2", "n4o1", "dose", "all"}
    assert set(rows["dex"]["test"]["dose"]["by"]) == set(map(str, attention_data.DOSES))
    quoted = json.loads((done / "quoted.json").read_text())
    assert quoted["tables"] == tables_of(text) and "PyTorch" in quoted["made_by"] and quoted["made_by"] in text
    for name in ("figure2.png", "differences.png"):
        assert Image.open(done / name).size > (600, 300)


@pytest.mark.long
def test_what_is_there_is_not_done_again(done, source, trainings):
    """Breaks when a finished comparison trains or asks again, or comes out otherwise the second time."""
    before, text = results(done), (done / "comparison.md").read_text()
    compare.main(arguments(source, done))
    assert not trainings and results(done) == before and (done / "comparison.md").read_text() == text


@pytest.mark.long
def test_a_finished_comparison_gains_its_mechanism(done, source, tmp_path, trainings):
    """Breaks when a row or seed has none, when it trains anew, changes another number, or is measured twice."""
    shutil.copytree(done, tmp_path / "study")
    flags = [flag for flag in arguments(source, tmp_path / "study") if flag != "--no-mechanism"]
    compare.main(flags)
    found = results(tmp_path / "study")
    assert not trainings and found | {"mechanism": None} == results(done)
    rows = found["mechanism"]["rows"]
    assert list(rows) == ["fine-tuned", "dex", "LoRA r18"] and rows["dex"]["seeds"] == 2
    assert set(rows["dex"]["hypotheses"]) == {"noise", "amplifies", "moves less", "learns less"}
    assert list(rows["dex"]["weights"]) == ["0"] and rows["dex"]["before"] != rows["fine-tuned"]["before"]
    text = (tmp_path / "study" / "comparison.md").read_text()
    assert len(tables_of(text)) == len(tables_of((done / "comparison.md").read_text())) + 6
    compare.main(flags)
    assert (tmp_path / "study" / "comparison.md").read_text() == text


@pytest.mark.long
def test_an_interrupted_comparison_goes_on(done, source, tmp_path, monkeypatch):
    """Breaks when a signal in the middle of a run loses finished cells or the started one, or changes the result."""

    def is_missing(cell: Path) -> bool:
        """Three of the twelve trained cells: the second seed at the second rate."""
        settings = json.loads((cell / "config.json").read_text())
        return (settings["lr"], settings["seed"]) == (5e-2, 1)

    cells = [cell for cell in (done / "cells").iterdir() if not is_missing(cell)]
    for cell in cells:
        shutil.copytree(cell, tmp_path / "cells" / cell.name)
    assert len(cells) == len(list((done / "cells").iterdir())) - 3
    steps, loss = [], supervised.supervised_loss

    def interrupted_at(number):
        def supervised_loss(*args):
            steps.append(1)
            if len(steps) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss(*args)

        return supervised_loss

    monkeypatch.setattr(supervised, "supervised_loss", interrupted_at(5))  # of 9: the second of the second cell
    with pytest.raises(SystemExit) as stopped:
        compare.main(arguments(source, tmp_path))
    assert stopped.value.code == 128 + signal.SIGTERM and len(steps) == 5
    compare.main(arguments(source, tmp_path))
    assert len(steps) == 9
    assert results(tmp_path) == results(done)


# --- what makes it fair -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["shared", "split", "twin", "twin-token", "v2", "v2-grouped", "dex", "swiglu", "swiglu-new", "paper-5"]
)
def test_the_control_is_the_smallest_that_is_large_enough(name, processor, tmp_path):
    """Breaks when a control has fewer trainable parameters than its row, or a needlessly larger rank."""
    study = fake_study(tmp_path, processor)

    def parameters(row, **changes):
        settings = replace(cell_settings(study, row, 1e-3, 0), **changes)
        return count(trainable(open_model(settings, WORLD.device)[0]).values())

    row = ROWS[name]
    line = RowResult(row, cell_settings(study, row, 1e-3, 0), parameters(row))
    control = attention_runs.make_control(study, line)
    settings = cell_settings(study, control, 1e-3, 0)
    assert (settings.attention, settings.feed_forward) == ("softmax", "mlp")
    assert parameters(control) >= line.trainable > parameters(control, r=settings.r - 1)
    assert settings.alpha / settings.r == pytest.approx(line.settings.alpha / line.settings.r)
    same = {"attention", "feed_forward", "option", "r", "alpha"}
    assert all(value == getattr(line.settings, key) for key, value in vars(settings).items() if key not in same)


@pytest.mark.long
def test_controls_of_one_rank_are_shared(processor, tmp_path, trainings):
    """Breaks when equal controls are trained twice, or controls of different recipes are taken for one."""
    rows = [ROWS[name] for name in ("fine-tuned", "shared", "split", "dex", "swiglu")]
    lines = compare_rows(fake_study(tmp_path, processor), rows, 1, [1e-3])
    assert [line.control and line.control.row.name for line in lines[:5]] == [
        None,
        "LoRA r17",
        "LoRA r17",
        "LoRA r18",
        "fine-tuned",
    ]
    assert len(lines) == 7 and len(trainings) == 7
    slow = FineTuningRow("slow", {"attention": "dex", "beta2": 0.9})
    lines = compare_rows(fake_study(tmp_path, processor), [ROWS["dex"], slow], 1, [1e-3])
    assert [line.row.name for line in lines] == ["dex", "slow", "LoRA r18", "LoRA r18, slow"]


@pytest.mark.long
def test_rates_are_chosen_by_validation_alone(processor, tmp_path, trainings):
    """Breaks when the test split has a say in a rate, or is even asked about a rate that was not chosen."""
    asked = []

    def test_scores(settings):
        asked.append((settings.lr, settings.seed))
        return [settings.lr * 100] * 4  # the test split likes the highest rate best

    validation = fake_measure(lambda settings: [{1e-3: 0.4, 3e-3: 0.6, 9e-3: 0.5}[settings.lr]] * 4)
    study = fake_study(tmp_path, processor, validation, fake_measure(test_scores))
    (line,) = compare_rows(study, [ROWS["fine-tuned"]], 3, [9e-3, 3e-3, 1e-3])
    assert line.settings.lr == 3e-3 and line.validation == pytest.approx({1e-3: 0.4, 3e-3: 0.6, 9e-3: 0.5})
    assert asked == [(3e-3, 0), (3e-3, 1), (3e-3, 2)]
    assert [(s.lr, s.seed) for s in trainings] == [(rate, seed) for seed in range(3) for rate in (1e-3, 3e-3, 9e-3)]


@pytest.mark.long
def test_the_grid_grows_for_all_rows_until_the_best_is_inside(processor, tmp_path, trainings):
    """Breaks when a rate at the edge is called the best, rows are tried at different rates, or one seed decides."""

    def grade(settings):  # dex is best at 4e-3, LoRA at 1e-3; the first seed alone would take the highest for both
        best = 4e-3 if settings.attention == "dex" else 1e-3
        return [0.9 if settings.seed == 0 and settings.lr > 3e-3 else 0.8 - abs(np.log2(settings.lr / best)) / 10] * 4

    study = fake_study(tmp_path, processor, fake_measure(grade))
    lines = compare_rows(study, [ROWS["fine-tuned"], ROWS["dex"]], 2, [1e-3, 2e-3], grow=True)
    assert {tuple(line.validation) for line in lines} == {(5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}
    assert [line.settings.lr for line in lines] == [1e-3, 4e-3, 1e-3]
    assert not any(line.is_at_edge for line in lines)
    study = fake_study(tmp_path, processor)
    (line,) = compare_rows(study, [FineTuningRow("slow", {"lr": 3e-4})], 1, grow=False)
    assert list(line.validation) == [3e-4, 6e-4, 1.2e-3] and line.settings.lr == 3e-4  # of equal ones the lowest


@pytest.mark.long
def test_seeds_are_added_where_they_are_needed(processor, tmp_path, trainings):
    """Breaks when a row stops before its difference is known to ±3 points, one that is known goes on, or the mean of
    all plain rows is known for fewer runs."""

    def grade(settings):
        return [0.5 + (settings.attention == "dex") * 0.2 * (settings.seed % 2)] * 4

    study = fake_study(tmp_path, processor, test=fake_measure(grade))
    lines = {line.row.name: line for line in compare_rows(study, [ROWS["twin"], ROWS["dex"]], 3, [1e-3], most_seeds=5)}
    assert {name: line.seeds for name, line in lines.items()} == {"twin": 3, "dex": 5, "LoRA r20": 5, "LoRA r18": 5}
    assert lines["dex"].scores["VQA"].tolist() == [[50 + 20 * (seed % 2)] * 4 for seed in range(5)]
    assert lines["dex"].common["VQA"].shape == (3, 4)


def test_a_control_has_as_much_time(processor, tmp_path, trainings, monkeypatch):
    """Breaks when a slower row has only a control that is done before it, or equal ones are trained twice."""
    ratios = {"twin": 1.34, "twin-small": 1.29, "dex": 1.04}
    monkeypatch.setattr(attention_runs, "step_ratio", lambda study, line: ratios[line.row.name])
    rows = [ROWS[name] for name in ratios]
    lines = {line.row.name: line for line in compare_rows(fake_study(tmp_path, processor), rows, 1, [1e-3], timed=True)}
    timed = lines["twin"].timed
    assert timed.row.name == "LoRA r20, 1.3 × steps" and timed.settings.samples == round(1.3 * 32)
    assert timed.settings.r == lines["twin"].control.settings.r == 20 and timed is lines["twin-small"].timed
    assert lines["dex"].timed is lines["dex"].control and lines["dex"].control.row.name == "LoRA r18"
    assert timed.scores["VQA"].shape == (1, 4)


@pytest.mark.long
def test_a_diverged_run_scores_nothing_and_is_named(processor, tmp_path, monkeypatch):
    """Breaks when one rate that is too high ends the comparison, or a failed run is left out of the mean in silence."""

    def train(records, model, optimizer, processor, settings, *rest):
        if settings.lr > 2e-3 or settings.seed == 1:
            raise Diverged("step 7: the loss is nan")
        return PROGRESS

    monkeypatch.setattr("train.studies.cells.train_on", train)
    study = fake_study(tmp_path, processor)
    lines = compare_rows(study, [ROWS["fine-tuned"]], 2, [1e-3, 3e-3])
    assert lines[0].settings.lr == 1e-3 and lines[0].validation == {1e-3: 0.25, 3e-3: 0.0}
    assert lines[0].scores["VQA"].tolist() == [[50.0] * 4, [0.0] * 4] and lines[0].trainable > 0
    assert "fine-tuned: a run diverged and scores 0: step 7" in attention_report.to_markdown(
        attention_report.summarize(study, lines)
    )


def test_a_row_that_diverges_at_the_first_rate_has_a_control(processor, tmp_path, monkeypatch):
    """Breaks when such a row silently gets no control, and so no verdict."""

    def train(records, model, optimizer, processor, settings, *rest):
        if settings.attention == "dex" and settings.lr < 2e-3:
            raise Diverged("step 7: the loss is nan")
        return PROGRESS

    monkeypatch.setattr("train.studies.cells.train_on", train)
    results = [RowResult(ROWS["dex"], cell_settings(study := fake_study(tmp_path, processor), ROWS["dex"], 1e-3, 0))]
    attention_runs.add_controls(study, results, 1e-3)
    assert [one.row.name for one in results] == ["dex", "LoRA r18"] and results[0].control is results[1]
    assert results[0].trainable == 188_420


@pytest.mark.long
def test_a_row_may_run_itself(processor, tmp_path, trainings):
    """Breaks when a later experiment cannot bring its own training, or then gets no control."""
    model = torch.nn.Linear(400, 400, bias=False)
    row = FineTuningRow("own", run=lambda settings, folder, study: model)
    lines = compare_rows(fake_study(tmp_path, processor), [row], 1, [1e-3])
    assert [line.row.name for line in lines] == ["own", "LoRA r15"]  # 160,000 at 10,752 a rank
    assert lines[0].control is lines[1] and len(trainings) == 1


def test_what_changes_the_maps_learns_slowly(processor, tmp_path, monkeypatch):
    """Breaks when `twin-slow` slows other parameters down, or leaves one that changes queries or keys at its rate."""
    rates = {}

    def train(records, model, optimizer, *rest):
        rates.update({name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]})
        assert set(rates) == set(trainable(model))
        return PROGRESS

    monkeypatch.setattr("train.studies.cells.train_on", train)
    row = ROWS["twin-slow"]
    study = fake_study(tmp_path, processor)
    row.run(cell_settings(study, row, 4e-3, 0), tmp_path, study)
    slow = {name for name, rate in rates.items() if rate == 1e-3}
    moving = {name for name in rates if any(part in name for part in ("q_proj.", "k_proj.", ".q2.", ".k2."))}
    assert slow == moving and len(slow) == 4 * 8  # layers; A and B of two branches of q and k
    assert {rate for name, rate in rates.items() if name not in slow} == {4e-3}


# --- intervals --------------------------------------------------------------------------------------------------------


def paired(row, control, pictures):
    gain = difference(100 * np.array(row), 100 * np.array(control), pictures)
    return (gain["mean"], gain["low"], gain["high"]), gain["significant"]


def test_differences_are_paired():
    """Breaks when row and control are estimated apart, a picture's questions are parted, or seeds count as examples."""
    # by example everything varies, the gain does not
    gain, significant = paired([[0.9, 0.1, 0.6, 0.3]], [[0.8, 0.0, 0.5, 0.2]], list("abcd"))
    assert gain == pytest.approx((10, 10, 10)) and significant
    # two pictures with gains of 0 and 40: an error of 20, and t = 12.706 for one degree of freedom
    gain, significant = paired([[0.5] * 9 + [0.9] * 9], [[0.5] * 18], ["a"] * 9 + ["b"] * 9)
    assert gain == pytest.approx((20, 20 - 254.12, 20 + 254.12), abs=0.01) and not significant
    # two seeds with gains of 0 and 20 on every example, however many there are
    gain, significant = paired([[0.5] * 100, [0.7] * 100], [[0.5] * 100, [0.5] * 100], list(range(100)))
    assert gain == pytest.approx((10, 10 - 127.06, 10 + 127.06), abs=0.01) and not significant


@pytest.mark.long
def test_the_words_follow_the_intervals(processor, tmp_path, trainings):
    """Breaks when a difference that is not significant is not called so, or a loss is called a gain."""

    def grade(settings):
        return [{"dex": 0.3, "twin": 0.5}.get(settings.attention, 0.5)] * 4

    study = fake_study(tmp_path, processor, test=fake_measure(grade))
    lines = compare_rows(study, [ROWS["twin"], ROWS["dex"]], 2, [1e-3])
    text = attention_report.to_markdown(attention_report.summarize(study, lines))
    assert "against LoRA r20 (215,040): equivalent in VQA." in text
    assert "against LoRA r18 (193,536): worse in VQA (-20.0)." in text
    assert "+0.0 [+0.0, +0.0] equivalent" in text and "2 seed(s): fewer than 5 decide nothing." in text
    pooled = [line[:-1].split("|") for line in text.partition("## Table 5")[2].splitlines() if line[:6] == "| twin"]
    assert pooled[0][2:4] == [" 2 rows, r 18 to 20 ", " +0.0 [+0.0, +0.0] equivalent "]
    alone = compare_rows(study, [ROWS["dex"]], 1, [1e-3])
    assert "-20.0 [-20.0, -20.0] one seed" in attention_report.to_markdown(attention_report.summarize(study, alone))


def test_a_pool_holds_what_differs_in_rank_alone(processor, tmp_path):
    """Breaks when the mean of plain rows has one that trained longer or otherwise, or mixes seeds."""
    study = fake_study(tmp_path, processor)

    def plain(name, score, **changes):
        row = FineTuningRow(name, PLAIN | changes)
        return RowResult(row, cell_settings(study, row, 1e-3, 0), scores={"VQA": np.array(score, float)})

    control, wide = plain("r2", [[0, 100], [100, 100]], r=2), plain("r3", [[100, 100], [0, 100], [0, 0]], r=3)
    others = [plain("long", [[0, 0]], samples=9), plain("steep", [[0, 0]], beta2=0.9)]
    others.append(RowResult(ROWS["dex"], cell_settings(study, ROWS["dex"], 1e-3, 0), scores=control.scores))
    pool = attention_runs.peers(control, [*others, wide, control])
    assert pool == [wide, control] and attention_runs.peers(control, [*others, control]) == []
    assert attention_report.mean_scores(pool)["VQA"].tolist() == [[50, 100], [50, 100]]


def test_verdicts_are_computed():
    """Breaks when a verdict is not that of its table's p-values, or a measure at its ceiling measures something."""

    def row(mean, error):
        return estimate(mean + error * 5**0.5 * np.array([[-1.2649], [-0.6325], [0], [0.6325], [1.2649]]))

    rows = {"up": row(9, 1), "down": row(-9, 1), "same": row(0.5, 0.3), "open": row(2, 2), "small": row(1, 0.2)}
    found = rules.judge(rows)
    verdicts = {"up": "better", "down": "worse", "same": "equivalent", "open": "undecided", "small": "equivalent"}
    assert {name: one["verdict"] for name, one in found.items()} == verdicts
    # p 0.02 alone, 0.08 among four
    assert rules.judge({"a": row(4, 1.08)})["a"]["verdict"] == "better"
    assert {one["verdict"] for one in rules.judge({name: row(4, 1.08) for name in "abcd"}).values()} == {"undecided"}
    # 2 points from the margin: t 2.86 and 2.11 of 4 degrees, p 0.023 and 0.052
    assert [rules.judge({"a": row(1, error)})["a"]["verdict"] for error in (0.7, 0.95)] == ["equivalent", "undecided"]
    assert {one["verdict"] for one in rules.judge(rows, measurable=False).values()} == {"out of range"}
    assert [rules.is_inside(score, 25) for score in (30, 37, 96, 97)] == [False, True, True, False]
    ladder, chances = ("easy", "middle", "hard"), dict.fromkeys(("easy", "middle", "hard"), 0.0)
    for scores, expected in (
        ((99, 80, 50), "hard"),
        ((99, 80, 5), "middle"),
        ((100, 99, 98), "hard"),
        ((9, 5, 1), "easy"),
    ):
        assert rules.choose_rung(ladder, dict(zip(ladder, scores, strict=True)), chances) == expected
    predictions = [rules.Prediction(name, "all", "equivalent", "") for name in ("same", "up", "open", "absent")]
    checked = rules.check(predictions, {name: {"all": verdict} for name, verdict in verdicts.items()})
    assert [one["outcome"] for one in checked] == ["confirmed", "refuted", "open"]


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_change_invalidates_exactly_its_cells(processor, tmp_path, trainings, monkeypatch):
    """Breaks when a stale cell is taken for one of other settings, questions, base or code, or too much is redone."""
    graded = []

    def redone(rows=("fine-tuned", "dex"), examples=4, **changes):
        trainings.clear(), graded.clear()
        measures = [fake_measure(lambda s: graded.append(s) or [0.5] * examples, examples=examples) for _ in range(2)]
        rows = [ROWS[row] if isinstance(row, str) else row for row in rows]
        compare_rows(fake_study(tmp_path, processor, *measures, **changes), rows, 2, [1e-3, 3e-3])
        return [settings.attention for settings in trainings], len(graded)

    # the parameters of rows and control at the first rate, the second rate, then the second seed
    everything = ["softmax", "dex", "softmax"] * 4
    assert redone() == (everything, 18)  # on validation; and on test at one rate
    assert redone() == ([], 0)
    assert redone(["fine-tuned", FineTuningRow("dex", {"attention": "dex", "option": ("heads=[0]",)})]) == (
        ["dex"] * 4,
        6,
    )
    assert redone(examples=6) == ([], 18)  # other questions: asked again, of the same models
    assert redone(fingerprint="another base") == (everything, 18)
    assert redone(base=replace(PLAIN_BASE, samples=48)) == (everything, 18)
    monkeypatch.setattr(cells, "VERSION", cells.VERSION + 1)
    assert redone() == (everything, 18)


@pytest.mark.long
def test_training_data_are_part_of_a_cell(processor, tmp_path, trainings):
    """Breaks when a changed file of data is answered from the cache."""

    def train():
        trainings.clear()
        base = replace(PLAIN_BASE, data=f"jsonl:{tmp_path / 'own.jsonl'}", validation=0)
        attention_data._training_records.cache_clear()  # what a new process would not have
        compare_rows(fake_study(tmp_path, processor, base=base), [ROWS["fine-tuned"]], 1, [1e-3])
        return len(trainings)

    write_jsonl(tmp_path, 20)
    assert [train(), train()] == [1, 0]
    write_jsonl(tmp_path, 20, answer="no")
    assert train() == 1


def test_all_that_is_learned_is_part_of_a_cell(tmp_path):
    """Breaks when a changed turn, answer or picture of a user's file is answered from the cache."""
    for number in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")

    def mark(image="0.png", first="a", answers=("yes", "no")):
        says = [{"from": role, "value": text} for role, text in zip(("human", "gpt") * 2, (first, *"bcd"), strict=True)]
        rows = [{"conversations": says}, {"image": image, "prefix": "is it", "suffix": "yes", "answers": answers}]
        (tmp_path / "own.json").write_text(json.dumps(rows))
        attention_data._training_records.cache_clear()
        return attention_data.training_records(replace(PLAIN_BASE, data=f"jsonl:{tmp_path}/own.json", validation=0), 0)[
            1
        ]

    marks = [mark(), mark(image="1.png"), mark(first="A"), mark(answers=("yes", "none"))]
    assert len(set(marks)) == 4 and mark() == marks[0]
    records, embedded = attention_data.training_records(PLAIN_BASE, 0)
    assert embedded == digest([(record.name, record.prefix, record.suffix) for record in records])


# --- data -------------------------------------------------------------------------------------------------------------


def write_jsonl(folder, pictures, answer="yes"):
    lines = []
    for number in range(pictures):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        lines += [json.dumps({"image": f"{number}.png", "prefix": f"what {i}", "suffix": answer}) for i in range(2)]
    (folder / "own.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vqav2", "jsonl"])
def test_no_picture_is_in_two_splits_of_any_seed(kind, processor, tmp_path):
    """Breaks when what one seed is tested on, another seed, or the choice of a rate, has seen."""
    if kind == "vqav2":
        write_vqav2(tmp_path / "d")
        (tmp_path / "pictures").mkdir()
        (tmp_path / "d" / "train2014").rename(tmp_path / "pictures" / "train2014")
    else:
        (tmp_path / "d").mkdir()
        write_jsonl(tmp_path / "d", 20)
    base = replace(PLAIN_BASE, data=f"{kind}:{tmp_path / 'd'}{'/own.jsonl' if kind == 'jsonl' else ''}", validation=0.3)
    if kind == "vqav2":
        base = replace(base, images=str(tmp_path / "pictures"))
    args = SimpleNamespace(coco=None)
    measures = {split: attention_data.make_measures(base, split, 100, args)[0] for split in ("validation", "test")}
    pictures = {split: set(measure.pictures) for split, measure in measures.items()}
    assert [len(found) for found in pictures.values()] == [3, 3] and not pictures["validation"] & pictures["test"]
    for seed in range(3):
        records, _ = attention_data.training_records(replace(base, seed=seed), base.seed)
        learned = {record.key for record in records}
        assert all(record.pictures[0].is_file() for record in records)
        assert len(learned) == 14 and not learned & (pictures["validation"] | pictures["test"])
    model = load_base(base, WORLD.device)
    scores = measures["test"].grade(model.eval(), processor, base, tmp_path)
    assert len(scores) == len(measures["test"].examples) == (9 if kind == "vqav2" else 6)


def test_own_examples_are_asked_and_scored_in_full(tmp_path, processor, monkeypatch):
    """Breaks when an earlier turn, a second picture or one of several right answers is lost, or text alone crashes."""
    for number in range(2):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    says = [{"from": role, "value": text} for role, text in zip(("human", "gpt") * 2, "abcd", strict=True)]
    rows = [
        {"image": ["0.png", "1.png"], "prefix": "which", "suffix": "one"},
        {"prefix": "text", "suffix": "alone"},
        {"image": "0.png", "conversations": says},
        {"image": "0.png", "prefix": "colour", "answers": ["red"] * 9 + ["blue"]},
        {"image": "0.png", "prefix": "shade", "answers": ["dark", "light"]},
    ]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    records = own_records(tmp_path / "own.json")
    benchmark = attention_data.benchmark_of(records)
    asked = {ask.prefix: (len(ask.images()), ask.before) for ask in vqa.asks_of(benchmark, "{question}")}
    before = (("a", "b"),)
    assert asked == {"which": (2, ()), "text": (0, ()), "c": (1, before), "colour": (1, ()), "shade": (1, ())}
    said = [["one", "alone", "d", "red", "light"], ["two", "ALONE", "c", "blue", "black"]]
    scores = [
        list(
            vqa.question_accuracies(
                benchmark.annotations, dict(zip([r.name for r in records], of, strict=True))
            ).values()
        )
        for of in said
    ]
    assert scores == [[1, 1, 1, 1, 1], [0, 0, 0, pytest.approx(0.3), 0]]
    monkeypatch.setattr(attention_data, "_held_out", lambda settings: records)
    base = replace(PLAIN_BASE, data=f"jsonl:{tmp_path / 'own.json'}", validation=0.5)
    measures = [attention_data.vqa_measure(base, split, None) for split in ("validation", "test")]
    model = load_base(base, WORLD.device).eval()
    assert sum(len(measure.grade(model, processor, base, tmp_path)) for measure in measures) == 5
    assert any(before in example for measure in measures for example in measure.examples)


@pytest.mark.parametrize("more", [(), ("jsonl:own.jsonl",)])
def test_a_study_reads_tar_shards(more, processor, tmp_path, monkeypatch):
    """Breaks when a study cannot count what it has learned from shards, or a damaged sample of them ends it."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path, 3)
    picture = (tmp_path / "0.png").read_bytes()
    with tarfile.open("s.tar", "w") as tar:
        for name in "abcdef":
            text = json.dumps({"prefix": f"what {name}", "suffix": "yes"}).encode() if name != "b" else b"{"
            for member, content in ((f"{name}.png", picture), (f"{name}.json", text)):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    base = replace(PLAIN_BASE, data=("shards:s.tar", *more), validation=0)
    records, _ = attention_data.training_records(base, 0)
    image = processor.config.num_image_tokens
    assert cells.count_tokens(records, processor, 10) > 10 * image and cells.count_tokens([], processor, 10) == 0
    asked = attention_data.vqa_measure(replace(base, validation=0.9), "test", 10)
    assert len(asked.examples) > 0


def test_pictures_that_are_all_gone_are_no_score(tmp_path, processor, capsys):
    """Breaks when a folder of pictures that is not there is stored as a score of 0."""
    write_jsonl(tmp_path, 4)
    base = replace(PLAIN_BASE, data=f"jsonl:{tmp_path}/own.jsonl", validation=0.9)
    model, measure = load_base(base, WORLD.device).eval(), attention_data.vqa_measure(base, "test", None)
    gone = sorted({tmp_path / f"{number}.png" for number in range(4)} & {Path(name) for name in measure.pictures})
    assert len(gone) == 2
    gone[0].unlink()
    assert len(measure.grade(model, processor, base, tmp_path / "a")) == 4
    assert capsys.readouterr().err.count("2 questions count as wrong") == 1
    gone[1].unlink()
    with pytest.raises(UserError, match="none of the 4 questions can be asked.*png"):
        measure.grade(model, processor, base, tmp_path / "b")


def test_val2014_is_the_test_split_where_it_is(tmp_path):
    """Breaks when VQAv2's own validation files lie in the folder and something else is reported."""
    write_vqav2(tmp_path)
    for name in ("v2_OpenEnded_mscoco_{}_questions.json", "v2_mscoco_{}_annotations.json"):
        text = (tmp_path / name.format("train2014")).read_text().replace("train2014", "val2014")
        (tmp_path / name.format("val2014")).write_text(text)
    (tmp_path / "val2014").mkdir()
    for path in (tmp_path / "train2014").iterdir():
        path.rename(tmp_path / "val2014" / path.name.replace("train2014", "val2014"))
    base = replace(PLAIN_BASE, data=f"vqav2:{tmp_path}", validation=0.3)
    measure = attention_data.vqa_measure(base, "test", 100)
    assert len(measure.examples) == 60 and all(name.startswith("val2014/") for name in measure.pictures)


def test_row_and_control_learn_from_the_same(processor, tmp_path):
    """Breaks when a row and its control see other data, or all seeds of the embedded scenes see the same."""
    study = fake_study(tmp_path, processor)

    def learned(row, seed, rate):
        return attention_data.training_records(cell_settings(study, row, rate, seed), study.base.seed)

    twin, (records, mark) = learned(ROWS["twin"], 0, 1e-3)[1], learned(ROWS["fine-tuned"], 0, 3e-3)
    assert twin == mark != learned(ROWS["twin"], 1, 1e-3)[1]
    tasks = [record.name.partition("/")[0] for record in records]
    assert [tasks.count(task) for task in ("vqa", "n2o1", "n2o2", "n4o1")] == [8, 8, 8, 8]
    first = records[0].pictures[0]()
    assert records[0].pictures[0]() is first  # drawn once for all cells


def test_needle_measures_know_their_places(processor):
    """Breaks when Figure 2 shows accuracy at another place than the needle's."""
    args = SimpleNamespace(protocol="constrained", coco=None)
    _, small, large, dose = attention_data.make_measures(PLAIN_BASE, "test", 32, args, ("n2o2", "n4o1"))
    assert Counter(dose.labels) == dict.fromkeys(attention_data.DOSES, 16)
    for (_, test), label in zip(dose.examples, dose.labels, strict=True):
        scene = scenes.needle(f"n4d{label}", "test", test.id).scene
        assert len(scene.objects) == label + 1 and test.places[0][1:] in {divmod(o.square, 4) for o in scene.objects}
    crowd = attention_data.existence_measure(8, 12, "test", args.protocol)
    said = [annotation.answer for _, _, annotation in crowd.examples]
    assert {words for words, *_ in crowd.examples} == {("yes", "no")}
    assert len(attention_data.existence_measure(8, 12, "test", "paper").examples[0]) == 2  # free answers
    assert said == ["yes", "no"] * 6 and crowd.chance == 50 and len(set(crowd.pictures)) == 2
    samples = scenes.pope("random", "test", 2, objects=8)
    assert all(len(set(sample.scene.squares)) == 9 for sample in samples)  # eight objects, and "none"
    assert small.labels[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)] and large.labels[:6][-1] == (1, 1)
    assert len(small.labels) == len(large.labels) == 16 and (small.chance, large.chance) == (25, 6.25)
    scores = 100 * np.array([[1, 0, 0, 0.5] * 4, [0, 0, 1, 0.5] * 4])
    assert attention_report.grid(attention_report.by_label(scores, small.labels)) == [[0.5, 0], [0.5, 0.5]]


# --- flags ------------------------------------------------------------------------------------------------------------


def test_rows_by_name_and_group():
    """Breaks when a group loses a variant, or the paper's rows are not its Table 1."""
    assert [row.name for row in attention_rows.pick_rows("attention")] == [
        "baseline",
        "fine-tuned",
        "shared",
        "split",
        "twin",
        "twin-small",
        "twin-token",
        "twin-half",
        "v2",
        "v2-grouped",
        "dex",
        "dex-entropy",
    ]
    assert [row.name for row in attention_rows.pick_rows("twin,swiglu,attention")][:3] == ["twin", "swiglu", "baseline"]
    for row in attention_rows.pick_rows("paper"):
        settings = replace(PLAIN_BASE, **row.changes)
        assert settings == replace(PLAIN_BASE, **RECIPES[row.name])
        assert row.needs_control(settings) == (row.name not in ("paper-1", "paper-3"))
    assert all("warmup" not in row.changes for row in attention_rows.pick_rows("paper", {"warmup"}))
    assert [row.published for row in attention_rows.pick_rows("paper")] == [53.21, 51.91, 35.72, 33.91, 41.32]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rows", "twn"], "--rows twn: choose of attention"),
        (["--lr", "1e-3"], "--lr: the study decides that itself"),
        (["--no-evaluate"], "--no-evaluate: the study"),
        (["--wings", "--stage", "1"], "--wings: the study"),
        (["--recipe", "paligemma"], "trains every weight"),
        (["--coco", "pictures"], "--coco goes with --data on disk"),
        (["--data", "jsonl:nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(flags, told, tmp_path, trainings):
    """Breaks when a wrong flag costs a comparison, or is passed over in silence."""
    with pytest.raises(UserError, match=told):
        compare.main(["--base", "tiny", "--device", "cpu", "--out", str(tmp_path), *flags])
    assert not trainings


def test_held_out_pictures_must_be_there(tmp_path):
    """Breaks when nothing is held out and the comparison starts all the same."""
    write_jsonl(tmp_path, 4)
    with pytest.raises(UserError, match="validation"):
        attention_data.vqa_measure(
            replace(PLAIN_BASE, data=f"jsonl:{tmp_path / 'own.jsonl'}", validation=0.2), "test", 10
        )


@pytest.mark.parametrize("flags", [["--rates", "0"], ["--rates", "a,b"], ["--seeds", "0"], ["--nonsense"]])
def test_flags_that_make_no_sense(flags, tmp_path):
    """Breaks when a flag's value is not checked."""
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: compare.main(["--base", "tiny", "--out", str(tmp_path), *flags]))
    assert stopped.value.code == 2
