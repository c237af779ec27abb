"""The plan of a run: memory and operations from shapes alone are those of the step itself, and
nothing is trained."""

import gc
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from model import cpu, registry
from model.attention import attention_modules
from model.config import PRESETS
from model.systems import mamba, scan
from model.systems.configs import QMAMBA_PRESETS, MambaConfig, QMambaConfig
from tests.files import draw, table, write_vqav2
from tests.runs import refused, settings_of, stage_settings, train
from train.data.batches import Order
from train.data.sources import read_split
from train.distributed import World
from train.model import open_model, supervised_loss
from train.optim import parameter_count, trainable
from train.plan import (
    CUDA,
    PlanRow,
    StepCost,
    cpu_seconds,
    open_sample,
    plan,
    plan_table,
    processor_of,
    spread_cost,
    step_costs,
)
from train.settings import step_layout
from train.systems.qmamba import TINY

CPU = torch.device("cpu")
META = torch.device("meta")
QUICK = "--device cpu --base tiny --samples 16 --batch-size 8 "
SMALL = replace(
    PRESETS["tiny"],
    vision=replace(PRESETS["tiny"].vision, num_hidden_layers=1, image_size=56),
    text=replace(PRESETS["tiny"].text, num_hidden_layers=2),
)
MAMBA = MambaConfig(1728, 32, 1, 4, eos_token_id=1, bos_token_id=2)
QMAMBA = QMambaConfig(SMALL.vision, replace(TINY, num_blocks=1, queries=4), MAMBA, 1727)


def first_batch(settings, model):
    order = Order(read_split(settings), processor_of(settings, model), settings, World(0, 1, CPU))
    return max(open_sample(order, settings), key=lambda micro: micro.batch.input_ids.numel())


def measured_peak(settings):
    """Bytes of the weights, and the peak of what PyTorch allocates in two whole steps beside
    them."""
    model, optimizer = open_model(settings, CPU)
    micro = first_batch(settings, model)
    model.train()
    gc.collect()  # what an earlier profile saw allocated would count as freed in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in range(2):
            for _ in range(step_layout(settings, 1)[1]):
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast == "bf16"):
                    loss = supervised_loss(model, micro, settings.label_smoothing)
                (loss / micro.tokens).backward()
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    events = profiled.profiler.kineto_results.events()
    live = 0
    peak = 0
    # Within it oneDNN takes a workspace that grows with threads and differs between processors, and
    # is no tensor.
    convolutions = [
        (e.start_ns(), e.end_ns()) for e in events if e.name() == "aten::convolution_backward"
    ]
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            if not any(start <= event.start_ns() <= end for start, end in convolutions):
                peak = max(peak, live)
    return peak + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# sizes of the decoder | flags
RUNS = """
    {} | --attention twin --dropout 0.1
    {"hidden_size": 512, "intermediate_size": 2048, "model_type": "gemma2", "attn_logit_softcapping": 50.0, \
        "final_logit_softcapping": 30.0, "sliding_window": 12} \
        | --attention softmax --full --autocast bf16 --checkpointing
    {"num_attention_heads": 6} | --attention shared --feed-forward swiglu-new --step-batch 16
    {"hidden_size": 256} | --attention softmax --full --optimizer muon --batch-size 1 --label-smoothing 0.3
    {} | qmamba --stage 2 --base small --step-batch 8
    {} | qmamba --stage 2 --base small --step-batch 8 --checkpointing"""


@pytest.mark.long
@pytest.mark.parametrize("sizes, flags", table(RUNS))
def test_memory_is_what_steps_allocate(sizes, flags, monkeypatch):
    """Breaks when the memory that a plan promises is not that of a step, a part of it is counted
    twice, or a scan is not planned as a GPU computes it."""
    text = replace(SMALL.text, **json.loads(sizes))
    monkeypatch.setitem(PRESETS, "tiny", replace(SMALL, text=text))
    monkeypatch.setitem(QMAMBA_PRESETS, "small", QMAMBA)
    monkeypatch.setattr(
        cpu, "ways", frozenset()
    )  # a plan is of PyTorch's functions; a CPU's own keep a few maps more
    monkeypatch.setitem(registry.SYSTEM_PRESETS, "small", "qmamba")
    if flags.startswith("qmamba"):
        settings = stage_settings("qmamba", QUICK + flags.removeprefix("qmamba"))
    else:
        settings = settings_of(QUICK + flags)
    row = plan(settings)
    cost = row.checkpointed if settings.checkpointing else row.plain
    monkeypatch.setattr(mamba, "selective_scan", partial(scan.selective_scan, chunk=scan.GPU_SIZE))
    assert cost.memory == pytest.approx(measured_peak(settings), rel=0.01)
    assert row.checkpointed.memory <= row.plain.memory
    assert row.checkpointed.flops > row.plain.flops
    assert row.plain.gradients == 4 * row.trained
    assert row.plain.moments == 8 * row.trained or settings.optimizer == "muon"


@pytest.mark.long
def test_operations_are_those_that_pytorch_counts(monkeypatch):
    """Breaks when a kind of product is not counted, or the backward pass through frozen weights is
    counted double."""
    monkeypatch.setitem(PRESETS, "tiny", SMALL)
    monkeypatch.setattr(cpu, "MIN_OPERATIONS", 1 << 60)  # the counter knows PyTorch's own products
    settings = settings_of(f"{QUICK} --attention softmax --autocast bf16")
    model = open_model(settings, META)[0]
    micro = first_batch(settings, model)
    flops = step_costs(model, micro, torch.bfloat16, False, "adamw")[0].flops
    model = open_model(settings, CPU)[0].train()
    for layer in attention_modules(model).values():
        layer.softcap = 50.0  # by the equations, of the kept positions alone in the last layer
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        supervised_loss(model, micro).backward()
    # the fused kernel computes the maps once more in its backward pass: in the last layer at the
    # kept positions
    (rows, length) = micro.batch.input_ids.shape
    text = SMALL.text
    queries = length + micro.positions.shape[1]
    assert (
        flops
        == counter.get_total_flops()
        + 2 * rows * text.num_attention_heads * queries * length * text.head_dim
    )


def test_a_plan_opens_headers_and_a_sample_and_trains_nothing(workplace, monkeypatch, printed):
    """Breaks when a plan reads the weights, makes a folder, or passes over pictures that are not
    there."""
    monkeypatch.setattr(
        torch.nn.Module, "load_state_dict", lambda *_, **__: pytest.fail("the weights are read")
    )
    write_vqav2(Path("vqav2"))
    flags = "--base embedded --data vqav2:vqav2 --recipe paper-1 --validation 0 --fraction 1"
    Path("vqav2/train2014/COCO_train2014_000000000003.jpg").unlink()
    train(flags, "--plan --gpu A100")
    table = "".join(printed().split(" "))
    assert "|embedded-softmax|344,064|4|60|15|" in table
    assert "1×A100" in table
    assert {path.name for path in Path().iterdir()} == {"vqav2"}
    refused(lambda: plan(settings_of(f"{flags} --max-bad 2")), "3 of the first")
    row = plan(settings_of(f"{flags} --steps 17 --checkpointing"))
    # fp32: weights and two moments in each of three checkpoints, and the adapter twice
    assert (row.samples, row.disk) == (60 + 2 * 4, (3 * 3 + 2) * 4 * 344_064)
    of_plan = plan(settings_of(f"{flags} --steps 17"))
    assert row.flops / of_plan.flops == row.checkpointed.flops / row.plain.flops
    assert row._replace(gpus=2, flops=312e12 * 2 * 3600).hours("A100") == "2.00 – 3.33"


def test_where_a_run_fits(monkeypatch, printed):
    """Breaks when a plan recommends what does not fit or changes the steps, or says nothing of what
    does not fit."""
    sizes = {
        "few": 10.0,
        "many": 30.0,
    }  # GB of one row and of 16, without checkpointing; with it half

    def planned(settings, name=None, gpus=1):
        total = (
            sizes["few" if settings.batch_size == 1 else "many"]
            / (4 if settings.quantize else 1)
            * 1e9
            - CUDA
        )
        costs = [StepCost(total, 0, 0, 0, 1e12), StepCost(total / 2, 0, 0, 0, 1e12)]
        return PlanRow("run", gpus, 1, settings.batch_size, 16, 16, 1, 100, *costs, 0, 1e15)

    monkeypatch.setattr("train.plan.plan", planned)

    def verdict(flags):
        train(f"--base mini --batch-size 16 --plan {flags}")
        return printed().splitlines()[-1]

    assert verdict("") == "fits on 16 GB with --batch-size 4 --step-batch 16 (14.0 GB of 16)"
    assert verdict("--gpu RTX4090 --checkpointing") == "fits on 24 GB as it is (15.5 GB of 24)"
    assert (
        verdict("--gpu A10") == "fits on 24 GB with --batch-size 8 --step-batch 16 (19.3 GB of 24)"
    )
    sizes.update(few=30.0, many=30.9)
    assert verdict("--gpu T4") == "fits on 16 GB with --checkpointing (15.9 GB of 16)"
    sizes.update(few=34.0, many=34.0)
    assert verdict("--gpu T4") == "fits on 16 GB with --quantize nf4 (8.5 GB of 16)"
    lines = plan_table([planned(settings_of(""), "run", 1)], "T4")
    assert "has no bf16, so give `--dtype fp16 --autocast fp16`" in lines
    assert verdict("--gpu T4 --shard").startswith("does not fit on 16 GB: it takes 17.5 GB")


def test_the_toy_s_seconds_grow_with_its_steps():
    """Breaks when a laptop's plan counts the steps that it measures instead of those of the run."""
    short, long = (
        cpu_seconds(settings_of(f"--batch-size 2 --samples {samples}")) for samples in (20, 2000)
    )
    assert 20 * short < long


def test_the_plan_of_own_pictures_counts_both_stages(workplace):
    """Breaks when the plan of own pictures ends in a traceback, leaves the alignment out, or writes
    a checkpoint."""
    draw("red.png", "red")
    Path("data.jsonl").write_text('{"image": "red.png", "prefix": "a", "suffix": "b"}\n' * 40)
    flags = "--data jsonl:data.jsonl --recipe own --steps 1 --checkpoint-every 1 --align"
    short, long = (cpu_seconds(settings_of(flags, steps)) for steps in ("4", "4000"))
    assert 20 * short < long
    assert sorted(path.name for path in workplace.iterdir()) == ["data.jsonl", "red.png"]


def test_the_paper_s_model_has_611_million_parameters_to_train():
    """Breaks when a published geometry is counted otherwise than it is trained, or what GPUs share
    is not divided,
    or a GPU's copy of the gradients, which DDP exchanges, is left out."""
    settings = settings_of("--base paligemma-3b-224 --recipe paper-2 --dtype bf16")
    model = open_model(settings, META)[0]
    assert parameter_count(trainable(model).values()) == 611_348_472
    layer = sum(p.nbytes for p in model.language_model.layers[0].parameters())
    alone = StepCost(80.0, 8.0, 16.0, 5.0, 1e12)
    cost = spread_cost(alone, 8, model, True, torch.bfloat16)
    assert 2 * layer + 2 * 257216 * 2048 < cost.weights - 80 / 8 < 2.1 * layer + 2.1 * 257216 * 2048
    assert cost == StepCost(cost.weights, 1.0, 2.0, 5.0, 1e12)
    plain, _ = open_model(settings_of("--base tiny --attention softmax"), META)
    half, whole = (
        spread_cost(alone, 8, plain, True, d).weights - 10 for d in (torch.bfloat16, None)
    )
    assert whole == 2 * half
    assert spread_cost(alone, 8, model, False, torch.bfloat16) == StepCost(
        80.0, 16.0, 16.0, 5.0, 1e12
    )
