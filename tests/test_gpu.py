"""What a GPU would do, as far as a CPU can show: CUDA-only branches on CPU tensors that say they are on a GPU.

CONTRIBUTING.md lists every such branch, with what it assumes.
"""

import ast
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import model.cpu as cpu
import model.device as device
import model.wings as wings
import train.data.batches as batches
import train.distributed as distributed
import train.supervised as supervised
from eval.records import embedded_records
from eval.text.corpus import Corpus
from lora import adapter
from model.attention import attention_mask, fused_attention
from model.common import UserError
from model.differential import graft
from model.generate import CHECK_EVERY, CompiledStep, generate
from model.wings import attach
from tests.reference import batch, hf_model, ours
from train.benchmark import work
from train.benchmark.setup import Options, Setup, micro_batch, open_setup, random_state
from train.benchmark.timing import COMPILED, OURS
from train.distributed import World, join_world, layers_of, spread
from train.loop import LoopOptions, fit
from train.systems.text import TextOrder, TextSettings
from weights.load import load_model

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
WHOLE = ("train/benchmark/", "model/cpu.py", "model/fused.py")  # listed as a whole


@pytest.fixture
def seems_on_gpu(monkeypatch):
    """Every tensor says that it is on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))


def depends_on_device(node: ast.AST) -> bool:
    """Whether an expression asks for a GPU: `is_cuda`, `on_gpu`, torch.cuda, or a comparison of a device's type."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        texts = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
        return bool(texts & {"cuda", "cpu"})
    return getattr(node, "id", getattr(node, "attr", "")) in ("is_cuda", "on_gpu", "cuda")


def test_every_branch_for_a_gpu_is_listed():
    """Breaks when the code for a GPU, which no test here can run whole, grows without a word on what it assumes."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Branches for a GPU")[2].partition("\n## ")[0]
    listed = {tuple(row) for row in re.findall(r"^\| `([\w/.]+)` (?:`(\w+)` )?\|", section, re.M)}
    found = set()
    packages = ("model", "lora", "weights", "eval", "train")
    for file in (file for package in packages for file in (ROOT / package).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        whole = next((name for name in WHOLE if path.startswith(name)), None)
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and any(map(depends_on_device, ast.walk(function))):
                found.add((whole, "") if whole else (path, function.name))
    assert found == listed, "list it in CONTRIBUTING.md, Branches for a GPU"


# The model


def test_one_key_head_is_shared_without_a_copy(seems_on_gpu, monkeypatch):
    """Breaks when CUDA's path attends otherwise, or K and V of one head are copied for every query head and layer."""
    called, original = [], F.scaled_dot_product_attention

    def spy(q, k, v, *args, **options):
        called.append((k, options["enable_gqa"]))
        return original(q, k, v, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    types = torch.tensor([[0, 0, 0, 1, 1]])
    mask = attention_mask(torch.ones(1, 5, dtype=torch.bool), types)
    for heads, given in ((1, mask), (2, mask), (1, None), (2, None)):
        q, k, v = (torch.randn(1, n, 5, 8, requires_grad=True) for n in (4, heads, heads))
        keys, values = (t.repeat_interleave(4 // heads, dim=1) for t in (k, v))
        logits = q @ keys.mT * 0.3
        expected = (logits if given is None else logits.masked_fill(~given, -torch.inf)).softmax(-1) @ values
        with cpu.using("torch"):
            found = fused_attention(q, k, v, given, 0.3)
        assert torch.allclose(found, expected, atol=1e-6)
        for one, other in zip(
            *(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected)), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-5)
        keys, shares = called.pop()
        assert shares == (given is None), "CUDA's kernels take a mask or shared heads"
        assert given is None or (keys.stride(1) == 0) == (heads == 1)


@pytest.mark.parametrize("generation", [1, 2])
def test_a_model_that_seems_on_a_gpu_answers_the_same(generation, monkeypatch):
    """Breaks when the checks that are left out on a GPU, or its later look for the end, change an answer."""
    model, inputs = ours(hf_model(generation), "sdpa"), batch(hf_model(generation), ((5, 0), (3, 0)))
    plain = generate(model, **inputs, max_new_tokens=CHECK_EVERY + 3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    assert [row.tolist() for row in generate(model, **inputs, max_new_tokens=CHECK_EVERY + 3)] == [
        row.tolist() for row in plain
    ]


def test_wings_that_seem_on_a_gpu_answer_the_same(seems_on_gpu, monkeypatch):
    """Breaks when the masked keys of the learners, as many as a row has columns, change an answer."""
    model, inputs = attach(ours(hf_model(1), "sdpa"), 4, routed=True), batch(hf_model(1), ((5, 2), (3, 4)))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".B." in name or ".router." in name:
            nn.init.normal_(parameter)
    widths, choose = [], wings.chosen_first
    monkeypatch.setattr(wings, "chosen_first", lambda *args: widths.append(choose(*args)[0].shape[1]) or choose(*args))
    logits, new = model(**inputs), generate(model, **inputs, max_new_tokens=3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: False))
    before = widths.copy()
    assert torch.allclose(model(**inputs), logits, atol=1e-4)
    assert [row.tolist() for row in generate(model, **inputs, max_new_tokens=3)] == [row.tolist() for row in new]
    length = inputs["input_ids"].shape[1]
    assert before[:2] == [length, length] and widths[len(before) : len(before) + 2] == [16, length - 16]


def test_a_compiled_step_is_a_cuda_graph_of_constant_sizes(seems_on_gpu, monkeypatch):
    """Breaks when a GPU gets no CUDA graph, or one that is recorded anew for other sizes."""
    given = {}
    monkeypatch.setattr(torch, "compile", lambda step, **options: given.update(options))
    CompiledStep(ours(hf_model(1)))
    assert given == {"fullgraph": True, "dynamic": False, "mode": "reduce-overhead"}


def test_chosen_heads_are_a_buffer():
    """Breaks when a step of dex copies the numbers of its heads to the device, which a CUDA graph cannot."""
    model = ours(hf_model(1))
    graft(model, "dex", heads=[1, 3])
    module = model.language_model.layers[0].self_attn
    assert module.chosen.tolist() == [1, 3] and "chosen" not in module.state_dict()
    assert module.to("meta").chosen.is_meta


def test_cudnn_does_not_plan_for_every_length(monkeypatch):
    """Breaks when cuDNN's attention, the first choice on an H100, plans anew for each token."""
    monkeypatch.setitem(device._IS_THERE, "cuda", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.choose_device("cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_benchmark_of_a_gpu_makes_its_rows(monkeypatch):
    """Breaks when the rows that no GPU has measured yet cannot be made: `--geometry 3b` on a GPU would end there."""
    monkeypatch.setattr(Setup, "on_gpu", property(lambda setup: True))
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    tiny = open_setup(Options(geometry="tiny", device="cpu", dtype="bf16"))
    state = random_state(tiny.config, tiny.dtype, CPU)
    steps, decoding = work.train(tiny, OURS, state), work.decode(tiny, COMPILED, state)
    assert [name.partition(",")[0] for name in steps] == ["batch 16", "batch 4"]
    assert list(decoding)[:2] == ["20 tokens, batch 1", "32 steps alone, batch 1"]
    last = list(steps.values())[-1]
    assert torch.isfinite(last.run()) and last.flops > 0
    alone = decoding["32 steps alone, batch 1"]
    assert torch.equal(alone.run(), alone.run()) and alone.moved > 0


# Data


def test_slots_and_pictures_are_counted_before_they_reach_a_gpu(processor):
    """Breaks when a picture too few ends in an assertion on the device, which ends the process's use of the GPU."""
    rows = [processor.layout(1, "what"), processor.layout(1, "count")]
    picture = torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()
    assert len(processor.pad(rows, [picture, picture]).image_index) == 2
    with pytest.raises(UserError, match="2 image slots for 1 pictures"):
        processor.pad(rows, [picture])


def test_a_gpu_gets_workers_and_pinned_batches(corpus: Corpus, monkeypatch):
    """Breaks when a GPU waits for pictures that the launching thread decodes, or for copies of text."""
    given: list[dict] = []
    monkeypatch.setattr(batches, "DataLoader", lambda data, **options: given.append(options) or [])
    monkeypatch.setattr(batches.os, "cpu_count", lambda: 24)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for workers, pin in ((None, True), (None, False), (2, True)):
        batches.load([], [], workers, pin)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    batches.load([], [], None, True)
    assert [(one["num_workers"], one["pin_memory"]) for one in given] == [(6, True), (0, False), (2, True), (8, True)]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 0)
    order = TextOrder(corpus, replace(TextSettings(), length=64, tokens=1000), "train")
    text = order.batch(0)
    pinned = text.pin_memory()
    assert torch.equal(pinned.targets, text.targets) and pinned.targets is not text.targets


def test_workers_draw_the_same_text(corpus: Corpus):
    """Breaks when text drawn by other processes is in another order, or a step loses a row."""
    settings = replace(TextSettings(), length=64, tokens=4 * 12 * 64, batch_size=4, accumulate=3)
    order = TextOrder(corpus, settings, "train", 1, 2)  # the second process takes rows 6 to 11 of each step of 12
    expected = [[order.batch(first, 4), order.batch(first + 4, 2)] for first in (30, 42)]
    for workers in (0, 2):
        steps = list(order.steps(2, workers))
        assert [[micro.names for micro in step] for step in steps] == [[m.names for m in step] for step in expected]
        for one, other in zip(chain(*steps), chain(*expected), strict=True):
            assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.targets, other.targets)


def test_new_features_are_copied_from_the_device_at_once(processor, tmp_path, monkeypatch):
    """Breaks when each picture that is added to the cache is a copy, and a wait, of its own."""
    model = load_model("embedded").requires_grad_(False)
    cache = supervised.FeatureCache.open(tmp_path, model)
    micro = batches.collate(embedded_records(("vqa",), split="validation", count=13), processor, cache)
    copies, copy = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(1) or copy(tensor))
    supervised.with_features(model, micro, cache)
    assert len(micro.keys) > 1 and len(copies) == 1
    assert all(cache.load(key) is not None for key in micro.keys)


# Training


class Steps:
    """Three steps of two micro-batches."""

    total = 3

    def steps(self, first, workers=0, pin=False):
        yield from [[Row(), Row()]] * (self.total - first)


class Row:
    names, tokens, bad = ("row",), 1, ()

    def to(self, device) -> "Row":
        return self


def test_a_step_reads_from_the_device_once(tmp_path, monkeypatch):
    """Breaks when the loop waits for the device at each loss or norm, and a GPU runs out of work meanwhile."""
    (tmp_path / "run").mkdir()
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, original=original: reads.append(1) or original(tensor))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(
        [{"params": [*model.parameters()], "names": ["weight", "bias"], "base_lr": 0.1}], lr=0.1
    )
    options = LoopOptions(schedule="constant", checkpoint_every=100)
    fit(
        model,
        optimizer,
        Steps(),
        lambda called, row: called(torch.ones(1, 4)).square().sum(),
        options,
        tmp_path / "run",
        World(0, 1, CPU),
    )
    assert len(reads) == 3


def test_processes_meet_on_gpus_but_count_on_the_cpu(monkeypatch):
    """Breaks when a process's GPU is guessed by NCCL, or counting samples makes every process wait for its GPU."""
    joined, summed = [], []
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "choose_device", torch.device)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: joined.append((args, options)))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: summed.append(tensor.device))
    world = join_world()
    assert joined == [(("cpu:gloo,cuda:nccl",), {"device_id": torch.device("cuda:1")})]
    assert world.totals(1, 2.5) == [1.0, 2.5] and summed == [CPU]


def test_sharded_layers_are_compiled_one_by_one(tmp_path, monkeypatch):
    """Breaks when FSDP2's work between the layers breaks the compiled graph, or compiling changes a gradient."""
    counter, compile_layer = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_layer(module, backend=counter))
    micro = micro_batch(open_setup(Options(geometry="tiny", device="cpu")), 2)
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    try:
        losses, gradients = [], []
        for compiles in (False, True):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            model = load_model("tiny")
            adapter.inject(model, r"language_model.*[qv]_proj", 4, 8)
            model.train()
            model.language_model.checkpointing = compiles
            called = spread(model, World(0, 2, CPU), True, compiles=compiles)
            with cpu.using("torch"):  # which the compiler takes in any case
                loss = supervised.supervised_loss(called, micro)
                loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
        assert losses[0] == losses[1] and 1 < counter.frame_count <= len(layers_of(model))
        assert not counters["graph_break"]
        assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    finally:
        dist.destroy_process_group()
