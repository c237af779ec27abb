"""The cache of a frozen vision tower's features: nothing that is learned depends on it, and no wrong one is taken."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.records import embedded_records
from lora.adapter import quantize
from model.attention import set_attention_backend
from model.common import UserError
from model.config import PRESETS
from model.graft import graft
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from tests.runs import QUICK, WORLD, metrics
from train import supervised
from train.data.batches import MicroBatch, collate
from train.data.features import FeatureCache
from train.data.sources import read_records
from train.settings import parse
from train.systems.open import open_model
from weights.load import load_model


@pytest.fixture
def model():
    return load_model("tiny").requires_grad_(False)


MIX = ("vqa", "n2o1", "n2o2", "caption")


def micro_batch(processor, cache=None, count=4) -> MicroBatch:
    return collate(embedded_records(MIX, count=count), processor, cache)


def features(model, processor, cache=None, count=4) -> torch.Tensor:
    micro = micro_batch(processor, cache, count)
    return supervised.with_features(model, micro, cache).features


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def train(folder: Path, *arguments) -> list[dict]:
    settings = parse([*QUICK, "--steps", "5", "--lr", "1e-2", *map(str, arguments)])[0]
    run = folder / "run"
    run.mkdir(parents=True)
    processor = Processor.from_source("tiny")
    model, optimizer = open_model(settings, WORLD.device)
    supervised.train_on(read_records(settings), model, optimizer, processor, settings, run, WORLD)
    return metrics(run)


@pytest.mark.long
def test_a_run_learns_the_same_with_an_empty_and_a_full_cache(tmp_path, monkeypatch):
    """Breaks when a cached feature differs from a fresh one by a bit, or a known picture is encoded once more."""
    cache = tmp_path / "cache"
    empty = train(tmp_path / "a", "--cache-features", cache)
    made = files(cache)
    encoded = []
    honest = supervised.PaliGemma.encode_images
    monkeypatch.setattr(supervised.PaliGemma, "encode_images", lambda *args: encoded.append(1) or honest(*args))
    full = train(tmp_path / "b", "--cache-features", cache)
    assert full == empty and made and not encoded
    assert files(cache) == made
    plain = train(tmp_path / "c")
    # bf16 keeps 8 bits of a feature: the loss is the same up to that
    assert [r["loss"] for r in plain] == pytest.approx([r["loss"] for r in full], rel=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("kept", [0, 1, 2, 5])
def test_a_run_learns_the_same_with_a_part_of_the_cache(kept, tmp_path):
    """Breaks when a picture's features depend on which other pictures are encoded with it."""
    cache = tmp_path / "cache"
    full = train(tmp_path / "a", "--cache-features", cache)
    for number, path in enumerate(sorted(cache.rglob("*.safetensors"))):
        if number % 6 > kept:
            path.unlink()
    assert train(tmp_path / "b", "--cache-features", cache) == full


@pytest.mark.long
def test_features_do_not_depend_on_the_batch(tmp_path, processor):
    """Breaks when a picture that is encoded with others gives other bits than alone, in any place, in bf16 too."""
    model = initialize(PaliGemma(PRESETS["tiny"])).requires_grad_(False)
    for name, autocast in (("fp32", contextlib.nullcontext()), ("bf16", torch.autocast("cpu", torch.bfloat16))):
        with autocast:
            cache = FeatureCache.open(tmp_path / name, model)
            together = features(model, processor, cache, 16)
            for order in ([*reversed(range(16))], [3], [9, 2, 7, 7, 1]):
                records = embedded_records(MIX, count=16)
                other = replace(cache, folder=tmp_path / f"{name}-{len(order)}")
                micro = collate([records[i] for i in order], processor, other)
                alone = supervised.with_features(model, micro, other).features[micro.image_index]
                whole = collate(records, processor).image_index
                assert torch.equal(alone, together[whole[order]])


@pytest.mark.long
def test_all_that_features_depend_on_is_in_the_key(tmp_path, monkeypatch):
    """Breaks when two towers of the same parameters, but other computations, share their features."""

    def folder(change=None, autocast=None) -> Path:
        model = load_model("tiny").requires_grad_(False)
        if change:
            change(model)
            model.requires_grad_(False)
        with autocast or contextlib.nullcontext():
            return FeatureCache.open(tmp_path, model).folder

    def larger_scale(model):
        quantize(model)
        model.vision_tower.encoder.layers[0].mlp.fc1.scale.mul_(1.5)

    def other_lambda(model):
        graft(model, "shared", where="vision")

    def another_rate(model):
        other_lambda(model)
        for module in model.vision_tower.modules():
            if hasattr(module, "lambda_init"):
                module.lambda_init = 0.5

    changes = {
        "none": None,
        "int8": quantize,
        "scale": larger_scale,
        "shared": other_lambda,
        "split": lambda model: graft(model, "split", where="vision"),
        "initial lambda": another_rate,
        "norm": lambda model: setattr(model.vision_tower.encoder.layers[0].layer_norm1, "eps", 1e-3),
        "backend": lambda model: set_attention_backend(model.vision_tower, "eager"),
        "dtype": lambda model: model.bfloat16(),
    }
    folders = {name: folder(change) for name, change in changes.items()}
    for dtype in (torch.bfloat16, torch.float16):
        folders[f"autocast {dtype}"] = folder(autocast=torch.autocast("cpu", dtype))
    with monkeypatch.context() as patch:  # a folder that two machines share
        patch.setattr("model.device.processor_name", lambda: "another")
        folders["processor"] = folder()
    assert len(set(folders.values())) == len(folders)
    for unrelated in (None, lambda model: graft(model, "twin"), lambda model: model.train()):
        assert folder(unrelated) == folders["none"]


def test_what_is_kept_are_the_towers_features(tmp_path, model, processor):
    """Breaks when the cache's rows meet other pictures, also where some are known and some are not."""
    cache = FeatureCache.open(tmp_path, model)
    micro = micro_batch(processor)
    expected = model.encode_images(micro.batch.pixel_values).bfloat16()
    assert len(expected) == 4 and not torch.equal(expected[0], expected[1])
    for number in (2, 0):  # the two that are known
        cache.save(cache.key(micro.batch.pixel_values[number]), expected[number])
    some = micro_batch(processor, cache)
    assert some.unseen.tolist() == [1, 3] and len(some.keys) == 2 == len(some.batch.pixel_values)
    filled = supervised.with_features(model, some, cache)
    assert torch.allclose(filled.features.float(), expected.float(), atol=0.02)
    assert torch.equal(filled.features[[0, 2]], expected[[0, 2]])
    known = micro_batch(processor, cache)
    assert known.keys == () and torch.equal(known.features, filled.features)
    assert supervised.with_features(model, known, cache) is known
    loss = supervised.supervised_loss(model, known)
    fresh = supervised.supervised_loss(model, micro)
    assert loss.item() == pytest.approx(fresh.item(), rel=1e-2)
    known.to("cpu").features.zero_()
    assert supervised.supervised_loss(model, known) != loss, "the features were never read"


def test_other_weights_or_pictures_find_nothing(tmp_path, model, processor):
    """Breaks when features of another tower, projector or picture are taken for those asked for."""
    features(model, processor, FeatureCache.open(tmp_path, model))
    assert len(files(tmp_path)) == 4
    for name in ("vision_tower.encoder.layers.1.mlp.fc1.weight", "multi_modal_projector.linear.bias"):
        weight = model.get_parameter(name)
        weight.data.view(-1)[-1] += 1e-3
        micro = micro_batch(processor, FeatureCache.open(tmp_path, model))
        assert len(micro.keys) == 4, name
        weight.data.view(-1)[-1] -= 1e-3
    deeper = load_model("tiny").requires_grad_(False)
    deeper.config = replace(deeper.config, vision=replace(deeper.config.vision, feature_layer=-2))
    assert FeatureCache.open(tmp_path, deeper).folder != FeatureCache.open(tmp_path, model).folder
    pixels = torch.zeros(3, 4, 4)
    moved = pixels.clone()
    moved[2, 3, 3] = 1e-6
    assert FeatureCache.key(pixels) != FeatureCache.key(moved)
    assert FeatureCache.key(pixels.transpose(1, 2)) == FeatureCache.key(pixels)  # what it holds, not how it lies


def test_training_the_decoder_leaves_the_key_alone(tmp_path, model):
    """Breaks when the key depends on weights that features do not depend on: no second epoch would find them."""
    before = FeatureCache.open(tmp_path, model)
    for parameter in model.language_model.parameters():
        parameter.requires_grad_(True).data.add_(1)
    assert FeatureCache.open(tmp_path, model) == before


def test_two_runs_share_a_folder(tmp_path, model, processor):
    """Breaks when two that write the same feature at once leave a mixture, or trip over each other."""
    caches = [FeatureCache.open(tmp_path, model) for _ in range(2)]
    micros = [micro_batch(processor, cache) for cache in caches]  # neither knows any
    first, second = (supervised.with_features(model, *pair) for pair in zip(micros, caches, strict=True))
    assert torch.equal(first.features, second.features)
    assert len(files(tmp_path)) == 4 == len([path for path in tmp_path.rglob("*") if path.is_file()])
    assert not micro_batch(processor, caches[1]).keys


@pytest.mark.parametrize("damage", ["empty", "cut", "other shape", "other name", "gone"])
def test_a_broken_file_is_taken_for_missing_and_written_again(damage, tmp_path, model, processor):
    """Breaks when a power cut, or a foreign file, stops a run or is learned from."""
    from safetensors.torch import save_file

    cache = FeatureCache.open(tmp_path, model)
    whole = features(model, processor, cache, count=1)
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[:-7])
    elif damage == "other shape":
        save_file({"features": torch.ones(3, 3, dtype=torch.bfloat16)}, path)
    elif damage == "other name":
        save_file({"something": whole[0]}, path)
    elif damage == "gone":
        path.unlink()
    assert len(micro_batch(processor, cache, 1).keys) == 1
    assert torch.equal(features(model, processor, cache, 1), whole)
    assert path.read_bytes() == content


def test_a_tower_that_learns_is_refused(tmp_path, model):
    """Breaks when features are kept that the next step makes wrong."""
    model.multi_modal_projector.linear.bias.requires_grad_(True)
    with pytest.raises(UserError, match=r"multi_modal_projector\.linear\.bias is trained"):
        FeatureCache.open(tmp_path, model)
    with pytest.raises(UserError, match="vision_tower.* is trained"):
        train(tmp_path, "--cache-features", tmp_path, "--attention", "softmax", "--full")
    assert not files(tmp_path)


def test_features_travel_with_their_batch(tmp_path, model, processor):
    """Breaks when a batch that goes to another device leaves its features behind."""
    micro = micro_batch(processor, FeatureCache.open(tmp_path, model))
    moved = micro.to("meta")
    assert moved.features.is_meta and moved.unseen.is_meta and moved.batch.pixel_values.is_meta
    assert moved.keys == micro.keys
