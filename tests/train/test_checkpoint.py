"""A checkpoint is whole or not there, and holds all that the next step depends on."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from model.common import UserError
from train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from train.optim import OPTIMIZERS, MuonAdamW, Rule, make_adamw, parameter_groups


def make(seed: int = 0, optimizer=make_adamw):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, optimizer(parameter_groups(model, [Rule("0.*", 0.1), Rule(r"2\.weight", 0.01)]), (0.9, 0.98))


def step(model, optimizer, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS.values(), partial(MuonAdamW, ratio=0.5)])
def test_resumed_equals_uninterrupted_to_the_bit(make_optimizer, tmp_path):
    """Breaks when a moment, a step count or a weight is not restored."""
    model, optimizer = make(optimizer=make_optimizer)
    for number in range(5):
        step(model, optimizer, number)
        if number == 2:
            save_checkpoint(tmp_path, 3, model, optimizer, {"epoch": 0})
    resumed, resumed_optimizer = make(seed=1, optimizer=make_optimizer)
    resumed[2].bias.data.copy_(model[2].bias)  # frozen: not in the checkpoint
    state = load_checkpoint(checkpoints(tmp_path)[-1], resumed, resumed_optimizer)
    assert (state["step"], state["progress"]) == (3, {"epoch": 0})
    for number in range(3, 5):
        step(resumed, resumed_optimizer, number)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_newest_are_kept_in_numeric_order(tmp_path):
    """Breaks when old checkpoints pile up, or step 9 counts as newer than step 10."""
    model, optimizer = make()
    step(model, optimizer, 0)
    for number in (8, 9, 10):
        save_checkpoint(tmp_path, number, model, optimizer, {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9", "step-10"]
    save_checkpoint(tmp_path, 10, model, optimizer, {"again": True}, keep=2)
    assert json.loads((tmp_path / "checkpoints/step-10/state.json").read_text())["progress"] == {"again": True}


def test_a_crash_while_writing_leaves_the_old_ones(tmp_path, monkeypatch):
    """Breaks when a half-written folder bears a checkpoint's name."""
    model, optimizer = make()
    step(model, optimizer, 0)
    save_checkpoint(tmp_path, 1, model, optimizer, {})

    def crash(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr("model.common.os.fsync", crash)
    with pytest.raises(UserError, match="no space left"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    monkeypatch.undo()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-1"]
    save_checkpoint(tmp_path, 2, model, optimizer, {})  # the leftovers are in nobody's way
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]


def test_another_runs_checkpoint_is_refused(tmp_path):
    """Breaks when weights land in a model that trains other parameters, or a damaged file ends in a traceback."""
    model, optimizer = make()
    step(model, optimizer, 0)
    folder = save_checkpoint(tmp_path, 1, model, optimizer, {})
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    groups = parameter_groups(other, [Rule("0.*", 0.1), Rule(r"2\.weight", 0.01)])
    with pytest.raises(UserError, match="other parameters"):
        load_checkpoint(folder, other, make_adamw(groups, (0.9, 0.98)))
    (folder / "trainable.safetensors").write_bytes(b"\x08")
    with pytest.raises(UserError, match="trainable.safetensors has been changed.*there is none before"):
        load_checkpoint(folder, model, optimizer)
