"""The built task of the attention study: its bound, its examples, and what one map and two make of
it."""

import torch
import torch.nn.functional as F

from train.studies import built
from train.studies.cells import Job


def test_the_bound_is_that_of_the_sharpest_map_allowed():
    """Breaks when the known size of the effect is wrong, or the answer is not that of the marked
    position."""
    x, right = built.draw(4000, seed=5)
    marked = x[:, :-1, built.CLASSES]
    assert torch.equal(marked.sum(1), torch.ones(4000))
    assert torch.equal(x[:, -1, :-1], torch.zeros(4000, 9))
    classes = x[:, :-1, : built.CLASSES]
    assert torch.equal(classes[marked.bool()].argmax(-1), right)
    logits = 2 * marked - 1  # 1 at the mark, −1 elsewhere: all that the soft cap allows
    seen = (F.softmax(logits, dim=1)[..., None] * classes).sum(1)
    accuracy = 100 * (seen.argmax(-1) == right).double().mean().item()
    assert abs(accuracy - built.best_of_one_map(draws=50_000)) < 2
    reversed_map = (
        F.softmax(-logits, dim=1)[..., None] * classes
    )  # a second map takes away what both have in common
    share = F.softmax(logits, dim=1)[marked == 0][0] / F.softmax(-logits, dim=1)[marked == 0][0]
    assert ((seen - share * reversed_map.sum(1)).argmax(-1) == right).all()


def test_two_maps_beat_the_bound_and_one_does_not(tmp_path, monkeypatch):
    """Breaks when the positive control has no effect, so that finding none elsewhere would say
    nothing."""
    accuracy = {}
    for kind, steps, rate in ("softmax", 120, 0.03), ("twin", 120, 0.03), ("split", 300, 0.02):
        monkeypatch.setattr(built, "STEPS", steps)
        accuracy[kind] = (
            100
            * sum(built.make(Job(kind, (), rate, 0), tmp_path)["scores"]["test"]["built"])
            / built.TESTS
        )
    assert 60 < accuracy["softmax"] < 88
    assert accuracy["twin"] > 99
    assert accuracy["split"] > 99


def test_seeds_learn_from_examples_of_their_own(tmp_path, monkeypatch):
    """Breaks when runs share examples, or learn those that are tested."""
    seeds = []
    draw = built.draw
    monkeypatch.setattr(
        built, "draw", lambda rows, seed, *others: seeds.append(seed) or draw(rows, seed, *others)
    )
    for seed in (0, 1):
        built.make(Job("softmax", (("steps", 3),), 0.01, seed), tmp_path)
    learned = seeds[:3] + seeds[5:8]
    tested = {*seeds[3:5]}
    assert len({*learned} - tested) == 6
    assert tested == {*seeds[8:]}
