"""The selective scan of Mamba (Gu and Dao 2023), its hand-written gradient, and an optional CUDA kernel for it.

In: the sequences x, Δ, B, C and the matrix A of a `MambaMixer`. Out: the outputs y and the state after the last step.

Letters beyond those of `model/config.py`: L steps, E channels of the mixer, N state size (not heads), T steps of a
chunk, K = ⌈L/T⌉ chunks of a row, M = B·K lanes (a lane is one chunk of one row).
"""

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.common import UserError

# Steps whose states are in memory at the same time. The backward pass keeps only the state before each block and
# computes the block again: 1/16 of the memory, and faster on a CPU, because a block stays in the cache.
BLOCK = 16
# Numbers in the states of one block that fit a CPU's cache; larger batches are scanned a few rows at a time. 1.8 times
# as fast for 64 rows of 32 steps with E = 256, N = 16 on one core.
CACHE_SIZE = 1 << 19

_kernel_is_on = False


def selective_scan(
    x: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, L, E) and the last state (B, N, E) of s_t = exp(Δ_t A) ⊙ s_{t−1} + (Δ_t x_t) ⊗ B_t, y_t = s_t C_t.

    x and delta (B, L, E), A (E, N) negative, B and C (B, L, N), state (B, N, E) or None for zeros (Gu and Dao 2023,
    Algorithm 2; B is discretised as Δ·B, as in all published code, not by the paper's Eq. 4). Computed in fp32, or in
    fp64 if any input is fp64. Every factor is the exponential of a number ≤ 0, and nothing is divided by a factor, so
    nothing overflows for any Δ ≥ 0.

    `chunk` T: the sequence is cut into chunks of T steps that run in parallel, which takes 2T + L/T steps instead of
    L. T ≥ L is a plain loop. None: the plain loop on a CPU, where it is faster, else the T with the fewest steps.
    Raises UserError for L = 0 and for shapes that do not fit each other.
    """
    batch, length, channels, size = _check_shapes(x, delta, A, B, C, state)
    if _kernel_is_on and state is None and x.is_cuda:
        return _kernel_scan(x.float(), delta.float(), A.float(), B.float(), C.float())
    if chunk is None:
        chunk = length if x.device.type == "cpu" else math.isqrt(length // 2) + 1
    dtype = torch.float32
    for tensor in (x, delta, A, B, C):
        dtype = torch.promote_types(dtype, tensor.dtype)
    state = x.new_zeros(batch, size, channels, dtype=dtype) if state is None else state.to(dtype)
    x, delta, A, B, C = (tensor.to(dtype).contiguous() for tensor in (x, delta, A.T, B, C))
    if length == 1 and not torch.is_grad_enabled():  # a decoding step: the general path would take three times as long
        _, states = _states(state, x, delta, A, B)
        return _sum_states(C, states[:, 1:]), states[:, 1].clone()  # a view would keep both states alive
    rows = batch if x.device.type != "cpu" else max(1, CACHE_SIZE // (min(BLOCK, length) * size * channels))
    parts = [
        SelectiveScan.apply(x, delta, A, B, C, state, min(chunk, length))
        for x, delta, B, C, state in zip(*(tensor.split(rows) for tensor in (x, delta, B, C, state)), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    y, last = zip(*parts, strict=True)
    return torch.cat(y), torch.cat(last)


def _check_shapes(x, delta, A, B, C, state) -> tuple[int, int, int, int]:
    """(B, L, E, N). Raises UserError for shapes that do not fit each other."""
    (batch, length, channels), size = x.shape, A.shape[-1]
    if length == 0:
        raise UserError("selective_scan: the sequence is empty (L = 0): give at least one token")
    expected = {
        "delta": (delta, (batch, length, channels)),
        "A": (A, (channels, size)),
        "B": (B, (batch, length, size)),
        "C": (C, (batch, length, size)),
        "state": (state, (batch, size, channels)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise UserError(
                f"selective_scan: {name} is {tuple(tensor.shape)}, expected {shape} for x {tuple(x.shape)} and "
                f"state size {size}: take weights and state from the same model"
            )
    return batch, length, channels, size


def use_kernel(on: bool = True, device: torch.device | str = "cuda") -> None:
    """Let GPUs scan with the kernel of the package mamba_ssm where a sequence starts without a state; False: never.

    Raises UserError if the package is not installed, or `device` is no GPU of NVIDIA's.
    """
    global _kernel_is_on
    remedy = "pip install mamba-ssm, on a machine with CUDA, or leave --kernel out"
    if on and importlib.util.find_spec("mamba_ssm") is None:
        raise UserError(f"mamba_ssm is not installed: {remedy}")
    if on and torch.device(device).type != "cuda":
        raise UserError(f"mamba_ssm computes on CUDA alone, not on {device}: leave --kernel out")
    _kernel_is_on = on


def _kernel_scan(x, delta, A, B, C) -> tuple[torch.Tensor, torch.Tensor]:
    """`selective_scan` without a first state, by the kernel, whose layout is (B, E, L); the last state has no grad."""
    # optional, for CUDA only
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # pyright: ignore[reportMissingImports]

    x, delta, B, C = (tensor.mT.contiguous() for tensor in (x, delta, B, C))
    y, last = selective_scan_fn(x, delta, A, B, C, return_last_state=True)
    return y.mT, last.mT


class SelectiveScan(torch.autograd.Function):
    """The scan and its gradient. A is (N, E) here: channels come last, so that every step reads contiguous memory."""

    @staticmethod
    def forward(ctx, x, delta, A, B, C, state, chunk):
        """y (B, L, E) and the last state (B, N, E).

        With a_t = exp(Δ_t A) and b_t = (Δ_t x_t) ⊗ B_t the recurrence is s_t = a_t ⊙ s_{t−1} + b_t. It is linear in the
        state e_k that enters lane k, so that lanes can run in parallel:

            1. run each lane from a zero state; its last state is z_k               (not needed if K = 1)
            2. P_k = ∏ a_t = exp(A Σ Δ_t) over the lane's steps;  e_{k+1} = P_k ⊙ e_k + z_k
            3. run each lane again from e_k, and write y_t = C_t s_t
        """
        batch, length = x.shape[:2]
        x, delta, B, C = (_to_lanes(tensor, chunk) for tensor in (x, delta, B, C))
        if len(x) > batch:
            last = x.new_zeros(len(x), *A.shape)
            for block in _blocks(chunk):
                last = _states(last, x[:, block], delta[:, block], A, B[:, block])[1][:, -1]
            state = _entering(_by_row(_lane_decay(delta, A), batch), _by_row(last, batch), state).flatten(0, 1)
        y, before = torch.empty_like(x), []
        for block in _blocks(chunk):
            before.append(state)
            _, states = _states(state, x[:, block], delta[:, block], A, B[:, block])
            y[:, block] = _sum_states(C[:, block], states[:, 1:])
            state = states[:, -1].clone()  # a view would keep the whole block alive
        ctx.save_for_backward(x, delta, A, B, C, torch.stack(before))
        ctx.batch, ctx.length = batch, length
        return _from_lanes(y, batch, length), _by_row(state, batch)[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_state):
        """The gradients of x, Δ, A, B, C and the first state, by reverse accumulation.

        Write ∂v for the gradient of the loss with respect to v, a_t = exp(Δ_t A), u_t = Δ_t x_t and g_t = ∂s_t, where
        g_t includes what reaches s_t through all later states:

            g_t  = C_t ⊗ ∂y_t + a_{t+1} ⊙ g_{t+1}       (the last step adds the gradient of the last state instead)
            ∂C_t = Σ_e s_t[:, e] ∂y_t[e]                 from y_t = C_t s_t
            ∂B_t = Σ_e g_t[:, e] u_t[e]                  from s_t = … + u_t ⊗ B_t
            ∂u_t = Σ_n g_t[n, :] B_t[n]
            ∂q_t = g_t ⊙ a_t ⊙ s_{t−1}                   of the exponent q_t = Δ_t A, from s_t = exp(q_t) ⊙ s_{t−1} + …
            ∂x_t = Δ_t ∂u_t;   ∂Δ_t = Σ_n A ⊙ ∂q_t + x_t ∂u_t;   ∂A = Σ_t Δ_t ∂q_t;   ∂s_0 = a_1 ⊙ g_1

        g runs backwards in time as s runs forwards, over the same lanes: with h_k the gradient that enters lane k from
        the lanes after it, and z_k what leaves lane k to the front if h_k were zero, h_{k−1} = P_k ⊙ h_k + z_k. The
        states of a block are computed again from the saved state before it.
        """
        x, delta, A, B, C, before = ctx.saved_tensors
        batch, chunk = ctx.batch, x.shape[1]
        grad_y = _to_lanes(grad_y.to(x.dtype), chunk)
        blocks = list(enumerate(_blocks(chunk)))[::-1]
        after = grad_state.to(x.dtype)  # a_{t+1} ⊙ g_{t+1} for the last step t of the block at hand
        if len(x) > batch:
            leaving = torch.zeros_like(before[0])
            for _, block in blocks:
                leaving = _adjoints(_decay(delta[:, block], A), C[:, block], grad_y[:, block], leaving)[1]
            decay, leaving = (_by_row(tensor, batch).flip(1) for tensor in (_lane_decay(delta, A), leaving))
            after = _entering(decay, leaving, after).flip(1).flatten(0, 1)
        grad_x, grad_delta, grad_B, grad_C = (torch.empty_like(tensor) for tensor in (x, delta, B, C))
        grad_A = torch.zeros_like(A)
        for index, block in blocks:
            x_t, delta_t, B_t, grad_y_t = x[:, block], delta[:, block], B[:, block], grad_y[:, block]
            decay, states = _states(before[index], x_t, delta_t, A, B_t)
            g, after = _adjoints(decay, C[:, block], grad_y_t, after)
            grad_C[:, block] = _sum_channels(states[:, 1:], grad_y_t)
            grad_B[:, block] = _sum_channels(g, delta_t * x_t)
            grad_u = _sum_states(B_t, g)
            grad_q = g.mul_(decay).mul_(states[:, :-1])
            grad_A += (grad_q * delta_t[:, :, None]).sum((0, 1))
            grad_delta[:, block] = grad_q.mul_(A).sum(2).addcmul_(grad_u, x_t)
            grad_x[:, block] = grad_u.mul_(delta_t)
        grads = (_from_lanes(grad, batch, ctx.length) for grad in (grad_x, grad_delta, grad_B, grad_C))
        grad_x, grad_delta, grad_B, grad_C = grads
        return grad_x, grad_delta, grad_A, grad_B, grad_C, _by_row(after, batch)[:, 0], None


def _blocks(steps: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, steps)) for start in range(0, steps, BLOCK)]


def _to_lanes(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """(B, L, W) to lanes (M, T, W), padded with zeros: a step with Δ = 0 leaves the state as it is."""
    missing = -tensor.shape[1] % chunk
    if missing:  # F.pad by nothing would copy
        tensor = F.pad(tensor, (0, 0, 0, missing))
    return tensor.unflatten(1, (-1, chunk)).flatten(0, 1)


def _from_lanes(tensor: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Lanes (M, T, W) back to (B, L, W)."""
    return _by_row(tensor, batch).flatten(1, 2)[:, :length]


def _by_row(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """(M, …) to (B, K, …)."""
    return tensor.unflatten(0, (batch, -1))


def _decay(delta: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """a_t = exp(Δ_t A), (M, T, N, E)."""
    return (delta[:, :, None] * A).exp_()


def _lane_decay(delta: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """P, the product of a lane's a_t, (M, N, E)."""
    return (delta.sum(1)[:, None] * A).exp_()


def _states(state, x, delta, A, B) -> tuple[torch.Tensor, torch.Tensor]:
    """a_t (M, T, N, E), and the states (M, T + 1, N, E) from `state` itself on."""
    decay = _decay(delta, A)
    states = decay.new_empty(len(x), x.shape[1] + 1, *A.shape)
    states[:, 0] = state
    torch.mul(B[..., None], (delta * x)[:, :, None], out=states[:, 1:])
    for t in range(x.shape[1]):
        states[:, t + 1].addcmul_(decay[:, t], states[:, t])
    return decay, states


def _adjoints(decay, C, grad_y, after) -> tuple[torch.Tensor, torch.Tensor]:
    """g_t (M, T, N, E), where the last step adds `after`, and a_1 ⊙ g_1, which goes to the steps before these."""
    g = C[..., None] * grad_y[:, :, None]
    g[:, -1] += after
    for t in range(g.shape[1] - 1, 0, -1):
        g[:, t - 1].addcmul_(decay[:, t], g[:, t])
    return g, decay[:, 0] * g[:, 0]


def _entering(decay: torch.Tensor, added: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """e (B, K, N, E) with e_0 = first, e_{k+1} = decay_k ⊙ e_k + added_k: what enters each lane."""
    entering = torch.empty_like(added)
    for k in range(added.shape[1]):
        entering[:, k] = first
        first = decay[:, k] * first + added[:, k]
    return entering


def _sum_states(weights: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Σ_n weights (M, T, N) · states (M, T, N, E), to (M, T, E)."""
    with torch.autocast(states.device.type, enabled=False):  # autocast would compute this product in bf16
        return (weights[:, :, None] @ states)[:, :, 0]


def _sum_channels(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ_e states (M, T, N, E) · weights (M, T, E), to (M, T, N). As a batched product it is several times slower."""
    return (states * weights[:, :, None]).sum(-1)
