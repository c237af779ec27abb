"""Language models from nothing: what rows are made of, that a run resumes to the bit, and what its user gets wrong."""

import itertools
import json
import os
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.text.corpus import BOS, EOS, open_corpus
from eval.text.tasks import Tasks
from model.common import UserError
from model.text import new_model
from tests.files import prose, write_prose
from tests.runs import metrics, spawn
from train import pretrain
from train.signals import Interrupted
from train.systems.text import TextOrder, TextSettings, draw_row, learn, make_optimizer, pack, text_loss
from train.text import main
from weights.load import load_model

SETTINGS = TextSettings(preset="nano", length=128, batch_size=2, tokens=2000)


def flags(text_folder: Path, corpus_folder: Path, out: Path, **more) -> list[str]:
    given = {
        "text": text_folder,
        "corpus": corpus_folder,
        "preset": "nano",
        "length": 128,
        "batch-size": 2,
        "tokens": 2000,
        "checkpoint-every": 3,
        "out": out,
    } | more
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


# --- rows --------------------------------------------------------------------------------------------------------


def test_rows_are_full_of_whole_documents(corpus):
    """Breaks when a row has padding, a task document is cut, text crosses a file's end, or a target is of another
    document than its input."""
    tasks, kinds = Tasks(corpus, "train"), {"text": 0, "needles": 0, "examples": 0}
    train = corpus.ids["train"].tolist()
    for number in range(60):
        row = draw_row(corpus, tasks, SETTINGS, number)
        assert sum(len(document) - 1 for document in row) == SETTINGS.length
        for document in row:
            text = corpus.tokenizer.decode(document[1:])
            kind = "text" if "«" not in text else "needles" if re.search(r"[^»]\n", text) else "examples"
            assert document[0] == BOS and (kind == "text" or document[-1] == EOS)
            assert EOS not in document[1:-1]
            kinds[kind] += 1
            assert kind != "needles" or number >= 6, "the curriculum: 0.35 of 16 rows hold recall alone"
            if kind == "text" and len(document) > 8:
                assert any(
                    train[i : i + len(document) - 1] == document[1:]
                    for i, token in enumerate(train)
                    if token == document[1]
                )
    assert min(kinds.values()) > 15
    row = draw_row(corpus, tasks, SETTINGS, 0)
    assert "«" in corpus.tokenizer.decode(row[0][1:])
    batch = pack([row, row], ["a", "b"])
    answers = pack([row, row], ["a", "b"], tasks.unforeseen)
    hidden = torch.isin(batch.targets, torch.tensor(tasks.unforeseen))
    assert hidden.any() and torch.equal(answers.targets == -100, hidden)
    assert torch.equal(answers.targets[~hidden], batch.targets[~hidden]) and answers.tokens == int((~hidden).sum())
    assert batch.input_ids.shape == batch.documents.shape == batch.targets.shape == (2, SETTINGS.length)
    assert batch.tokens == 2 * SETTINGS.length
    at = 0
    for number, document in enumerate(row):
        part = slice(at, at + len(document) - 1)
        assert batch.input_ids[0, part].tolist() == document[:-1] and batch.targets[0, part].tolist() == document[1:]
        assert set(batch.documents[0, part].tolist()) == {number}
        at = part.stop


@pytest.mark.parametrize("length", [64, 65, 66, 97, 101])
def test_examples_are_never_cut(length, corpus):
    """Breaks when the last example's answer, or the end, does not fit into a row that is nearly full."""
    tasks, settings = Tasks(corpus, "train"), replace(SETTINGS, length=length, needles=0.0, examples=1.0)
    first = [draw_row(corpus, tasks, settings, number)[0] for number in range(200)]
    assert all(document[-1] == EOS for document in first)
    assert max(map(len, first)) > min(length, 83) - 4  # as many as fit, or MOST_RECORDS with 8 questions


def test_the_order_starts_anywhere(corpus):
    """Breaks when a resumed run sees other rows than an uninterrupted one, or two seeds or steps the same."""
    settings = replace(SETTINGS, accumulate=2, tokens=2 * 2 * 128 * 6)
    whole = list(TextOrder(corpus, settings).steps(0))
    assert len(whole) == 6 == TextOrder(corpus, settings).total and all(len(step) == 2 for step in whole)
    resumed = list(TextOrder(corpus, settings).steps(4))
    for ours, theirs in zip(itertools.chain(*resumed), itertools.chain(*whole[4:]), strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids) and ours.names == theirs.names
    rows = [tuple(row.tolist()) for step in whole for micro in step for row in micro.input_ids]
    assert len(set(rows)) == 24
    other = next(TextOrder(corpus, replace(settings, seed=1)).steps(0))[0]
    assert not torch.equal(other.input_ids, whole[0][0].input_ids)


def test_learning_lowers_the_loss(corpus):
    """Breaks when the loss is not of the documents' own next tokens, or the optimizer leaves parameters out."""
    model = new_model("nano", True)
    optimizer = make_optimizer(model, replace(SETTINGS, lr=1e-2))
    groups = optimizer.param_groups
    names = {name for group in groups for name in group["names"]}
    assert names == {name for name, _ in model.named_parameters()}
    bare = {
        name.rpartition(".")[0].rpartition(".")[2] if name.endswith("weight") else name.rpartition(".")[2]
        for name in groups[0]["names"]
    }
    assert groups[0]["weight_decay"] == 0 and groups[1]["weight_decay"] == SETTINGS.weight_decay
    assert bare == {
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "subln",
        "lambda_q1",
        "lambda_k1",
        "lambda_q2",
        "lambda_k2",
    }
    batch, losses = TextOrder(corpus, SETTINGS).batch(0), []
    for _ in range(12):
        loss = text_loss(model, batch) / batch.tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and 6 < losses[0] < 9


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["differential", "plain"])
def test_a_run_resumes_to_the_bit(text_folder, tmp_path, kind, capsys):
    """Breaks when an interrupted run ends elsewhere than an uninterrupted one."""
    main(flags(text_folder, tmp_path / "corpus", tmp_path / "whole", attention=kind))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")
    steps = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert [step.name for step in steps] == ["step-6", "step-8"]  # 2000 tokens are 8 steps of 256
    shutil.rmtree(steps[-1])
    main(["--resume", str(tmp_path / "cut")])
    whole, cut = (load_model(tmp_path / name / "model").state_dict() for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert {"model", "loss.png", "config.json", "checkpoints"} <= {p.name for p in (tmp_path / "cut").iterdir()}
    assert (tmp_path / "cut" / "model" / "tokenizer.model").exists()
    said = capsys.readouterr().out
    assert (
        "python -m eval.text" in said and " attention, 2,048 tokens in " in said
    )  # those learned, not those asked for


@pytest.mark.long
def test_a_run_keeps_its_tokens_when_the_text_changes(tmp_path):
    """Breaks when resuming replaces the corpus and tokenizer of a run by those of an edited text."""
    text, corpus, run = write_prose(tmp_path / "text"), tmp_path / "corpus", tmp_path / "run"
    main(flags(text, corpus, run))
    before = {file.name: file.read_bytes() for file in corpus.iterdir()}
    logged = metrics(run)
    shutil.rmtree(run / "checkpoints" / "step-8")
    (text / "0.txt").write_text(prose(1000))
    main(["--resume", str(run)])
    assert {file.name: file.read_bytes() for file in corpus.iterdir()} == before
    assert metrics(run) == logged


def one_of_two(rank: int, runs: dict[int, list[str]]) -> None:
    """One of the two processes that torchrun would start, for several runs in turn, by the port of each."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for port, given in runs.items():
        os.environ["MASTER_PORT"] = str(port)
        main(given)


@pytest.mark.long
def test_two_processes_learn_what_one_does(text_folder, tmp_path):
    """Breaks when a step has more rows on two processes, a row is learned twice or by nobody, FSDP2 loses a weight of
    the result, or a run cannot go on with another number of processes."""
    names, runs = ("ddp", "sharded"), {}
    step = {"tokens": 4 * 6 * 128, "batch-size": 2, "accumulate": 3, "checkpoint-every": 2}  # 4 steps of 6 rows
    for name in names:  # each process takes 3 rows of a step, in micro-batches of 2 and 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            given = flags(text_folder, tmp_path / "corpus", tmp_path / name, **step)
            runs[free.getsockname()[1]] = given + (["--shard"] if name == "sharded" else [])
    spawn(one_of_two, (runs,), nprocs=2)
    main(flags(text_folder, tmp_path / "corpus", tmp_path / "alone", **step | {"batch-size": 6, "accumulate": 1}))
    assert len(list((tmp_path / "sharded/checkpoints/step-4").glob("shard-*.safetensors"))) == 2
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "sharded", resumed, ignore=shutil.ignore_patterns("step-4", "model"))
    main(["--resume", str(resumed)])
    losses, weights = (
        {name: read(tmp_path / name) for name in ("alone", "resumed", *names)}
        for read in (metrics, lambda run: load_model(run / "model").state_dict())
    )
    for name in ("resumed", *names):
        assert len(losses[name]) == len(losses["alone"]) == 4
        for ours, theirs in zip(losses[name], losses["alone"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
            assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        assert all(torch.allclose(value, weights["alone"][key], 1e-3, 1e-4) for key, value in weights[name].items())


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_processes_share_the_rows_of_a_step(corpus, processes):
    """Breaks when a row of a step is taken twice or by no process, or a process takes more than its share."""
    settings = replace(SETTINGS, accumulate=3)
    orders = [TextOrder(corpus, settings, "train", rank, processes) for rank in range(processes)]
    steps = [[micro.names for micro in list(order.steps(2))[0]] for order in orders]
    assert [sum(map(len, micros)) for micros in steps] == [6 // processes] * processes
    assert max(len(names) for micros in steps for names in micros) <= settings.batch_size
    assert [name for micros in steps for names in micros for name in names] == [f"row {n}" for n in range(12, 18)]
    with pytest.raises(UserError, match="a step of 6 rows .* cannot be shared equally by 4 processes"):
        TextOrder(corpus, settings, "train", 0, 4)


def test_pretraining_on_text_is_this_command(monkeypatch):
    """Breaks when `train.pretrain --text` makes the embedded base instead, or loses its flags."""
    given = []
    monkeypatch.setattr("train.text.main", given.append)
    for flags in (["--text"], ["--preset", "nano", "--text", "a", "b"], ["--text=a"]):
        pretrain.main(flags)
        assert given.pop() == flags


def test_an_interrupted_run_says_how_to_go_on(text_folder, tmp_path, monkeypatch, capsys):
    """Breaks when Ctrl-C loses a run."""

    def interrupted(*args, **kwargs):
        raise Interrupted(2)

    monkeypatch.setattr("train.systems.text.fit", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(flags(text_folder, tmp_path / "corpus", tmp_path / "run"))
    assert stopped.value.code == 130
    assert f"go on with: python -m train.text --resume {tmp_path / 'run'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokens": 0}, "--tokens is 0.0, expected a number from 1 to"),
        ({"length": 32}, "--length is 32, expected an integer from 64 to"),
        ({"needles": 0.7, "examples": 0.4}, "leave no room for text"),
        ({"text": "/nowhere"}, "--text /nowhere: no such file or folder"),
        ({"length": 100000}, "fewer than a row of 100000"),
    ],
)
def test_mistakes_are_told_before_a_step(text_folder, tmp_path, more, message):
    """Breaks when a wrong flag ends in a traceback."""
    with pytest.raises(UserError, match=message):
        main(flags(text_folder, tmp_path / "corpus", tmp_path / "run", **more))


def test_folders_are_checked(text_folder, tmp_path):
    """Breaks when a run is overwritten, or another folder is resumed."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(json.dumps({"base": "embedded"}))
    with pytest.raises(UserError, match="not empty: choose another folder"):
        main(flags(text_folder, tmp_path / "corpus", tmp_path / "full"))
    with pytest.raises(UserError, match="no run folder of train.text"):
        main(["--resume", str(tmp_path / "full")])
    with pytest.raises(UserError, match="leave the other flags out"):
        main(["--resume", str(tmp_path / "full"), "--lr", "1"])
    open_corpus(tmp_path / "small", [text_folder], 1040)
    with pytest.raises(UserError, match="has 1040 pieces, preset nano knows 1024"):
        from train.distributed import join_world

        learn(SETTINGS, open_corpus(tmp_path / "small", [text_folder], 1040), tmp_path, join_world("cpu"))
