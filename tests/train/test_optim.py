"""Rates, groups and schedules: what learns, by name, and how fast."""

import re

import pytest
import torch
from torch import nn

from model.common import UserError
from train.optim import SCALARS, MuonAdamW, Rule, make_adamw, parameter_groups, rate_factor, set_rates, trainable
from train.settings import parse
from train.systems.open import open_model


def small_model():
    return nn.ModuleDict(
        {
            "tower": nn.Linear(3, 3),
            "head": nn.Linear(3, 2),
            "scale": nn.ParameterDict({"mu": nn.Parameter(torch.ones(1))}),
        }
    )


def test_the_first_rule_that_matches_counts_and_the_rest_is_frozen():
    """Breaks when a parameter learns at another group's rate, or something unnamed learns at all."""
    model = small_model()
    groups = parameter_groups(model, [Rule(r".*\.mu", 0.5), Rule(r"(head|scale).*", 0.1, 0.01)])
    assert [group["names"] for group in groups] == [["scale.mu"], ["head.weight", "head.bias"]]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.5, 0.0), (0.1, 0.01)]
    assert set(trainable(model)) == {"scale.mu", "head.weight", "head.bias"}


def test_a_rule_that_reaches_nothing_is_refused():
    """Breaks when a misspelt pattern trains nothing in silence, or one rule swallows what another was for."""
    with pytest.raises(UserError, match="haed"):
        parameter_groups(small_model(), [Rule("haed.*", 0.1)])
    with pytest.raises(UserError, match="head"):
        parameter_groups(small_model(), [Rule(".*", 0.1), Rule("head.*", 0.1)])


def test_decay_reaches_only_its_group():
    """Breaks when weight decay pulls at λ and μ, whose zero means nothing."""
    model = small_model()
    optimizer = make_adamw(parameter_groups(model, [Rule(r".*\.mu", 0.1), Rule("head.*", 0.1, 0.5)]), (0.9, 0.98))
    before = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    for parameter in trainable(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(trainable(model)["scale.mu"], before["scale.mu"])
    assert torch.allclose(trainable(model)["head.weight"], before["head.weight"] * (1 - 0.1 * 0.5))


def test_schedules():
    """Breaks when warm-up, decay or the end of training are off by a step."""
    linear = [rate_factor(step, 10, 2, "linear") for step in range(10)]
    assert linear[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert linear[2:] == pytest.approx([1 - i / 8 for i in range(8)])
    cosine = [rate_factor(step, 100, 0, "cosine") for step in (0, 25, 50, 75)]
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert rate_factor(10, 10, 2, "linear") == 0.0
    assert {rate_factor(step, 10, 2, "constant") for step in range(2, 10)} == {1.0}
    with pytest.raises(UserError, match="'step'"):
        rate_factor(5, 10, 2, "step")


def test_every_group_keeps_its_own_peak():
    """Breaks when a schedule overwrites the rates that groups differ by."""
    groups = parameter_groups(small_model(), [Rule(r".*\.mu", 0.5), Rule("head.*", 0.1)])
    optimizer = make_adamw(groups, (0.9, 0.98))
    set_rates(optimizer, 0.5)
    set_rates(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.02])


def test_the_rate_of_scalars_is_applied_once():
    """Breaks when --scalar-lr counts twice under Muon, or a matrix of λ is moved by Muon at the full rate."""
    given = "--base tiny --attention v2 --optimizer muon --lr 0.01 --scalar-lr 0.002 --device cpu".split()
    _, optimizer = open_model(parse(given)[0], torch.device("cpu"))
    rates = {name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]}
    scalars = {name for name in rates if re.fullmatch(SCALARS, name)}
    assert any("lambda_proj.weight" in name for name in scalars) and scalars != rates.keys()
    for name, rate in rates.items():
        assert rate == pytest.approx(0.002 if name in scalars else 0.01), name


def test_muon_moves_the_matrices_and_adamw_the_rest():
    """Breaks when a rate reaches the wrong parameters, or the two halves differ from PyTorch's own optimizers."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": nn.Linear(4, 3), "embed": nn.Embedding(5, 4)})
    alone = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    optimizer = MuonAdamW(parameter_groups(model, [Rule(".*", 0.02)]), (0.9, 0.98), ratio=0.05)
    assert [group["names"] for group in optimizer.param_groups] == [["inner.bias", "embed.weight"], ["inner.weight"]]
    muon = torch.optim.Muon([alone["inner.weight"]], 0.01, weight_decay=0.0, momentum=0.95)
    adamw = torch.optim.AdamW([alone["inner.bias"], alone["embed.weight"]], 5e-4, (0.9, 0.98), weight_decay=0.0)
    for _ in range(3):
        set_rates(optimizer, 0.5)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            alone[name].grad = parameter.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, alone[name]), name
