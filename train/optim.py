"""Which parameters are trained, at which rate, on which schedule: an optimizer with one group for
each rule (names, rate, decay), and the factor of the rate at every step."""

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# λ, μ and the norms of a graft. No decay: it would pull these scalars and gains towards values
# without meaning.
SCALARS = r".*\.(lambda_\w+|lambda_proj\.\w+|mu|subln\.weight|gate\.weight|temperature|sinks)"


class Rule(NamedTuple):
    """Parameters, by name, that are trained at `lr` with `weight_decay`."""

    names: Sequence[str]
    lr: float
    weight_decay: float = 0.0


def parameter_names(model: nn.Module, pattern: str) -> list[str]:
    """The names of the parameters whose whole name matches `pattern` (re.fullmatch), at least
    one."""
    names = [name for name, _ in model.named_parameters() if re.fullmatch(pattern, name)]
    assert names, f"no parameter matches {pattern!r}"
    return names


def parameter_groups(model: nn.Module, rules: Sequence[Rule]) -> list[dict]:
    """Optimizer groups with their "names", one for each rule; a parameter belongs to the first rule
    that names it.
    All other parameters are frozen."""
    parameters = dict(model.named_parameters())
    groups, taken = [], set()
    for rule in rules:
        names = [name for name in rule.names if name not in taken]
        taken.update(names)
        rates = {"lr": rule.lr, "base_lr": rule.lr, "weight_decay": rule.weight_decay}
        groups.append({**rates, "names": names, "params": [parameters[name] for name in names]})
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in taken)
    return groups


def make_adamw(
    groups: list[dict], betas: tuple[float, float], kind: type = torch.optim.AdamW
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019), or another `kind`, over `groups`, fused where PyTorch
    can."""
    is_fused = all(
        parameter.device.type in ("cuda", "cpu")
        for group in groups
        for parameter in group["params"]
    )
    return kind(groups, betas=betas, fused=is_fused)


# The decay of Adam (Kingma & Ba 2015) is a part of the gradient. RAdam (Liu et al. 2020) has
# AdamW's decay, and takes a parameter at a time: all at once would copy every gradient.
OPTIMIZERS = {"adamw": make_adamw, "adam": partial(make_adamw, kind=torch.optim.Adam)}
OPTIMIZERS["radam"] = partial(torch.optim.RAdam, decoupled_weight_decay=True, foreach=False)


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon may update it: a matrix that is no embedding, and not of λ, which has a rate of
    its own."""
    return parameter.dim() == 2 and "embed" not in name and not re.fullmatch(SCALARS, name)


class Muon(torch.optim.Muon):
    """PyTorch's Muon, with products in the dtype of the weights. PyTorch's are in bf16, which takes
    17 times as long where a CPU has no instructions for it."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                # Nesterov's momentum
                mean = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp_(mean, group["momentum"]))
                # a matrix with more rows than columns moves further
                ratio = max(1, len(p) / p.shape[1])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * ratio**0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U·Vᵀ of a matrix U·S·Vᵀ, by five steps of Newton-Schulz (Jordan 2024)."""
    if len(matrix) > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        # x becomes (3.4445 − 4.775·G + 2.0315·G²)·x, whose singular values are nearer to 1
        gram = x @ x.T
        change = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        x = torch.addmm(x, change, x, beta=3.4445)
    return x


class MuonAdamW(Optimizer):
    """Muon (Jordan 2024) for the matrices in `groups`, AdamW for embeddings, norms, biases and
    convolutions.

    groups: of `parameter_groups`; each is split in two. ratio: AdamW's rate over Muon's, in each of
    these groups. plain: groups that AdamW takes whole, at their own rate. Muon moves a matrix by
    its rate in every direction, whatever its gradient's size. Checkpoints see one optimizer.
    """

    def __init__(
        self,
        groups: Sequence[dict],
        betas: tuple[float, float],
        ratio: float,
        plain: Sequence[dict] = (),
    ):
        matrices = []
        others = [*plain]
        for group in groups:
            matrices += subgroup(group, True, 1.0)
            others += subgroup(group, False, ratio)
        super().__init__([*others, *matrices], {})
        self.parts = []
        if others:
            self.parts.append(make_adamw(others, betas))
        if matrices:
            self.parts.append(Muon(matrices, momentum=0.95))
        for part in self.parts:
            # the parts share their groups and their state with this optimizer
            part.state = self.state

    def step(self, closure=None) -> None:
        for part in self.parts:
            part.step(closure)


def subgroup(group: dict, is_matrix: bool, factor: float) -> list[dict]:
    """The inner matrices of a group, or all else, at `factor` times its rate; [] without any."""
    named = zip(group["names"], group["params"], strict=True)
    chosen = {name: p for name, p in named if is_inner_matrix(name, p) == is_matrix}
    if not chosen:
        return []
    rates = {rate: factor * group[rate] for rate in ("lr", "base_lr")}
    return [{**group, **rates, "names": [*chosen], "params": [*chosen.values()]}]


def reconnect(optimizer: Optimizer, model: nn.Module) -> None:
    """Point the groups of a fresh optimizer to the model's parameters by name: FSDP2 has replaced
    the tensors."""
    parameters = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameters[name] for name in group["names"]]


def rate_factor(step: int, total: int, warmup: float, schedule: str) -> float:
    """The factor of the peak rate at a step: from 1 / (warmup + 1) at step 0 up to 1, then
    `schedule` down to 0.

    warmup: steps, or if below 1 a share of `total`. schedule: "linear", "cosine", or "constant",
    which stays at 1.
    """
    warmup = int(warmup if warmup >= 1 else warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    factors = {
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "constant": 1.0,
    }
    return factors[schedule]


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Give every group its peak rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def optimized(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters of an optimizer, by name. A vision tower that was aligned stays in it when
    frozen."""
    groups = optimizer.param_groups
    return {
        name: p for group in groups for name, p in zip(group["names"], group["params"], strict=True)
    }


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def parameter_count(parameters) -> int:
    """The number of elements in all of `parameters`."""
    return sum(parameter.numel() for parameter in parameters)
