"""Q-Mamba's training: the model of each stage is put together from its parts, and the right ones learn."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eval import ask, scenes
from eval.run import log_likelihoods
from model.common import UserError
from model.mamba import MambaLM, initialize_mamba
from model.qmamba import QMamba
from model.source import BUNDLED_FOLDER
from model.system_configs import MambaConfig
from tests.reference import relative_error
from train import finetune
from train.distributed import join_world
from train.optim import trainable
from train.settings import Settings, parse
from train.systems.open import open_model, open_processor, open_stage
from weights import inspect
from weights.export import export_model
from weights.load import load_model, load_siglip

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    """A published Mamba with the embedded vocabulary, and its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("language")
    config = transformers.MambaConfig(
        vocab_size=1728,
        hidden_size=32,
        num_hidden_layers=1,
        state_size=4,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes((BUNDLED_FOLDER / "tokenizer.model").read_bytes())
    return folder


def settings_of(language: Path, *options: str, stage: int = 1, **changes) -> Settings:
    given = [f"language_model={language}", "queries=4", "hidden_size=16", "num_blocks=2", *options]
    flags = [flag for option in given for flag in ("--option", option)] if stage == 1 else []
    settings = parse(["--arch", "qmamba", "--stage", str(stage), *flags])[0]
    return replace(settings, **changes)


def open_first(language: Path, *options: str, **changes) -> QMamba:
    return open_stage(settings_of(language, *options, **changes), torch.float32, CPU)


# ---------------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_parts_come_from_where_they_are_said_to(language):
    """Breaks when the eye or the language model starts from random weights, or an option has no effect."""
    model = open_first(language, "local_attention=false", "scan_order=forward", "feature_layer=-3")
    eye = load_model("embedded").vision_tower
    assert all(torch.equal(p, model.vision_tower.get_parameter(name)) for name, p in eye.named_parameters())
    hf = transformers.MambaForCausalLM.from_pretrained(language)
    for name, parameter in model.language_model.named_parameters():
        assert torch.equal(parameter, hf.get_parameter(f"backbone.{name}")), name
    projector = model.config.projector
    assert (projector.queries, projector.num_blocks, projector.local_attention, projector.scan_order) == (
        4,
        2,
        False,
        "forward",
    )
    assert model.vision_tower.config.feature_layer == model.config.vision.feature_layer == -3
    pixels = torch.rand(1, 3, 112, 112) * 2 - 1
    assert model.encode_images(pixels).shape == (1, 4, 32)
    again, other = open_first(language), open_first(language, seed=1)
    assert relative_error(open_first(language).encode_images(pixels), again.encode_images(pixels)) == 0
    assert relative_error(other.encode_images(pixels), again.encode_images(pixels)) > 0.1


@pytest.mark.long
def test_trained_parts_are_taken_over(language, tmp_path):
    """Breaks when a trained connector, or the layers of a published Mamba, are announced and not used."""
    source = MambaLM(MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=2, state_size=4))
    initialize_mamba(source.backbone, seed=5)
    (tmp_path / "mamba").mkdir()
    save_file(source.state_dict(), tmp_path / "mamba" / "model.safetensors")
    (tmp_path / "mamba" / "config.json").write_text(json.dumps(source.config.to_dict()))
    donor = open_first(language, "state_size=4", seed=7)
    export_model(donor, tmp_path / "donor")
    model = open_first(
        language, "state_size=4", f"blocks_from={tmp_path / 'mamba'}", f"connector_from={tmp_path / 'donor'}"
    )
    mine, theirs = model.multi_modal_projector, donor.multi_modal_projector
    for block, layer in zip(mine.blocks, source.backbone.layers, strict=True):
        assert torch.equal(block.mixer.in_proj.weight, layer.mixer.in_proj.weight)
    for part in ("vision_proj.weight", "connector.forward_mixer.A_log", "connector.backward_mixer.in_proj.weight"):
        assert torch.equal(mine.get_parameter(part), theirs.get_parameter(part))
    assert not torch.equal(mine.output.weight, theirs.output.weight)
    bare = [f"language_model={language}", "projector=connector", "hidden_size=16", "state_size=4"]
    flags = [flag for option in bare for flag in ("--option", option)]
    donor = open_stage(parse(["--arch", "qmamba", "--stage", "1", "--seed", "8", *flags])[0], torch.float32, CPU)
    assert not hasattr(donor.multi_modal_projector, "queries")
    export_model(donor, tmp_path / "bare")
    model = open_first(language, "state_size=4", f"connector_from={tmp_path / 'bare'}")
    mine, theirs = model.multi_modal_projector, donor.multi_modal_projector
    assert all(torch.equal(p, mine.connector.get_parameter(name)) for name, p in theirs.connector.named_parameters())


@pytest.mark.long
def test_a_published_siglip_is_an_eye(tmp_path):
    """Breaks when the tower of a SiglipModel, of 384 px in the paper, is not read as transformers reads it."""
    sizes = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    hf = transformers.SiglipModel(
        transformers.SiglipConfig(
            vision_config=sizes | {"patch_size": 14, "image_size": 60}, text_config=sizes | {"vocab_size": 50}
        )
    ).eval()
    hf.save_pretrained(tmp_path)
    tower = load_siglip(tmp_path)
    pixels = torch.rand(2, 3, 60, 60) * 2 - 1
    with torch.no_grad():
        assert relative_error(tower(pixels), hf.vision_model(pixels).last_hidden_state) <= 1e-6
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("vision_model.post_layernorm.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="missing, 1: post_layernorm.weight"):
        load_siglip(tmp_path)
    assert (
        relative_error(
            load_siglip("embedded").embeddings.patch_embedding.weight,
            load_model("embedded").vision_tower.embeddings.patch_embedding.weight,
        )
        == 0
    )


# ---------------------------------------------------------------------------------------------------------------------
# The stages
# ---------------------------------------------------------------------------------------------------------------------


def learns(model) -> set[str]:
    """The parts that learn."""
    return {".".join(name.split(".")[:1]) for name in trainable(model)}


def test_the_stages_train_what_the_paper_trains(language, tmp_path):
    """Breaks when stage 1 touches the language model, stage 2 leaves it frozen, or either trains the eye."""
    first, world = settings_of(language), join_world("cpu")
    model, optimizer = open_model(first, world.device)
    assert isinstance(optimizer, torch.optim.RAdam)
    assert set(trainable(model)) == {
        f"multi_modal_projector.{name}" for name, _ in model.multi_modal_projector.named_parameters()
    }
    export_model(model, tmp_path / "model")
    second = settings_of(language, stage=2, base=str(tmp_path / "model"))
    model, optimizer = open_model(second, world.device)
    assert learns(model) == {"multi_modal_projector", "language_model"}
    assert not any(p.requires_grad for p in model.vision_tower.parameters())
    assert all(
        p.requires_grad for part in (model.multi_modal_projector, model.language_model) for p in part.parameters()
    )


def test_the_defaults_are_the_paper_s():
    """Breaks when a run with `--arch qmamba` alone is not the published recipe, or the embedded one shadows it."""
    for stage, rate, rows in ((1, 1e-4, 256), (2, 2e-5, 128)):
        settings = parse(["--arch", "qmamba", "--stage", str(stage), "--data", "jsonl:x", "--base", "y"])[0]
        assert (settings.lr, settings.step_batch) == (rate, rows)
        assert (settings.optimizer, settings.schedule, settings.warmup, settings.epochs, settings.dtype) == (
            "radam",
            "cosine",
            0.03,
            1,
            "fp32",
        )
        assert parse(["--arch", "qmamba", "--stage", str(stage)])[0].lr != rate
        assert parse(["--arch", "qmamba", "--stage", str(stage), "--lr", "1"])[0].lr == 1


@pytest.mark.long
def test_both_stages_run_end_to_end(language, tmp_path, capsys):
    """Breaks when the command does not train, write, and go on from what it wrote."""
    common = ["--arch", "qmamba", "--samples", "64", "--eval-limit", "6", "--checkpoint-every", "9"]
    options = [f"language_model={language}", "queries=4", "hidden_size=16", "num_blocks=1"]
    finetune.main(
        [
            *common,
            "--stage",
            "1",
            "--out",
            str(tmp_path / "one"),
            *(flag for option in options for flag in ("--option", option)),
        ]
    )
    one = load_model(tmp_path / "one" / "model")
    assert type(one) is QMamba and (tmp_path / "one" / "model" / "tokenizer.model").exists()
    finetune.main([*common, "--stage", "2", "--base", str(tmp_path / "one" / "model"), "--out", str(tmp_path / "two")])
    two = load_model(tmp_path / "two" / "model")
    changed = {name.split(".")[0] for name, p in two.named_parameters() if not torch.equal(p, one.get_parameter(name))}
    assert changed == {"multi_modal_projector", "language_model"}
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["samples"] == 64 and summary["after"]["vqa"] is not None
    assert "qmamba, stage 2" in (told := capsys.readouterr().out) and "VQA" in told and "needle, 2" not in told
    inspect.main([str(tmp_path / "two" / "model")])
    assert "qmamba, 112 px, our own names" in capsys.readouterr().out
    scenes.sample("vqa", "test", 0).image.save(tmp_path / "scene.png")
    ask.main(["--adapter", str(tmp_path / "two"), "--image", str(tmp_path / "scene.png"), "--prompt", "exist dog"])
    assert "exist dog" in capsys.readouterr().out


def test_choices_are_weighed_as_if_read_alone(language):
    """Breaks when a prompt's state, which its choices share, is lost over a shorter choice's padding."""
    settings = settings_of(language)
    model = open_stage(settings, torch.float32, CPU)
    processor, _ = open_processor(settings, model)
    picture, choices = torch.rand(1, 3, 112, 112) * 2 - 1, ["yes", "top left", "row 2 column 3"]
    prefixes = ["Is there a dog in the image?", "where"]
    features = model.encode_images(picture)
    batch = processor.pad([processor.layout(1, prefix) for prefix in prefixes])
    ids = [[*processor.encode(choice), processor.config.eos_token_id] for choice in choices]
    weighed = log_likelihoods(model, batch, [ids, ids], features, torch.tensor([0, 0]))
    for prefix, found in zip(prefixes, weighed, strict=True):
        for choice, answer, score in zip(choices, ids, found, strict=True):
            alone = processor.pad([processor.layout(1, prefix, choice)])
            logits = model(alone.input_ids, None, alone.token_type_ids, image_features=features).log_softmax(-1)
            steps = zip(logits[0, -len(answer) - 1 : -1], answer, strict=True)
            assert relative_error(score, sum(step[token] for step, token in steps)) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("queries=17",), "17 queries are more than the picture's 16 features"),
        (("queries=0",), "queries is 0"),
        (("queries=many",), "expected int, such as 8"),
        (("local_attention=1",), "expected bool, such as True"),
        (("querries=3",), "--option querries: choose of language_model"),
        (("projector=mlp",), "projector is 'mlp'"),
        (("projector=linear",), "--option queries: a projector of kind 'linear' has none"),
        (("scan_order=sideways",), "sideways"),
        (("num_attention_heads=3",), "no multiple of 3 heads"),
        (("feature_layer=-9",), "feature_layer -9"),
        (("language_model=embedded.nowhere",), "no such folder"),
    ],
)
def test_senseless_options_are_refused(language, options, told):
    """Breaks when an impossible projector fails somewhere inside, or is trained."""
    with pytest.raises(UserError, match=told) as caught:
        open_first(language, *options)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_parts_that_do_not_fit_are_refused(language, tmp_path):
    """Breaks when weights of other sizes, another model, or no language model at all is told late or not at all."""
    with pytest.raises(UserError, match="language_model=state-spaces"):
        open_stage(parse(["--arch", "qmamba", "--stage", "1", "--base", str(BUNDLED_FOLDER)])[0], torch.float32, CPU)
    with pytest.raises(UserError, match="num_hidden_layers 1, the projector 2"):
        open_first(language, f"blocks_from={language}")
    with pytest.raises(UserError, match="connector_from=embedded: both models must be a Q-Mamba"):
        open_first(language, "connector_from=embedded")
    export_model(open_first(language, "hidden_size=24"), tmp_path / "wide")
    with pytest.raises(UserError, match="its vision_proj has other sizes.*24"):
        open_first(language, f"connector_from={tmp_path / 'wide'}")
    with pytest.raises(UserError, match="--stage 2: embedded is no Q-Mamba"):
        open_stage(settings_of(language, stage=2), torch.float32, CPU)
    with pytest.raises(UserError, match="stage 1 has decided that"):
        open_stage(replace(settings_of(language, stage=2), option=("queries=3",)), torch.float32, CPU)


def test_the_embedded_default_needs_no_option():
    """Breaks when the first command of the README asks for something, or its parts do not fit each other."""
    settings = parse(["--arch", "qmamba", "--stage", "1"])[0]
    model = open_stage(settings, torch.float32, CPU)
    assert asdict(model.config.projector)["queries"] < model.config.vision.num_image_tokens
    assert len(model.multi_modal_projector.blocks) == 4
    processor, files = open_processor(settings, model)
    assert files[0].name == "tokenizer.model" and processor.config.num_image_tokens == 8
