"""The alignment stage: the vision tower, and nothing else, learns from the answers."""

from functools import partial

import pytest
import torch
from PIL import Image

from eval.records import Record, Refusal
from tests.runs import WORLD, refused
from train import align as alignment
from train.settings import parse
from train.systems.open import open_model
from weights.load import load_model


def records(number: int) -> list[Record]:
    """Pictures of one color, each with two questions; the last picture cannot be read."""
    result = []
    for index in range(number):
        name, color = ("red", "#d22") if index % 2 == 0 else ("green", "#2c4")
        picture = Refusal("no picture") if index == number - 1 else partial(Image.new, "RGB", (8, 8), color)
        turns = (("which color", name), ("is it red", "yes" if name == "red" else "no"))
        result += [Record(f"{index}/{turn}", f"{index}", (picture,), (turn,)) for turn in turns]
    return result


def test_the_tower_alone_learns_the_answers():
    """Breaks when the stage trains the decoder, learns nothing, or ends at a picture that cannot be read."""
    settings = parse(["--recipe", "own", "--align", "12"])[0]
    model = load_model("tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = alignment.align(model, records(70), settings, WORLD)
    assert len(losses) == 12 and losses[-1] < 0.2 < losses[0]
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    tower = {name for name in before if name.startswith("vision_tower.")}
    assert changed <= tower and len(changed) > 0.9 * len(tower)


def test_a_new_tower_reads_what_is_near():
    """Breaks when a patch of a new tower attends to far ones as to near ones, or rows and columns are exchanged."""
    model = load_model("tiny")
    alignment.new_tower(model)
    layer, side = model.vision_tower.encoder.layers[0], 8
    positions = model.vision_tower.embeddings.position_embedding.weight
    with torch.no_grad():
        q, k = (project(layer.layer_norm1(positions)).view(64, 4, 32) for project in attention_inputs(layer))
        maps = (torch.einsum("ihd,jhd->hij", q, k) * 32**-0.5).softmax(-1).mean(0)
        picture = torch.zeros(1, 3, 64, 64)
        assert model.encode_images(picture).shape == (1, 64, 128) and model.config.num_image_tokens == 64
    row, column = torch.arange(64) // side, torch.arange(64) % side
    distance = (row[:, None] - row).abs() + (column[:, None] - column).abs()
    near, far = maps[distance <= 1].mean(), maps[distance >= 4].mean()
    assert near > 10 * far
    sides = [maps[(row[:, None] - row == a) & (column[:, None] - column == b)].mean() for a, b in ((0, 1), (1, 0))]
    assert min(sides) > 5 * far  # a neighbour in the row, and one in the column


def attention_inputs(layer) -> tuple:
    return layer.self_attn.q_proj, layer.self_attn.k_proj


def test_what_the_tower_has_learned_is_kept():
    """Breaks when the training after it moves the tower as fast as the decoder, or a checkpoint leaves it out."""
    model, optimizer = open_model(parse(["--base", "tiny", "--recipe", "own"])[0], torch.device("cpu"))
    rates = {name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates.keys() == dict(model.named_parameters()).keys()
    expected = {(True, True): 1e-3, (True, False): 1e-4, (False, True): 1e-2, (False, False): 1e-3}
    for name, parameter in model.named_parameters():
        kind = name.startswith("vision_tower."), parameter.dim() == 2 and "embed" not in name
        assert rates[name] == pytest.approx(expected[kind]), name


def test_rare_questions_share_a_number_and_rare_answers_are_left_out(monkeypatch):
    """Breaks when a question of one's own for each picture makes a head as large as the data."""
    monkeypatch.setattr(alignment, "COMMON", 1)
    given = [Record(f"{i}", f"{i}", ("x",), ((q, a),)) for i, (q, a) in enumerate(["pa", "pa", "qa", "qb"])]
    text_only, several = Record("t", "t", (), (("p", "a"),)), Record("s", "s", ("x", "y"), (("p", "a"),))
    asked = alignment.examples([*given, text_only, several])
    assert asked == {"0": [(1, 0)], "1": [(1, 0)], "2": [(0, 0)]}


def test_a_loss_that_is_not_finite_is_refused():
    """Breaks when the stage goes on with a tower that is lost."""
    model = load_model("tiny")
    model.vision_tower.post_layernorm.weight.data.fill_(float("nan"))
    refused(lambda: alignment.align(model, records(4), parse(["--recipe", "own"])[0], WORLD), "alignment, step 0")
