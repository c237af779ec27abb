"""Several processes: their checkpoints resume in any number, and together they answer what one would."""

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from math import nan
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from eval import scenes
from eval.records import embedded_records
from eval.run import Ask, ask_all
from model import device
from model.common import UserError
from model.paligemma import PaliGemma
from model.processor import Processor
from tests.files import write_vqav2
from tests.runs import in_processes, metrics
from train import finetune, processes
from train.checkpoint import load_checkpoint
from train.distributed import World, ask_together, average_gradients, divide, join_world
from train.loop import Diverged, check_finite
from train.optim import Rule, make_adamw, parameter_groups
from train.settings import parse, step_layout
from train.supervised import make_order, mean_over_rows
from weights.load import load_model


@pytest.fixture(scope="module")
def spread_run(tmp_path_factory):
    """A run of two processes that spread all weights. Its 21 micro-batches make 4 steps of 6, the last one short."""
    folder = tmp_path_factory.mktemp("spread")
    write_vqav2(folder / "vqav2")
    in_processes(
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
@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_processes_goes_on(number, spread_run, tmp_path):
    """Breaks when a spread checkpoint loses a part or a moment, or the steps of a run depend on who takes them."""
    whole = metrics(spread_run)
    assert len(whole) == 4
    cut = tmp_path / "cut"
    shutil.copytree(spread_run, cut, ignore=shutil.ignore_patterns("step-4", "model", "summary.json"))
    if number == 1:
        finetune.main(["--resume", str(cut)])
    else:
        in_processes(number, "--resume", cut)
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


@pytest.mark.parametrize(("number", "kind"), [("1", "mps"), ("2", "cpu")])
def test_several_processes_of_a_mac_take_the_cpu(number, kind, monkeypatch):
    """Breaks when they choose MPS, between which gloo cannot exchange tensors, and which has no fp64."""
    monkeypatch.setenv("WORLD_SIZE", number)
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
    for number in (1, 2, 4, 8, 16, 64):
        if number <= rows:
            size, micro_batches = step_layout(settings, number)
            assert size * micro_batches == rows and micro_batches % number == 0 and size <= settings.batch_size
    for number in (3, 24, 2 * rows):
        with pytest.raises(UserError, match=f"^--step-batch {rows} is no multiple .* of {number}: change") as one:
            step_layout(settings, number)
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


class OneOfTwo(World):
    """A process of two, which is a thread: `gather` exchanges lists in memory."""

    def meet(self, barrier: Barrier, values: list) -> "OneOfTwo":
        object.__setattr__(self, "exchange", (barrier, values))
        return self

    def gather(self, value) -> list:
        barrier, values = self.exchange
        barrier.wait()
        values[self.rank] = value
        barrier.wait()
        return list(values)


def as_two(work) -> list:
    """`work(world)` of both."""
    barrier, values, results = Barrier(2, timeout=60), [None, None], [None, None]
    worlds = [OneOfTwo(rank, 2, torch.device("cpu")).meet(barrier, values) for rank in range(2)]
    threads = [Thread(target=lambda world=world: results.__setitem__(world.rank, work(world))) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def ask_as_one_of_two(world: World, asked: list[Ask]) -> tuple[list, dict]:
    for items in ([], ["a"], list("abcde"), list("aabbbcdda")):
        seen: list[str] = []
        done = divide(world, items, lambda own: [seen.append(item) or f"{item} by {world.rank}" for item in own], str)  # noqa: B023
        shares = world.gather(seen)
        assert sorted(shares[0] + shares[1]) == sorted(items) and not set(shares[0]) & set(shares[1])
        assert done == [f"{item} by {int(item in shares[1])}" for item in items]
    left_out: dict[str, str] = {}
    return ask_together(world, *embedded(), asked, **LIMITS, left_out=left_out), left_out


@pytest.mark.long
def test_two_processes_answer_as_one(tmp_path):
    """Breaks when a question is answered twice, by nobody, or in another's place, or its problem is not told to all."""
    asked, left_out = questions(tmp_path), {}
    both = as_two(lambda world: ask_as_one_of_two(world, asked))
    expected = ask_all(*embedded(), asked, **LIMITS, left_out=left_out)
    assert len(set(expected)) > 6 and expected.count(None) == 3
    assert both == [(expected, left_out)] * 2


# Processes of one CPU that split rows

SPLIT = (
    "--base tiny --samples 41 --batch-size 8 --accumulate 2 --checkpoint-every 1 --keep 3 --eval-limit 8 --tasks vqa"
)
SPLIT = f"{SPLIT} --measure-every 1 --device cpu --attention twin --lr 1e-2 --warmup 0".split()


@pytest.mark.long
def test_two_processes_train_as_one(tmp_path, monkeypatch):
    """Breaks when splitting the rows changes steps, samples, their order, a gradient or an evaluation; when a run does
    not go on with another number of processes; or when one that has ended leaves something behind.

    6 micro-batches make 3 steps; the last has one row, so one process has none.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    finetune.main([*SPLIT, "--out", str(one)])
    shutil.copytree(one, two, ignore=shutil.ignore_patterns("step-2", "step-3", "best", "summary.json", "adapter_*"))
    monkeypatch.chdir(tmp_path)  # where the package is not
    finetune.main(["--resume", "two", "--processes", "2"])
    assert not dist.is_initialized()
    expected, found = metrics(one), metrics(two)
    assert len(expected) == 3 and expected[0] == found[0] and expected[1:] != found[1:]
    for before, after in zip(expected, found, strict=True):
        for name in ("lambda", "map_distance"):
            assert after[name] == {layer: pytest.approx(value, rel=1e-3) for layer, value in before.pop(name).items()}
        assert after == after | {name: pytest.approx(value, rel=2e-5) for name, value in before.items()}
    weights = [load_file(folder / "adapter_model.safetensors") for folder in (one, two)]
    # AdamW divides a gradient by its size: a few that are almost zero step by their rounding
    assert all((tensor - weights[1][name]).norm() < 1e-3 * tensor.norm() for name, tensor in weights[0].items())
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (one, two))
    assert "--processes 2 " in second["command"] and "--processes" not in first["command"]
    assert first["samples"] == second["samples"] == 41 and first["after"] == second["after"]
    assert first["held_out"]["after"]["loss"] == pytest.approx(second["held_out"]["after"]["loss"], rel=1e-4)


def test_processes_are_started_where_they_save_time(monkeypatch):
    """Breaks when a short run, a large model, a GPU, one thread or torchrun gets them, or a wrong number no error; or
    when a resumed run goes on with another number than it had, and so to other weights."""
    small, large = (nn.Linear(side, side, device="meta") for side in (100, 6000))

    def number(*flags, wanted=None, threads=8, model=small, resumed=None) -> int:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return processes.choose_processes(wanted, parse([*flags, "--device", "cpu"])[0], model, resumed)

    assert [number(threads=threads) for threads in (1, 2, 3, 64)] == [1, 2, 3, 4]
    assert number("--data", "jsonl:x") == 4 and number("--batch-size", "16") == 2 == number("--samples", "1", wanted=2)
    short = number("--samples", "2000"), number("--steps", "50"), number("--batch-size", "15")
    assert (*short, number("--shard"), number(model=large), number(wanted=1)) == (1,) * 6
    monkeypatch.setattr(processes, "checkpoints", lambda run: [run])
    for had, world, rows, expected in (
        ("3", 1, 32, 3),
        ("1", 1, 32, 1),
        ("9", 1, 8, 8),
        ("3", 3, 32, 4),
        ("x", 1, 32, 4),
    ):
        progress = {"processes": world, "origin": {"numerics": {"processes": f"{had} processes"}}}
        monkeypatch.setattr(processes, "read_state", lambda folder, progress=progress: {"progress": progress})
        assert number("--batch-size", str(rows), resumed=Path("run")) == expected
    assert number(wanted=2, resumed=Path("run")) == 2
    for flags, wanted, problem in ((["--shard"], 2, "share a CPU"), (["--batch-size", "3"], 4, "has only 3 rows")):
        with pytest.raises(UserError, match=f"^--processes {wanted}: .*{problem}"):
            number(*flags, wanted=wanted)
    with pytest.raises(UserError, match="^--processes 0: expected 1 or more"):
        parse(["--processes", "0"])
    with monkeypatch.context() as patch:
        patch.setattr(processes, "choose_device", lambda name: torch.device("cuda"))
        assert number() == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert number() == 1
    with pytest.raises(UserError, match="torchrun"):
        number(wanted=2)


ENDS = """#!{python}
import os, sys, time
if {early}:
    sys.exit("error: no room")
import torch.distributed as dist
rank, size, _, file = os.environ["DMT_PROCESS"].split()
store = dist.FileStore(file, int(size))
store.set(rank, "ready")
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
dist.barrier()
dist.destroy_process_group()
time.sleep(1.5)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("early", "problem"), [(True, r"ended with code 1 \(error: no room\)"), (False, "was killed by signal 9 ")]
)
def test_a_process_that_ends_ends_the_run(early, problem, tmp_path, monkeypatch):
    """Breaks when the first process waits for one that could not start, or was killed in a step, or takes an error of
    its own for that; or when the folder in which they met is there longer than they need it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    script = tmp_path / "python"
    script.write_text(ENDS.format(python=sys.executable, early=early))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(UserError, match=f"^process 2 {problem}"), processes.several(2, "cpu", []) as meet:
        world = meet()
        assert not any((tmp_path / "temporary").iterdir())
        world.totals(1.0)
    assert not dist.is_initialized()
    if early:
        with pytest.raises(RuntimeError, match="^of its own"), processes.several(2, "cpu", []):
            time.sleep(0.5)
            raise RuntimeError("of its own")


def test_distances_are_those_of_all_rows():
    """Breaks when the distance between the maps is that of the first process's rows, or of a row that is no record."""
    decoder, tower = "language_model.layers.0", "vision_tower.encoder.layers.0"

    def measured(world: World, rows: tuple[int, int]) -> dict:
        number, pictures = rows[world.rank], (2, 0)[world.rank]
        batch = SimpleNamespace(attention_mask=torch.ones(number, 3), pixel_values=torch.ones(pictures, 1))
        found = {
            "lambda": {decoder: 0.5},
            "map_distance": {decoder: (0.1, 0.4)[world.rank], tower: (0.2, nan)[world.rank]},
        }
        return mean_over_rows(found, SimpleNamespace(batch=batch, is_empty=not number), world)

    of_both = {decoder: pytest.approx((0.1 + 2 * 0.4) / 3), tower: pytest.approx(0.2)}
    assert as_two(lambda world: measured(world, (1, 2))) == [{"lambda": {decoder: 0.5}, "map_distance": of_both}] * 2
    second = as_two(lambda world: measured(world, (0, 2)))[0]
    assert second == {"lambda": {decoder: 0.5}, "map_distance": {decoder: pytest.approx(0.4)}}
    assert as_two(lambda world: measured(world, (0, 0)))[0] == {"lambda": {decoder: 0.5}}


def test_a_process_ends_with_the_first(tmp_path, monkeypatch):
    """Breaks when a process stays behind after the first one was killed."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ncat\necho ended > ended\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script))
    other = processes.Other(1, "1 2 1 0", [], 1)
    assert other.process.poll() is None
    other.process.stdin.close()  # as the system does for a killed one
    assert other.process.wait(30) == 0 and Path("ended").exists()
    child = os.fork()
    if not child:
        os.dup2(os.open(script, os.O_RDONLY), 0)
        processes._end_with_first()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_gradients_are_averaged_where_any_process_has_one(monkeypatch):
    """Breaks when a parameter that only other processes use is not trained, or one that nobody uses is decayed."""
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    parameters[0].grad = torch.full((2, 3), 3.0)
    of_other = torch.tensor([1.0, 1, 0, *[5.0] * 6, 4, 8, 0])
    monkeypatch.setattr(dist, "all_reduce", lambda flat: flat.add_(of_other))
    average_gradients(parameters, World(0, 2, torch.device("cpu"), splits_rows=True))
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 4.0)) and parameters[1].grad.tolist() == [2, 4]
    assert parameters[2].grad is None


def test_all_processes_end_at_a_loss_that_is_not_finite():
    """Breaks when only the process that meets it ends, and the others wait, or report no record."""

    def problem(world: World) -> str:
        losses = [1.0, [1.0, float("nan")][world.rank]]
        micros = [type("Micro", (), {"names": (f"{name}{world.rank}",)}) for name in "ab"]
        with pytest.raises(Diverged) as raised:
            check_finite(float("nan"), losses, 7, micros, world)
        return str(raised.value)

    assert as_two(problem) == ["step 7: the loss is nan on b1: lower --lr, or look at these records"] * 2
