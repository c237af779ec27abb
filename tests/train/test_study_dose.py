"""The dose of noise: the bound by hand, the row without a second map, and both tasks end to end on
tiny cells."""

from unittest.mock import Mock

import pytest
import torch

from model.attention import attention_modules, tapped
from model.differential import graft, variants_of
from tests.reference import relative_error
from tests.runs import read_cells
from train import compare
from train.studies import built, dose
from weights.load import load_model


def test_the_bound_of_one_map_by_hand():
    """Breaks when the best map is counted as worse, or better, than it can be; e^0.5 is below 2,
    e^0.8 above."""
    # both others of one class
    assert built.best_of_one_map(0.25, 2) == pytest.approx(100 * (1 - 7 / 64), abs=0.3)
    assert built.best_of_one_map(0.25, 1) == built.best_of_one_map(0.4, 2) == 100


@torch.no_grad()
def test_a_cap_bounds_every_weight():
    """Breaks when a decoder's layer has no cap, or another one: no visible weight is more than e^2c
    times another."""
    model = load_model("embedded").eval()
    weights = []
    dose.cap_logits(model, 0.25)
    with tapped(dict.fromkeys(attention_modules(model.language_model).values(), weights.append)):
        dose.answers(model, "test", 32, torch.arange(32))
    assert len(weights) == 4
    for of in weights:
        least = of.masked_fill(of == 0, 1).min(-1).values
        assert 1.6 < (of.max(-1).values / least).max() <= 2.71828**0.5 + 1e-4


@torch.no_grad()
def test_shared_is_plain_attention_with_a_norm():
    """Breaks when the row without a second map is another model than `shared`: A − λ·A = (1 −
    λ)·A."""
    model = load_model("embedded").eval()
    graft(model, "shared", seed=3)
    variants = variants_of(model).values()

    def answers():
        return dose.answers(model, "test", 32, torch.arange(32))[0]

    assert all(0.1 < variant.coefficient().item() < 0.9 for variant in variants)
    shared = answers()
    for variant in variants:
        built.without_second_map(variant)
    assert 0 < relative_error(answers(), shared) < 1e-3  # ε in the norm


def test_a_longer_run_takes_more_steps():
    """Breaks when the rows at so many times the steps are those of the short runs again."""
    short, long = (dose.study_of(dose.Options(), "built", 0.5, times) for times in (1, 4))
    for row, changes in short.rows.items():
        assert dict(long.rows[row]) == dict(changes) | {"steps": 1200}


@pytest.mark.long
def test_both_tasks_from_end_to_end(tmp_path, monkeypatch, printed):
    """Breaks when a dose is not that of its cell, or rates come from runs that are tested."""
    for name, value in {
        "FALLING": (None, 0.5),
        "BASE_STEPS": 1,
        "BATCH": 8,
        "POOL": 32,
        "TESTS": {"validation": 16, "test": 16},
        "TASKS": {"built": (4, (0.01,)), "needle": (2, (3e-3,))},
        "TUNING_SEEDS": (100,),
    }.items():
        monkeypatch.setattr(dose, name, value)
    found = Mock(wraps=dose.found)
    monkeypatch.setattr(dose, "found", found)
    command = f"--caps 0.5 --seeds 2 --jobs 1 --out {tmp_path} --rows".split()
    compare.run_study("dose", [*command, *dose.PLAIN, "plain + head norm", "v2"])
    lines = read_cells(tmp_path / "comparison.csv")
    assert "## needle, 1 × steps" in printed()
    asked = [call.args[1] for call in found.call_args_list]
    assert asked.count("test") == asked.count("validation") - 2  # the base, under two caps
    assert len({line.study for line in lines}) == 4  # each task, and at more steps
    assert {line.seed for line in lines} == {0, 1, 100}
