"""Held-out examples: scored right, by one process or several, without a trace in training; the best
weights stay."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from eval import figures
from eval.data.records import Record, read_data
from lora import adapter
from model.config import PRESETS
from model.processor import Processor
from tests.files import draw, json_lines, read_json, write_json, write_lines
from tests.runs import WORLD, assert_same_tensors, metrics, refused, settings_of, train
from train import model as systems
from train import validation
from train.checkpoint import Progress, Result, newest_progress
from train.data.batches import collate
from train.data.sources import read_split
from train.settings import Settings
from train.summary import gain_over_blind, print_accuracies, print_summary, recommended
from train.validation import HeldOut, draw_numbers, is_better, open_held_out
from weights.load import load_model

TINY = PRESETS["tiny"]
SMALL = replace(
    TINY,
    vision=replace(TINY.vision, num_hidden_layers=1),
    text=replace(TINY.text, num_hidden_layers=2),
)
SUMMARY = json.loads('{"left_out": [], "empty_steps": 0, "samples": 60, "seconds": 1.0}')
COLORS = {"red": "#dc1e1e", "green": "#1ea028", "blue": "#283cdc", "yellow": "#e6d228"}


def write_colors(folder, count):
    """The --data of pictures of one color each, and the question for it."""
    dice = random.Random(0)
    rows = []
    for number in range(count):
        name, color = dice.choice(list(COLORS.items()))
        picture = Image.new("RGB", (40, 30), color)
        picture.putpixel((0, 0), (number, 0, 0))  # no two are the same
        picture.save(folder / f"{number}.png")
        asked = "answer en What color is it?"
        rows.append({"image": f"{number}.png", "prefix": asked, "suffix": name})
    return f"--data jsonl:{write_lines(folder / 'data.jsonl', rows)}"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", SMALL)
        data = write_colors(tmp_path_factory.mktemp("colors"), 30)
        flags = "--base tiny --validation 0.4 --batch-size 3 --steps 8 --epochs 9 --dropout 0.1 --attention twin"
        yield f"{data} {flags} --checkpoint-every 3 --device cpu"


@pytest.mark.long
def test_training_is_the_same_with_open_eyes(flags, tmp_path, monkeypatch):
    """Breaks when an evaluation leaves a trace in training, is not made again by a resumed run, or
    scores wrongly."""
    for name, every in (("closed", 0), ("open", 2)):
        train(flags, f"--eval-every {every} --out", tmp_path / name)
    closed = metrics(tmp_path / "closed")
    whole = metrics(tmp_path / "open")
    evaluated = [record["step"] for record in whole if "held_out_loss" in record]
    assert evaluated == [record["step"] for record in whole if "exact_match" in record]
    assert evaluated == [1, 3, 5, 7]
    for record, alone in zip(whole, closed, strict=True):
        assert {name: record[name] for name in closed[0]} == alone
    assert all(value > 0 for value in whole[1]["map_distance"].values())
    assert len(whole[1]["lambda"]) > 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        # the sixth call comes after the evaluation of step 4 and the checkpoint of step 3
        losses = [systems.supervised_loss] * 5 + [Mock(side_effect=KeyboardInterrupt)]
        patch.setattr(systems, "supervised_loss", lambda *args: losses.pop(0)(*args))
        train(flags, "--eval-every 2 --out", tmp_path / "cut")
    train("--resume", tmp_path / "cut")
    assert metrics(tmp_path / "cut") == whole
    file = "adapter_model.safetensors"
    last = load_file(tmp_path / "open" / file)
    assert_same_tensors(load_file(tmp_path / "cut" / file), last)
    assert_same_tensors(load_file(tmp_path / "closed" / file), last)
    best = load_file(tmp_path / "open/best" / file)
    assert_same_tensors(load_file(tmp_path / "cut/best" / file), best)
    summary = read_json(tmp_path / "open/summary.json")["held_out"]
    assert read_json(tmp_path / "cut/summary.json")["held_out"] == summary
    answers = (tmp_path / "open/answers.jsonl").read_text().splitlines()
    assert len(answers) == summary["asked"] == 12
    assert {*"question truth before after blind right".split()} <= json.loads(answers[0]).keys()
    assert (tmp_path / "open/answers.png").exists()
    # the last evaluation, computed another way
    model = load_model("tiny")
    processor = Processor.from_source("tiny")
    adapter.load(model.eval(), tmp_path / "open")
    micro = collate(read_split(settings_of(flags), "validation"), processor).to("cpu")
    with torch.no_grad():
        expected = systems.supervised_loss(model.eval(), micro).item() / micro.tokens
    assert whole[-1]["held_out_loss"] == pytest.approx(expected, rel=1e-5)
    # the other is of gray pictures
    assert summary["after"]["loss"] == whole[-1]["held_out_loss"] != summary["blind"]["loss"]


@pytest.mark.long
def test_a_run_without_progress_stops_and_is_finished(flags, tmp_path, monkeypatch):
    """Breaks when --patience is not kept, or a run that it has ended trains on when it is resumed,
    or is compared on other examples than before."""
    train(flags, "--eval-every 2 --patience 1 --lr 0 --out", tmp_path / "run")
    logged = metrics(tmp_path / "run")
    train("--resume", tmp_path / "run")
    assert len(logged) == 4
    assert metrics(tmp_path / "run") == logged
    monkeypatch.setattr(validation, "draw_numbers", lambda items, most: items[1:])
    refused(lambda: train("--resume", tmp_path / "run"), "the records", "--allow-changed")
    assert newest_progress(tmp_path / "run").stopped == 4
    assert read_json(tmp_path / "run/summary.json")["held_out"]["stopped"] == 4
    train("--allow-changed --resume", tmp_path / "run")  # what was scored before is scored again
    told = read_json(tmp_path / "run/summary.json")["held_out"]
    assert told["before"]["loss"] == told["after"]["loss"]
    assert len(metrics(tmp_path / "run")) > 4  # the examples that had ended it are not these


@pytest.mark.long
def test_held_out_examples_that_cannot_be_read_are_counted(flags, tmp_path):
    """Breaks when a score is of fewer examples than it says, or of half of them."""
    given = f"{flags} {write_colors(tmp_path, 12).replace('data', 'eval-data', 1)} --steps 1 --out"
    (tmp_path / "3.png").write_bytes(b"broken")
    train(given, tmp_path / "run")
    assert read_json(tmp_path / "run/summary.json")["held_out"]["examples"] == 11
    (tmp_path / "7.png").write_bytes(b"broken")
    refused(lambda: train(given, tmp_path / "other"), "2 of 12 held-out")


# loss and exact match; then the step and age of the best, and the step of the stop. In the last but
# one, of 100 answers, two standard errors are 8 %: the loss decides
STEPS = """[NaN, 90.0, null, null, null]
[3.0, 10.0, 2, 0, null]
[2.0, 10.0, 3, 0, null]
[9.0, 20.0, 4, 0, null]
[1.0, 10.0, 4, 1, null]
[8.0, 20.0, 6, 0, null]
[8.0, 27.0, 6, 1, null]
[7.0, null, 6, 2, 8]"""


def test_the_best_is_kept(tmp_path, monkeypatch):
    """Breaks when worse weights take the place of better ones, a tie in exact match is not decided
    by the loss, or a loss that is not a number counts."""
    scores = {}
    progress = Progress()
    monkeypatch.setattr(HeldOut, "evaluate", lambda *args, **options: Result(scores=scores))
    held_out = HeldOut([], [], [], [*range(100)], None, Settings(eval_every=1, patience=2), WORLD)
    run = torch.nn.Module(), tmp_path, 100, ()
    monkeypatch.setattr(validation, "write_trained", lambda model, folder, *args: folder.mkdir())
    for step, (loss, exact, *expected) in enumerate(json_lines(STEPS), 1):
        scores.update(loss=loss, exact_match=exact)
        assert bool(held_out.evaluate_step(*run, step, progress)) == math.isfinite(loss)
        best = progress.best
        assert [best and best.step, best and best.since, progress.stopped] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    low = Result(matches=[1.0], scores={"loss": 1.0, "exact_match": None})
    high = replace(low, scores=low.scores | {"loss": 2.0})
    assert recommended({"after": high, "best": low}) is low  # which the run recommends
    assert recommended({"after": low, "best": high}) is low
    assert recommended({"after": low}) is low
    none, one = json_lines("""{"exact_match": 0.0, "loss": 2.0}
{"exact_match": 0.5, "loss": 5.0}""")
    for lucky, other in ((none, one), (one, none)):  # of 200 answers, one more is noise
        assert is_better(lucky, other, 200) == (lucky is none)


# by default three to ten; 60 records cost 20 + 120 samples, a share of 0.15 of 100 steps of 45 are
# 675
EVALUATIONS = """[{"eval_every": 3}, 8, [3, 6, 8]]
[{"batch_size": 45}, 100, [25, 50, 75, 100]]
[{"batch_size": 2}, 100, [34, 68, 100]]
[{"step_batch": 999, "batch_size": 2}, 100, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]]"""


@pytest.mark.parametrize("flags, total, steps", json_lines(EVALUATIONS))
def test_evaluations_take_a_seventh_of_the_time(flags, total, steps, tmp_path, monkeypatch):
    """Breaks when the last step is not evaluated, or a small run is evaluated all the time or
    hardly ever."""
    found = Result(scores={"loss": 1.0, "exact_match": None})
    monkeypatch.setattr(HeldOut, "evaluate", lambda *args, **options: found)
    settings = Settings(keep_best=False, **flags)
    held_out = HeldOut([None] * 60, [], [], [*range(60)], None, settings, WORLD)
    run = torch.nn.Module(), tmp_path, total, ()
    every = range(1, total + 1)
    assert [step for step in every if held_out.evaluate_step(*run, step, Progress())] == steps


# the right answers of each, and the loss of their first answer. In the second, two of 60 answers,
# those of one of 30 pictures, differ: 3.33 % with a standard error of 3.33; t(29) is 2.045. In the
# third nothing is matched: the loss decides
BLIND = """[[50, 1], [20, 1], ""]
[[50, 1], [48, 5], "loses 3.33 % exact match (±6.82"]
[[0, 1], [0, 2], ""]
[[0, 2], [0, 2], "loses 0.00 nats an answer (±0.00"]"""


@pytest.mark.parametrize("trained, blind, line", json_lines(BLIND))
def test_a_picture_whose_use_is_not_shown_is_reported(trained, blind, line, tmp_path, printed):
    """Breaks when a model that answers as well without the picture passes for one that sees it."""
    records = [
        Record(f"{n}", f"{n // 2}", (Path("a.png"),), (("color?", "red"),)) for n in range(60)
    ]
    held_out = HeldOut(records, [2] * 60, [], list(range(60)), None, Settings(), WORLD)
    results = {}
    for name, (right, loss) in {"after": trained, "blind": blind}.items():
        matches = [1.0] * right + [0.0] * (60 - right)
        results[name] = Result([loss + n % 3 for n in range(60)], matches=matches)
    gain = gain_over_blind(held_out, results)
    (tmp_path / "metrics.jsonl").touch()
    print_summary(SUMMARY | {"held_out": {"over_blind": gain}}, {}, Settings(), tmp_path)
    text = printed()
    assert line in text
    assert ("not shown to use the picture" in text) == bool(line)
    alone = replace(held_out, records=[replace(record, key="0") for record in records])
    assert gain_over_blind(alone, results) is None  # one picture says nothing of others


LEARNS = """[[3.0, 2.0, 1.0], true]
[[3.0, 1.0, 0.95], false]
[[3, 1, 0.2, 0.3], false]
[[2, 1], false]"""


@pytest.mark.parametrize("losses, is_rising", json_lines(LEARNS))
def test_a_run_that_still_learns_says_what_to_try(losses, is_rising, tmp_path, printed):
    """Breaks when a run that ends too early looks finished, or a finished one is sent on."""
    lines = [{"step": 0}]
    lines += [{"step": step, "held_out_loss": loss} for step, loss in enumerate(losses, 1)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    for base, advice in {
        "some/base": f"--steps {2 * len(lines)}\n",
        "embedded": "--recipe own\n",
    }.items():
        settings = Settings(data=("jsonl:a b.jsonl",), base=base)
        print_summary(SUMMARY, {}, settings, tmp_path)
        assert (advice in printed()) is is_rising
        solved = {"held_out": {"after": {"exact_match": 95.0}}}
        print_summary(SUMMARY | solved, {}, settings, tmp_path)
        assert advice not in printed()


def test_the_chance_of_a_needle_is_a_place_of_all(printed):
    summary, tests = json_lines("""{"before": {"needle": null}, "text_only_guess": {"overall": 3.0}}
{"vqa": 1.0, "vqa_details": {"per_answer_type": {}}, "needle_details": {"n4o1": 9.0}}""")
    print_accuracies(summary, {"after": Result(tests=tests)}, Settings())
    assert printed().split()[-2:] == ["9.0", "6.2"]


def test_boxes_are_scored_and_drawn(tmp_path, monkeypatch):
    """Breaks when a run on boxes reports no AP, or another than of its answers, or a sheet shows
    pictures alone."""
    boxes = json.loads('{"cat": [4.0, 6, 20, 18], "dog": [22.0, 20, 12, 16]}')
    layout = {"categories": [{"id": name, "name": name} for name in boxes]}
    layout |= {"images": [], "annotations": []}
    for n in range(8):
        draw(tmp_path / f"{n}.png", (n, n, n), size=(40, 60))
        layout["images"].append({"id": n, "file_name": f"{n}.png", "width": 40, "height": 60})
        for name, box in boxes.items():
            layout["annotations"].append({"image_id": n, "category_id": name, "bbox": box})
    data = f"coco:{write_json(tmp_path / 'b.json', layout)}"
    swapped = " ; <loc0900><loc0900><loc0100><loc0100> dog"  # beside the cat
    said = {r.name: r.suffix.partition(" ; ")[0] + swapped for r in read_data(data)}
    monkeypatch.setattr(
        validation, "ask_together", lambda *args, **options: [said[q.id] for q in args[3]]
    )
    flags = f"--data {data} --base tiny --validation 0.5 --batch-size 2 --device cpu"
    monkeypatch.setattr(validation, "LONGEST", 1)  # answers of boxes are long
    run = tmp_path / "run"
    train(flags, "--steps 2 --eval-every 1 --out", run)
    assert [record["AP"] for record in metrics(run)] == [50, 50]
    assert read_json(run / "summary.json")["held_out"]["after"]["AP"] == 50
    # the frame of a miss is orange; true boxes alone are green
    colors = {color for _, color in Image.open(run / "answers.png").getcolors(1 << 20)}
    assert {figures.HIT, figures.MISS} <= colors
    drawn = Mock(wraps=figures.draw_boxes)
    monkeypatch.setattr(figures, "draw_boxes", drawn)
    train(flags, f"--show-batch {tmp_path}/sheet.png")
    calls = [call.args for call in drawn.call_args_list]
    assert len(calls) == 2  # each picture once
    assert len({image.size for image, *_ in calls}) == 1
    for image, corners, labels in calls:
        shares = torch.tensor(corners) / torch.tensor(2 * image.size) * torch.tensor([40, 60] * 2)
        expected = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in boxes.values()])
        assert list(labels) == list(boxes)
        assert torch.allclose(shares, expected, atol=0.04)


def test_what_is_held_out(tmp_path, processor, monkeypatch, warned):
    """Breaks when held-out examples are the first of a file, those of training, or more than asked
    for, or are few without a word."""
    settings = settings_of(write_colors(tmp_path, 40), "--validation 0.5 --eval-limit 8")

    def opened(**changes):
        return open_held_out(replace(settings, **changes), processor, WORLD)

    held_out = opened()
    every = read_split(settings, "validation")
    names = [r.name for r in held_out.records]
    assert names == [r.name for r in every if r.name in names]
    assert len(set(names)) == 8
    # of each task that comes in turn
    assert len({number % 4 for number in draw_numbers(range(400), 100)}) == 4
    assert not {r.key for r in held_out.records} & {r.key for r in read_split(settings)}
    assert not any(r.sampled for r in opened(answers="sampled").records)
    assert sorted(n for batch in held_out.plan for n in batch) == held_out.asked == list(range(8))
    assert opened(validation=0.001) is None  # too small for one picture
    lines = warned().splitlines()
    assert [line[:12] for line in lines] == ["warning: 8 h"] * 2 + ["warning: 0 h"]
    assert "--validation 0.001" in lines[-1]
    assert len(opened(eval_limit=400).records) == 20
    assert not warned()
    assert opened(validation=0, patience=3) is None
    assert "warning: 0 held-out" in warned()
    own = opened(data=("embedded",), eval_data=settings.data)
    assert len(own.records) == 8  # of scenes it were 2
    long = [replace(r, key="one", turns=(("caption en", "a red dog " * 30),)) for r in every]
    monkeypatch.setattr(validation, "read_split", lambda *args: long)
    assert not opened().asked  # too long to be generated
    longer = "three dogs in the corner"
    either = [replace(r, answers=("dog", longer), turns=(("a", "dog"),)) for r in every]
    monkeypatch.setattr(validation, "read_split", lambda *args: either)
    room = len(processor.tokenizer.encode(longer)) + 1
    assert set(opened().lengths) == {room}  # each right answer is read to its end
    monkeypatch.setattr(validation, "read_split", lambda *args: long)
    assert "warning: 1 held-out" in warned()  # all are of one picture


def test_what_is_asked_is_drawn_once_for_all():
    """Breaks when each evaluation asks other examples, or the first ones, which may be of a
    kind."""
    drawn = draw_numbers(range(100), 20)
    assert drawn == draw_numbers(range(100), 20) == sorted({*drawn})
    assert len(drawn) == 20
    assert drawn[-1] > 50
