"""The precision of training: updates far below the resolution of bf16 must not be lost."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model.common import UserError
from tests.runs import in_processes
from train import finetune
from train.checkpoint import checkpoints, read_state
from train.distributed import World, set_gradient_sync
from train.loop import Diverged, LoopOptions, fit
from train.optim import Rule, make_adamw, parameter_groups, trainable
from train.settings import parse
from train.systems import open as systems
from train.systems.open import open_model
from weights.export import export_model
from weights.load import load_model

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """`--dtype auto` is resolved as on a GPU, and the model is opened on the CPU."""
    resolve = systems.choose_dtype
    monkeypatch.setattr(systems, "choose_dtype", lambda name, device: resolve(name, torch.device("cuda")))


def mean_change(settings, steps: int = 40) -> float:
    """The mean change of the trained weights after `steps` of the run's optimizer at rate 1e-5, by synthetic gradients.

    The gradients have one sign: with Adam, each step moves each weight by about the rate.
    """
    model, optimizer = open_model(settings, CPU)
    weights = trainable(model)
    before = {name: p.detach().float().clone() for name, p in weights.items()}
    dice = torch.Generator().manual_seed(0)
    gradients = {name: torch.rand(p.shape, generator=dice) + 0.5 for name, p in weights.items()}
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    for _ in range(steps):
        for name, p in weights.items():
            p.grad = gradients[name].to(p.dtype)
        optimizer.step()
    changes = [(p.detach().float() - before[name]).abs().flatten() for name, p in weights.items()]
    return torch.cat(changes).mean().item()


@pytest.mark.parametrize("run", ["full", "wings-1", "wings-2", "qmamba-1", "qmamba-2"])
def test_trained_weights_move_on_a_gpu_as_they_do_in_fp32(run, as_on_cuda, tmp_path):
    """Breaks when "auto" trains weights in bf16, where most updates of 1e-5 round to nothing."""
    if run == "full":
        arguments = ["--base", "tiny", "--full", "--attention", "softmax"]
    else:
        arch, _, stage = run.partition("-")
        arguments = ["--arch", arch, "--stage", stage, "--base", "embedded"]
        if stage == "2":
            first = open_model(parse(["--arch", arch, "--stage", "1", "--base", "embedded"])[0], CPU)[0]
            systems_base = tmp_path / "model"
            export_model(first, systems_base)
            arguments += ["--base", str(systems_base)]
    given = parse([*arguments, "--weight-decay", "0"])[0]
    exact = parse([*arguments, "--weight-decay", "0", "--dtype", "fp32"])[0]
    assert mean_change(given) == pytest.approx(mean_change(exact), rel=0.02)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", [["--full", "--attention", "softmax"], ["--wings", "--stage", "1"]])
def test_weights_in_half_precision_are_not_trained(what, dtype):
    """Breaks when a run that would lose most of its updates starts without a word."""
    with pytest.raises(UserError, match=f"--dtype {dtype}: .*leave --dtype out.*--autocast"):
        parse([*what, "--dtype", dtype])


def test_a_sharded_model_reads_bf16_and_keeps_fp32(tmp_path):
    """Breaks when FSDP2 trains bf16 weights, or loses what one process learns under autocast."""
    common = [
        "--base",
        "tiny",
        "--no-evaluate",
        "--full",
        "--attention",
        "softmax",
        "--autocast",
        "bf16",
        "--lr",
        "1e-5",
    ]
    common += ["--batch-size", "2", "--samples", "60", "--steps", "4", "--warmup", "0", "--device", "cpu"]
    finetune.main([*common, "--accumulate", "2", "--out", str(tmp_path / "alone")])
    in_processes(2, *common, "--shard", "--out", tmp_path / "pair")
    start = load_model("tiny").state_dict()
    alone, pair = (load_model(tmp_path / name / "model").state_dict() for name in ("alone", "pair"))
    moved = {name: (alone[name] - start[name]).abs().mean().item() for name in start}
    for name, tensor in pair.items():
        assert tensor.dtype == torch.float32
        if tensor.dim() > 1:  # the gradient of a key's bias is zero but for rounding
            assert (tensor - start[name]).abs().mean().item() == pytest.approx(moved[name], rel=0.1), name
    files = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("alone", "pair")]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in files]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def restored_scaler(cut: int, run: Path) -> dict:
    """The scaler's state after 4 fp16 steps, stopped after `cut` of them and resumed."""
    for steps in (cut, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = make_adamw(parameter_groups(model, [Rule(".*", 1e-3)]), (0.9, 0.98))
        order = Rows(steps)
        fit(model, optimizer, order, square, LoopOptions(autocast="fp16", schedule="constant"), run, World(0, 1, CPU))
    return read_state(checkpoints(run)[-1])["scaler"]


@dataclass
class Row:
    factor: float
    names: tuple[str, ...] = ("row",)
    tokens: int = 1
    bad: tuple[str, ...] = ()

    def to(self, device) -> "Row":
        return self


@dataclass
class Rows:
    """One row a step. The loss of the second overflows when it is scaled, so that the scaler backs off."""

    total: int

    def steps(self, first, workers=0, pin=False):
        for step in range(first, self.total):
            yield [Row(1e36 if step == 1 else 1.0)]


def square(model, row):
    return model(torch.ones(1, 4)).float().square().sum() * row.factor


def test_the_gradient_scaler_is_restored(tmp_path):
    """Breaks when a resumed fp16 run starts again at the first scale, which would overflow anew."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, resumed = restored_scaler(4, tmp_path / "whole"), restored_scaler(3, tmp_path / "cut")
    fresh = torch.amp.GradScaler("cpu").state_dict()
    assert whole["scale"] < fresh["scale"] and whole["_growth_tracker"] == 2
    assert resumed == whole


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    """Breaks when a step with a finite loss leaves no weight finite, and a checkpoint of them is written."""
    model = nn.Linear(4, 1)
    optimizer = make_adamw(parameter_groups(model, [Rule(".*", 1e-3)]), (0.9, 0.98))

    def loss(model, row):
        return square(model, row) + (0 * model.weight).sum().sqrt()

    with pytest.raises(Diverged, match="^step 0: the loss is finite, but the norm of its gradient is nan: lower --lr"):
        fit(model, optimizer, Rows(2), loss, LoopOptions(checkpoint_every=1), tmp_path, World(0, 1, CPU))
    assert all(p.isfinite().all() for p in model.parameters()) and not checkpoints(tmp_path)


def test_the_last_micro_batch_alone_exchanges_gradients_when_compiled(tmp_path):
    """Breaks when torch.compile's wrapper hides DDP, and every micro-batch is all-reduced."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    try:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        compiled = torch.compile(wrapped)
        set_gradient_sync(compiled, False)
        assert not wrapped.require_backward_grad_sync
        set_gradient_sync(compiled, True)
        assert wrapped.require_backward_grad_sync
    finally:
        dist.destroy_process_group()
