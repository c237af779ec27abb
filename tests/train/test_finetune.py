"""The main job: what it learns, that it can be interrupted anywhere, and that many processes do the
work of one."""

import json
import os
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from eval.data.records import embedded_records
from lora import adapter
from model.differential import KINDS, graft
from model.generate import ask
from model.lowrank import LowRank
from tests.files import draw, read_json, read_lines, table, write_json, write_lines, write_vqav2
from tests.killed_runs import kill_often
from tests.runs import (
    QUICK,
    SERVER,
    WORLD,
    assert_same_tensors,
    metrics,
    refused,
    refuses,
    run,
    settings_of,
    torchrun,
    train,
)
from train import finetune
from train import model as systems
from train.data.batches import collate
from train.flags import flag_name
from train.model import open_model
from train.optim import trainable
from train.settings import RECIPES, Settings
from weights.load import load_model

# What is trained


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_trains_and_is_opened_again(kind, tmp_path):
    """Breaks when a variant cannot be trained by the command, or its run folder does not give the
    trained model."""
    losses = run("--steps 6 --lr 1e-2 --attention", kind, out=tmp_path / "run")
    assert len(losses) == 6
    assert all(0 < record["loss"] < 20 for record in losses)
    model = load_model("tiny")
    adapter.load(model, tmp_path / "run")
    summary = read_json(tmp_path / "run/summary.json")
    assert summary["trainable_parameters"] == sum(p.numel() for p in trainable(model).values())


LAMBDAS = "lambda_q1 lambda_k1 lambda_q2 lambda_k2 subln.weight"
SECOND = "mu q2.lora_A.weight q2.lora_B.weight k2.lora_A.weight k2.lora_B.weight"


@pytest.mark.long
@pytest.mark.parametrize(
    "flags, linears, names",
    [
        ("--attention softmax", 7, ""),
        ("--attention shared", 7, LAMBDAS),
        (
            "--attention twin --feed-forward swiglu-new",
            4,
            f"{SECOND} w_g.weight w_1.weight w_2.weight",
        ),
    ],
)
def test_the_trainable_set_by_name(flags, linears, names, processor):
    """Breaks when LoRA's injection freezes λ, μ or a norm, as in the published code, or a base
    weight learns, or the vision tower keeps activations for a backward pass."""
    model, optimizer = open_model(settings_of(QUICK, flags), WORLD.device)
    learned = trainable(model).keys()
    lora = {name for name in learned if ".lora.lora_" in name}
    assert {part.dropout for part in model.modules() if isinstance(part, LowRank)} == {0.1}
    assert len(lora) == 4 * linears * 2  # layers, linears, A and B
    rest = {re.split(r"self_attn\.|mlp\.", name)[-1] for name in learned - lora}
    assert rest == set(names.split())
    for group in optimizer.param_groups:
        for name in group["names"]:
            is_bare = name.endswith(("mu", "subln.weight")) or "lambda_" in name
            assert not (is_bare and group["weight_decay"]), name
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(learned)
    micro = collate(embedded_records(count=2), processor)
    assert not model.encode_images(micro.batch.pixel_values).requires_grad
    systems.supervised_loss(model, micro).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} <= learned


@pytest.mark.long
def test_full_fine_tuning_writes_a_model(tmp_path, monkeypatch):
    """Breaks when a run of all weights gives no model folder, or cannot end after a kill that came
    behind the model."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            finetune, "summary_of", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        run("--recipe own --steps 2", out=tmp_path / "run")
    train("--resume", tmp_path / "run")
    assert (tmp_path / "run/summary.json").exists()
    before = load_model("tiny").state_dict()
    after = load_model(tmp_path / "run/model").state_dict()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > 0.9 * len(before)


@pytest.mark.long
def test_vqav2_is_trained_on_and_evaluated(tmp_path, printed):
    """Breaks when the official files cannot be fine-tuned on, or held-out pictures are trained
    on."""
    write_vqav2(tmp_path / "vqav2")
    flags = f"--data vqav2:{tmp_path}/vqav2 --recipe paper-1 --validation 0.2 --fraction 1 --answers sampled --evaluate"
    logged = run(flags, "--per-picture 2 --batch-size 4", out=tmp_path / "run")
    assert len(logged) == 12  # 16 pictures of 3 questions
    summary = read_json(tmp_path / "run/summary.json")
    assert summary["held_out"]["examples"] == 12
    assert summary["before"]["needle"] is None
    assert summary["held_out"]["after"]["vqa_accuracy"] == summary["after"]["vqa"] is not None
    assert read_json(tmp_path / "run/adapter_config.json")["prompt"] == "answer {question}"
    assert "--prompt 'answer Where is the dog?'" in printed()


@pytest.mark.long
def test_recipes_are_table_1():
    """Breaks when a row of the paper's Table 1 is run with other settings than it states."""
    table = """softmax mlp 4e-4 32 64 1e-9
        shared swiglu-new 4e-4 32 64 1e-9
        softmax mlp 2e-5 16 32 1e-8
        shared mlp 2e-5 32 64 1e-8
        split swiglu-new 2e-5 32 64 1e-8"""
    assert [name for name in RECIPES if name.startswith("paper")] == [
        f"paper-{n}" for n in range(1, 6)
    ]
    for number, row in enumerate(table.splitlines(), start=1):
        s = settings_of(f"--recipe paper-{number}")
        attention, feed_forward, *numbers = row.split()
        assert (s.attention, s.feed_forward) == (attention, feed_forward)
        assert [s.lr, s.r, s.alpha, s.weight_decay] == [*map(float, numbers)]
        assert (s.step_batch, s.warmup, s.schedule) == (4, 50, "linear")
        assert (s.beta2, s.dropout) == (0.98, 0.1)
    assert settings_of("--recipe paper-1 --lr 1").lr == 1


# From Python


def shade(number):
    """An example as of a data set of Hugging Face, which has None for what is absent."""
    return {
        "image": Image.new("RGB", (9, 6), (12 * number, 0, 200)),
        "prefix": "how light",
        "suffix": "dark" if number < 10 else "light",
        "answers": ["dim", "dim"] if number < 3 else None,
    }


class Shades:
    def __len__(self):
        return 20

    def __getitem__(self, number):
        return shade(number) | {"image": np.asarray(shade(number)["image"])}


@pytest.mark.long
def test_examples_of_a_program_are_those_of_a_file(tmp_path):
    """Breaks when the function trains otherwise than the command, a picture in memory is another
    than in its file, a resumed run takes other examples for its own, or the returned model is not
    the one whose answers were scored."""
    lines = []
    for number in range(20):
        line = shade(number)
        line.pop("image").save(tmp_path / f"{number}.png")
        given = {name: value for name, value in line.items() if value}
        lines.append(given | {"image": f"{number}.png"})
    files = {
        "data": f"jsonl:{write_lines(tmp_path / 'a.jsonl', lines)}",
        "eval_data": f"jsonl:{write_lines(tmp_path / 'b.jsonl', lines[:7])}",
        "out": tmp_path / "command",
    }
    given = {"data": Shades(), "eval_data": [shade(number) for number in range(7)]}
    settings = json.loads("""{"base": "tiny", "batch_size": 2, "device": "cpu", "recipe": "lora",
        "steps": 6, "lr": 0.02, "eval_every": 3, "checkpoint_every": 2}""")
    flags = []
    for name, value in (settings | files).items():
        flags += [flag_name(name), value]
    train(*flags)
    call = tmp_path / "call"
    with pytest.raises(KeyboardInterrupt):
        stops = Mock(side_effect=[None] * 4 + [KeyboardInterrupt])
        finetune.finetune(**given, **settings, out=str(call), resume=None, on_log=stops)
    resumed = partial(finetune.finetune, resume=call)
    refuses(finetune, f"--resume {call}", "python:eval_data", "finetune(resume=")
    changed = [shade(number) | {"image": shade(max(1, number))["image"]} for number in range(20)]
    refused(lambda: resumed(**given | {"data": changed}), "the records")
    refused(lambda: resumed(data=given["data"], resume=tmp_path / "command"), "from files")
    refused(lambda: finetune.finetune(**given, **settings, metrics={"AP": max}), "metrics: AP")

    def of_light(answers, truths):
        return truths.count("light") + truths.count(["dim", "dim", "dark"]) / 100

    on_log = Mock()
    done = resumed(**given, on_log=on_log, metrics={"of light": of_light})
    logged = [call.args for call in on_log.call_args_list]
    rows = metrics(done.run)
    for row in rows:
        row.pop("of light", None)
    assert rows == metrics(tmp_path / "command")
    assert done.history[4:] == [record for _, record in logged]
    assert [step for step, _ in logged] == [4, 5]
    assert done.summary["held_out"]["after"]["of light"] == logged[-1][1]["of light"] == 0.03
    rows = read_lines(done.run / "answers.jsonl")
    column = "after" if done.summary["held_out"]["best_step"] == 6 else "best"
    pictures = [example["image"] for example in given["eval_data"]]
    asked = ask(done.model, done.processor, pictures, [row["question"] for row in rows])
    for said, row in zip(asked, rows, strict=True):
        assert said[: len(row[column])] == row[column]
    assert rows[0]["name"] == "eval_data[0]"
    assert rows[0][column] != rows[0]["before"]
    first, *_ = read_lines(tmp_path / "command/answers.jsonl")
    assert rows[0]["images"] == []
    assert first["images"] == [f"{tmp_path}/0.png"]  # for the page


# Interruptions


TWELVE = "--steps 12 --step-batch 4 --samples 40 --checkpoint-every 4 --attention shared"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    run(TWELVE, out=folder / "run")
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_resumed_metrics_are_equal_to_the_bit(number, whole, tmp_path, monkeypatch, warned):
    """Breaks when a state that the next step depends on is lost, or a signal loses steps or has
    another exit code."""
    loss = systems.supervised_loss
    calls = []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 14:  # in the middle of the seventh step
            if number is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), number)
        return loss(*args)

    cut = tmp_path / "cut"
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        patch.setattr(systems, "supervised_loss", interrupted)
        run(TWELVE, out=cut)
    saved = ["step-4"]
    if number is not None:
        assert ended.value.code == 128 + number
        assert f"--resume {tmp_path}" in warned()
        saved += ["step-7"]
    assert sorted(path.name for path in (cut / "checkpoints").iterdir()) == saved
    train("--resume", cut)
    assert metrics(cut) == metrics(whole)
    file = "adapter_model.safetensors"
    assert_same_tensors(load_file(cut / file), load_file(whole / file))


@pytest.mark.long
def test_kill_9_at_any_moment(tmp_path):
    """Breaks when a death leaves a broken checkpoint, loses more than the steps since the last, or
    changes a run."""
    with ProcessPoolExecutor(
        1, SERVER
    ) as pool:  # it has no threads, and its children are forked from it
        steps, equal = pool.submit(kill_often, tmp_path, 16).result()
    assert equal
    assert len(steps) >= 4  # it died in different places


# Several processes


@pytest.mark.long
@pytest.mark.parametrize("shard", ["", "--shard"], ids=["ddp", "fsdp2"])
def test_two_processes_do_the_work_of_one(shard, tmp_path):
    """Breaks when gradients have the wrong weight or are exchanged before the last of a step's
    micro-batches, or processes read the same data."""
    flags = "--steps 4 --dropout 0 --clip 0.5 --seed 3 --checkpoint-every 2 --step-batch 8"
    # four micro-batches of two rows; on two processes two each
    alone = run(flags, out=tmp_path / "alone")
    torchrun(2, QUICK, flags, shard, "--out", tmp_path / "pair")
    for one, two in zip(alone, metrics(tmp_path / "pair"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=5e-5)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
    learned = []
    for name in ("alone", "pair"):
        model = load_model("tiny")
        adapter.load(model, tmp_path / name)
        learned.append(trainable(model))
    for name, parameter in learned[0].items():
        assert torch.allclose(parameter, learned[1][name], rtol=1e-3, atol=2e-4), name


# Mistakes and bad records


def write_own(folder, count, broken):
    """The --data of `count` pictures, the first of which are `broken`."""
    rows = []
    for number in range(count):
        file = draw(folder / f"{number}.png")
        if number < broken:
            file.write_bytes(b"broken")
        rows.append({"image": file.name, "prefix": "what", "suffix": "a dog"})
    return f"--data jsonl:{write_lines(folder / 'own.jsonl', rows)} --validation 0"


@pytest.mark.parametrize("flags", ["--recipe lora", "--full --attention softmax --optimizer muon"])
def test_a_step_without_a_usable_record_changes_nothing(flags, tmp_path, printed):
    """Breaks when momentum or decay moves the weights in a step that learns nothing, or its loss is
    logged as 0."""
    saved = "--epochs 1 --checkpoint-every 1 --keep 9 --batch-size 1 --weight-decay 0.1 --seed 1"
    logged = run(write_own(tmp_path, 4, 1), saved, flags, out=tmp_path / "run")
    (empty,) = [record["step"] for record in logged if "loss" not in record]
    assert len(logged) == 4
    assert empty > 0
    assert logged[empty]["lr"] > 0
    assert read_json(tmp_path / "run/summary.json")["empty_steps"] == 1
    assert "1 step had no usable record" in printed()
    for file in ("trainable.safetensors", "optimizer.safetensors"):
        before, after = (
            load_file(tmp_path / f"run/checkpoints/step-{n}" / file) for n in (empty, empty + 1)
        )
        assert_same_tensors(before, after)


# with --dtype bf16 most updates would be lost
MISTAKES = """--data imagenet | imagenet
--option mew=1 | mew
--targets nothing | nothing
--full --attention twin | softmax
--full --attention softmax --dtype bf16 | --autocast
--prompt answer | {question}"""


@pytest.mark.long
@pytest.mark.parametrize("flags, named", table(MISTAKES))
def test_mistakes_are_one_line(flags, named, tmp_path):
    """Breaks when a user's mistake ends in a traceback, or leaves a folder that refuses the mended
    command."""
    refused(lambda: run(flags, out=tmp_path / "run"), named)
    assert not (tmp_path / "run").exists()


def test_the_form_of_v2_is_that_of_the_file(tmp_path):
    """Breaks when a run or an adapter of v2 from before it started exact goes on, or opens, in the
    other form."""
    write_json(tmp_path / "config.json", asdict(Settings(attention="v2")))
    assert settings_of("--resume", tmp_path).options == {"exact": False}
    assert settings_of("--attention v2").options == {"exact": True}
    model = load_model("tiny").requires_grad_(False)
    graft(model, "v2", exact=False)
    adapter.save(model, tmp_path, "tiny")
    config = read_json(tmp_path / "adapter_config.json")
    del config["differential"][0]["exact"]
    write_json(tmp_path / "adapter_config.json", config)
    again = load_model("tiny").requires_grad_(False)
    adapter.load(again, tmp_path)
    assert again.grafts == model.grafts
