"""Several processes: their checkpoints resume in any number, and together they answer what one would."""

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors import safe_open

from eval import scenes
from eval.records import embedded_records
from eval.run import Ask, ask_all
from model import device
from model.common import UserError
from model.paligemma import PaliGemma
from model.processor import Processor
from tests.files import write_vqav2
from tests.runs import metrics, torchrun
from train import finetune
from train.checkpoint import load_checkpoint
from train.distributed import World, ask_together, divide, join_world
from train.optim import Rule, make_adamw, parameter_groups
from train.settings import parse, step_layout
from train.supervised import make_order
from weights.load import load_model


@pytest.fixture(scope="module")
def spread_run(tmp_path_factory):
    """A run of two processes that spread all weights. Its 21 micro-batches make 4 steps of 6, the last one short."""
    folder = tmp_path_factory.mktemp("spread")
    write_vqav2(folder / "vqav2")
    torchrun(
        2,
        "--base",
        "tiny",
        "--data",
        f"vqav2:{folder / 'vqav2'}",
        "--validation",
        "0.2",
        "--fraction",
        "0.9",
        "--full",
        "--attention",
        "softmax",
        "--shard",
        "--batch-size",
        "2",
        "--accumulate",
        "3",
        "--lr",
        "1e-3",
        "--warmup",
        "0",
        "--checkpoint-every",
        "2",
        "--device",
        "cpu",
        "--out",
        folder / "run",
    )
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 3])
def test_another_number_of_processes_goes_on(processes, spread_run, tmp_path):
    """Breaks when a spread checkpoint loses a part or a moment, or the steps of a run depend on who takes them."""
    whole = metrics(spread_run)
    assert len(whole) == 4
    cut = tmp_path / "cut"
    shutil.copytree(spread_run, cut, ignore=shutil.ignore_patterns("step-4", "model", "summary.json"))
    if processes == 1:
        finetune.main(["--resume", str(cut)])
    else:
        torchrun(processes, "--resume", cut)
    resumed = metrics(cut)
    assert resumed[:2] == whole[:2] and len(resumed) == 4
    for one, other in zip(whole[2:], resumed[2:], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-6)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
    models = [load_model(folder / "model").state_dict() for folder in (spread_run, cut)]
    assert all(torch.allclose(tensor, models[1][name], rtol=1e-3, atol=1e-4) for name, tensor in models[0].items())
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (spread_run, cut))
    assert first["held_out"]["after"] == pytest.approx(second["held_out"]["after"], rel=1e-4)
    for one, other in zip(whole, resumed, strict=True):  # each process has scored a share
        assert one["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=2e-5)
    best = load_model(cut / "best").state_dict()
    assert second["held_out"]["best_step"] == 4 and all(torch.equal(best[name], models[1][name]) for name in best)
    assert first["samples"] == second["samples"] == 42 and first["before"]["vqa"] is not None


@pytest.mark.long
def test_a_spread_checkpoint_is_parts_without_pickles(spread_run):
    """Breaks when a process writes more than its part, or a file that runs code when it is opened."""
    folder = spread_run / "checkpoints/step-4"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)
    held = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held.append({name: file.get_slice(name).get_shape() for name in file.keys()})
    name = "language_model.embed_tokens.weight"
    whole = load_model("tiny").get_parameter(name).shape
    assert sum(shapes[name][0] for shapes in held) == whole[0]


@pytest.mark.long
def test_a_lost_part_is_refused(spread_run, tmp_path):
    """Breaks when a checkpoint of which a file was not copied resumes with half of its weights."""
    for part in (1, 2):
        folder = tmp_path / f"step-{part}"
        shutil.copytree(spread_run / "checkpoints/step-4", folder)
        (folder / f"shard-0000{part}-model-00001-of-00001.safetensors").unlink()
        (folder / "manifest.json").unlink()  # as in a checkpoint of an older version
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({"step": 4, "progress": state["progress"]}))
        model = load_model("tiny")
        with pytest.raises(UserError, match="part|other parameters"):
            load_checkpoint(folder, model, make_adamw(parameter_groups(model, [Rule(".*", 0.1)]), (0.9, 0.98)))


@pytest.mark.long
def test_processes_must_share_a_step_equally():
    """Breaks when a run goes on with steps of another size than those before."""
    assert World(0, 3, torch.device("cpu")).share(6) == 2
    with pytest.raises(UserError, match="takes 6 micro-batches, which 4 processes cannot share"):
        World(0, 4, torch.device("cpu")).share(6)


@pytest.mark.parametrize(("processes", "kind"), [("1", "mps"), ("2", "cpu")])
def test_several_processes_of_a_mac_take_the_cpu(processes, kind, monkeypatch):
    """Breaks when they choose MPS, between which gloo cannot exchange tensors, and which has no fp64."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setitem(device._IS_THERE, "mps", lambda: True)
    monkeypatch.setitem(device._IS_THERE, "cuda", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert join_world().device.type == kind


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (["--recipe", "paper-2"], 4),
        (["--recipe", "paligemma"], 256),
        (["--wings", "--stage", "1"], 256),
        (["--wings", "--stage", "2"], 64),
        (["--arch", "qmamba", "--stage", "1"], 256),
        (["--arch", "qmamba", "--stage", "2"], 128),
    ],
)
def test_a_recipe_s_step_has_as_many_rows_on_any_number_of_processes(flags, rows):
    """Breaks when more processes make a larger step: the published rate would go with another batch."""
    settings = parse([*flags, "--data", "jsonl:x"])[0]
    for processes in (1, 2, 4, 8, 16, 64):
        if processes <= rows:
            size, micro_batches = step_layout(settings, processes)
            assert size * micro_batches == rows and micro_batches % processes == 0 and size <= settings.batch_size
    for processes in (3, 24, 2 * rows):
        with pytest.raises(UserError, match=f"^--step-batch {rows} is no multiple .* of {processes}: change") as one:
            step_layout(settings, processes)
        assert "\n" not in str(one.value)


def test_a_step_with_fewer_rows_than_asked_for_is_said(processor, capsys):
    """Breaks when --batch-size is lowered to a recipe's step without a word, or said by every process."""
    settings = parse(["--recipe", "paper-1", "--batch-size", "32"])[0]
    records = embedded_records(("vqa",), count=8)
    for rank in (0, 1):
        make_order(records, processor, settings, World(rank, 2, torch.device("cpu")))
    assert capsys.readouterr().err == "--batch-size 32: a step has 4 rows, see --step-batch\n"
    make_order(records, processor, replace(settings, batch_size=4), World(0, 2, torch.device("cpu")))
    assert not capsys.readouterr().err


def test_a_step_without_a_recipe_is_what_the_flags_say():
    """Breaks when a flag does not override a recipe, or two flags that contradict start a run."""
    assert step_layout(parse([])[0], 3) == (32, 3)
    assert step_layout(parse(["--recipe", "paper-2", "--accumulate", "4"])[0], 2) == (4, 8)
    assert step_layout(parse(["--recipe", "paper-2", "--step-batch", "12", "--batch-size", "2"])[0], 3) == (2, 6)
    with pytest.raises(UserError, match="--step-batch 8 --accumulate 2: one decides the other"):
        step_layout(parse(["--step-batch", "8", "--accumulate", "2"])[0], 1)
    with pytest.raises(UserError, match="--step-batch 48 is no multiple of 32"):
        finetune.main(["--step-batch", "48"])


# Answers


def questions(folder: Path) -> list[Ask]:
    """Free and multiple-choice ones on seven pictures, one of which cannot be read."""
    for number in range(6):
        scenes.sample("vqa", "test", 32 * number).image.save(folder / f"{number}.png")
    (folder / "6.png").write_bytes(b"broken")
    prompts = [("caption en", ()), ("answer en Is there a cat in the image?", ()), ("which", ("yes", "no", "two dogs"))]
    return [
        Ask(f"{prompt[:3]}-{number}", f"{number}", folder / f"{number}.png", prompt, choices)
        for prompt, choices in prompts
        for number in range(7)
    ]


LIMITS = {"max_new_tokens": 4, "batch_size": 4}


def embedded() -> tuple[PaliGemma, Processor]:
    return load_model("embedded"), Processor.from_source("embedded")


def one_of_two(rank: int, folder: Path, asked: list[Ask]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=2, rank=rank, timeout=timedelta(seconds=120))
    world = World(rank, 2, torch.device("cpu"))
    for items in ([], ["a"], list("abcde"), list("aabbbcdda")):
        seen: list[str] = []
        done = divide(world, items, lambda own: [seen.append(item) or f"{item} by {rank}" for item in own], str)  # noqa: B023
        shares = world.gather(seen)
        assert sorted(shares[0] + shares[1]) == sorted(items) and not set(shares[0]) & set(shares[1])
        assert done == [f"{item} by {int(item in shares[1])}" for item in items]
    left_out: dict[str, str] = {}
    answers = ask_together(world, *embedded(), asked, **LIMITS, left_out=left_out)
    (folder / f"{rank}.json").write_text(json.dumps([answers, left_out]))
    dist.destroy_process_group()


@pytest.mark.long
def test_two_processes_answer_as_one(tmp_path):
    """Breaks when a question is answered twice, by nobody, or in another's place, or its problem is not told to all."""
    asked, left_out = questions(tmp_path), {}
    torch.multiprocessing.spawn(one_of_two, (tmp_path, asked), nprocs=2)
    expected = ask_all(*embedded(), asked, **LIMITS, left_out=left_out)
    assert len(set(expected)) > 6 and expected.count(None) == 3
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected, left_out]
