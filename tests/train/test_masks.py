"""The small coder of masks, and training on masks."""

import pytest
import torch
from safetensors import safe_open

from eval import figures
from eval.data.pictures import Dice
from eval.data.records import read_coco
from model.masks import SIDE
from tests.eval.test_masks import ellipse, has_color, layout, written
from tests.files import draw, json_lines, read_json, write_json
from tests.runs import metrics, refuses, settings_of, train, words
from train import finetune, masks, validation
from weights.masks import BUNDLED_CODER, load_mask_coder


def test_the_shipped_coder_is_as_good_as_it_says():
    """Breaks when the file beside the embedded base is another, too large, or does not know drawn
    shapes."""
    assert BUNDLED_CODER.stat().st_size < 1e6
    with safe_open(BUNDLED_CODER, "pt") as file:
        facts = file.metadata()
    share = masks.overlap(load_mask_coder("embedded"), int(facts["seed"]))
    assert share == pytest.approx(float(facts["overlap"]), abs=1e-3)
    assert share > 0.94


def test_a_coder_is_made_from_its_seed(tmp_path, monkeypatch):
    """Breaks when two runs of a seed differ, a seed does nothing, the loss trains no part, or codes
    stay where nothing is near."""
    monkeypatch.setattr(masks, "STEPS", 3)
    monkeypatch.setattr(masks, "HELD_OUT", 64)
    made = []
    for number, seed in enumerate((0, 0, 1)):
        out = tmp_path / f"{number}.safetensors"
        masks.main(words("--out", out, "--seed", seed))
        made.append(load_mask_coder(out).state_dict())
    torch.manual_seed(0)
    untrained = masks.MaskCoder(masks.WIDTH, masks.SIZE).state_dict()
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name
        assert not torch.equal(tensor, made[2][name]), name
        assert not torch.equal(tensor, untrained[name]), name
    (shapes,) = masks.batches("train", 1, 0)
    assert len(load_mask_coder(out).encode(shapes).unique()) > 5


def test_what_the_loss_trains(monkeypatch):
    """Breaks when the encoder does not learn from the decoder, straight through the codes, or from
    its distance to them, or the codes do not learn."""
    coder = masks.MaskCoder(2, 4)
    (shapes,) = masks.batches("train", 1, 0)
    gradients = []
    for weight in (0.0, 10.0):
        monkeypatch.setattr(masks, "COMMITMENT", weight)
        coder.zero_grad()
        masks.coder_loss(coder, shapes).backward()
        gradients.append({name: p.grad.clone() for name, p in coder.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        is_moved = not torch.allclose(gradient, gradients[1][name])
        assert is_moved == name.startswith("encoder"), name


def test_shapes_fill_their_box():
    """Breaks when a shape is empty, is not cropped to its box, or training sees what is held
    out."""
    shapes = torch.stack([masks.draw_shape(Dice(str(number))) for number in range(64)])
    assert shapes.shape == (64, SIDE, SIDE)
    solid = shapes > 0.5
    assert solid.any(1).all(1).float().mean() > 0.8
    assert 0.2 < solid.float().mean() < 0.8
    learned = next(masks.batches("train", 1, 0))
    assert not (learned == next(masks.batches("held-out", 1, 0))).flatten(1).all(1).any()


def test_masks_are_learned_scored_and_drawn(tmp_path, monkeypatch, printed):
    """Breaks when a run on masks learns boxes alone, reports no mIoU, draws no mask, or points to a
    command without the coder."""
    value = {"images": [], "annotations": []}
    for number in range(8):
        one = layout(tmp_path, written(ellipse((4 + number, 6, 24, 38), (40, 60))), size=(40, 60))
        name = f"{number}.png"
        draw(tmp_path / name, (number, 0, 0), size=(40, 60))
        value["images"].append(one["images"][0] | {"id": number, "file_name": name})
        value["annotations"].append(one["annotations"][0] | {"image_id": number})
    value["categories"] = one["categories"]
    data = f"coco-masks:{write_json(tmp_path / 'b.json', value)}"
    records = {r.name: r for r in read_coco(tmp_path / "b.json", coder=load_mask_coder("embedded"))}
    monkeypatch.setattr(
        validation,
        "ask_together",
        lambda *args, **options: [records[q.id].suffix for q in args[3]],
    )
    monkeypatch.setattr(validation, "LONGEST_BOXES", 999)
    flags = f"--data {data} --base tiny --validation 0.5 --batch-size 2 --device cpu"
    refuses(finetune, f"{flags} --steps 1", "b.json", "--masks FILE")
    run = tmp_path / "run"
    flags += " --masks embedded"
    train(flags, "--steps 1 --eval-every 1 --out", run)
    assert f"eval.detect --data coco-masks:TEST --masks embedded --adapter {run}" in printed()
    assert metrics(run)[0]["mIoU"] > 80
    assert read_json(run / "summary.json")["held_out"]["after"]["mIoU"] > 80
    assert has_color(run / "answers.png", figures.MISS, figures.HIT)  # over a true mask
    train(flags, f"--show-batch {tmp_path}/sheet.png")
    assert "<seg" in printed()
    assert has_color(tmp_path / "sheet.png", figures.SERIES[0])


CODERS = """["coco-masks:a.json", "embedded"]
["coco-masks:a.json --masks b.npz", "b.npz"]
["coco-masks:a.json --base google/paligemma-3b-pt-224", null]
["coco:a.json", null]
["coco:a.json --eval-data coco-masks:a.json", "embedded"]"""


def test_the_coder_of_a_run():
    """Breaks when a published base learns codes of the toy's coder without being asked to."""
    for flags, expected in json_lines(CODERS):
        settings = settings_of("--data", flags)
        assert settings.masks_file == expected
        assert settings.recipe != "own"
