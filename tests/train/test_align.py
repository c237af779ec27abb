"""The alignment stage: the vision tower, and nothing else, learns from the answers."""

import os
import random
import signal
from argparse import Namespace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file

from eval.data.records import Record, Refusal
from model.images import to_pixels
from model.paligemma import initialize
from tests.files import draw, write_lines
from tests.runs import WORLD, assert_same_tensors, metrics, refused, settings_of, train
from train import align as alignment
from train import model as systems
from train.checkpoint import Progress
from train.data.batches import collate
from train.model import open_model
from weights.load import load_model


def records(number):
    """Pictures of one color, each with two questions; the last picture cannot be read."""
    result = []
    for index in range(number):
        name, color = ("red", "#d22") if index % 2 == 0 else ("green", "#2c4")
        picture = partial(Image.new, "RGB", (8, 8), color)
        if index == number - 1:
            picture = Refusal("no picture")
        is_red = "yes" if name == "red" else "no"
        for turn in (("which color", name), ("is it red", is_red)):
            result.append(Record(f"{index}/{turn}", f"{index}", (picture,), (turn,)))
    return result


def test_the_tower_alone_learns_the_answers(monkeypatch, tmp_path):
    """Breaks when the stage trains the decoder, learns nothing, ends at a picture that cannot be
    read, shows all in one order, or does not move them."""
    shifted = Mock(side_effect=lambda pictures: pictures)
    monkeypatch.setattr(alignment, "shifted", shifted)
    settings = settings_of("--recipe own --align 16")
    model = load_model("tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = alignment.align(model, records(70), settings, WORLD, tmp_path, Progress())
    assert len(losses) == 16
    assert losses[-1] < 0.2 < losses[0]
    seen = torch.cat([call.args[0][:, 0, 0, 0] for call in shifted.call_args_list]).tolist()
    assert seen[:69] != seen[69:138]  # two passes over the pictures
    changed = {
        name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])
    }
    tower = {name for name in before if name.startswith("vision_tower.")}
    assert changed <= tower
    assert len(changed) > 0.9 * len(tower)


def test_the_head_reads_by_attention_and_by_the_greatest(seeded):
    """Breaks when a channel's greatest value is not read alone, or a reading gets no loss."""
    model = load_model("tiny")
    head = alignment.AnswerHead(128, 3, 5)
    patches = torch.randn(2, 4, 128)
    questions = torch.tensor([[0, 1], [2, 0]])
    asked = torch.tensor([[True, True], [True, False]])
    logits = head(patches, questions, asked)
    again = head(torch.cat((patches, patches[:, :1]), 1), questions, asked)  # nothing greater
    assert logits.shape == (2, 3, 5)
    assert (logits[0] - again[0]).abs().min() > 1e-5
    torch.testing.assert_close(logits[1], again[1])
    opened = {"a": torch.zeros(3, 112, 112)}
    logits = torch.tensor([[[0.0, 0.0]], [[0.0, 9.0]]])
    loss = alignment.loss_of(model, Mock(return_value=logits), opened, {"a": [(1, 0)]}, "none")
    assert loss.item() == pytest.approx((0.6931 + 9.0001) / 2, abs=1e-3)  # -log 1/2, log(1 + e⁹)


def test_the_small_tower_tells_letters_apart():
    """Breaks when the file beside the embedded base is another, or too large: of eight letters that
    it has not learned, most are nearest to the mean of their kind. Random weights tell few."""
    dice = random.Random(0)
    pixels = []
    for number in range(320):
        image = Image.new("RGB", (64, 64), tuple(dice.choices(range(60, 120), k=3)))
        place = dice.randrange(4, 30), dice.randrange(0, 24)
        font = ImageFont.load_default(dice.randrange(28, 44))
        ImageDraw.Draw(image).text(place, "AEHKORTX"[number % 8], (230, 230, 60), font)
        pixels.append(to_pixels(image, 64))
    letters = torch.arange(320) % 8

    def share(model):
        with torch.no_grad():
            greatest = model.encode_images(torch.stack(pixels)).amax(1)
        means = torch.stack([greatest[:160][letters[:160] == n].mean(0) for n in range(8)])
        nearest = torch.cdist(greatest[160:], means).argmin(1)
        return (nearest == letters[160:]).float().mean().item()

    assert alignment.SMALL_TOWER.stat().st_size < 1.3e6
    model = load_model("embedded")
    alignment.small_tower(model)
    shipped = share(model.eval())
    initialize(model.vision_tower)
    assert shipped > 0.7
    assert share(model) < 0.5


def test_a_run_on_own_pictures_starts_from_the_small_tower():
    """Breaks when a run has another tower, or a base of other sizes takes this one."""
    model, _ = open_model(settings_of("--recipe own"), WORLD.device)
    stored = {name: part.float() for name, part in load_file(alignment.SMALL_TOWER).items()}
    assert_same_tensors(model.vision_tower.state_dict(), stored)
    assert model.encode_images(torch.zeros(1, 3, 64, 64)).shape == (1, 64, 128)
    assert model.config.num_image_tokens == 64
    refused(lambda: alignment.small_tower(load_model("mini")), "--new-tower", "embedded base alone")


def test_pictures_are_moved_and_boxes_are_not(processor, monkeypatch, tmp_path, seeded):
    """Breaks when a row is moved as a column, pictures move together, a border is torn, or a box
    leaves its object."""
    pictures = torch.arange(2 * 3 * 32 * 32.0).view(2, 3, 32, 32)
    found = []
    for picture, moved in zip(pictures, alignment.shifted(pictures), strict=True):
        padded = torch.nn.functional.pad(picture[None], (2, 2, 2, 2), mode="replicate")[0]
        windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4)
        found.append((windows == moved).all((2, 3, 4)))
        assert found[-1].sum() == 1
    assert not torch.equal(*found)
    many = alignment.shifted(pictures[:1].expand(400, -1, -1, -1))
    assert len(many.flatten(1).unique(dim=0)) == 25
    seen = []
    settings = settings_of("--recipe own")
    monkeypatch.setattr(systems, "fit", lambda model, optimizer, order, loss, *_, **__: loss)
    monkeypatch.setattr(
        systems, "supervised_loss", lambda model, micro, _: seen.append(micro.batch.pixel_values)
    )
    loss = systems.train_on(Namespace(processor=processor), None, None, settings, tmp_path, WORLD)
    picture = partial(Image.radial_gradient, "L")
    for answer, is_moved in (("red", True), ("<loc0001><loc0002><loc0003><loc0004> dog", False)):
        micro = collate([Record("a", "a", (picture,), (("detect dog", answer),))], processor)
        loss(None, micro)
        assert torch.equal(seen[-1], micro.batch.pixel_values) is not is_moved
    other = Mock()  # a tokenizer without locations: it knows the piece as another one
    other.tokenizer.piece_to_id.return_value = 0
    systems.train_on(Namespace(processor=other), None, None, settings, tmp_path, WORLD)(None, micro)
    assert not torch.equal(seen[-1], micro.batch.pixel_values)


def test_own_pictures_on_the_embedded_base_take_their_recipe():
    """Breaks when a user's own data is trained as the scenes are, or a flag that asks for LoRA is
    overruled."""
    own = "--data jsonl:a.jsonl --data csv:b"
    for flags in (own, f"{own} --epochs 3 --align 1", f"{own} --base embedded"):
        settings = settings_of(flags)
        assert (settings.recipe, settings.full, settings.new_tower) == ("own", True, True)
    for flags, patience in {
        "": 5,
        "--no-evaluate": 0,
        "--eval-every 0": 0,
        "--patience 2": 2,
    }.items():
        assert settings_of(f"{own} {flags}").patience == patience
    others = "coco:a.json, jsonl:a --recipe lora, jsonl:a --attention twin, jsonl:a --base tiny, jsonl:a --r 4"
    assert not settings_of().new_tower
    for data in others.split(", "):
        assert not settings_of(f"--data {data}").new_tower, data


def test_what_the_tower_has_learned_is_kept():
    """Breaks when the training after it moves the tower as fast as the decoder, or a checkpoint
    leaves it out."""
    model, optimizer = open_model(settings_of("--base tiny --recipe own"), WORLD.device)
    rates = {name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates.keys() == dict(model.named_parameters()).keys()
    expected = {(True, True): 1e-3, (True, False): 1e-4, (False, True): 1e-2, (False, False): 1e-3}
    for name, parameter in model.named_parameters():
        kind = name.startswith("vision_tower."), parameter.dim() == 2 and "embed" not in name
        assert rates[name] == pytest.approx(expected[kind]), name


def test_rare_questions_share_a_number_and_rare_answers_are_left_out(monkeypatch):
    """Breaks when a question of one's own for each picture makes a head as large as the data, or a
    tower is frozen that answers of its pictures, which are all different, have not taught."""
    assert alignment.is_taught(records(4))
    assert not alignment.is_taught(records(4)[:2])
    monkeypatch.setattr(alignment, "COMMON", 1)

    def record(name, answer, pictures=("x",), question="p"):
        return Record(name, name, pictures, ((question, answer),))

    asked = alignment.numbered_questions(
        [
            record("0", "a"),
            record("1", "a"),
            record("2", "a", question="q"),
            record("3", "b", question="q"),
            *(record(f"b{i}", "<loc0001> a") for i in range(5)),
            record("t", "a", pictures=()),
            record("s", "a", pictures=("x", "y")),
        ]
    )
    assert asked == {"0": [(1, 0)], "1": [(1, 0)], "2": [(0, 0)]}


def test_an_alignment_without_examples_says_so(warned):
    """Breaks when the stage is left out without a word."""
    given = records(4)[:1], settings_of("--recipe own"), WORLD, None, Progress()
    assert alignment.align(load_model("tiny"), *given) == []
    assert "alignment is left out: no answer" in warned()


def test_a_loss_that_is_not_finite_is_refused(tmp_path):
    """Breaks when the stage goes on with a tower that is lost."""
    model = load_model("tiny")
    model.vision_tower.post_layernorm.weight.data.fill_(float("nan"))
    given = model, records(4), settings_of("--recipe own"), WORLD, tmp_path, Progress()
    refused(lambda: alignment.align(*given), "alignment, step 0")


@pytest.mark.long
def test_an_interrupted_alignment_goes_on_to_the_bit(workplace, monkeypatch, warned):
    """Breaks when a signal in the first half of a run loses it, says nothing, or leaves a run that
    goes on with other weights than one that nothing interrupts."""
    for number in range(8):
        draw(Path(f"{number}.png"), ("red", "green")[number % 2])
    write_lines(
        Path("data.jsonl"),
        ({"image": f"{n}.png", "prefix": "a", "suffix": f"{n % 2}"} for n in range(8)),
    )
    flags = "--base tiny --data jsonl:data.jsonl --recipe own --align 6 --steps 2 --batch-size 4"
    flags += " --validation 0 --no-evaluate --device cpu --checkpoint-every 4 --out"
    train(flags, "whole")
    shifted = alignment.shifted
    pixels = []

    def stopped(given):
        pixels.append(shifted(given))
        if len(pixels) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(pixels) == 6:  # in the second call, which has written the checkpoint of four
            raise KeyboardInterrupt
        return pixels[-1]

    monkeypatch.setattr(alignment, "shifted", stopped)
    with pytest.raises(SystemExit) as ended:
        train(flags, "cut")
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(pixels) == 3
    assert "--resume cut" in warned()
    with pytest.raises(KeyboardInterrupt):
        train("--resume cut")
    train("--resume cut")
    assert "cut: goes on from step-0" in warned()
    assert len(pixels) == 8
    assert metrics(Path("cut")) == metrics(Path("whole"))
    assert_same_tensors(*(load_file(f"{run}/model/model.safetensors") for run in ("cut", "whole")))
    monkeypatch.setattr(alignment, "shifted", Mock(side_effect=[*pixels[:2], KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):  # as a second Ctrl-C: what is saved stays
        train(flags.replace("every 4", "every 2"), "new")
    assert Path("new/checkpoints/step-0").exists()
