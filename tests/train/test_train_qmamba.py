"""Q-Mamba's training: the model of each stage is put together from its parts, and the right ones
learn."""

import shutil

import pytest
import torch
import transformers

from model.source import BUNDLED_FOLDER
from model.systems.configs import MambaConfig
from model.systems.mamba import MambaLM, initialize_mamba
from tests.reference import hf_mamba
from tests.runs import assert_same_tensors, refused, stage_settings, words
from train.model import open_model
from train.systems import qmamba
from weights.export import export_model
from weights.load import load_model

CPU = torch.device("cpu")
SMALL = "queries=4 hidden_size=16 num_blocks=2 state_size=4".split()


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A published Mamba with the embedded vocabulary, and its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("language")
    hf_mamba(vocab_size=1728, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    shutil.copy(BUNDLED_FOLDER / "tokenizer.model", folder)
    return folder


def flags(stage, *options):
    return f"--stage {stage}" + "".join(f" --option {option}" for option in options)


def open_first(language, *options):
    """The model of stage 1; a later option overrides an earlier one."""
    argv = flags(1, f"language_model={language}", *SMALL, *options)
    return stage_settings("qmamba", argv).open_stage(torch.float32, CPU)


def test_the_parts_come_from_where_they_are_said_to(language):
    """Breaks when the tower or the language model starts from random weights, or an option has no
    effect."""
    model = open_first(language, "local_attention=false", "scan_order=forward", "feature_layer=-3")
    tower = load_model("embedded").vision_tower
    hf = transformers.MambaForCausalLM.from_pretrained(language)
    assert_same_tensors(model.vision_tower.state_dict(), tower.state_dict())
    assert_same_tensors(model.language_model.state_dict(), hf.backbone.state_dict())
    projector = model.config.projector
    sizes = projector.queries, projector.local_attention, projector.scan_order
    assert sizes == (4, False, "forward")
    assert model.vision_tower.config.feature_layer == model.config.vision.feature_layer == -3


def test_trained_blocks_are_taken_over(language, tmp_path):
    """Breaks when the layers of a published Mamba are announced and not used; a trained connector:
    test_study_qmamba.py."""
    source = MambaLM(MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=2, state_size=4))
    initialize_mamba(source.backbone, seed=5)
    export_model(source, tmp_path / "mamba")
    blocks = open_first(language, f"blocks_from={tmp_path / 'mamba'}").multi_modal_projector.blocks
    for block, layer in zip(blocks, source.backbone.layers, strict=True):
        assert_same_tensors(block.mixer.state_dict(), layer.mixer.state_dict())


@pytest.mark.parametrize("stage, rate, rows", [(1, 1e-4, 256), (2, 2e-5, 128)])
def test_the_defaults_are_those_of_the_paper(stage, rate, rows):
    """Breaks when a run without further flags is not the published recipe, or the embedded one
    shadows it."""
    s = stage_settings("qmamba", flags(stage), "--data jsonl:x --base y")
    recipe = s.lr, s.step_batch, s.optimizer, s.warmup, s.dtype
    assert recipe == (rate, rows, "radam", 0.03, "fp32")
    assert stage_settings("qmamba", flags(stage)).lr != rate
    given = stage_settings("qmamba", flags(1), "--lr 0.5 --weight-decay 0.25")
    _, optimizer = open_model(given, CPU)
    assert isinstance(optimizer, torch.optim.RAdam)
    (group,) = optimizer.param_groups
    assert (group["base_lr"], group["weight_decay"]) == (0.5, 0.25)


@pytest.mark.long
def test_both_stages_run_end_to_end(tmp_path):
    """Breaks when a stage trains other parts than the paper's, or does not go on from what was
    written."""
    small = "--samples 64 --eval-limit 4 --checkpoint-every 9"
    start, _ = open_model(stage_settings("qmamba", flags(1)), CPU)
    qmamba.main(words(flags(1), small, f"--out {tmp_path}/1"))
    first = load_model(tmp_path / "1/model")
    qmamba.main(words(flags(2), small, f"--base {tmp_path}/1/model --out {tmp_path}/2"))
    second = load_model(tmp_path / "2/model")
    parts = ["multi_modal_projector"]
    for before, after in ((start, first), (first, second)):
        pairs = zip(before.named_parameters(), after.parameters(), strict=True)
        assert {name.split(".")[0] for (name, p), of in pairs if not torch.equal(p, of)} == {*parts}
        parts.append("language_model")


MISFITS = {"querries=3": ["--option querries"], "connector_from=embedded": ["is no Q-Mamba"]}
MISFITS |= {"connector_from={wide}": ["connector_from=", " other sizes"]}


@pytest.mark.parametrize("option, told", MISFITS.items())
def test_parts_that_do_not_fit_are_refused(language, tmp_path, option, told):
    """Breaks when an impossible projector, or weights of other sizes, fail somewhere inside, or are
    trained."""
    if "wide" in option:
        export_model(open_first(language, "hidden_size=24"), tmp_path)
    refused(lambda: open_first(language, option.format(wide=tmp_path)), *told)


@pytest.mark.parametrize("flag", ["--attention twin", "--dropout 0.1", "--targets x"])
def test_what_a_stage_does_not_read_is_refused(flag):
    """Breaks when a plain model is trained, and its run says that it has a graft."""
    refused(lambda: stage_settings("wings", "--stage 1", flag), flag.split()[0], "leave it out")


def test_a_stage_follows_a_recipe_and_names_itself():
    """Breaks when --recipe is taken without its values, or a next command begins another stage."""
    settings = stage_settings("qmamba", "--stage 2 --recipe paper-1 --base y")
    assert (settings.recipe, settings.lr, settings.r) == ("paper-1", 4e-4, 32)
    assert settings.command == "python -m train.systems.qmamba --stage 2".split()
