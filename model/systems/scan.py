"""The selective scan of Mamba (Gu and Dao 2023) and its gradient, written out.

In: the sequences x, Δ, B, C and the matrix A of a `MambaMixer`. Out: the outputs y and the state
after the last step. Letters beyond those of `model/config.py`: L steps, E channels of the mixer, N
state size (not heads), T steps of a block, whose states are in memory at the same time.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

# T on a CPU. The backward pass keeps the state before each block and computes the block again: a
# sixteenth of the memory, and faster, because a block stays in the cache.
BLOCK = 16
# numbers that fit a CPU's cache: rows are scanned a few at a time, 1.8 times as fast
CACHE_SIZE = 1 << 19
# numbers of a block on a GPU: 256 MB, of which the backward pass holds six
GPU_SIZE = 1 << 26


def selective_scan(x, delta, A, B, C, state=None, chunk=None) -> tuple[Tensor, Tensor]:
    """y (B, L, E) and the last state (B, N, E) of s_t = exp(Δ_t A) ⊙ s_{t−1} + (Δ_t x_t) ⊗ B_t, y_t
    = s_t C_t.

    x and delta (B, L, E), A (E, N) negative, B and C (B, L, N), state (B, N, E) or None for zeros
    (Gu and Dao 2023, Algorithm 2; B is discretised as Δ·B, as in all published code). Computed in
    fp32, or in fp64 if any input is fp64. Every factor is the exponential of a number ≤ 0, and
    nothing is divided by it: no Δ ≥ 0 overflows.

    `chunk`: how many steps `_scan_in_parallel` takes at a time; 0: step by step. None: 0 on a CPU,
    where it is faster, else as many as GPU_SIZE allows.
    """
    (batch, length, channels), size = x.shape, A.shape[1]
    if chunk is None:
        is_cpu = x.device.type == "cpu" and not isinstance(x, FakeTensor)
        chunk = 0 if is_cpu else max(1, GPU_SIZE // (batch * size * channels))
    given = x, delta, A.T, B, C
    is_fp64 = any(tensor.dtype == torch.float64 for tensor in given)
    dtype = torch.float64 if is_fp64 else torch.float32
    x, delta, A, B, C = (tensor.to(dtype).contiguous() for tensor in given)
    if state is None:
        state = x.new_zeros(batch, size, channels)
    state = state.to(dtype)
    # a decoding step: the general path would take three times as long
    if length == 1 and not torch.is_grad_enabled():
        _, states = _states(state, x, delta, A, B, parallel=False)
        y = _sum_states(C, states[:, 1:])
        return y, states[:, 1].clone()  # a view would keep both states alive
    rows = batch
    if not chunk:
        rows = max(1, CACHE_SIZE // (min(BLOCK, length) * size * channels))
    parts = []
    split = (tensor.split(rows) for tensor in (x, delta, B, C, state))
    for x, delta, B, C, state in zip(*split, strict=True):
        parts.append(SelectiveScan.apply(x, delta, A, B, C, state, chunk))
    if len(parts) == 1:
        return parts[0]
    y, last = zip(*parts, strict=True)
    return torch.cat(y), torch.cat(last)


class SelectiveScan(torch.autograd.Function):
    """The scan and its gradient. A is (N, E) here: channels come last, so that every step reads
    contiguous memory."""

    @staticmethod
    def forward(ctx, x, delta, A, B, C, state, chunk):
        """y (B, L, E) and the last state (B, N, E), block by block."""
        ctx.parallel = bool(chunk)
        ctx.steps = chunk or BLOCK
        y, before = torch.empty_like(x), []
        for start in range(0, x.shape[1], ctx.steps):
            block = slice(start, start + ctx.steps)
            before.append(state)
            _, states = _states(state, x[:, block], delta[:, block], A, B[:, block], ctx.parallel)
            y[:, block] = _sum_states(C[:, block], states[:, 1:])
            state = states[:, -1].clone()  # a view would keep the whole block alive
        ctx.save_for_backward(x, delta, A, B, C, torch.stack(before))
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_state):
        """The gradients of x, Δ, A, B, C and the first state, by reverse accumulation.

        Write ∂v for the gradient of the loss with respect to v, a_t = exp(Δ_t A), and g_t = ∂s_t, which includes what
        reaches s_t through all later states:

            g_t  = C_t ⊗ ∂y_t + a_{t+1} ⊙ g_{t+1}       (the last step adds the gradient of the last state instead)
            ∂C_t = Σ_e s_t[:, e] ∂y_t[e]                 from y_t = C_t s_t
            ∂B_t = Σ_e g_t[:, e] Δ_t x_t[e]              from s_t = … + (Δ_t x_t) ⊗ B_t
            ∂u_t = Σ_n g_t[n, :] B_t[n]                  of u_t = Δ_t x_t
            ∂q_t = g_t ⊙ a_t ⊙ s_{t−1}                   of the exponent q_t = Δ_t A, from s_t = exp(q_t) ⊙ s_{t−1} + …
            ∂x_t = ∂u_t Δ_t;   ∂Δ_t = ∂u_t x_t + Σ_n A ⊙ ∂q_t;   ∂A = Σ_t Δ_t ∂q_t;   ∂s_0 = a_1 ⊙ g_1

        The states of a block are computed again from the saved state before it.
        """
        x, delta, A, B, C, before = ctx.saved_tensors
        grad_y = grad_y.to(x.dtype)
        after = grad_state.to(x.dtype)  # a_{t+1} ⊙ g_{t+1} for the last step t of the block at hand
        grad_x = torch.empty_like(x)
        grad_delta = torch.empty_like(delta)
        grad_A = torch.zeros_like(A)
        grad_B = torch.empty_like(B)
        grad_C = torch.empty_like(C)
        for start in reversed(range(0, x.shape[1], ctx.steps)):
            # 1. the states of the block, once more
            block = slice(start, start + ctx.steps)
            x_t, delta_t, B_t = x[:, block], delta[:, block], B[:, block]
            grad_y_t = grad_y[:, block, None]
            decay, states = _states(before[start // ctx.steps], x_t, delta_t, A, B_t, ctx.parallel)
            # 2. g_t, from the last step to the first
            g = C[:, block, :, None] * grad_y_t
            g[:, -1] += after
            _scan(decay, g, ctx.parallel, reverse=True)
            after = decay[:, 0] * g[:, 0]
            # 3. what follows; as batched products, these two would be several times slower
            grad_C[:, block] = (states[:, 1:] * grad_y_t).sum(-1)
            grad_B[:, block] = (g * (delta_t * x_t)[:, :, None]).sum(-1)
            grad_u = _sum_states(B_t, g)
            torch.mul(grad_u, delta_t, out=grad_x[:, block])
            grad_q = g.mul_(decay).mul_(states[:, :-1])
            grad_A += (grad_q * delta_t[:, :, None]).sum((0, 1))
            grad_delta[:, block] = grad_q.mul_(A).sum(2).addcmul_(grad_u, x_t)
        return grad_x, grad_delta, grad_A, grad_B, grad_C, after, None


def _states(state, x, delta, A, B, parallel: bool) -> tuple[Tensor, Tensor]:
    """a_t (B, T, N, E), and the states (B, T + 1, N, E) from `state` itself on."""
    decay = (delta[:, :, None] * A).exp_()
    states = decay.new_empty(len(x), x.shape[1] + 1, *A.shape)
    states[:, 0] = state
    torch.mul(B[..., None], (delta * x)[:, :, None], out=states[:, 1:])
    states[:, 1].addcmul_(decay[:, 0], state)
    _scan(decay, states[:, 1:], parallel)
    return decay, states


def _scan(decay: Tensor, values: Tensor, parallel: bool, reverse: bool = False) -> None:
    """v_t ← v_t + a_t ⊙ v_{t−1} for t = 1, 2, … along dimension 1, in place; reverse: v_{t−1} ←
    v_{t−1} + a_t ⊙ v_t."""
    if parallel:
        _scan_in_parallel(decay.roll(-1 if reverse else 0, 1), values, reverse)
        return
    for t in range(1, values.shape[1]):
        if reverse:
            values[:, -t - 1].addcmul_(decay[:, -t], values[:, -t])
        else:
            values[:, t].addcmul_(decay[:, t], values[:, t - 1])


def _scan_in_parallel(decay: Tensor, values: Tensor, reverse: bool) -> None:
    """v_t ← v_t + a_t ⊙ v_{t−1} as in `_scan`, or with `reverse` v_t ← v_t + a_t ⊙ v_{t+1};
    overwrites `decay`, too.

    The work-efficient scan of Brent and Kung (1982): 3 log₂ T operations on 4 T elements in all.
    Every other position takes in the one before it, they are scanned among themselves, and those
    between take in their results.
    """
    steps = values.shape[1]
    # the latter of train/plan.py: it works in place, no memory is taken
    if steps == 1 or isinstance(values, FakeTensor):
        return
    to, source = slice(1, steps, 2), slice(0, steps - 1, 2)
    rest, ends = slice(2, steps, 2), slice(1, steps - 1, 2)
    if reverse:
        to, source = slice(steps % 2, steps - 1, 2), slice(steps % 2 + 1, steps, 2)
        odd = (steps - 1) % 2
        rest, ends = slice(odd, steps - 2, 2), slice(odd + 1, steps - 1, 2)
    values[:, to].addcmul_(decay[:, to], values[:, source])
    decay[:, to].mul_(decay[:, source])
    _scan_in_parallel(decay[:, to], values[:, to], reverse)
    values[:, rest].addcmul_(decay[:, rest], values[:, ends])


def _sum_states(weights: Tensor, states: Tensor) -> Tensor:
    """Σ_n weights (B, T, N) · states (B, T, N, E), to (B, T, E)."""
    # autocast would compute this product in bf16
    with torch.autocast(states.device.type, enabled=False):
        return (weights[:, :, None] @ states)[:, :, 0]
