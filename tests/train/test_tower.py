"""The small tower beside the embedded base, and what makes it."""

import math
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.runs import assert_same_tensors, refused, settings_of, words
from train import tower
from train.align import SMALL_TOWER, small_tower
from train.model import open_model
from weights.load import load_model


def test_the_shipped_tower_is_as_good_as_it_says():
    """Breaks when the file beside the embedded base is another, too large, or tells no signs."""
    assert SMALL_TOWER.stat().st_size < 1.3e6
    with safe_open(SMALL_TOWER, "pt") as file:
        facts = file.metadata()
    model = load_model("embedded")
    small_tower(model)
    share = tower.share_of_signs(model.eval())
    assert share == pytest.approx(float(facts["signs"]), abs=0.01)
    assert share > 0.4
    tower.begin(model, 0)
    assert tower.share_of_signs(model.eval()) < 0.2


def test_a_run_on_own_pictures_starts_from_it():
    """Breaks when a run has another tower, or a base of other sizes takes this one."""
    model, _ = open_model(settings_of("--recipe own"), torch.device("cpu"))
    with safe_open(SMALL_TOWER, "pt") as file:
        stored = {name: file.get_tensor(name).float() for name in file.keys()}
    assert_same_tensors(model.vision_tower.state_dict(), stored)
    assert model.encode_images(torch.zeros(1, 3, 64, 64)).shape == (1, 64, 128)
    assert model.config.num_image_tokens == 64
    refused(lambda: small_tower(load_model("mini")), "--new-tower", "embedded base alone")


def test_a_tower_is_made_from_its_seed(tmp_path, monkeypatch):
    """Breaks when two runs of a seed differ, a seed does nothing, a part of the tower does not
    learn, or another part of the model does."""
    monkeypatch.setattr(tower, "STEPS", 2)
    made = [tower.train_tower(seed).state_dict() for seed in (0, 0, 1)]
    base = load_model("embedded")
    before = base.state_dict()
    tower.begin(base, 0)
    first = base.state_dict()
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name
        if name.startswith("vision_tower."):
            assert not torch.equal(tensor, made[2][name]), name
            assert not torch.equal(tensor, first[name]), name
        else:
            assert torch.equal(tensor, before[name]), name
    monkeypatch.setattr(tower, "share_of_signs", lambda model: 0.25)
    tower.main(words("--out", tmp_path / "t.safetensors"))
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata() == {"seed": "0", "signs": "0.2500"}
        for name in file.keys():
            expected = made[0][f"vision_tower.{name}"].bfloat16()
            assert torch.equal(file.get_tensor(name), expected), name


def drawn(question, count=1000, hardness=1.0):
    """Pictures that are asked this, and the answers."""
    pictures, answers = [], []
    for number in range(count):
        picture, asked = tower.draw(Random(f"test/{number}"), hardness)
        if question in dict(asked):
            pictures.append(picture.numpy())
            answers.append(dict(asked)[question])
    return pictures, np.array(answers)


def test_what_is_asked_is_true(monkeypatch):
    """Breaks when a row is asked as a column, a size, an angle or a color is another one, or
    pictures do not become harder."""
    # 1. without noise and faint shapes: what differs from the ground is the sign
    monkeypatch.setattr(tower, "draw_shapes", lambda *_: None)
    real = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Mute(real(seed)))
    rows, columns = np.mgrid[:64, :64]

    def mass(picture):
        ground = np.median(picture, axis=(1, 2), keepdims=True)
        return np.abs(picture - ground).max(0) > 0.2

    measures = {
        "row": lambda at: rows[at].mean(),
        "column": lambda at: columns[at].mean(),
        "size": lambda at: np.ptp(rows[at]),
    }
    for question in measures:
        pictures, answers = drawn(question)
        inked = list(map(mass, pictures))
        related = {}
        for name, measure in measures.items():
            related[name] = np.corrcoef(list(map(measure, inked)), answers)[0, 1]
        assert max(related, key=related.get) == question
        assert related[question] > 0.4
    # 2. a color is that of the pixels which are no ground
    pictures, answers = drawn("color")
    palette = np.array([*tower.COLORS.values()]) / 127.5 - 1
    right = []
    for picture, answer in zip(pictures, answers, strict=True):
        ink = np.median(picture[:, mass(picture)], axis=1)
        right.append(np.abs(palette - ink).sum(1).argmin() == answer)
    assert np.mean(right) > 0.8
    # 3. a sign in the middle at first, anywhere later
    spread = []
    for hardness in (0.0, 1.0):
        pictures, _ = drawn("sign", 100, hardness)
        spread.append(np.std([columns[mass(picture)].mean() for picture in pictures]))
    assert spread[1] > 1.2 * spread[0]


class Mute:
    """A generator whose noise is none."""

    def __init__(self, generator):
        self.generator = generator

    def normal(self, mean, deviation, shape):
        return 0 * self.generator.normal(mean, deviation, shape)


def test_hands_point_where_they_are_said_to():
    """Breaks when an angle is not clockwise from the top, or a sign is not the same each time."""
    for seed in range(50):
        canvas = Mock()
        facts = dict(tower.draw_hand(Random(seed), canvas, (0, 0, 0), np.zeros(3)))
        x, y, to_x, to_y = canvas.line.call_args.args[0]
        degrees = math.degrees(math.atan2(to_x - x, y - to_y))
        assert round(degrees / 15) % 24 == facts["angle"]
    strokes = tower.strokes_of(3)
    tower.strokes_of.cache_clear()
    assert tower.strokes_of(3) == strokes != tower.strokes_of(4)


def test_a_first_tower_reads_what_is_near():
    """Breaks when a patch of a first tower attends to far ones as to near ones, or rows and columns
    are exchanged."""
    model = load_model("tiny")
    tower.begin(model, 0)
    layer = model.vision_tower.encoder.layers[0]
    x = layer.layer_norm1(model.vision_tower.embeddings.position_embedding.weight)
    q = layer.self_attn.q_proj(x).view(64, 4, 32)
    k = layer.self_attn.k_proj(x).view(64, 4, 32)
    maps = (torch.einsum("ihd,jhd->hij", q, k) * 32**-0.5).softmax(-1).mean(0)
    assert model.encode_images(torch.zeros(1, 3, 64, 64)).shape == (1, 64, 128)
    assert model.config.num_image_tokens == 64
    row = torch.arange(64) // 8
    column = torch.arange(64) % 8
    down = row[:, None] - row
    right = column[:, None] - column
    distance = down.abs() + right.abs()
    far = maps[distance >= 4].mean()
    assert maps[distance <= 1].mean() > 10 * far
    assert maps[(down == 0) & (right == 1)].mean() > 5 * far  # a neighbour in the row
    assert maps[(down == 1) & (right == 0)].mean() > 5 * far  # and one in the column


def test_a_first_tower_sees_edges_as_clearly_as_brightness():
    """Breaks when channels follow the brightness alone, a faint noise is made loud, or a wide or a
    narrow embedding cannot be set."""
    generator = torch.Generator().manual_seed(0)
    brightness = torch.rand(40, 3, 1, 1, generator=generator) - 0.5
    edges = torch.where(torch.rand(40, 1, 1, 64, generator=generator) < 0.5, 0.4, -0.4)
    pictures = brightness + edges + 0.01 * torch.randn(40, 3, 64, 64, generator=generator)
    for width in (5, 200):
        embedding = torch.nn.Conv2d(3, width, 8, 8)
        tower.whiten(embedding, pictures)
        channels = embedding(pictures).movedim(1, 0).flatten(1)[:192]
        assert channels.mean(1).abs().max() < 1e-3
        loudest = channels.var(1).sort().values[-5:]
        assert loudest[0] > 0.5
        assert loudest[-1] < 1.1
        correlation = torch.corrcoef(channels)[-5:, -5:] - torch.eye(5)
        assert correlation.abs().max() < 0.01
        assert channels.var(1)[:-11].lt(0.01).all()  # 8 columns, 3 colors
