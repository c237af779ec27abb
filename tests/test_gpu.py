"""What a GPU does, as far as a CPU can show it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import model.cpu as cpu
from eval.data.records import embedded_records
from lora import adapter
from model.attention import attention_mask, fused_attention
from tests.runs import WORLD, refused
from train.data.batches import collate
from train.distributed import World, layers_of, spread
from train.model import supervised_loss
from weights.load import load_model


@pytest.fixture(autouse=True)
def without_cpu_paths():
    """PyTorch's own functions compute, as on a GPU and in a compiled graph."""
    with cpu.using("torch"):
        yield


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_one_key_head_is_shared_without_a_copy(heads, is_masked, monkeypatch):
    """Breaks when CUDA's path attends otherwise, or K and V of one head are copied for every query
    head and layer."""
    called = []
    attend = F.scaled_dot_product_attention

    def spy(q, k, v, *args, **options):
        called.append((k, options["enable_gqa"]))
        return attend(q, k, v, *args, **options)

    mask = (
        attention_mask(torch.ones(1, 5, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 1]]))
        if is_masked
        else None
    )
    q, k, v = (torch.randn(1, n, 5, 8, requires_grad=True) for n in (4, heads, heads))
    keys, values = (t.repeat_interleave(4 // heads, dim=1) for t in (k, v))
    logits = q @ keys.mT * 0.3
    expected = (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(
        -1
    ) @ values
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    computed = fused_attention(q, k, v, mask, 0.3)
    assert torch.allclose(computed, expected, atol=1e-6)
    gradients = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (computed, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
    ((shared, uses_gqa),) = called
    assert uses_gqa == (mask is None), "CUDA's kernels take a mask or shared heads"
    assert mask is None or (shared.stride(1) == 0) == (heads == 1)


def test_slots_and_pictures_are_counted_before_they_reach_a_gpu(processor):
    """Breaks when a picture too few ends in an assertion on the device, which ends the process's
    use of the GPU."""
    rows = [processor.row_of(1, [("what", None)]), processor.row_of(1, [("count", None)])]
    picture = torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()
    assert len(processor.pad(rows, [picture, picture]).image_index) == 2
    refused(lambda: processor.pad(rows, [picture]), "2 image slots")


@pytest.mark.long
def test_sharded_layers_are_compiled_one_by_one(processor, tmp_path, monkeypatch):
    """Breaks when FSDP2's work between the layers breaks the compiled graph, or compiling changes a
    gradient."""
    counter = CompileCounter()
    compile_layer = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_layer(module, backend=counter))
    micro = collate(embedded_records(("vqa",), count=2), processor)
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    try:
        losses = []
        gradients = []
        for compiles in (False, True):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            model = load_model("tiny")
            del model.vision_tower.encoder.layers[1:], model.language_model.layers[1:]
            adapter.inject(model, r"language_model.*[qv]_proj", 4, 8)
            model.train()
            model.language_model.checkpointing = compiles
            called = spread(model, World(0, 2, WORLD.device), True, compiles=compiles)
            loss = supervised_loss(called, micro)
            loss.backward()
            losses.append(loss.item())
            gradients.append(
                {
                    name: p.grad.full_tensor()
                    for name, p in model.named_parameters()
                    if p.grad is not None
                }
            )
        assert losses[0] == losses[1]
        assert 1 < counter.frame_count <= len(layers_of(model))
        assert not counters["graph_break"]
        assert all(
            torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items()
        )
    finally:
        dist.destroy_process_group()
