"""The alignment stage: the vision tower, and nothing else, learns from the answers."""

import os
import signal
from argparse import Namespace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from eval.data.records import Record, Refusal
from model.processor import Processor
from tests.runs import WORLD, metrics, refused, words
from train import align as alignment
from train import finetune
from train import model as systems
from train.checkpoint import Progress
from train.data.batches import collate
from train.model import open_model
from train.settings import parse
from weights.load import load_model


def records(number: int) -> list[Record]:
    """Pictures of one color, each with two questions; the last picture cannot be read."""
    result = []
    for index in range(number):
        name, color = ("red", "#d22") if index % 2 == 0 else ("green", "#2c4")
        picture = (
            Refusal("no picture")
            if index == number - 1
            else partial(Image.new, "RGB", (8, 8), color)
        )
        turns = (("which color", name), ("is it red", "yes" if name == "red" else "no"))
        result += [Record(f"{index}/{turn}", f"{index}", (picture,), (turn,)) for turn in turns]
    return result


def test_the_tower_alone_learns_the_answers(monkeypatch, tmp_path):
    """Breaks when the stage trains the decoder, learns nothing, ends at a picture that cannot be
    read, shows all in one order, or does not move them."""
    seen = []
    monkeypatch.setattr(
        alignment, "shifted", lambda pictures: seen.extend(pictures[:, 0, 0, 0]) or pictures
    )
    settings = parse(["--recipe", "own", "--align", "16"])[0]
    model = load_model("tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = alignment.align(model, records(70), settings, WORLD, tmp_path, Progress())
    assert len(losses) == 16 and losses[-1] < 0.2 < losses[0]
    assert seen[:69] != seen[69:138]  # two passes over the pictures
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    tower = {name for name in before if name.startswith("vision_tower.")}
    assert changed <= tower and len(changed) > 0.9 * len(tower)


def test_a_new_tower_reads_what_is_near():
    """Breaks when a patch of a new tower attends to far ones as to near ones, or rows and columns
    are exchanged."""
    model = load_model("tiny")
    alignment.new_tower(model)
    layer, side = model.vision_tower.encoder.layers[0], 8
    positions = model.vision_tower.embeddings.position_embedding.weight
    with torch.no_grad():
        q, k = (
            project(layer.layer_norm1(positions)).view(64, 4, 32)
            for project in attention_inputs(layer)
        )
        maps = (torch.einsum("ihd,jhd->hij", q, k) * 32**-0.5).softmax(-1).mean(0)
        picture = torch.zeros(1, 3, 64, 64)
        assert (
            model.encode_images(picture).shape == (1, 64, 128)
            and model.config.num_image_tokens == 64
        )
    row, column = torch.arange(64) // side, torch.arange(64) % side
    distance = (row[:, None] - row).abs() + (column[:, None] - column).abs()
    near, far = maps[distance <= 1].mean(), maps[distance >= 4].mean()
    assert near > 10 * far
    sides = [
        maps[(row[:, None] - row == a) & (column[:, None] - column == b)].mean()
        for a, b in ((0, 1), (1, 0))
    ]
    assert min(sides) > 5 * far  # a neighbour in the row, and one in the column


def test_a_new_tower_sees_edges_as_clearly_as_brightness():
    """Breaks when channels follow the brightness alone, a faint noise is made loud, or a wide or a
    narrow embedding cannot be set."""
    generator = torch.Generator().manual_seed(0)
    brightness = torch.rand(40, 3, 1, 1, generator=generator) - 0.5
    edges = torch.where(torch.rand(40, 1, 1, 64, generator=generator) < 0.5, 0.4, -0.4)
    pictures = brightness + edges + 0.01 * torch.randn(40, 3, 64, 64, generator=generator)
    for width in (5, 200):
        embedding = torch.nn.Conv2d(3, width, 8, 8)
        alignment.whiten(embedding, pictures)
        channels = embedding(pictures).movedim(1, 0).flatten(1)[:192]
        assert channels.mean(1).abs().max() < 1e-3
        loudest = channels.var(1).sort().values[-5:]
        assert loudest[0] > 0.5 and loudest[-1] < 1.1
        correlation = torch.corrcoef(channels)[-5:, -5:] - torch.eye(5)
        assert correlation.abs().max() < 0.01
        assert channels.var(1)[:-11].lt(0.01).all()  # 8 columns, 3 colors


def attention_inputs(layer) -> tuple:
    return layer.self_attn.q_proj, layer.self_attn.k_proj


def test_pictures_are_moved_and_boxes_are_not(monkeypatch, tmp_path):
    """Breaks when a row is moved as a column, pictures move together, a border is torn, or a box
    leaves its object."""
    pictures = torch.arange(2 * 3 * 32 * 32.0).view(2, 3, 32, 32)
    torch.manual_seed(0)
    moved = alignment.shifted(pictures)
    flat = moved.flatten(1).tolist()
    for picture, got in zip(pictures, moved, strict=True):
        padded = torch.nn.functional.pad(picture[None], (2, 2, 2, 2), mode="replicate")[0]
        assert (
            sum(
                torch.equal(padded[:, y : y + 32, x : x + 32], got)
                for y in range(5)
                for x in range(5)
            )
            == 1
        )
    assert flat[0] != [value - 3072 for value in flat[1]]
    assert (
        len(
            {
                *map(
                    tuple,
                    alignment.shifted(pictures[:1].expand(400, -1, -1, -1)).flatten(1).tolist(),
                )
            }
        )
        == 25
    )
    seen, settings = [], parse(["--recipe", "own"])[0]
    monkeypatch.setattr(
        systems, "fit", lambda model, optimizer, order, loss, *args, **options: loss
    )
    monkeypatch.setattr(
        systems, "supervised_loss", lambda model, micro: seen.append(micro.batch.pixel_values)
    )
    processor = Processor.from_source("tiny")
    loss = systems.train_on(Namespace(processor=processor), None, None, settings, tmp_path, WORLD)
    for answer, is_moved in (("red", True), ("<loc0001><loc0002><loc0003><loc0004> dog", False)):
        picture = partial(Image.radial_gradient, "L")
        micro = collate([Record("a", "a", (picture,), (("detect dog", answer),))], processor)
        loss(None, micro)
        assert torch.equal(seen[-1], micro.batch.pixel_values) is not is_moved


def test_own_pictures_on_the_embedded_base_take_their_recipe():
    """Breaks when a user's own data is trained as the scenes are, or a flag that asks for LoRA is
    overruled."""
    own = "--data jsonl:a.jsonl --data csv:b"
    for flags in (own, f"{own} --epochs 3 --seed 1", f"{own} --base embedded"):
        settings = parse(flags.split())[0]
        assert (settings.recipe, settings.full, settings.new_tower) == ("own", True, True)
    for flags, patience in (
        ("", 5),
        ("--no-evaluate", 0),
        ("--eval-every 0", 0),
        ("--patience 2", 2),
    ):
        assert parse(f"{own} {flags}".split())[0].patience == patience
    others = "coco:a.json, jsonl:a --recipe lora, jsonl:a --attention twin, jsonl:a --base tiny, jsonl:a --r 4"
    for flags in (
        "",
        *f"--data {others}".replace(", ", ",--data ").split(","),
    ):
        assert not parse(flags.split())[0].new_tower, flags


def test_what_the_tower_has_learned_is_kept():
    """Breaks when the training after it moves the tower as fast as the decoder, or a checkpoint
    leaves it out."""
    model, optimizer = open_model(
        parse(["--base", "tiny", "--recipe", "own"])[0], torch.device("cpu")
    )
    rates = {name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates.keys() == dict(model.named_parameters()).keys()
    expected = {(True, True): 1e-3, (True, False): 1e-4, (False, True): 1e-2, (False, False): 1e-3}
    for name, parameter in model.named_parameters():
        kind = name.startswith("vision_tower."), parameter.dim() == 2 and "embed" not in name
        assert rates[name] == pytest.approx(expected[kind]), name


def test_rare_questions_share_a_number_and_rare_answers_are_left_out(monkeypatch):
    """Breaks when a question of one's own for each picture makes a head as large as the data, or a
    tower is frozen that answers of its pictures, which are all different, have not taught."""
    assert alignment.is_taught(records(4)) and not alignment.is_taught([*records(4)[:2]])
    monkeypatch.setattr(alignment, "COMMON", 1)
    given = [
        Record(f"{i}", f"{i}", ("x",), ((q, a),))
        for i, (q, a) in enumerate(["pa", "pa", "qa", "qb"])
    ]
    text_only, several = (
        Record("t", "t", (), (("p", "a"),)),
        Record("s", "s", ("x", "y"), (("p", "a"),)),
    )
    boxes = [Record(f"b{i}", f"b{i}", ("x",), (("p", "<loc0001> a"),)) for i in range(5)]
    asked = alignment.examples([*given, *boxes, text_only, several])
    assert asked == {"0": [(1, 0)], "1": [(1, 0)], "2": [(0, 0)]}


def test_a_loss_that_is_not_finite_is_refused(tmp_path):
    """Breaks when the stage goes on with a tower that is lost."""
    model = load_model("tiny")
    model.vision_tower.post_layernorm.weight.data.fill_(float("nan"))
    given = model, records(4), parse(["--recipe", "own"])[0], WORLD, tmp_path, Progress()
    refused(lambda: alignment.align(*given), "alignment, step 0")


@pytest.mark.long
def test_an_interrupted_alignment_goes_on_to_the_bit(tmp_path, monkeypatch, capsys):
    """Breaks when a signal in the first half of a run loses it, says nothing, or leaves a run that
    goes on with other weights than one that nothing interrupts."""
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        Image.new("RGB", (8, 8), ("red", "green")[number % 2]).save(f"{number}.png")
    lines = [f'{{"image": "{n}.png", "prefix": "a", "suffix": "{n % 2}"}}' for n in range(8)]
    Path("data.jsonl").write_text("\n".join(lines))
    flags = "--base tiny --data jsonl:data.jsonl --recipe own --align 6 --steps 2 --batch-size 4"
    flags += " --validation 0 --no-evaluate --device cpu --checkpoint-every 4 --out"
    finetune.main(words(flags, "whole"))
    shifted, pixels = alignment.shifted, []

    def stopped(given):
        pixels.append(shifted(given))
        if len(pixels) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(pixels) == 6:  # in the second call, which has written the checkpoint of four
            raise KeyboardInterrupt
        return pixels[-1]

    monkeypatch.setattr(alignment, "shifted", stopped)
    with pytest.raises(SystemExit) as ended:
        finetune.main(words(flags, "cut"))
    assert ended.value.code == 128 + signal.SIGTERM and len(pixels) == 3
    assert "--resume cut" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        finetune.main(["--resume", "cut"])
    finetune.main(["--resume", "cut"])
    assert "cut: goes on from step-0" in capsys.readouterr().err and len(pixels) == 8
    assert metrics(Path("cut")) == metrics(Path("whole"))
    ours, theirs = (load_file(f"{run}/model/model.safetensors") for run in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    monkeypatch.setattr(alignment, "shifted", Mock(side_effect=[*pixels[:2], KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):  # as a second Ctrl-C: what is saved stays
        finetune.main(words(flags.replace("every 4", "every 2"), "new"))
    assert Path("new/checkpoints/step-0").exists()
