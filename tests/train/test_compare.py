"""The attention study: fair controls, measures that share no picture, and cells that are done
once."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eval.data.records import read_examples
from model.images import load_image
from tests.files import draw, read_json, write_lines, write_mmneedle, write_vqav2
from tests.runs import read_cells, refused, refuses, words
from train import compare
from train.loop import Diverged
from train.model import load_base, open_model
from train.optim import parameter_count, trainable
from train.studies import attention, training
from train.studies.attention import PLAIN, ROWS, control_by_size, tasks_of
from train.studies.measures import (
    accuracy,
    asking,
    scene_needles,
    training_records,
    vqa_task,
    with_noise,
)
from train.systems.studies import qmamba, wings

CPU = torch.device("cpu")
GIVEN = {"samples": 32, "batch_size": 16, "limit": 32, "tasks": "vqa,n2o1,n2o2,n4o1"}
BASE = attention.Options(base="tiny", device="cpu", **GIVEN, **PLAIN)
FLAGS = "--seeds 2 --samples 32 --batch-size 16 --limit 8 --rates 1e-2 --no-positive --jobs 1 --warmup 0"


@pytest.mark.long
def test_the_command_from_end_to_end(tmp_path, monkeypatch, printed):
    """Breaks when a table, a control, a seed or an interval is missing, or a finished cell is
    trained again."""
    command = words("--rows fine-tuned dex --device cpu", FLAGS, "--out", tmp_path)
    compare.main(command)
    text = printed()
    assert "## Minus the mean of all plain rows" in text
    assert "LoRA r18" in text
    assert "## Range" in text
    rows = {line.row for line in read_cells(tmp_path / "comparison.csv")}
    assert rows == {"fine-tuned", "dex", "LoRA r18"}
    table = read_json(tmp_path / "comparison.json")["tables"]["the mean of all plain rows"]
    noisy = [f"n4o1, noise {strength}" for strength in attention.NOISE]
    measures = ["mean", "VQA", "n2o2", "n3d8", "n4o1", *noisy, "e16"]
    assert [gap["measure"] for gap in table] == measures
    monkeypatch.setattr(training, "train_on", None)
    compare.main(command)
    assert printed() == text


@pytest.mark.long
def test_a_cell_that_was_interrupted_while_it_was_asked_is_not_trained_again(tmp_path):
    """Breaks when a trained adapter is lost, or its last checkpoint holds another model than was
    asked."""
    tasks = {"test": {"VQA": vqa_task(BASE, "test", 16)}}
    settings = replace(BASE, samples=64, dropout=0.1, attention="twin", lr=1e-2, warmup=0)
    first, again = (training.train_and_ask(settings, tasks, tmp_path) for _ in range(2))
    assert first["scores"] == again["scores"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("name", [name for name in ROWS if name != "fine-tuned"])
def test_the_control_is_the_smallest_that_is_large_enough(name):
    """Breaks when a control has fewer trainable parameters than its row, or a needlessly larger
    rank."""

    def parameters(changes):
        model, _ = open_model(replace(BASE, **changes), torch.device("meta"))
        return parameter_count(trainable(model).values())

    title, control = control_by_size(BASE, ROWS[name])
    smaller = control | {"r": control["r"] - 1}
    assert parameters(control) >= parameters(ROWS[name]) > parameters(smaller)
    assert title == f"LoRA r{control['r']}"
    assert control["alpha"] / control["r"] == BASE.alpha / BASE.r
    assert control.items() >= PLAIN.items()


def test_controls_are_chosen():
    """Breaks when a study without controls trains them, or its rows stand beside no plain one."""

    def study(rows, *controls):
        return attention.study_of(replace(BASE, rows=rows, controls=controls))

    alone = study(("fine-tuned", "dex", "v2"))
    assert [*alone.rows] == ["fine-tuned", "dex", "v2"]
    assert alone.lengthen is None
    assert next(iter(alone.beside.values())) == {"dex": ("fine-tuned",), "v2": ("fine-tuned",)}
    assert study(("fine-tuned", "dex"), "size").lengthen is None
    assert study(("fine-tuned", "dex"), "time").lengthen[:2] == ("samples", BASE.samples)
    timed = attention.study_of(replace(BASE, rows=("fine-tuned", "dex"), steps=7))
    assert timed.lengthen[:2] == ("steps", 7)


def write_jsonl(folder, pictures, answer="yes"):
    rows = []
    for number in range(pictures):
        image = f"{number}.png"
        draw(folder / image, (number, 0, 0))
        rows += [{"image": image, "prefix": f"what {i}", "suffix": answer} for i in range(2)]
    return f"jsonl:{write_lines(folder / 'own.jsonl', rows)}"


@pytest.mark.parametrize("kind", ["vqav2", "jsonl"])
def test_no_picture_is_in_two_splits_of_any_seed(kind, processor, tmp_path):
    """Breaks when what one seed is tested on, another seed, or the choice of a rate, has seen; a
    picture that is gone counts as wrong; or VQAv2's validation files lie in the folder and
    something else is reported."""
    if kind == "vqav2":
        write_vqav2(tmp_path)
    data = f"vqav2:{tmp_path}" if kind == "vqav2" else write_jsonl(tmp_path, 20)
    base = replace(BASE, data=(data,), validation=0.3)
    validation, test = (vqa_task(base, split, 100) for split in ("validation", "test"))
    held_out = {*validation.groups, *test.groups}
    assert len(set(validation.groups)) == len(set(test.groups)) == 3
    assert len(held_out) == 6
    for seed in range(3):
        learned = {record.key for record in training_records(replace(base, seed=seed))}
        assert len(learned) == 14
        assert not learned & held_out
    model = load_base(base, CPU)
    tasks = {"test": {"VQA": test}}
    scores = training.ask_tasks(model, processor, base, tasks, tmp_path)["test"]["VQA"]
    assert len(scores) == len(test.groups) == (9 if kind == "vqav2" else 6)
    if kind == "jsonl":
        Path(test.groups[0]).unlink()
        (tmp_path / "again").mkdir()
        refused(
            lambda: training.ask_tasks(model, processor, base, tasks, tmp_path / "again"), "png"
        )
        refused(lambda: vqa_task(replace(base, validation=0.05), "test", 10), "validation")
    else:
        write_vqav2(tmp_path, subset="val2014")
        groups = vqa_task(base, "test", 100).groups
        assert len(groups) == 60
        assert all(name.startswith("val2014/") for name in groups)


def test_data_on_disk_are_part_of_a_cell(tmp_path):
    """Breaks when a changed answer or question of a user's file is answered from finished cells."""
    model = load_base(BASE, CPU)

    def key(answer="yes", asked="yes", **change):
        base = replace(BASE, data=(write_jsonl(tmp_path, 10, asked),), validation=0.3)
        task = vqa_task(base, "test", 10)
        task = replace(task, asks=[replace(question, **change) for question in task.asks])
        write_jsonl(tmp_path, 10, answer)
        return training.key_of([base], model, {"test": {"VQA": task}})

    changes = [{"answer": "no"}, {"asked": "no"}, {"choices": ("a", "b")}, {"before": (("a",),)}]
    assert key() == key()
    keys = {key(), *(key(**change) for change in changes)}
    model.config = replace(model.config, pad_token_id=3)
    assert len({*keys, key()}) == 6
    assert training.deciding(BASE)["device"] == "cpu"  # on which dtypes depend
    options = wings.Options(data=(write_jsonl(tmp_path, 10),), validation=0.3)
    seen, of_seed_1 = (wings.looked_at(replace(options, seed=seed)) for seed in (0, 1))
    assert seen == of_seed_1  # held out from all seeds
    with pytest.raises(Diverged):
        training.descend(model, Mock(), [torch.tensor(torch.nan)], 1)


def test_own_examples_are_asked_and_scored_in_full(tmp_path):
    """Breaks when an earlier turn, a second picture or one of several right answers is lost, or
    text alone crashes."""
    write_jsonl(tmp_path, 2)
    file = tmp_path / "own.jsonl"
    rows = """{"image": ["0.png", "1.png"], "prefix": "which", "suffix": "one"}
{"prefix": "text", "suffix": "alone"}
{"image": "0.png", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, \
{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}
{"image": "0.png", "prefix": "colour", "answers": ["red", "red", "red", \
"red", "red", "red", "red", "red", "red", "blue"]}
{"image": "0.png", "prefix": "shade", "answers": ["dark", "light"]}
"""
    file.write_text(rows * 2)
    own = replace(BASE, data=(f"jsonl:{file}",), eval_data=(f"jsonl:{file}",))
    questions = [q for split in ("validation", "test") for q in vqa_task(own, split, None).asks]
    assert {q.prefix: (len(q.images()), q.before) for q in questions} == {
        "which": (2, ()),
        "text": (0, ()),
        "c": (1, (("a", "b"),)),
        "colour": (1, ()),
        "shade": (1, ()),
    }
    said = "two ALONE c blue black".split()
    found = map(partial(accuracy, "official"), read_examples(file)[:5], said)
    assert [*found] == pytest.approx([0, 1, 0, 0.3, 0])


def test_tasks_of_the_embedded_scenes_are_even():
    """Breaks when a needle is in one place more often than in another, or guessing has another
    score."""
    tasks = tasks_of(BASE, "test")
    assert [tasks[name].chance for name in ("n2o2", "n4o1", "e16")] == [25, 6.25, 50]
    places = sorted(ask.truth.places[0][1:] for ask in tasks["n4o1"].asks)
    assert places == [divmod(place, 4) for place in range(16)]


@pytest.mark.parametrize("study", ["attention", "on disk", "wings", "qmamba"])
def test_what_chooses_a_rate_is_not_what_is_tested(study, tmp_path):
    """Breaks when needles, or other questions, of the validation split are those of the test
    split."""
    given = BASE
    if study == "on disk":
        coco = write_mmneedle(tmp_path / "coco")
        data = (write_jsonl(tmp_path, 20),)
        given = replace(
            BASE, data=data, validation=0.3, limit=64, coco=str(coco), captions=f"{coco / 'C'}"
        )
    makers = {
        "wings": partial(wings.tasks_of, given),
        "qmamba": lambda split: {"count": qmamba.scene_task("count", split, 16)},
    }
    make = makers.get(study, partial(tasks_of, given))
    chosen_by = make("validation")
    for name, tested in make("test").items():
        validation = seen(chosen_by[name])
        test = seen(tested)
        assert not validation & test or name == wings.TEXT and validation != test, name
        if name == "needle":  # guessing is the same in both
            places = [ask.truth.places[0] for ask in tested.asks]
            assert {places.count(place) for place in places} == {len(places) / 4}


def seen(task):
    """What a model is given, without names."""
    given = set()
    for question in task.asks:
        pictures = [np.asarray(load_image(image)).tobytes() for image in question.images()]
        given.add((question.prefix, *pictures))
    return given


def test_a_seed_draws_adapter_and_graft():
    """Breaks when runs of several seeds start from one LoRA or one graft, or a seed from two."""

    def opened(seed):
        return trainable(open_model(replace(BASE, attention="twin", seed=seed), CPU)[0])

    first = opened(1)
    again = opened(1)
    other = opened(2)
    drawn = [name for name in first if "lora_A" in name]
    assert {name.split(".")[-3] for name in drawn} >= {"q2", "lora"}  # the graft's, the adapter's
    for name in drawn:
        assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first[name], other[name]), name


def test_a_cell_is_asked_without_dropout(processor, tmp_path):
    """Breaks when the model that has just been trained answers in training mode."""
    model, _ = open_model(replace(BASE, dropout=0.5), CPU)
    for parameter in trainable(model).values():
        torch.nn.init.constant_(parameter, 0.05)
    asks = [
        replace(q, choices=("yes", "no"), wants_log_probs=True)
        for q in vqa_task(BASE, "test", 8).asks
    ]
    tasks = {"test": {"VQA": asking("", asks, lambda truth, likelihoods: likelihoods[0])}}
    first, again = (
        training.ask_tasks(model.train(), processor, BASE, tasks, tmp_path) for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize(
    "flags", "--lr 1|--no-evaluate|--recipe help|--patience 3|--coco x|--data jsonl:x".split("|")
)
def test_mistakes_are_told_before_anything_is_trained(flags, tmp_path, monkeypatch):
    """Breaks when a wrong flag costs a comparison, or is passed over in silence."""
    monkeypatch.setattr(training, "train_on", None)
    command = f"--base tiny --device cpu --out {tmp_path} {flags}"
    refuses(compare, command, "x" if flags.endswith(":x") else "--")


def test_the_help_names_other_studies(printed):
    """Breaks when a study cannot be found."""
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    told = printed()
    assert " | ".join(compare.STUDIES) in told
    assert "--scalar-lr" in told
    assert "--patience" not in told  # which is refused
    assert "here: 3200" in told


def test_noise_is_of_its_strength_and_the_same_for_all():
    """Breaks when noise is of another strength, drawn anew for each row, or names other cells by an
    address."""
    clean = scene_needles("n4o1", 16)[3]
    noisy, again = (with_noise([clean], 8)[0] for _ in range(2))
    assert noisy.places == clean.places
    assert repr(noisy) == repr(again)
    assert " at 0x" not in repr(noisy)
    before, after, same = (np.array(test.pictures[0](), float) for test in (clean, noisy, again))
    assert np.array_equal(after, same)
    inner = (before > 40) & (before < 215)  # where nothing is cut off
    assert abs((after - before)[inner].std() - 8) < 0.2
