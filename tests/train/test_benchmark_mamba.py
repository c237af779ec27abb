"""The benchmark of Mamba times the same work on every side."""

import pytest
import torch

from model.config import PRESETS
from model.generate import generate
from model.system_configs import MambaConfig
from tests.reference import relative_error
from train.benchmark import mamba as benchmark_mamba
from train.benchmark.mamba import (
    COMPILED_PEER,
    PARALLEL,
    STEPS,
    Sizes,
    chart,
    language_models,
    measure,
    mixer_run,
    mixers,
    steps_after,
)
from train.benchmark.timing import OURS, THEIRS, table

pytestmark = pytest.mark.long

SIZES = Sizes(
    MambaConfig(hidden_size=32, num_hidden_layers=1),
    scans=(8,),
    lengths=(8, 16),
    base=PRESETS["tiny"],
    contexts=(4, 16),
    steps=2,
    batch=2,
    prompt=4,
    answer=3,
)


@pytest.fixture
def uncompiled(monkeypatch):
    """The compiler takes minutes, and is not what is tested."""
    monkeypatch.setattr(torch, "compile", lambda module: module)


def test_every_row_is_there(uncompiled, monkeypatch):
    """Breaks when a length, a pass, a context or a side is left out, or the slow peer runs more than once."""
    monkeypatch.setattr(benchmark_mamba, "SLOW", 16)
    monkeypatch.setattr(benchmark_mamba, "in_own_process", lambda function, *arguments: function(*arguments))
    scan, again, *found = measure("cpu", 2, SIZES)
    assert again.work == "scan, 8 positions, forward and backward" == f"{scan.work} and backward"
    assert scan.against == STEPS and {*scan.seconds} == {*scan.peak} == {STEPS, PARALLEL}
    mixer = [row for row in found if row.work.startswith("mixer")]
    assert [(row.work, row.against) for row in mixer] == [
        (f"mixer, {length} positions, forward{more}{peer}", against)
        for length in (8, 16)
        for more in ("", " and backward")
        for peer, against in (("", THEIRS), (", compiled peer", COMPILED_PEER))
    ]
    assert [len(row.seconds[OURS]) for row in mixer] == [2, 2, 2, 2, 2, 2, 1, 2]
    assert [row.work for row in found[len(mixer) :]] == [
        "one token after 4",
        "one token after 16",
        "3 tokens after 4, batch 2",
    ]
    assert "tokens/s" in table(found) and all(row.ratio(OURS) for row in found)
    assert chart(found).size[0] > 100


def test_the_sides_do_the_same_work(uncompiled):
    """Breaks when the mixers differ in weights, or one of them leaves out a gradient."""
    sides, h = mixers(SIZES.mixer, "cpu"), torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    expected = mixer_run(sides[OURS], h, False)()
    for side, mixer in sides.items():
        assert relative_error(mixer_run(mixer, h, False)(), expected) <= 1e-5, side
        mixer_run(mixer, h, True)()
        for name, parameter in sides[OURS].named_parameters():
            assert relative_error(mixer.get_parameter(name).grad, parameter.grad) <= 1e-4, (side, name)


def test_a_step_is_one_after_its_context(uncompiled):
    """Breaks when repeated steps go on growing the context, overflow the cache, or the models differ in size."""
    models = language_models(SIZES, "cpu")
    sizes = [
        sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and "vision" not in name)
        for model in models.values()
    ]
    assert abs(sizes[0] / sizes[1] - 1) < 0.1
    for model in models.values():
        run = steps_after(model, 6, SIZES)
        for _ in range(3):
            run()
        ids = torch.full((1, 4), 7)
        assert len(generate(model, ids, None, torch.zeros_like(ids), None, 5)[0]) == 5  # no end token


def test_without_transformers_our_side_is_measured(monkeypatch, capsys):
    """Breaks when the benchmark needs what is a test's requirement."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert list(mixers(SIZES.mixer, "cpu")) == [OURS]
    assert "not installed" in capsys.readouterr().err
