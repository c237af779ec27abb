"""Held-out examples: scored right, by one process or several, without a trace in training; the best weights stay."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from eval.records import Record
from lora import adapter
from model.processor import Processor
from tests.runs import WORLD, metrics
from train import finetune, supervised
from train.data.batches import collate
from train.data.sources import read_records
from train.settings import Settings, parse
from train.summary import gain_over_blind, next_commands, print_held_out
from train.validation import HeldOut, Watch, choose, open_held_out, read_step
from weights.fingerprint import tensor_fingerprint
from weights.load import load_model

COLORS = {"red": (220, 30, 30), "green": (30, 160, 40), "blue": (40, 60, 220), "yellow": (230, 210, 40)}


def write_colors(folder: Path, count: int) -> Path:
    """Pictures of one color each, and the question for it."""
    folder.mkdir(exist_ok=True)
    dice, lines = random.Random(0), []
    for number in range(count):
        name, color = dice.choice(list(COLORS.items()))
        Image.new("RGB", (40, 30), color).save(folder / f"{number}.png")
        lines.append({"image": f"{number}.png", "prefix": "answer en What color is it?", "suffix": name})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    data = write_colors(tmp_path_factory.mktemp("colors"), 30)
    return ["--base", "tiny", "--data", f"jsonl:{data}", "--validation", "0.4", "--batch-size", "3"] + (
        "--steps 8 --epochs 9 --dropout 0.1 --attention softmax --measure-every 0 --checkpoint-every 3 --device cpu"
    ).split()


def test_training_is_the_same_with_open_eyes(flags, tmp_path, monkeypatch):
    """Breaks when an evaluation leaves a trace in training, is not made again by a resumed run, or scores wrongly."""
    finetune.main([*flags, "--eval-every", "0", "--out", str(tmp_path / "closed")])
    hashed = []
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "tensor_fingerprint", lambda of: hashed.append(1) or tensor_fingerprint(of))
        finetune.main([*flags, "--eval-every", "2", "--out", str(tmp_path / "open")])
    assert 1 <= len(hashed) <= 2  # not at every evaluation: once, and once more if the best step is opened
    closed, whole = metrics(tmp_path / "closed"), metrics(tmp_path / "open")
    scored = [record["step"] for record in whole if "held_out_loss" in record and "exact_match" in record]
    assert scored == [1, 3, 5, 7]
    assert [{name: record[name] for name in closed[0]} for record in whole] == closed

    class Power(Exception):
        pass

    honest, calls = supervised.supervised_loss, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 6:  # after the evaluation of step 4 and the checkpoint of step 3
            raise Power
        return honest(*args)

    with monkeypatch.context() as patch:
        patch.setattr(supervised, "supervised_loss", fails)
        with pytest.raises(Power):
            finetune.main([*flags, "--eval-every", "2", "--out", str(tmp_path / "cut")])
    finetune.main(["--resume", str(tmp_path / "cut")])
    assert metrics(tmp_path / "cut") == whole
    files = "adapter_model.safetensors", "best/adapter_model.safetensors"
    cut, open_, closed = ([tmp_path / run / file for file in files] for run in ("cut", "open", "closed"))
    for ours, theirs in [*zip(cut, open_, strict=True), (closed[0], open_[0])]:
        ours, theirs = load_file(ours), load_file(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("cut", "open")]
    assert summaries[0]["held_out"] == summaries[1]["held_out"]
    answers = [json.loads(line) for line in (tmp_path / "open/answers.jsonl").read_text().splitlines()]
    assert len(answers) == 12 and {"question", "truth", "before", "after", "blind", "right"} <= answers[0].keys()
    assert (tmp_path / "open/answers.png").exists()
    # the last evaluation, computed another way
    model, processor = load_model("tiny"), Processor.from_source("tiny")
    adapter.load(model.eval(), tmp_path / "open")
    records = read_records(parse(flags)[0], "validation")
    with torch.no_grad():
        micro = collate(records, processor).to("cpu")
        loss = supervised.supervised_loss(model.eval(), micro).item() / micro.tokens
    assert whole[-1]["held_out_loss"] == pytest.approx(loss, rel=1e-5)
    assert summaries[1]["held_out"]["after"]["loss"] == whole[-1]["held_out_loss"]
    assert summaries[1]["held_out"]["blind"]["loss"] != whole[-1]["held_out_loss"]  # of gray pictures


def test_a_run_without_progress_stops_and_is_finished(flags, tmp_path, capsys):
    """Breaks when --patience is not kept, or a run that it has ended trains on when it is resumed."""
    finetune.main([*flags, "--eval-every", "2", "--patience", "1", "--lr", "0", "--out", str(tmp_path / "run")])
    logged = metrics(tmp_path / "run")
    assert len(logged) == 4 and logged[1]["held_out_loss"] == logged[3]["held_out_loss"]
    said = capsys.readouterr().out
    assert (
        "stopped early, after step 4: 1 evaluations without" in said
        and "best, by exact match, then loss: after step 2" in said
    )
    finetune.main(["--resume", str(tmp_path / "run")])
    assert metrics(tmp_path / "run") == logged
    assert json.loads((tmp_path / "run/summary.json").read_text())["held_out"]["stopped"] == 4


def test_the_best_is_kept(tmp_path):
    """Breaks when worse weights take the place of better ones, or a tie in exact match is not decided by the loss."""
    scores = [(3.0, 10.0), (2.0, 10.0), (9.0, 20.0), (1.0, 10.0), (8.0, 20.0), (8.0, 20.0), (7.0, None)]
    held_out = SimpleNamespace(
        settings=replace(Settings(), patience=2, eval_every=1),
        world=WORLD,
        evaluate=lambda model, most, cache: None,
        scores=lambda result: dict(zip(("loss", "exact_match"), scores[step - 1], strict=True)),
    )

    def write(model, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(step))

    watch, progress, seen = Watch(held_out, tmp_path, write), {}, []
    for step in range(1, len(scores) + 1):
        watch.check(None, None, 100, step, progress)
        seen.append((progress["best"]["step"], progress["best"]["since"], progress.get("stopped")))
        assert (tmp_path / "best/weights").read_text() == str(progress["best"]["step"])
    assert seen == [(1, 0, None), (2, 0, None), (3, 0, None), (3, 1, None), (5, 0, None), (5, 1, None), (5, 2, 7)]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_weights_of_another_course_are_not_the_best(tmp_path):
    """Breaks when a run that goes on from an older checkpoint takes the weights after it for those of its best step, or
    when a loss that is not a number can never be beaten."""
    scores, settings = {"exact_match": 10.0}, replace(Settings(), eval_every=1)
    held_out = SimpleNamespace(
        settings=settings, world=WORLD, evaluate=lambda model, most, cache: None, scores=lambda result: scores
    )
    watch, progress = Watch(held_out, tmp_path, lambda model, folder: folder.mkdir()), {}
    for step, loss in ((1, float("nan")), (2, 3.0), (4, 1.0)):
        scores["loss"] = loss
        watch.check(None, None, 100, step, progress)
    assert progress["best"]["step"] == read_step(tmp_path / "best") == 4
    scores["loss"], progress["best"] = 3.5, {"step": 2, "loss": 3.0, "exact_match": 10.0, "since": 0}  # of step 2
    watch.check(None, None, 100, 3, progress)
    assert progress["best"]["step"] == read_step(tmp_path / "best") == 3
    scores["loss"] = float("nan")
    assert watch.check(None, None, 100, 4, progress) == {}
    assert progress["best"]["step"] == 3 and progress["best"]["since"] == 1  # the last weights are not the best ones


def test_a_picture_that_was_not_used_is_reported(capsys):
    """Breaks when a model that answers as well without the picture passes for one that sees it, or the reverse."""
    records = [Record(f"{n}", f"{n // 2}", (Path("a.png"),), (("color?", "red"),)) for n in range(60)]
    held_out = HeldOut(records, [2] * 60, [], list(range(60)), None, Settings(), WORLD)

    def result(right: int, loss: float) -> dict:
        answers = ["red"] * right + ["blue"] * (60 - right)
        return {"records": {"losses": [loss + n % 3 for n in range(60)], "tokens": [2] * 60, "answers": answers}}

    def said(trained: dict, blind: dict) -> str:
        gain = gain_over_blind(held_out, {"before": result(0, 9), "after": trained, "blind": blind})
        summary = {"stopped": None, "best_step": None, "over_blind": gain}
        print_held_out(summary, Settings(), Path("run"))
        return capsys.readouterr().out

    assert said(result(50, 1), result(20, 1)) == ""
    assert "the picture was not used" in said(result(50, 1), result(49, 5))
    assert "the picture was not used" in said(result(20, 1), result(50, 5))
    assert said(result(0, 1), result(0, 2)) == ""  # nothing is matched: the loss decides
    assert "the picture was not used" in said(result(0, 2), result(0, 2))


def test_what_is_held_out(tmp_path, processor, capsys):
    """Breaks when held-out examples are the first of a file, those of training, or more than asked for."""
    settings = parse(["--data", f"jsonl:{write_colors(tmp_path, 40)}", "--validation", "0.5", "--eval-limit", "8"])[0]
    held_out = open_held_out(settings, processor, WORLD)
    every = read_records(settings, "validation")
    names = [r.name for r in held_out.records]
    assert names == [r.name for r in every if r.name in names] and len(set(names)) == 8
    assert choose(range(8), 8) == list(range(8))
    assert len({number % 4 for number in choose(range(400), 100)}) == 4  # of each task that comes in turn
    assert not {r.key for r in held_out.records} & {r.key for r in read_records(settings)}
    assert sorted(n for batch in held_out.plan for n in batch) == held_out.asked == list(range(8))
    for share in (0, 0.001):  # asked for, and too small for one picture
        assert open_held_out(replace(settings, validation=share), processor, WORLD) is None
        assert capsys.readouterr().err.count("nothing is held out: --validation 0.001") == bool(share)
    talks = [replace(r, turns=(("how many", "one " * 30), *r.turns)) for r in every]
    long = [replace(r, turns=(("caption en", "a red dog " * 30),)) for r in every]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.validation.read_records", lambda *args: long)
        assert not open_held_out(settings, processor, WORLD).asked  # too long to be generated
        patch.setattr("train.validation.read_records", lambda *args: talks)
        longest = max(sum(len(processor.encode(answer)) + 1 for _, answer in r.turns) for r in talks)
        patch.setattr("train.validation.MAX_LOGITS", 2 * longest * processor.config.text.vocab_size)
        lengthy = open_held_out(settings, processor, WORLD)
        assert max(map(len, lengthy.plan)) == 2 and max(lengthy.lengths) < longest / 4


def test_the_next_commands_fit_the_data():
    """Breaks when a run proposes commands that ask other data, another model, or export what cannot be exported."""

    def proposed(*argv: str, best: bool = False) -> str:
        return " | ".join(next_commands(parse(argv)[0], Path("run"), best)).replace("python -m ", "")

    ask = "eval.ask --adapter run --image FILE --prompt 'answer en Where is the dog?'"
    export = "weights.export run FOLDER"
    for best in (False, True):  # the table of the embedded data is of the last weights
        asked = f"eval.vqa --adapter run | eval.needle --adapter run | {ask}"
        assert proposed(best=best) == f"{asked} | {export}" and proposed("--attention", "twin", best=best) == asked
    data = "--data", "jsonl:a b.jsonl@2", "--data", "jsonl:c.jsonl@1", "--attention", "softmax", "--images", "pictures"
    own_ask = "eval.ask --adapter run --image FILE --prompt PROMPT"  # its questions are not ours
    scored = "eval.vqa --data jsonl:TEST.jsonl --images pictures --adapter run"  # not what was trained on
    assert proposed(*data) == f"{scored} | {own_ask} | {export}"
    own = "--data", "jsonl:a.jsonl", "--eval-data", "coco:b.json", "--attention", "dex"
    assert proposed(*own, best=True) == (
        f"eval.detect --data coco:b.json --adapter run/best | {own_ask.replace('run', 'run/best')} | "
        "weights.export run/best FOLDER"
    )
    assert "| eval.detect --adapter run |" in proposed("--tasks", "detect,vqa")
    assert proposed("--data", "shards:a.tar") == f"{own_ask} | {export}"
    full = proposed("--data", "vqav2:d", "--full", "--attention", "softmax")
    assert full.startswith("eval.vqa --data vqav2:d --model run/model --prompt 'answer {question}' | eval.ask --model")
    assert full.endswith("weights.export run/model FOLDER")


def test_a_command_that_is_run_as_a_file_says_how_to_run_it(tmp_path):
    """Breaks when `python train/finetune.py` ends in a traceback about a package that is not there."""
    file = Path(finetune.__file__)
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "python -m train.finetune" in done.stderr and done.stderr.count("\n") == 1
