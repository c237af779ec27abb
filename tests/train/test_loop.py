"""The loop itself, on six numbers: its updates are those of a plain transcription in float64."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.runs import WORLD, metrics, refused
from train.checkpoint import checkpoints
from train.distributed import World
from train.loop import LoopSettings, fit
from train.optim import Rule, make_adamw, parameter_groups

# micro-batches of each step: supervised tokens, and the names of unusable records
STEPS = [
    [(1, ""), (7, "")],
    [(2, "a"), (2, "")],
    [(0, "b")],
    [(4, "a"), (0, "")],
    [(5, ""), (1, "")],
]
RATES = [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]  # two steps of warm-up, then linear
FLAGS = {
    "warmup": 2,
    "schedule": "linear",
    "clip": 0.5,
    "checkpoint_every": 2,
    "keep": 9,
    "device": "cpu",
}


def order(most_bad=2):
    """Each micro-batch has as many rows of three numbers as tokens, and one name in two rows."""
    dice = torch.Generator().manual_seed(0)
    rows = [[tokens for tokens, _ in step] for step in STEPS]
    drawn = [
        [torch.randn(n, 3, generator=dice, dtype=torch.float64) for n in step] for step in rows
    ]
    steps = [
        [
            SimpleNamespace(rows=x, tokens=n, names=("r",) * -(-n // 2), bad=tuple(bad))
            for x, (n, bad) in zip(of_step, step, strict=True)
        ]
        for of_step, step in zip(drawn, STEPS, strict=True)
    ]
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
    (model, optimizer) = made()
    (plain, _) = made()
    progress = fit(model, optimizer, order(), loss, LoopSettings(**FLAGS), tmp_path, WORLD)
    learned = [*plain[0].parameters(), plain[2].weight]
    groups = [
        {"params": learned[:2], "weight_decay": 0.2},
        {"params": learned[2:], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), foreach=False)
    logged = metrics(tmp_path)
    for line, micros, rate in zip(logged, order().steps(0, 0, False), RATES, strict=True):
        tokens = sum(micro.tokens for micro in micros)
        assert line["lr"] == pytest.approx(0.01 * rate)
        assert ("loss" in line) == bool(tokens)
        if tokens:
            mean = sum(loss(plain, micro) for micro in micros) / tokens
            gradients = torch.autograd.grad(mean, learned)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            assert (line["loss"], line["gradient_norm"]) == pytest.approx(
                (mean.item(), norm.item()), rel=1e-6
            )
            for parameter, gradient in zip(learned, gradients, strict=True):
                parameter.grad = gradient * min(1, 0.5 / norm.item())
            reference.param_groups[0]["lr"] = 0.1 * rate
            reference.param_groups[1]["lr"] = 0.01 * rate
            reference.step()
    assert all(
        torch.allclose(a, b, rtol=1e-5)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert (progress.step, progress.samples, progress.bad, progress.empty_steps) == (
        5,
        13,
        ["a", "b"],
        1,
    )
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-4", "step-5"]


def test_too_many_unusable_records_and_an_early_end(tmp_path):
    """Breaks when --max-bad is off by one or takes no share of few records, or a run goes on, or
    without a checkpoint, after it has been stopped."""
    run = LoopSettings(**FLAGS), tmp_path / "bad", WORLD
    refused(lambda: fit(*made(), order(1), loss, *run), "more than 1", "the last: b")
    counts = 1, 3, 20, 199, 5000
    for given, most in ((None, (0, 1, 2, 19, 20)), (20, (0, 1, 10, 20, 20)), (0, (0,) * 5)):
        assert tuple(map(LoopSettings(max_bad=given).most_bad, counts)) == most

    def stop(step, progress):
        progress.stopped = 3 if step == 3 else None
        return {}

    fit(*made(), order(), loss, LoopSettings(**FLAGS), tmp_path / "stopped", WORLD, validate=stop)
    assert [path.name for path in checkpoints(tmp_path / "stopped")] == ["step-2", "step-3"]
    assert len(metrics(tmp_path / "stopped")) == 3


def test_dropout_is_another_at_each_step_process_and_seed(tmp_path):
    """Breaks when all steps, processes or seeds drop the same activations."""
    drawn = []
    names = count()

    def drawing(model, micro):
        drawn.append(torch.rand(1).item())
        return loss(model, micro)

    for rank, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        folder = tmp_path / str(next(names))
        world = World(rank, 1, WORLD.device)
        fit(*made(), order(), drawing, LoopSettings(**FLAGS, seed=seed), folder, world)
    runs = [drawn[start : start + 8] for start in range(0, len(drawn), 8)]
    assert runs[0] == runs[3]
    assert len({*drawn}) == 24
