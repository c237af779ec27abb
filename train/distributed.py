"""One process or several: a `World` from what `torchrun` sets, a model wrapped by DDP or sharded by
FSDP2, and the answers to questions that all processes share.
"""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eval.answer import ask_all
from model.common import UserError, shown
from model.device import choose_device
from weights.fingerprint import gathered
from weights.load import empty_model

LAYERS = ("vision_tower.encoder.layers", "language_model.layers", "multi_modal_projector.blocks")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # without torchrun


@dataclass(frozen=True)
class World:
    """The rank of this process among `size` processes, and its device. The first one prints and
    writes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value) -> list:
        """The `value` of every process, by rank, on the CPU, so that no process waits for its
        GPU."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sums(self, *values: float) -> list:
        """The sum of each value over all processes, in one exchange."""
        return [sum(of_all) for of_all in zip(*self.gather(values), strict=True)]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def joined_world(device: str) -> Iterator[World]:
    """The world that `torchrun` started, if it did, for the block; the threads of PyTorch are
    afterwards what they were. Raises UserError for a device that is not there, and for variables
    that `torchrun` does not set so."""
    threads = torch.get_num_threads()
    named = {name: os.environ.get(name, alone) for name, alone in ALONE.items()}
    problem = f"{shown(named)}: start with torchrun, which sets these, or unset them"
    numbers = [int(value) for value in named.values() if value.isdecimal()]
    if len(numbers) < 3 or max(numbers[:2]) >= numbers[2]:
        raise UserError(problem)
    rank, local, size = numbers
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{local}"
    elif device == "auto" and size > 1:  # gloo does not have MPS
        device = "cpu"
    chosen = choose_device(device)
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        kind = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        try:
            dist.init_process_group(kind, device_id=chosen if on_gpu else None)
        except (ValueError, RuntimeError) as error:  # of the address
            raise UserError(f"{problem} ({shown(error)})") from None
    try:
        yield World(rank, size, chosen)
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            # a process group kept alive by a reference cycle would be destroyed too late, and abort
            gc.collect()
            dist.destroy_process_group()


def spread(
    model: nn.Module,
    world: World,
    shard: bool,
    autocast: torch.dtype | None = None,
    compiles: bool = False,
) -> nn.Module:
    """The module to call in place of `model`: itself in one process; else DDP, or with `shard`
    FSDP2 layer by layer.

    Both average gradients, so the loss must be multiplied by `world.size`. FSDP2 gathers an fp32
    model in bf16 under `autocast` to bf16, and sums gradients in fp32.
    """
    if world.size == 1 or not shard:
        if world.size > 1:
            model = DistributedDataParallel(model)
        return torch.compile(model) if compiles else model
    # here: it takes a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if reads_bf16(model, autocast):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in layers_of(model):
        # the layers alone: FSDP2 does its work between them, where a graph of the whole would break
        if compiles:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of vision tower, decoder and projector, which FSDP2 shards one by one."""
    return [layer for name, part in model.named_modules() if name in LAYERS for layer in part]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has spread the weights: no process holds all of them."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def whole_model(model: nn.Module, world: World) -> nn.Module:
    """The model; if FSDP2 has sharded it, a whole one in the main memory of the first process."""
    if not is_sharded(model):
        return model
    whole = empty_model(model.config, next(model.parameters()).dtype)
    for name, tensor in model.state_dict().items():
        tensor = gathered(tensor)
        if world.is_first:
            whole.load_state_dict({name: tensor.cpu()}, strict=False, assign=True)
    return whole


def reads_bf16(model: nn.Module, autocast: torch.dtype | None) -> bool:
    """Whether an fp32 model may gather its weights in bf16: λ and decay rates (A_log) need
    fp32."""
    needs_fp32 = model.grafts or any(name.endswith("A_log") for name, _ in model.named_parameters())
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return autocast == torch.bfloat16 and is_fp32 and not needs_fp32


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Set whether DDP's next backward pass exchanges gradients: only the last micro-batch of a step
    needs to. FSDP2 always does: between micro-batches each process would else hold the gradients of
    all weights."""
    model = getattr(model, "_orig_mod", model)  # torch.compile has wrapped it
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = sync


def ask_together(
    world: World, model, processor, questions: Sequence, **options
) -> list[str | None]:
    """`eval.answer.ask_all`, shared by all processes, which call it with the same questions: each
    asks its copy of the model about its share of the pictures. All get all answers, None where a
    question cannot be asked."""
    # 1. this process's share
    keys = list(dict.fromkeys(question.key for question in questions))
    share = {*keys[world.rank :: world.size]}
    places = [place for place, question in enumerate(questions) if question.key in share]
    if not world.is_first:
        options["progress"] = None
    asks = [questions[place] for place in places]
    answers = ask_all(model, processor, asks, left_out={}, **options)

    # 2. those of all
    together = {}
    for of_process in world.gather(dict(zip(places, answers, strict=True))):
        together |= of_process
    return [together[place] for place in range(len(questions))]
