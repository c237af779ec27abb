"""The precision of training: updates far below the resolution of bf16 must not be lost."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.runs import WORLD, metrics, refused, settings_of, stage_settings, torchrun, train
from train import model as systems
from train.checkpoint import newest_progress
from train.distributed import set_gradient_sync
from train.loop import LoopSettings, fit
from train.model import open_model
from train.optim import Rule, make_adamw, parameter_groups, trainable
from weights.export import export_model
from weights.load import load_model

pytestmark = pytest.mark.long


@pytest.mark.parametrize("run", ["full", "wings", "qmamba"])
def test_trained_weights_are_in_fp32_on_a_gpu(run, monkeypatch, tmp_path):
    """Breaks when "auto" trains weights in bf16, where most updates of 1e-5 round to nothing."""
    resolve = systems.choose_dtype  # --dtype auto as on a GPU, and the model on the CPU
    monkeypatch.setattr(
        systems, "choose_dtype", lambda name, device: resolve(name, torch.device("cuda"))
    )
    settings = settings_of("--base tiny --full --attention softmax")
    if run != "full":  # the second stage starts from the model of the first
        first = stage_settings(run, "--stage 1 --base embedded")
        export_model(open_model(first, WORLD.device)[0], tmp_path / "model")
        settings = stage_settings(run, f"--stage 2 --base {tmp_path}/model")
    learned = trainable(open_model(settings, WORLD.device)[0])
    assert learned
    assert all(parameter.dtype == torch.float32 for parameter in learned.values())


def test_a_sharded_model_reads_bf16_and_keeps_fp32(tmp_path):
    """Breaks when FSDP2 trains bf16 weights, or loses what one process learns under autocast."""
    flags = "--base tiny --no-evaluate --full --attention softmax --autocast bf16 --lr 1e-5 --batch-size 2"
    flags = (
        f"{flags} --step-batch 4 --samples 60 --steps 4 --warmup 0 --device cpu --out {tmp_path}"
    )
    train(f"{flags}/alone")
    torchrun(2, f"{flags}/pair --shard")
    start = load_model("tiny").state_dict()
    alone, pair = (load_model(tmp_path / name / "model").state_dict() for name in ("alone", "pair"))
    for name, tensor in pair.items():
        assert tensor.dtype == torch.float32
        if tensor.dim() > 1:  # the gradient of a key's bias is zero but for rounding
            moved = ((weights[name] - start[name]).abs().mean().item() for weights in (pair, alone))
            assert next(moved) == pytest.approx(next(moved), rel=0.1), name
    lines = zip(metrics(tmp_path / "alone"), metrics(tmp_path / "pair"), strict=True)
    for one, both in lines:
        assert one["loss"] == pytest.approx(both["loss"], rel=5e-3)


def fit_small(run, steps, loss, **settings):
    """Train a small model in `run`, from its newest checkpoint on, by one row a step, which is its
    number."""
    torch.manual_seed(0)
    rows = [[SimpleNamespace(names=("row",), tokens=1, bad=(), number=n)] for n in range(steps)]
    order = SimpleNamespace(
        total=steps, most_bad=0, steps=lambda first, *args, **options: iter(rows[first:])
    )
    model = nn.Linear(4, 8)
    optimizer = make_adamw(parameter_groups(model, [Rule(["weight", "bias"], 1e-3)]), (0.9, 0.98))
    run.mkdir(exist_ok=True)
    fit(model, optimizer, order, loss, LoopSettings(schedule="constant", **settings), run, WORLD)


def test_the_gradient_scaler_is_restored(tmp_path):
    """Breaks when a resumed fp16 run starts again at the first scale, which would overflow anew."""

    def loss(model, row):  # the second overflows when it is scaled, so that the scaler backs off
        return model(torch.ones(1, 4)).float().square().sum() * (1e36 if row.number == 1 else 1.0)

    for name, steps in (("cut", 3), ("cut", 4), ("whole", 4)):
        fit_small(tmp_path / name, steps, loss, autocast="fp16")
    cut, whole = (newest_progress(tmp_path / name).scaler for name in ("cut", "whole"))
    assert whole["scale"] < torch.amp.GradScaler("cpu").state_dict()["scale"]
    assert whole["_growth_tracker"] == 2
    assert cut == whole


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    """Breaks when a step with a finite loss leaves no weight finite, and a checkpoint of them is
    written."""

    def loss(model, row):
        return model(torch.ones(1, 4)).square().sum() + (0 * model.weight).sum().sqrt()

    refused(lambda: fit_small(tmp_path, 2, loss, checkpoint_every=1), "step 0: ", "gradient", "nan")
    # a scaler skips sixteen such steps, which bring it from 65,536 to 1
    refused(lambda: fit_small(tmp_path / "fp16", 30, loss, autocast="fp16"), "step 16: ", "nan")
    assert newest_progress(tmp_path) is None


def test_the_last_micro_batch_alone_exchanges_gradients_when_compiled(tmp_path):
    """Breaks when torch.compile's wrapper hides DDP, and every micro-batch is all-reduced."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    try:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        for sync in (False, True):
            set_gradient_sync(torch.compile(wrapped), sync)
            assert wrapped.require_backward_grad_sync == sync
    finally:
        dist.destroy_process_group()
