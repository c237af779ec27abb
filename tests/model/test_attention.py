"""The mask, against its rule written as loops, and what rests on it."""

import pytest
import torch

from model.attention import Attention, attention_mask
from tests.reference import set_attention_backend


def mask_by_loops(valid, types, window):
    rows, width = types.shape
    mask = torch.zeros(rows, 1, width, width, dtype=torch.bool)
    for b in range(rows):
        for i in range(width):
            for j in range(width):
                tokens_after_key = int(valid[b, j + 1 : i + 1].sum())
                looks_back = j <= i and (window is None or tokens_after_key < window)
                same_block = types[b, i] == 0 and types[b, j] == 0
                mask[b, 0, i, j] = i == j or ((looks_back or same_block) and bool(valid[b, j]))
    return mask


def digits(rows):
    return torch.tensor([list(map(int, row)) for row in rows.split()])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_mask_is_the_rule(window):
    """Breaks when a query attends to a later suffix token or to padding, or the prefix hides a
    token from itself."""
    valid = digits("00111111 11111111 11111100 11100011").bool()
    types = digits("00000111 00011111 00111100 00000011")
    expected = mask_by_loops(valid, types, window)
    assert torch.equal(attention_mask(valid, types, window=window), expected)
    for last in (1, 3):  # rows of the same
        assert torch.equal(attention_mask(valid, types, last, window), expected[:, :, -last:])
    assert expected.any(-1).all()  # no row is empty, padding included


def test_a_fully_padded_row_is_finite(seeded):
    """Breaks when a fully padded row turns into NaN and poisons the batch's gradients."""
    attention = Attention(12, 2, 1, 6, scale=6**-0.5)
    x = torch.randn(1, 4, 12, requires_grad=True)
    mask = attention_mask(torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4, dtype=torch.long))
    for backend in ("sdpa", "eager"):
        set_attention_backend(attention, backend)
        out = attention(x, None, mask)
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad.isfinite().all()
