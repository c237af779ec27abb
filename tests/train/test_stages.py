"""Training in stages: a system's model, what of it learns and at which rate, and the folder that a stage leaves.

A system of this test stands beside the real ones: the mechanism needs nothing of theirs.
"""

from types import SimpleNamespace

import pytest
import torch

from train import settings
from train.finetune import main
from train.optim import trainable
from train.settings import StageRecipe, parse
from train.systems import open as systems
from train.systems.open import open_model
from weights.load import load_model

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def system(monkeypatch):
    """Two stages of the plain model: the projector alone, then decoder and projector at other rates."""
    stages = {
        1: StageRecipe({r"multi_modal_projector\..*": 1.0}, {"lr": 1e-3, "optimizer": "radam"}),
        2: StageRecipe({r"multi_modal_projector\..*": 5.0, r"language_model\..*": 1.0}, {"lr": 1e-4}),
    }
    monkeypatch.setitem(settings.STAGES, "probe", stages)
    probe = SimpleNamespace(
        open_stage=lambda settings, dtype, device: load_model(settings.base, dtype=dtype, device=device),
        tokenizer_source=lambda settings: settings.base,
    )
    monkeypatch.setattr(systems, "system_of", lambda arch: probe)


def test_each_stage_trains_what_it_names_at_its_rates():
    """Fails if a stage's defaults or rates are lost, or what it does not name is trained."""
    settings = parse("--arch probe --stage 2 --weight-decay 0.5".split())[0]
    model, optimizer = open_model(settings, torch.device("cpu"))
    rates = {name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]}
    parts = {"multi_modal_projector": 5e-4, "language_model": 1e-4}
    wanted = {name: parts[part] for name, _ in model.named_parameters() if (part := name.split(".")[0]) in parts}
    assert rates == pytest.approx(wanted) and trainable(model).keys() == rates.keys()
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.5}
    settings = parse("--arch probe --stage 1 --lr 0.5".split())[0]
    assert settings.lr == 0.5 and isinstance(open_model(settings, torch.device("cpu"))[1], torch.optim.RAdam)


def test_a_stage_leaves_a_model_that_the_next_starts_from(tmp_path):
    """Fails if a stage's weights are not in the folder, or if what did not learn has changed."""
    small = "--arch probe --steps 2 --batch-size 4 --samples 16 --no-evaluate"
    main(f"{small} --stage 1 --out {tmp_path}/1".split())
    before, after = load_model("embedded"), load_model(tmp_path / "1" / "model")
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    changed = {name for (name, a), b in pairs if not torch.equal(a, b)}
    assert changed == {"multi_modal_projector.linear.weight", "multi_modal_projector.linear.bias"}
    main(f"{small} --stage 2 --base {tmp_path}/1/model --out {tmp_path}/2".split())
    assert (tmp_path / "2" / "model" / "tokenizer.model").exists()
