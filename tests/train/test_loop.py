"""The loop itself, on six numbers: its updates are those of a plain transcription in float64."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.files import read_lines
from tests.runs import WORLD, metrics, refused
from train.checkpoint import checkpoints
from train.distributed import World
from train.loop import LoopSettings, fit
from train.optim import Rule, make_adamw, parameter_groups

# micro-batches of each step: supervised tokens, and the names of unusable records
STEPS = json.loads("""[
    [[1, ""], [7, ""]],
    [[2, "a"], [2, ""]],
    [[0, "b"]],
    [[4, "a"], [0, ""]],
    [[5, ""], [1, ""]]
]""")
RATES = [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]  # two steps of warm-up, then linear
FLAGS = json.loads("""{"warmup": 2, "schedule": "linear", "clip": 0.5, "checkpoint_every": 2,
    "keep": 9, "device": "cpu"}""")


def order(most_bad=2):
    """Each micro-batch has as many rows of three numbers as tokens, and one name in two rows."""
    dice = torch.Generator().manual_seed(0)
    steps = []
    for step in STEPS:
        micros = []
        for tokens, bad in step:
            rows = torch.randn(tokens, 3, generator=dice, dtype=torch.float64)
            names = ("r",) * -(-tokens // 2)
            micros.append(SimpleNamespace(rows=rows, tokens=tokens, names=names, bad=tuple(bad)))
        steps.append(micros)
    read = lambda first, workers, pin: iter(steps[first:])  # noqa: E731
    return SimpleNamespace(total=len(steps), most_bad=most_bad, steps=read)


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.0), nn.Linear(1, 1)).double()
    rules = [Rule(["0.weight", "0.bias"], 0.1, 0.2), Rule(["2.weight"], 0.01)]
    return model, make_adamw(parameter_groups(model, rules), (0.8, 0.9))


def loss(model, micro):
    assert model.training
    return (model(micro.rows) - 3 * micro.rows[:, :1]).square().sum()


def test_the_updates_are_those_of_a_transcription(tmp_path):
    """Breaks when a step takes another rate, weighs tokens or clips otherwise, or logs another
    loss, norm or count."""
    model, optimizer = made()
    plain, _ = made()
    progress = fit(model, optimizer, order(), loss, LoopSettings(**FLAGS), tmp_path, WORLD)
    learned = [*plain[0].parameters(), plain[2].weight]
    groups = [
        {"params": learned[:2], "weight_decay": 0.2},
        {"params": learned[2:], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), foreach=False)
    for line, micros, rate in zip(
        metrics(tmp_path), order().steps(0, 0, False), RATES, strict=True
    ):
        tokens = sum(micro.tokens for micro in micros)
        assert line["lr"] == pytest.approx(0.01 * rate)
        assert ("loss" in line) == bool(tokens)
        if tokens:
            mean = sum(loss(plain, micro) for micro in micros) / tokens
            gradients = torch.autograd.grad(mean, learned)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
            assert line["loss"] == pytest.approx(mean.item(), rel=1e-6)
            assert line["gradient_norm"] == pytest.approx(norm, rel=1e-6)
            for parameter, gradient in zip(learned, gradients, strict=True):
                parameter.grad = gradient * min(1, 0.5 / norm)
            for group, own in zip(reference.param_groups, (0.1, 0.01), strict=True):
                group["lr"] = own * rate
            reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)
    assert (progress.step, progress.samples) == (5, 13)
    second = read_lines(tmp_path / "metrics.jsonl")[1]  # two samples of four tokens
    assert second["tokens_per_second"] / second["samples_per_second"] == pytest.approx(2, rel=1e-2)
    assert (progress.bad, progress.empty_steps) == (["a", "b"], 1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-4", "step-5"]


def test_too_many_unusable_records_and_an_early_end(tmp_path):
    """Breaks when --max-bad is off by one or takes no share of few records, or a run goes on, or
    without a checkpoint, after it has been stopped."""
    run = LoopSettings(**FLAGS), tmp_path / "bad", WORLD
    refused(lambda: fit(*made(), order(1), loss, *run), "more than 1", "the last: b")
    for given, most in {None: [0, 1, 2, 19, 20], 20: [0, 1, 10, 20, 20], 0: [0] * 5}.items():
        of = LoopSettings(max_bad=given).most_bad
        assert [of(count) for count in (1, 3, 20, 199, 5000)] == most

    def stop(step, progress):
        progress.stopped = 3 if step == 3 else None
        return {}

    folder = tmp_path / "stopped"
    fit(*made(), order(), loss, LoopSettings(**FLAGS), folder, WORLD, validate=stop)
    assert [path.name for path in checkpoints(folder)] == ["step-2", "step-3"]
    assert len(metrics(folder)) == 3


def test_dropout_is_another_at_each_step_process_and_seed(tmp_path):
    """Breaks when all steps, processes or seeds drop the same activations."""
    drawn = []

    def drawing(model, micro):
        drawn.append(torch.rand(1).item())
        return loss(model, micro)

    for number, (rank, seed) in enumerate(((0, 0), (1, 0), (0, 1), (0, 0))):
        world = World(rank, 1, WORLD.device)
        settings = LoopSettings(**FLAGS, seed=seed)
        fit(*made(), order(), drawing, settings, tmp_path / str(number), world)
    assert drawn[:8] == drawn[24:]
    assert len({*drawn}) == 24
