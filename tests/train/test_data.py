"""The order of training data, its batches, and records that cannot be used."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from PIL import Image

from eval.data.records import Record, split_records, vqav2_records
from model.processor import Processor
from tests.files import write_vqav2
from tests.runs import WORLD, refused
from train.data import batches
from train.data.batches import MicroBatches, Order, collate, plan_epoch, supervised
from train.distributed import World
from train.settings import Settings


def records(count=40, pictures=10):
    images = [
        partial(Image.new, "RGB", (8, 8), (number * 20 % 256, 0, 0)) for number in range(pictures)
    ]
    prefixes = ("answer en Is there a dog in the image?", "count dog")
    suffixes = ("two dogs and a cat", "yes")
    turns = [((prefixes[i % 3 > 0], suffixes[i % 2]),) for i in range(count)]
    return [
        Record(f"r{i}", f"p{i % pictures}", (images[i % pictures],), turns[i]) for i in range(count)
    ]


def test_an_epoch_holds_every_record_once():
    """Breaks when a record is lost or doubled, or the order does not change with epoch and seed."""
    keys = [f"p{i % 30}" for i in range(200)]
    lengths = [(7 * i) % 23 for i in range(200)]
    plans = [
        plan_epoch(keys, lengths, 8, seed, epoch, 3)
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert all(sorted(i for batch in plan for i in batch) == list(range(200)) for plan in plans)
    assert {len(batch) for plan in plans for batch in plan} == {8}
    assert plans[0] == plans[1] != plans[2] != plans[3]


def test_a_batch_holds_similar_lengths_and_questions_of_one_picture():
    """Breaks when a batch is mostly padding or has one length only, short ones come first, every
    question pays for its picture, or the same ones always meet."""
    lengths = [(37 * i) % 320 for i in range(4000)]
    plan = [[lengths[i] for i in batch] for batch in plan_epoch([*range(4000)], lengths, 16, 0, 0)]
    assert sum(max(batch) * len(batch) for batch in plan) < 1.15 * sum(lengths)
    assert sum(len(set(batch)) for batch in plan) > 8 * len(plan)
    assert sum(max(a) > max(b) for a, b in pairwise(plan)) > len(plan) / 3
    keys = [i // 6 for i in range(600)]
    plans = [plan_epoch(keys, [10] * 600, 12, 0, 0, per_picture) for per_picture in (1, 2, 6)]
    pictures = [sum(len({keys[i] for i in batch}) for batch in plan) for plan in plans]
    assert pictures[0] > 500
    assert 250 < pictures[1] <= 300
    assert pictures[2] == 100
    assert any(
        abs(a - b) > 1 for batch in plans[1] for a, b in zip(batch[::2], batch[1::2], strict=True)
    )


def test_a_batch_is_what_the_model_trains_on(processor):
    """Breaks when targets are shifted twice or not at all, or a row gets another's picture or
    padding carries loss."""
    chosen = records(6, pictures=3)
    micro = collate(chosen, processor)
    assert micro.batch.pixel_values.shape[0] == 3
    assert micro.batch.image_index.tolist() == [0, 1, 2, 0, 1, 2]
    assert micro.tokens == int((micro.batch.labels != -100).sum())
    rows = micro.batch.input_ids, micro.positions, micro.targets, chosen
    for ids, positions, targets, record in zip(*rows, strict=True):
        kept = targets != -100
        assert processor.decode(targets[kept]) == record.suffix
        assert targets[kept][-1] == processor.config.eos_token_id
        assert torch.equal(ids[positions[kept] + 1], targets[kept])  # the token after each position
    positions, targets = supervised(
        torch.tensor([[-100, -100, 5, 6], [-100, 7, -100, -100], [-100] * 4])
    )
    assert targets.tolist() == [[5, 6], [7, -100], [-100, -100]]
    assert positions.tolist() == [[1, 2], [0, 0], [0, 0]]


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_order_can_start_at_any_step(processor, workers):
    """Breaks when a resumed run reads other batches than the uninterrupted one would have."""
    order = Order(
        records(), processor, Settings(batch_size=4, step_batch=8, epochs=3, seed=5), WORLD
    )
    state = torch.get_rng_state()
    whole, *parts = [
        [[m.names for m in step] for step in order.steps(n, workers)] for n in (0, 1, 5, 8, 14)
    ]
    assert len(whole) == 15
    assert parts == [whole[first:] for first in (1, 5, 8, 14)]
    assert torch.equal(
        torch.get_rng_state(), state
    )  # else masks of dropout would change after a resume


def test_processes_share_the_steps_of_one(processor, monkeypatch):
    """Breaks when two processes together do not read exactly what one process reads, no whole step
    ends as a run, the questions of a picture are parted, or a run without --epochs is shorter or
    longer than it should be."""
    settings = Settings(batch_size=4, step_batch=8, seed=5)
    alone = Order(records(), processor, settings, WORLD)
    pair = [
        Order(records(), processor, settings, World(rank, 2, WORLD.device)) for rank in range(2)
    ]
    for whole, *halves in zip(alone.steps(0), *(order.steps(0) for order in pair), strict=True):
        assert sorted(m.names for m in whole) == sorted(m.names for half in halves for m in half)
    refused(lambda: Order(records(4), processor, settings, WORLD), "--step-batch", "--batch-size")
    together = Order(records(), processor, Settings(batch_size=4, per_picture=4), WORLD).steps(0)
    assert [len(micro.batch.pixel_values) for step in together for micro in step] == [1] * 10
    own = [Settings(batch_size=size, data=("jsonl:own.jsonl",)) for size in (1, 3, 4)]
    for steps, totals in ((320, [320, 320, 320]), (12, [40, 14, 12])):
        monkeypatch.setattr(batches, "STEPS", steps)
        assert [Order(records(), processor, settings, WORLD).total for settings in own] == totals


def test_bad_records_are_left_out_and_named(processor, tmp_path):
    """Breaks when one unreadable picture ends a night's run, or disappears without a word; or a
    batch of too long records ends it."""
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    good = records(2)
    bad = Record("q7", "broken", (tmp_path / "broken.jpg",), (("caption en", "a dog"),))
    control = Record("q8", "p0", good[0].pictures, (("say <bos>", "a dog"),))
    micro = collate([good[0], bad, control, good[1]], processor)
    assert micro.names == ("r0", "r1")
    assert [line[:4] for line in micro.bad] == ["q7: ", "q8: "]
    assert "broken.jpg" in micro.bad[0]
    empty = collate([bad], processor)
    assert (empty.names, empty.tokens, len(empty.bad)) == ((), 0, 1)
    assert empty.targets.unique().tolist() == [-100]
    short = Processor(processor.config, processor.tokenizer, max_length=8)
    empty = collate(good, short)
    assert len(empty.bad) == 2
    assert empty.tokens == 0
    assert "max_length is 8" in empty.bad[0]
    assert short.max_length == 8


def test_vqav2_is_read_and_split_by_picture(tmp_path):
    """Breaks when a picture is in training and validation, or the prompt or answer is not the
    published one, or all seeds hold out the same."""
    write_vqav2(tmp_path)
    made = vqav2_records(
        tmp_path, prompt="{ {0} {question}"
    )  # filled literally, not as a format string
    train, held_out = (split_records(made, split, 1.0, 0.2) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (48, 12)
    assert not {r.key for r in train} & {r.key for r in held_out}
    assert train[0].prefix.startswith("{ {0} What is")
    assert train[0].suffix == "yes"
    assert len({r.key for r in split_records(made, "train", 0.5, 0.2)}) == 8
    assert split_records(made, "validation", 1.0, 0.2, seed=1) != held_out  # each seed has its own


def test_sampled_answers_follow_the_annotators_and_the_seed(tmp_path, processor):
    """Breaks when `--answers sampled` always says the common answer, or each equally often, or
    resumes with other draws, or a run draws the same in every epoch; or answers are drawn without
    it."""
    write_vqav2(tmp_path)
    made = [
        replace(record, sampled=True) for record in vqav2_records(tmp_path, prompt="{question}")
    ]

    def answers(epoch, made=made):
        micro = MicroBatches(made, processor, f"0/{epoch}")[range(len(made))]
        return [processor.decode(row[row != -100]) for row in micro.targets]

    assert answers(0) == answers(0) != answers(1)
    assert 66 < sum(answers(epoch).count("no") for epoch in range(5)) < 114  # 90 expected of 300
    assert {*answers(0, [replace(record, sampled=False) for record in made])} == {"yes"}
    said = [{}, {}]  # by a run of two epochs of three steps, on each record
    order = Order(made, processor, Settings(batch_size=20, epochs=2), WORLD)
    for number, (micro,) in enumerate(order.steps(0)):
        said[number // 3] |= zip(micro.names, micro.targets[:, 0].tolist(), strict=True)
    changed = [name for name in said[0] if said[0][name] != said[1][name]]
    assert 13 < len(changed) < 38  # 60 · 2 · 0.7 · 0.3 = 25 expected, four standard deviations
