"""Several processes: their checkpoints resume in any number, and together they answer what one
would."""

import shutil
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from eval.answer import ask_all
from eval.data import scenes
from eval.data.records import embedded_records
from eval.question import Question
from model.processor import Processor
from tests.files import read_json, write_vqav2
from tests.runs import WORLD, assert_same_tensors, metrics, refused, refuses, settings_of, torchrun
from train import finetune
from train.data.batches import Order
from train.distributed import World, ask_together, joined_world
from train.loop import Diverged, check_loss
from train.settings import step_layout
from weights.load import load_model

# Checkpoints of weights that are spread over processes


@pytest.fixture(scope="module")
def spread_run(tmp_path_factory):
    """A run of two processes that spread all weights. Its 21 micro-batches make 4 steps of 6, the
    last one short."""
    folder = tmp_path_factory.mktemp("spread")
    write_vqav2(folder / "vqav2")
    data = f"--base tiny --data vqav2:{folder}/vqav2 --validation 0.2 --fraction 0.9 --batch-size 2 --step-batch 12"
    rest = (
        "--full --attention softmax --shard --lr 1e-3 --warmup 0 --checkpoint-every 2 --device cpu"
    )
    torchrun(2, data, rest, "--epochs 1 --eval-every 2 --out", folder / "run")
    return folder / "run"


@pytest.mark.long
def test_a_spread_run_goes_on_with_as_many_processes(spread_run, tmp_path):
    """Breaks when a spread checkpoint loses a part or a moment, or another number of processes
    would read other batches."""
    whole = metrics(spread_run)
    cut = tmp_path / "cut"
    shutil.copytree(
        spread_run, cut, ignore=shutil.ignore_patterns("step-4", "model", "summary.json")
    )
    refuses(finetune, f"--resume {cut}", "2 processes, this call 1")
    torchrun(2, "--resume", cut)
    resumed = metrics(cut)
    assert resumed[:2] == whole[:2]
    assert len(resumed) == len(whole) == 4
    for before, after in zip(whole, resumed, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=2e-6)
        assert after["gradient_norm"] == pytest.approx(before["gradient_norm"], rel=1e-4)
    for before, after in zip(
        whole[1::2], resumed[1::2], strict=True
    ):  # each process scores a share
        assert after["held_out_loss"] == pytest.approx(before["held_out_loss"], rel=2e-5)
    models = [load_model(folder / "model").state_dict() for folder in (spread_run, cut)]
    assert all(
        torch.allclose(tensor, models[1][name], rtol=1e-3, atol=1e-4)
        for name, tensor in models[0].items()
    )
    first, second = (read_json(folder / "summary.json") for folder in (spread_run, cut))
    assert first["held_out"]["after"] == pytest.approx(second["held_out"]["after"], rel=1e-4)
    assert first["samples"] == second["samples"] == 42
    assert first["before"]["vqa"] is not None
    best = load_model(cut / "best").state_dict()
    assert second["held_out"]["best_step"] == 4
    assert_same_tensors(best, models[1])


@pytest.mark.long
def test_a_spread_checkpoint_is_parts_without_pickles(spread_run):
    """Breaks when a process writes more than its part, or a file that runs code when it is
    opened."""
    folder = spread_run / "checkpoints/step-4"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    first, second = sorted(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert second < 1.2 * first
    name = "language_model.embed_tokens.weight"
    rows = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            rows += file.get_slice(name).get_shape()[0]
    assert rows == load_model("tiny").get_parameter(name).shape[0]


# Steps


@pytest.mark.parametrize("flags, rows", [("--recipe paper-2", 4), ("--recipe paligemma", 256)])
def test_a_recipe_s_step_has_as_many_rows_on_any_number_of_processes(flags, rows):
    """Breaks when more processes make a larger step: the published rate would go with another
    batch."""
    settings = settings_of(flags, "--data jsonl:x")
    for number in (1, 2, 4, 8, 16, 64):
        if number <= rows:
            size, micro_batches = step_layout(settings, number)
            assert size * micro_batches == rows
            assert micro_batches % number == 0
            assert size <= settings.batch_size
    for number in (3, 24, 2 * rows):
        refused(lambda number=number: step_layout(settings, number), f"--step-batch {rows}")


def test_a_step_is_what_the_flags_say(processor):
    """Breaks when a flag does not override a recipe, or a step cannot be made."""
    assert step_layout(settings_of(), 3) == (32, 3)
    settings = settings_of("--recipe paper-2 --step-batch 12 --batch-size 2")
    assert step_layout(settings, 3) == (2, 6)
    settings = settings_of("--recipe paper-1")
    Order(embedded_records(("vqa",), count=8), processor, settings, World(0, 2, WORLD.device))


# Two threads in place of two processes


class OneOfTwo(World):
    """A process of two, which is a thread: `gather` exchanges lists in memory."""

    def meet(self, barrier, values):
        object.__setattr__(self, "exchange", (barrier, values))
        return self

    def gather(self, value):
        barrier, values = self.exchange
        barrier.wait()
        values[self.rank] = value
        barrier.wait()
        return list(values)


def as_two(work):
    """`work(world)` of both."""
    barrier = Barrier(2, timeout=60)
    values = [None, None]
    results = [None, None]
    worlds = [OneOfTwo(rank, 2, WORLD.device).meet(barrier, values) for rank in range(2)]
    threads = [
        Thread(target=lambda world=world: results.__setitem__(world.rank, work(world)))
        for world in worlds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def questions(folder):
    """Free and multiple-choice ones on seven pictures, one of which cannot be read."""
    for number in range(6):
        scenes.sample("vqa", "test", 32 * number).image.save(folder / f"{number}.png")
    (folder / "6.png").write_bytes(b"broken")
    prompts = [
        ("caption en", ()),
        ("answer en Is there a cat in the image?", ()),
        ("which", ("yes", "no", "two dogs")),
    ]
    return [
        Question(f"{prompt[:3]}-{number}", f"{number}", folder / f"{number}.png", prompt, choices)
        for prompt, choices in prompts
        for number in range(7)
    ]


@pytest.mark.long
def test_two_processes_answer_as_one(tmp_path):
    """Breaks when a question is answered twice, by nobody, or in another's place, or its problem is
    not told to all."""
    asked = questions(tmp_path)
    limits = {"max_new_tokens": 4, "batch_size": 4}

    def answers(ask, *world, **options):
        model = load_model("embedded")
        return ask(*world, model, Processor.from_source("embedded"), asked, **limits, **options)

    expected = answers(ask_all, left_out={})
    assert len(set(expected)) > 6
    assert expected.count(None) == 3
    assert as_two(lambda world: answers(ask_together, world)) == [expected] * 2


@pytest.mark.parametrize(
    "given", "RANK=1|RANK=x|RANK=|LOCAL_RANK=1|WORLD_SIZE=0|WORLD_SIZE=2 RANK=0".split("|")
)
def test_a_broken_environment_is_one_line(given, monkeypatch):
    """Breaks when what is left of another job's variables ends in a traceback, or in a run of which
    no process writes."""
    for name in "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR".split():
        monkeypatch.delenv(name, raising=False)
    variables = dict(variable.split("=") for variable in given.split())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(joined_world("cpu").__enter__, str(variables)[1:-1].split(",")[0], "torchrun")


def test_all_processes_end_at_a_loss_that_is_not_finite():
    """Breaks when only the process that meets it ends, and the others wait, or report no record."""

    def problem(world):
        losses = [1.0, [1.0, float("nan")][world.rank]]
        micros = [SimpleNamespace(names=(f"{n}{world.rank}",)) for n in "ab"]
        with pytest.raises(Diverged) as raised:
            check_loss(float("nan"), losses, 7, micros, world)
        return str(raised.value)

    first, second = as_two(problem)
    assert first == second
    assert first.startswith("step 7: ")
    assert "nan on b1" in first
