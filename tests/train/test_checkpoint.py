"""A checkpoint is whole or not there, and holds all that the next step depends on."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.files import read_json, write_json
from tests.runs import WORLD, refused
from train.checkpoint import (
    Best,
    Progress,
    Result,
    checkpoints,
    file_digest,
    load_checkpoint,
    newest_progress,
    save_checkpoint,
)
from train.optim import OPTIMIZERS, MuonAdamW, Rule, make_adamw, parameter_groups


def make(seed=0, optimizer=make_adamw):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    rules = [Rule(["0.weight", "0.bias"], 0.1), Rule(["2.weight"], 0.01)]
    return model, optimizer(parameter_groups(model, rules), betas=(0.9, 0.98))


def step(model, optimizer, number=0):
    torch.manual_seed(number)
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(folder):
    """The optimizer of a model that has made a step, which is saved in `folder`."""
    model, optimizer = make()
    step(model, optimizer)
    save_checkpoint(folder, Progress(step=1), model, optimizer, WORLD)
    return optimizer


@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS.values(), partial(MuonAdamW, ratio=0.5)])
def test_resumed_equals_uninterrupted_to_the_bit(make_optimizer, tmp_path):
    """Breaks when a moment, a step count, a weight, the best score or a result is not restored."""
    model, optimizer = make(optimizer=make_optimizer)
    model[0].bias.requires_grad_(False)  # an aligned tower: the optimizer's, and in the checkpoint
    kept = Progress(
        step=3, bad=["a"], best=Best(2, 1.0, None, 1), results={"before": Result([None], ["b"])}
    )
    for number in range(5):
        step(model, optimizer, number)
        if number == 2:
            save_checkpoint(tmp_path, kept, model, optimizer, WORLD)
    resumed, resumed_optimizer = make(seed=1, optimizer=make_optimizer)
    resumed[0].bias.requires_grad_(False)
    resumed[2].bias.data.copy_(model[2].bias)  # frozen: not in the checkpoint
    progress = newest_progress(tmp_path)
    assert progress == kept
    load_checkpoint(tmp_path, progress, resumed_optimizer)
    for number in range(3, 5):
        step(resumed, resumed_optimizer, number)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )


DAMAGES = {
    "lost": lambda moments: moments.pop("0.weight/exp_avg"),
    "short": lambda moments: moments.update({"0.weight/exp_avg": torch.zeros(8, 3)}),
    "strange": lambda moments: moments.update({"9.weight/exp_avg": torch.zeros(8, 4)}),
    "state": None,
}
RUBBISH = {"none": b"", "text": b"x" * 300, "short": b"\x08\0\0\0\0\0\0\0{}"}


@pytest.mark.parametrize("name", DAMAGES)
def test_state_that_does_not_fit_is_one_line(name, tmp_path):
    """Breaks when a run goes on with a fresh moment in place of a lost one, or a manifest made anew
    hides damage."""
    optimizer = saved(tmp_path)
    folder: Path = tmp_path / "checkpoints/step-1"
    if damage := DAMAGES[name]:
        moments = load_file(folder / "optimizer.safetensors")
        damage(moments)
        save_file(moments, folder / "optimizer.safetensors")
    else:
        (folder / "state.json").write_text('{"steps": 1}')
    digests = {
        file.name: file_digest(file) for file in folder.iterdir() if file.name != "manifest.json"
    }
    write_json(folder / "manifest.json", digests)
    refused(lambda: load_checkpoint(tmp_path, newest_progress(tmp_path), optimizer), "step-1")


@pytest.mark.parametrize("name", ["trainable", "optimizer"])
@pytest.mark.parametrize("raw", RUBBISH.values(), ids=RUBBISH)
def test_what_is_no_safetensors_is_one_line(name, raw, tmp_path):
    """Breaks when a file that holds no tensors, which a manifest made anew vouches for, is a
    traceback."""
    optimizer = saved(tmp_path)
    (tmp_path / "checkpoints/step-1" / f"{name}.safetensors").write_bytes(raw)
    refused(lambda: load_checkpoint(tmp_path, Progress(step=1), optimizer), "step-1")


def test_tensors_can_be_read_by_whoever_reads_the_run(tmp_path):
    """Breaks when a group that shares runs reads the state of a checkpoint, but not its tensors."""
    model, optimizer = make()
    save_checkpoint(tmp_path, Progress(step=1), model, optimizer, WORLD)
    assert len({file.stat().st_mode for file in (tmp_path / "checkpoints/step-1").iterdir()}) == 1


def test_a_file_that_is_lost_or_strange_is_named(tmp_path):
    """Breaks when the manifest is compared where both have a file alone."""
    saved(tmp_path)
    moments = tmp_path / "checkpoints/step-1/optimizer.safetensors"
    moments.rename(moments.with_stem("other"))
    refused(lambda: newest_progress(tmp_path), "optimizer.safetensors, other.safetensors: missing")


def test_the_newest_are_kept_in_numeric_order(tmp_path):
    """Breaks when old checkpoints pile up, or step 9 counts as newer than step 10."""
    model, optimizer = make()
    step(model, optimizer)
    for keep, kept in ((2, ["step-9", "step-10"]), (1, ["step-10"])):
        for number in (8, 9, 10):
            save_checkpoint(
                tmp_path, Progress(step=number, samples=keep), model, optimizer, WORLD, keep=keep
            )
        assert [path.name for path in checkpoints(tmp_path)] == kept
    assert read_json(tmp_path / "checkpoints/step-10/state.json")["samples"] == 1  # written again
