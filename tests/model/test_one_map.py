"""Published recipes that keep one attention map: nothing that would make a second one has a
gradient."""

import pytest
import torch
import torch.nn.functional as F

from lora import adapter
from model.differential import graft
from tests.model.test_differential import TARGETS, batch, tiny

pytestmark = pytest.mark.usefixtures("seeded")


def test_zeros_in_every_new_weight_stay_zero():
    """Breaks when `--zero-init` of axolotl's conversion learns a second map: q₂, k₂, the vectors of
    λ and λ_init start at 0, so that each gradient is a product with a zero."""
    x, target = torch.randn(2, 3, 9, 16)
    drawn = [torch.randn(16, 16) / 4 for _ in range(4)]
    zeros = [torch.zeros(16, 16), torch.zeros(16, 16), *torch.zeros(4, 16)]
    weights = [weight.requires_grad_() for weight in drawn + zeros]
    q1, k1, v, o, q2, k2, *vectors = weights
    optimizer = torch.optim.AdamW(weights, 0.01)
    for _ in range(20):
        lq1, lk1, lq2, lk2 = vectors
        factor = (lq1 @ lk1).exp() - (lq2 @ lk2).exp()
        first, second = (F.softmax(x @ q @ (x @ k).mT / 4, -1) for q, k in ((q1, k1), (q2, k2)))
        ((first - factor * second) @ x @ v @ o - target).square().mean().backward()
        assert all(weight.grad.any() for weight in (q1, k1, v, o))
        assert not any(weight.grad.any() for weight in (q2, k2, *vectors))
        optimizer.step()
        optimizer.zero_grad()
    assert not any(weight.any() for weight in (q2, k2, *vectors))


@pytest.mark.parametrize("learned", [False, True])
def test_a_fixed_lambda_of_zero_trains_no_second_branch(learned):
    """Breaks when DiffLoRA's quickstart, λ fixed at 0 and a norm, learns a second map; a λ that is
    learned as a number leaves 0."""
    model = tiny()
    names = graft(model, "difflora", lambda_init=0.0, norm=True)
    adapter.inject(model, TARGETS, 2, 4.0)
    second = {name: model.get_parameter(name) for name in names if ".q2." in name or ".k2." in name}
    factors = [model.get_parameter(name).requires_grad_(learned) for name in names if "_d" in name]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    moved = []
    for _ in range(3):
        model(**batch()).square().mean().backward()
        moved.append(any(p.grad.any() for p in second.values()))
        optimizer.step()
        optimizer.zero_grad()
    assert len(second) == 8
    assert moved == [False, learned, learned]
    assert all(factor.any() == learned for factor in factors)
