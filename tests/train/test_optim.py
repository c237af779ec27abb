"""Rates, groups and schedules: what learns, by name, and how fast."""

import re

import pytest
import torch
from torch import nn

from tests.runs import WORLD, settings_of
from train import optim
from train.model import open_model
from train.optim import (
    MuonAdamW,
    Rule,
    make_adamw,
    parameter_groups,
    parameter_names,
    rate_factor,
    set_rates,
    trainable,
)


def small_model():
    scale = nn.ParameterDict({"mu": nn.Parameter(torch.ones(1))})
    return nn.ModuleDict({"tower": nn.Linear(3, 3), "head": nn.Linear(3, 2), "scale": scale})


def test_rates_and_decay_reach_only_their_group():
    """Breaks when weight decay pulls at λ and μ, whose zero means nothing, or a schedule overwrites
    a group's peak."""
    model = small_model()
    assert parameter_names(model, r".*\.(mu|w)") == ["scale.mu"]  # whole names
    assert optim.is_inner_matrix("a.multi.weight", model["head"].weight)
    for name in "mu lambda_mean gate.weight temperature sinks".split():
        assert re.fullmatch(optim.SCALARS, f"a.{name}")
    rules = [
        Rule(parameter_names(model, r".*\.mu"), 0.5),
        Rule(parameter_names(model, r"(head|scale).*"), 0.1, 0.5),
    ]
    optimizer = make_adamw(parameter_groups(model, rules), (0.9, 0.98))
    # a parameter belongs to the first rule that names it, and the rest is frozen
    assert [group["names"] for group in optimizer.param_groups] == [
        ["scale.mu"],
        ["head.weight", "head.bias"],
    ]
    assert set(trainable(model)) == {"scale.mu", "head.weight", "head.bias"}
    with pytest.raises(AssertionError, match="no parameter"):
        parameter_names(model, "tower")  # whole names
    set_rates(optimizer, 0.5)
    set_rates(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.02])
    before = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    for parameter in trainable(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(trainable(model)["scale.mu"], before["scale.mu"])
    assert torch.allclose(trainable(model)["head.weight"], before["head.weight"] * (1 - 0.02 * 0.5))


@pytest.mark.parametrize(
    "kind, left", [("adamw", 0.95**2), ("adam", 0.8004468), ("radam", 0.95**2)]
)
def test_decay_is_a_part_of_the_gradient_in_adam_alone(kind, left):
    """Breaks when an optimizer is another, or gets other betas: 1 with a decay of 0.5, two steps
    without a gradient."""
    groups = parameter_groups(
        nn.ParameterDict({"a": nn.Parameter(torch.ones(1))}), [Rule(["a"], 0.1, 0.5)]
    )
    optimizer = optim.OPTIMIZERS[kind](groups, betas=(0.8, 0.9))
    for _ in range(2):
        groups[0]["params"][0].grad = torch.zeros(1)
        optimizer.step()
    assert groups[0]["params"][0].item() == pytest.approx(left)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_schedules():
    """Breaks when warm-up, decay or the end of training are off by a step, or one step of warm-up
    is the whole run."""
    linear = [rate_factor(step, 10, 2, "linear") for step in range(10)]
    assert linear == pytest.approx([1 / 3, 2 / 3, *(1 - i / 8 for i in range(8))])
    assert rate_factor(10, 10, 2, "linear") == 0.0
    cosine = [rate_factor(step, 100, 0, "cosine") for step in (0, 25, 50, 75)]
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert [rate_factor(step, 10, 1, "constant") for step in range(10)] == [0.5] + [1.0] * 9
    assert [rate_factor(step, 10, 0.29, "constant") for step in range(3)] == pytest.approx(
        [1 / 3, 2 / 3, 1.0]
    )


def test_the_rate_of_scalars_is_applied_once():
    """Breaks when --scalar-lr counts twice under Muon, or a matrix of λ is moved by Muon at the
    full rate."""
    flags = "--base tiny --attention v2 --optimizer muon --lr 0.01 --scalar-lr 0.002 --device cpu"
    _, optimizer = open_model(settings_of(flags), WORLD.device)
    rates = {name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]}
    scalars = {name for name in rates if re.fullmatch(optim.SCALARS, name)}
    assert any("lambda_proj.weight" in name for name in scalars)
    assert scalars != rates.keys()
    assert rates == {name: pytest.approx(0.002 if name in scalars else 0.01) for name in rates}


def test_muon_moves_the_matrices_and_adamw_the_rest(seeded):
    """Breaks when a rate reaches the wrong parameters, or the two halves differ from PyTorch's own
    optimizers."""
    model = nn.ModuleDict({"inner": nn.Linear(4, 3), "embed": nn.Embedding(5, 4)})
    alone = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    optimizer = MuonAdamW(
        parameter_groups(model, [Rule([*alone], 0.02, 0.1)]), (0.9, 0.98), ratio=0.05
    )
    assert [group["names"] for group in optimizer.param_groups] == [
        ["inner.bias", "embed.weight"],
        ["inner.weight"],
    ]
    muon = torch.optim.Muon([alone["inner.weight"]], 0.01, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(
        [alone["inner.bias"], alone["embed.weight"]], 5e-4, (0.9, 0.98), weight_decay=0.1
    )
    for _ in range(3):
        set_rates(optimizer, 0.5)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            alone[name].grad = parameter.grad.clone()
        for stepped in (optimizer, muon, adamw):
            stepped.step()
    for name, parameter in model.named_parameters():
        # PyTorch's Muon computes in bf16
        assert (parameter - alone[name]).abs().max() <= (3e-4 if name == "inner.weight" else 0)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_computes_in_the_precision_of_the_weights(shape, seeded):
    """Breaks when its products are in bf16, which a CPU without instructions for it computes 17
    times as slowly, or a tall matrix is moved as a wide one."""
    matrix = nn.Parameter(torch.zeros(shape))
    optimizer = MuonAdamW(
        parameter_groups(nn.ParameterDict({"a": matrix}), [Rule(["a"], 1.0)]), (0.9, 0.98), 1.0
    )
    mean = torch.zeros(shape).double()
    expected = torch.zeros(shape).double()
    for _ in range(3):
        matrix.grad = torch.randn(shape)
        mean = 0.95 * mean + 0.05 * matrix.grad.double()
        u, s, v = torch.linalg.svd(0.05 * matrix.grad.double() + 0.95 * mean, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        expected -= max(1, shape[0] / shape[1]) ** 0.5 * u * s @ v
        optimizer.step()
    assert (matrix - expected).abs().max() <= 1e-4
