"""The selective scan of Mamba (Gu and Dao 2023), its hand-written gradient, and an optional CUDA kernel for it.

In: the sequences x, Δ, B, C and the matrix A of a `MambaMixer`. Out: the outputs y and the state after the last step.

Letters beyond those of `model/config.py`: L steps, E channels of the mixer, N state size (not heads), T steps of a
block, whose states are in memory at the same time.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

# Steps of a block on a CPU. The backward pass keeps the state before each block and computes the block again: a
# sixteenth of the memory, and faster, because a block stays in the cache.
BLOCK = 16
# Numbers in the states of a block that fit a CPU's cache; larger batches are scanned a few rows at a time. 1.8 times as
# fast for 64 rows of 32 steps with E = 256, N = 16 on one core.
CACHE_SIZE = 1 << 19
# The same on a GPU, for its memory: 256 MB, of which the backward pass holds six.
GPU_SIZE = 1 << 26

kernel_is_on = False  # `model.mamba.choose_kernel` sets it


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
    Algorithm 2; B is discretised as Δ·B, as in all published code). Computed in fp32, or in fp64 if any input is fp64.
    Every factor is the exponential of a number ≤ 0, and nothing is divided by it: no Δ ≥ 0 overflows.

    `chunk` T: T steps at a time by `_scan_in_parallel`, which takes 3 log₂ T operations in place of T. 0: step by step,
    in blocks. None: 0 on a CPU, where it is faster, else as many in parallel as GPU_SIZE allows.
    """
    (batch, length, channels), size = x.shape, A.shape[1]
    assert length > 0, "the sequence is empty"
    if kernel_is_on and state is None and x.is_cuda:
        return _kernel_scan(x.float(), delta.float(), A.float(), B.float(), C.float())
    if chunk is None:
        is_cpu = x.device.type == "cpu" and not isinstance(x, FakeTensor)
        chunk = 0 if is_cpu else max(1, GPU_SIZE // (batch * size * channels))
    is_fp64 = any(tensor.dtype == torch.float64 for tensor in (x, delta, A, B, C))
    dtype = torch.float64 if is_fp64 else torch.float32
    state = x.new_zeros(batch, size, channels, dtype=dtype) if state is None else state.to(dtype)
    x, delta, A, B, C = (tensor.to(dtype).contiguous() for tensor in (x, delta, A.T, B, C))
    if length == 1 and not torch.is_grad_enabled():  # a decoding step: the general path would take three times as long
        _, states = _states(state, x, delta, A, B, parallel=False)
        return _sum_states(C, states[:, 1:]), states[:, 1].clone()  # a view would keep both states alive
    rows = batch if chunk else max(1, CACHE_SIZE // (min(BLOCK, length) * size * channels))
    split = zip(*(tensor.split(rows) for tensor in (x, delta, B, C, state)), strict=True)
    parts = [SelectiveScan.apply(x, delta, A, B, C, state, chunk) for x, delta, B, C, state in split]
    y, last = zip(*parts, strict=True)
    return (y[0], last[0]) if len(y) == 1 else (torch.cat(y), torch.cat(last))


def _kernel_scan(x, delta, A, B, C) -> tuple[torch.Tensor, torch.Tensor]:
    """`selective_scan` without a first state, by the kernel, whose layout is (B, E, L); the last state has no grad."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # pyright: ignore[reportMissingImports]

    x, delta, B, C = (tensor.mT.contiguous() for tensor in (x, delta, B, C))
    y, last = selective_scan_fn(x, delta, A, B, C, return_last_state=True)
    return y.mT, last.mT


class SelectiveScan(torch.autograd.Function):
    """The scan and its gradient. A is (N, E) here: channels come last, so that every step reads contiguous memory."""

    @staticmethod
    def forward(ctx, x, delta, A, B, C, state, chunk):
        """y (B, L, E) and the last state (B, N, E), block by block."""
        y, before = torch.empty_like(x), []
        for block in _blocks(x.shape[1], chunk):
            before.append(state)
            _, states = _states(state, x[:, block], delta[:, block], A, B[:, block], bool(chunk), keep=False)
            y[:, block] = _sum_states(C[:, block], states[:, 1:])
            state = states[:, -1].clone()  # a view would keep the whole block alive
        ctx.save_for_backward(x, delta, A, B, C, torch.stack(before))
        ctx.chunk = chunk
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
        parallel, grad_y = bool(ctx.chunk), grad_y.to(x.dtype)
        after = grad_state.to(x.dtype)  # a_{t+1} ⊙ g_{t+1} for the last step t of the block at hand
        grad_x, grad_delta, grad_B, grad_C = (torch.empty_like(tensor) for tensor in (x, delta, B, C))
        grad_A = torch.zeros_like(A)
        for index, block in reversed(list(enumerate(_blocks(x.shape[1], ctx.chunk)))):
            x_t, delta_t, B_t, grad_y_t = x[:, block], delta[:, block], B[:, block], grad_y[:, block]
            decay, states = _states(before[index], x_t, delta_t, A, B_t, parallel)
            g = C[:, block, :, None] * grad_y_t[:, :, None]
            g[:, -1] += after
            if parallel:
                _scan_in_parallel(decay.roll(-1, 1), g, reverse=True)  # the last factor is applied to nothing
            else:
                for t in range(g.shape[1] - 1, 0, -1):
                    g[:, t - 1].addcmul_(decay[:, t], g[:, t])
            after = decay[:, 0] * g[:, 0]
            grad_C[:, block] = _sum_channels(states[:, 1:], grad_y_t)
            grad_B[:, block] = _sum_channels(g, delta_t * x_t)
            grad_u = _sum_states(B_t, g)
            torch.mul(grad_u, delta_t, out=grad_x[:, block])
            grad_q = g.mul_(decay).mul_(states[:, :-1])
            grad_A += (grad_q * delta_t[:, :, None]).sum((0, 1))
            grad_delta[:, block] = grad_q.mul_(A).sum(2).addcmul_(grad_u, x_t)
        return grad_x, grad_delta, grad_A, grad_B, grad_C, after, None


def _blocks(length: int, chunk: int) -> list[slice]:
    """The steps in blocks of `chunk` steps, or of BLOCK."""
    return [slice(start, start + (chunk or BLOCK)) for start in range(0, length, chunk or BLOCK)]


def _states(state, x, delta, A, B, parallel, keep=True) -> tuple[torch.Tensor, torch.Tensor]:
    """a_t (B, T, N, E), and the states (B, T + 1, N, E) from `state` itself on. keep: a_t is still needed."""
    decay = (delta[:, :, None] * A).exp_()
    states = decay.new_empty(len(x), x.shape[1] + 1, *A.shape)
    states[:, 0] = state
    torch.mul(B[..., None], (delta * x)[:, :, None], out=states[:, 1:])
    if parallel:
        states[:, 1].addcmul_(decay[:, 0], state)
        _scan_in_parallel(decay.clone() if keep else decay, states[:, 1:])
    else:
        for t in range(x.shape[1]):
            states[:, t + 1].addcmul_(decay[:, t], states[:, t])
    return decay, states


def _scan_in_parallel(decay: torch.Tensor, values: torch.Tensor, reverse: bool = False) -> None:
    """v_t ← v_t + a_t ⊙ v_{t−1} for t = 1, 2, … along dimension 1, in place; reverse: v_{t+1}, from the last t back.

    The work-efficient scan of Brent and Kung (1982): 3 log₂ T operations on 4 T elements in all. Upwards, position
    2m·s − 1 gathers the s positions before it, and its `decay`, which is overwritten, becomes the product of theirs;
    downwards, the positions between take over what ends before them.
    """
    if isinstance(values, FakeTensor):  # of train/plan.py: it works in place, no memory is taken
        return
    steps, span = values.shape[1], 1

    def add(first: int) -> tuple[slice, slice]:
        """Add to positions first, first + 2s, … what ends s positions before; returns both."""
        low, high = (steps - 1 - first) % (2 * span) if reverse else first, steps - first if reverse else steps
        shift = span if reverse else -span
        to, other = slice(low, high, 2 * span), slice(low + shift, high + shift, 2 * span)
        values[:, to].addcmul_(decay[:, to], values[:, other])
        return to, other

    while span < steps:
        to, other = add(2 * span - 1)
        decay[:, to].mul_(decay[:, other])
        span *= 2
    while span > 1:
        span //= 2
        if 3 * span <= steps:
            add(3 * span - 1)


def _sum_states(weights: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Σ_n weights (B, T, N) · states (B, T, N, E), to (B, T, E)."""
    with torch.autocast(states.device.type, enabled=False):  # autocast would compute this product in bf16
        return (weights[:, :, None] @ states)[:, :, 0]


def _sum_channels(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ_e states (B, T, N, E) · weights (B, T, E), to (B, T, N). As a batched product it is several times slower."""
    return (states * weights[:, :, None]).sum(-1)
