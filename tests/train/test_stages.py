"""Training in stages: a system's model, what of it learns and at which rate, and the folder that a stage leaves.

A system of this test's own is put beside the real ones: the mechanism must need nothing of theirs.
"""

import json

import pytest
import torch

from model.common import UserError
from model.qmamba import QMamba, initialize_qmamba
from model.system_configs import ProjectorConfig, QMambaConfig, read_config
from train import recipes
from train.finetune import main
from train.optim import trainable
from train.recipes import StageRecipe
from train.settings import parse
from train.systems import open as systems
from train.systems.open import System, open_model
from weights.export import export_model
from weights.load import load_model

pytestmark = pytest.mark.long


def open_any(settings, dtype, device):
    return load_model(settings.base, dtype=dtype, device=device)


@pytest.fixture
def system(monkeypatch):
    """Two stages of the plain model: the projector alone, then decoder and projector at other rates."""
    stages = {
        1: StageRecipe({r"multi_modal_projector\..*": 1.0}, {"lr": 1e-3, "optimizer": "radam"}),
        2: StageRecipe({r"multi_modal_projector\..*": 5.0, r"language_model\..*": 1.0}, {"lr": 1e-4}),
    }
    monkeypatch.setitem(recipes.STAGES, "probe", stages)
    monkeypatch.setitem(systems.SYSTEMS, "probe", System(open_any))


def test_each_stage_trains_what_it_names_at_its_rates(system):
    settings = parse(["--arch", "probe", "--stage", "2", "--weight-decay", "0.5"])[0]
    model, optimizer = open_model(settings, torch.device("cpu"))
    groups = {group["pattern"]: (group["base_lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert groups == {r"multi_modal_projector\..*": (5e-4, 0.5), r"language_model\..*": (1e-4, 0.5)}
    assert {name.split(".")[0] for name in trainable(model)} == {"multi_modal_projector", "language_model"}


def test_a_stage_brings_defaults_and_the_command_line_goes_before(system):
    assert parse(["--arch", "probe", "--stage", "1"])[0].optimizer == "radam"
    settings = parse(["--arch", "probe", "--stage", "1", "--lr", "0.5"])[0]
    assert (settings.lr, settings.optimizer) == (0.5, "radam")
    model, optimizer = open_model(settings, torch.device("cpu"))
    assert isinstance(optimizer, torch.optim.RAdam)


@pytest.mark.parametrize("argv", [["--arch", "probe"], ["--stage", "1"], ["--arch", "probe", "--stage", "3"]])
def test_a_stage_that_is_not_there_is_refused(system, argv):
    with pytest.raises(UserError, match="stage"):
        open_model(parse(argv)[0], torch.device("cpu"))


def test_a_stage_leaves_a_model_that_the_next_starts_from(system, tmp_path):
    """Fails if a stage's weights are not in the folder, or if what did not learn has changed."""
    small = ["--steps", "2", "--batch-size", "4", "--samples", "16", "--no-evaluate", "--measure-every", "0"]
    main(["--arch", "probe", "--stage", "1", "--out", str(tmp_path / "1"), *small])
    before, after = load_model("embedded"), load_model(tmp_path / "1" / "model")
    changed = {
        name
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {"multi_modal_projector.linear.weight", "multi_modal_projector.linear.bias"}
    base = ["--base", str(tmp_path / "1" / "model")]
    main(["--arch", "probe", "--stage", "2", *base, "--out", str(tmp_path / "2"), *small])
    assert json.loads((tmp_path / "2" / "summary.json").read_text())["trainable_parameters"] > 1e6
    assert (tmp_path / "2" / "model" / "tokenizer.model").exists()


def tiny_qmamba() -> QMamba:
    vision = read_config("weights/tiny/config.json").vision
    projector = ProjectorConfig(queries=4, hidden_size=16, num_blocks=1, num_attention_heads=2)
    text = QMambaConfig().text.__class__(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    return initialize_qmamba(QMamba(QMambaConfig(vision, projector, text, image_token_id=63)))


def test_a_model_of_another_type_is_written_and_opened(tmp_path):
    """Fails if config.json's model_type does not choose the class, or a name is translated."""
    model = tiny_qmamba().eval()
    export_model(model, tmp_path / "q")
    again = load_model(tmp_path / "q")
    assert type(again) is QMamba and again.config == model.config
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)


def test_a_damaged_model_of_another_type_says_what_is_missing(tmp_path):
    export_model(tiny_qmamba(), tmp_path / "q")
    raw = json.loads((tmp_path / "q" / "config.json").read_text())
    raw["projector_config"]["num_blocks"] = 2
    (tmp_path / "q" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="blocks.1"):
        load_model(tmp_path / "q")
