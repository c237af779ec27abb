"""The loop: what it learns, that it can be interrupted anywhere, and that many processes do the work of one."""

import json
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from eval import records
from eval.records import embedded_records
from lora import adapter
from model.common import UserError
from model.differential import KINDS
from tests.files import write_vqav2
from tests.killed_runs import kill_often
from tests.runs import QUICK, SERVER, WORLD, in_processes, metrics, run, start, torchrun
from train import align, finetune, loop, supervised
from train import metrics as log_of_a_run
from train.data.batches import collate
from train.distributed import World
from train.optim import trainable
from train.recipes import RECIPES
from train.settings import Settings, parse
from train.systems.open import open_model
from weights.load import load_model


def settings(*arguments) -> Settings:
    return parse([*QUICK, *map(str, arguments)])[0]


def batches(model, processor, count):
    records = embedded_records(("vqa", "caption", "detect"), count=count)  # answers of different length
    return [collate([record], processor).to("cpu") for record in records], collate(records, processor)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_trains_and_is_opened_again(kind, tmp_path):
    """Breaks when a variant cannot be trained by the command, or its run folder does not give the trained model."""
    losses = run("--attention", kind, "--steps", 6, "--lr", "1e-2", out=tmp_path / "run")
    assert len(losses) == 6 and all(0 < record["loss"] < 20 for record in losses)
    files = "adapter_config.json adapter_model.safetensors config.json metrics.jsonl loss.png checkpoints summary.json"
    assert set(files.split()) <= {path.name for path in (tmp_path / "run").iterdir()}
    model = load_model("tiny")
    adapter.load(model, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["trainable_parameters"] == sum(p.numel() for p in trainable(model).values())
    assert set(summary) >= {"before", "after", "trainable_parameters", "seconds"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attention", "softmax"], set()),
        (["--attention", "shared"], {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "subln.weight"}),
        (
            ["--attention", "twin"],
            {"mu", "q2.lora_A.weight", "q2.lora_B.weight", "k2.lora_A.weight", "k2.lora_B.weight"},
        ),
        (
            ["--attention", "twin", "--feed-forward", "swiglu-new"],
            {
                "mu",
                "q2.lora_A.weight",
                "q2.lora_B.weight",
                "k2.lora_A.weight",
                "k2.lora_B.weight",
                "w_g.weight",
                "w_1.weight",
                "w_2.weight",
            },
        ),
    ],
)
def test_the_trainable_set_by_name(arguments, expected):
    """Breaks when λ, μ or a norm is frozen by LoRA's injection, as in the published code, or a base weight learns."""
    model, optimizer = open_model(settings(*arguments), WORLD.device)
    lora = {name for name in trainable(model) if ".lora.lora_" in name}
    linears = 7 if "swiglu-new" not in arguments else 4
    assert len(lora) == 4 * linears * 2  # layers, linears, A and B
    rest = {name.split(".self_attn.")[-1].split(".mlp.")[-1] for name in set(trainable(model)) - lora}
    assert rest == expected
    assert not [
        name for name in trainable(model) if name.startswith(("vision_tower", "multi_modal", "language_model.emb"))
    ]
    decayed = {name for group in optimizer.param_groups if group["weight_decay"] for name in group["names"]}
    assert not [name for name in decayed if name.endswith(("mu", "subln.weight")) or "lambda_" in name]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trainable(model))


def test_the_vision_tower_is_not_touched(processor):
    """Breaks when gradients or activations are kept below the first adapter."""
    model, _ = open_model(settings(), WORLD.device)
    micro = collate(embedded_records(count=2), processor)
    assert not model.encode_images(micro.batch.pixel_values).requires_grad
    supervised.supervised_loss(model, micro).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} <= set(trainable(model))


@pytest.mark.long
def test_accumulation_is_one_large_batch(processor):
    """Breaks when micro-batches are weighted by their number, not by their supervised tokens."""
    model, _ = open_model(settings("--dropout", "0"), WORLD.device)
    for module in model.modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.normal_(module.lora_B.weight, std=0.02)
    small, large = batches(model, processor, 6)
    assert len({micro.tokens for micro in small}) > 1
    supervised.supervised_loss(model, large).div(large.tokens).backward()
    at_once = {name: p.grad.clone() for name, p in trainable(model).items()}
    model.zero_grad()
    total = sum(micro.tokens for micro in small)
    assert total == large.tokens
    for micro in small:
        supervised.supervised_loss(model, micro).div(total).backward()
    for name, p in trainable(model).items():
        assert torch.allclose(p.grad, at_once[name], rtol=1e-4, atol=1e-7), name


@pytest.mark.long
def test_resumed_metrics_are_equal_to_the_bit(tmp_path, monkeypatch):
    """Breaks when any state that the next step depends on is lost: moments, schedule, dropout, order, λ."""
    arguments = ["--steps", 14, "--accumulate", 2, "--samples", 40, "--checkpoint-every", 4, "--attention", "shared"]
    run(*arguments, out=tmp_path / "whole")

    class Power(Exception):
        pass

    honest, calls = supervised.supervised_loss, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 20:  # in the middle of step 9; the last checkpoint is that of step 8
            raise Power
        return honest(*args)

    monkeypatch.setattr(supervised, "supervised_loss", fails)
    with pytest.raises(Power):
        run(*arguments, out=tmp_path / "cut")
    assert len(metrics(tmp_path / "cut")) == 9
    finetune.main(["--resume", str(tmp_path / "cut")])
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    tensors = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("cut", "whole")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.long
def test_kill_9_at_any_moment(tmp_path):
    """Breaks when a death leaves a broken checkpoint, loses more than the steps since the last, or changes a run.

    The command kills fifty times where it is not told otherwise.
    """
    with ProcessPoolExecutor(1, SERVER) as pool:  # it has no threads, and its children are forked from it
        report = pool.submit(kill_often, tmp_path, 25).result()
    assert report["kills"] == 25 and report["equal"]
    assert len(report["steps"]) >= 4  # it died in different places


def test_a_whole_model_is_written_anew_after_a_kill(tmp_path, monkeypatch):
    """Breaks when a run that was killed after it wrote its model can never end: the folder is not empty."""

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "summarize", killed)
        with pytest.raises(KeyboardInterrupt):
            run("--full", "--attention", "softmax", "--steps", 2, out=tmp_path / "run")
    finetune.main(["--resume", str(tmp_path / "run")])
    assert (tmp_path / "run/summary.json").exists() and (tmp_path / "run/model/config.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"), [(["--step-batch", "3"], "no multiple of 2"), (["--align", "1", "--full"], "would forget")]
)
def test_what_cannot_be_trained_is_refused_before_weights_are_read(flags, said, tmp_path, monkeypatch):
    """Breaks when minutes of loading and measuring come before a mistake that the settings show."""
    monkeypatch.setattr(finetune, "load_start", lambda *args: pytest.fail("the weights were read"))
    monkeypatch.setattr(align, "LARGE", 1000)
    with pytest.raises(UserError, match=said):
        run(*flags, "--attention", "softmax", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_speed_of_a_step_is_its_own(tmp_path, monkeypatch):
    """Breaks when the step after a checkpoint counts the time of writing it as training."""
    clock, save = [0.0], loop.save_checkpoint

    def tick() -> float:
        clock[0] += 0.01
        return clock[0]

    def slow_save(*args, **options) -> None:
        clock[0] += 1000
        save(*args, **options)

    monkeypatch.setattr(loop, "save_checkpoint", slow_save)
    monkeypatch.setattr(log_of_a_run, "time", SimpleNamespace(perf_counter=tick))
    run("--steps", 4, "--checkpoint-every", 2, "--measure-every", 0, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[2]["seconds"] > 1000 and min(line["samples_per_second"] for line in lines) > 10
    assert not any("map_distance" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_exit(number, tmp_path):
    """Breaks when Ctrl-C or a cluster's SIGTERM loses the steps since the last checkpoint."""
    long = "--steps 100000 --epochs 10000 --checkpoint-every 100000".split()
    child = start([*QUICK, *long, "--out", tmp_path / "run"], tmp_path / "errors")
    file = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(child.pid, number)
    child.join(120)
    errors = (tmp_path / "errors").read_text()
    assert child.exitcode == 128 + number, errors
    assert "--resume" in errors.splitlines()[-1]
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved == [f"step-{len(metrics(tmp_path / 'run'))}"]


@pytest.mark.long
@pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_do_the_work_of_one(shard, tmp_path):
    """Breaks when gradients are averaged with the wrong weight, or processes read the same data."""
    common = ["--steps", "4", "--dropout", "0", "--clip", "0.5", "--seed", "3", "--checkpoint-every", "2"]
    common += ["--step-batch", "4"]  # on one process two micro-batches of two rows, on two processes one each
    alone = run(*common, out=tmp_path / "alone")
    if shard:
        in_processes(2, *QUICK, *common, "--out", tmp_path / "pair", "--shard")
    else:
        torchrun(2, *QUICK, *common, "--out", tmp_path / "pair")
    pair = metrics(tmp_path / "pair")
    assert len(pair) == len(alone) == 4
    for one, two in zip(alone, pair, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
    models = [load_model("tiny") for _ in range(2)]
    for model, name in zip(models, ("alone", "pair"), strict=True):
        adapter.load(model, tmp_path / name)
    for name, parameter in trainable(models[0]).items():
        assert torch.allclose(parameter, trainable(models[1])[name], rtol=1e-3, atol=2e-4), name


@pytest.mark.long
def test_a_loss_that_is_not_finite_names_the_batch(tmp_path, monkeypatch):
    """Breaks when a run goes on for hours after its weights are lost."""
    honest, seen = supervised.supervised_loss, []

    def third_is_nan(model, micro):
        seen.append(micro.names)
        return honest(model, micro) * (float("nan") if len(seen) == 3 else 1)

    monkeypatch.setattr(supervised, "supervised_loss", third_is_nan)
    with pytest.raises(UserError) as caught:
        run("--steps", 3, "--accumulate", 2, out=tmp_path / "run")
    assert str(caught.value).startswith(f"step 1: the loss is nan on {', '.join(seen[2])}: lower --lr")
    assert len(metrics(tmp_path / "run")) == 1


def test_a_step_waits_for_the_others_twice(tmp_path, monkeypatch):
    """Breaks when processes wait for each other, or for the device, at every micro-batch instead of every step."""
    waits = {"totals": 0, "gather": 0, "numbers": 0}

    def counted(owner, name, key):
        method = getattr(owner, name)

        def call(*args, **kwargs):
            waits[key] += 1
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(World, "totals", "totals")
    counted(World, "gather", "gather")
    counted(loop, "read_numbers", "numbers")
    run("--steps", 1, "--accumulate", 2, "--measure-every", 0, out=tmp_path / "one")
    first = dict(waits)
    run("--steps", 4, "--accumulate", 2, "--measure-every", 0, out=tmp_path / "four")
    assert {key: waits[key] - 2 * first[key] for key in waits} == {"totals": 6, "gather": 0, "numbers": 3}


@pytest.mark.long
def test_too_many_bad_records_stop_the_run(tmp_path):
    """Breaks when a data set of broken pictures trains on what is left without a word."""
    lines = [{"image": f"{i}.jpg", "prefix": "caption en", "suffix": "a dog"} for i in range(8)]
    for line in lines:
        (tmp_path / line["image"]).write_bytes(b"broken")
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="unusable records"):
        run("--data", f"jsonl:{tmp_path / 'own.jsonl'}", "--max-bad", 3, "--validation", 0, out=tmp_path / "run")


@pytest.mark.parametrize("flags", [(), ("--full", "--attention", "softmax", "--optimizer", "muon")])
def test_a_step_without_a_usable_record_changes_nothing(flags, tmp_path, capsys):
    """Breaks when momentum or decay moves the weights in a step that learns nothing, or its loss is logged as 0."""
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"broken")
    lines = [{"image": f"{number}.png", "prefix": "what", "suffix": "a dog"} for number in range(4)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = "--data", f"jsonl:{tmp_path / 'own.jsonl'}", "--validation", 0, "--batch-size", 1, "--weight-decay", 0.1
    saved = "--checkpoint-every", 1, "--keep", 9, "--measure-every", 1
    logged = run(*data, *saved, *flags, out=tmp_path / "run")
    empty = [record["step"] for record in logged if "loss" not in record]
    assert len(logged) == 4 and len(empty) == 1 and empty[0] > 0 and logged[empty[0]]["lr"] > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["empty_steps"] == 1 and "1 step had no usable record" in capsys.readouterr().out
    for file in ("trainable.safetensors", "optimizer.safetensors"):
        at = [load_file(tmp_path / f"run/checkpoints/step-{number}" / file) for number in (*empty, empty[0] + 1)]
        assert all(torch.equal(at[0][name], at[1][name]) for name in at[1])


@pytest.mark.long
def test_vqav2_is_trained_on_and_evaluated(tmp_path, capsys, monkeypatch):
    """Breaks when the official files cannot be fine-tuned on, or held-out pictures are trained on."""
    write_vqav2(tmp_path / "vqav2")
    read, opened = records.read_questions, []
    monkeypatch.setattr(records, "read_questions", lambda path: opened.append(path) or read(path))
    finetune.main(
        [
            "--base",
            "tiny",
            "--data",
            f"vqav2:{tmp_path / 'vqav2'}",
            "--validation",
            "0.2",
            "--epochs",
            "2",
            "--recipe",
            "paper-1",
            "--fraction",
            "1",
            "--answers",
            "sampled",
            "--accumulate",
            "1",
            "--warmup",
            "2",
            "--per-picture",
            "2",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "run"),
        ]
    )
    assert len(metrics(tmp_path / "run")) == 2 * 12  # 16 pictures of 3 questions, by 4
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["before"]["vqa"] is not None and summary["before"]["needle"] is None
    assert {"before", "after", "blind"} <= summary["held_out"].keys() and summary["held_out"]["examples"] == 12
    assert summary["held_out"]["after"]["vqa_accuracy"] == summary["after"]["vqa"]
    assert len(opened) == 1, "the files are read for training and for the held-out questions"
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["prompt"] == "answer {question}"
    assert "--prompt 'answer Where is the dog?'" in capsys.readouterr().out


@pytest.mark.long
def test_recipes_are_table_1():
    """Breaks when a row of the paper's Table 1 is run with other settings than it states."""
    rows = {name: parse(["--recipe", name])[0] for name in RECIPES}
    table = {name: (s.attention, s.feed_forward, s.lr, s.r, s.alpha, s.weight_decay) for name, s in rows.items()}
    assert table["paper-1"] == ("softmax", "mlp", 4e-4, 32, 64, 1e-9)
    assert table["paper-2"] == ("shared", "swiglu-new", 4e-4, 32, 64, 1e-9)
    assert table["paper-3"] == ("softmax", "mlp", 2e-5, 16, 32, 1e-8)
    assert table["paper-4"] == ("shared", "mlp", 2e-5, 32, 64, 1e-8)
    assert table["paper-5"] == ("split", "swiglu-new", 2e-5, 32, 64, 1e-8)
    for name in ("paper-1", "paper-5"):
        s = rows[name]
        assert (s.step_batch, s.warmup, s.schedule, s.beta2, s.dropout) == (4, 50, "linear", 0.98, 0.1)
    assert rows["paligemma"].step_batch == 256
    assert parse(["--recipe", "paper-1", "--lr", "1"])[0].lr == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "imagenet"], "expected embedded"),
        (["--data", "vqav2:/nowhere"], "not found"),
        (["--batch-size", "0"], "an integer from 1 to"),
        (["--fraction", "2"], "from 0 to 1"),
        (["--option", "mu"], "NAME=VALUE"),
        (["--option", "mew=1"], "no option mew"),
        (["--targets", "nothing"], "match no"),
        (
            ["--attention", "twin", "--option", "half=true", "--targets", ".*v_proj"],
            "neither has LoRA: add one of them",
        ),
        (["--resume", "/nowhere"], "other flags"),
        (["--steps", "0"], "an integer from 1 to"),
        (["--full"], "softmax"),
        (["--align", "1"], "add --full"),
        (["--prompt", "answer {"], "must contain {question}"),
        (["--prompt", "{question:>10000000000}"], "must contain {question}"),
        (["--device", "cuda"], "--device cuda: none that"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    """Breaks when a user's mistake ends in a traceback, or in a run."""
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "run")]
    with pytest.raises(UserError, match=message) as caught:
        finetune.main([*QUICK, *arguments, *out])
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_run_folder_is_never_overwritten(tmp_path):
    """Breaks when a second run destroys the first one's results."""
    run("--steps", 1, out=tmp_path / "run")
    with pytest.raises(UserError, match="not empty"):
        run("--steps", 1, out=tmp_path / "run")
    with pytest.raises(UserError, match="no run folder"):
        finetune.main(["--resume", str(tmp_path)])


@pytest.mark.long
def test_full_fine_tuning_writes_a_model(tmp_path):
    """Breaks when training every weight, by the recipe for own data, gives no model folder or not what was trained."""
    run("--recipe", "own", "--steps", 2, out=tmp_path / "run")
    before, after = load_model("tiny").state_dict(), load_model(tmp_path / "run/model").state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 0.9 * len(before)
