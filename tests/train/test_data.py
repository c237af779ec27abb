"""The order of training data, its batches, and records that cannot be used."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
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
    images = [partial(Image.new, "RGB", (8, 8), (n * 20 % 256, 0, 0)) for n in range(pictures)]
    made = []
    for i in range(count):
        prefix = "count dog" if i % 3 else "answer en Is there a dog in the image?"
        suffix = "yes" if i % 2 else "two dogs and a cat"
        place = i % pictures
        made.append(Record(f"r{i}", f"p{place}", (images[place],), ((prefix, suffix),)))
    return made


def test_an_epoch_holds_every_record_once():
    """Breaks when a record is lost or doubled, or the order does not change with epoch and seed."""
    keys = [f"p{i % 30}" for i in range(200)]
    lengths = [(7 * i) % 23 for i in range(200)]
    plans = []
    for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0)):
        plan = plan_epoch(keys, lengths, 8, seed, epoch, 3)
        assert sorted(sum(plan, [])) == list(range(200))
        assert {len(batch) for batch in plan} == {8}
        plans.append(plan)
    assert plans[0] == plans[1] != plans[2] != plans[3]


def test_a_batch_holds_similar_lengths_and_questions_of_one_picture():
    """Breaks when a batch is mostly padding or has one length only, short ones come first, every
    question pays for its picture, or the same ones always meet."""
    lengths = [(37 * i) % 320 for i in range(4000)]
    plan = np.take(lengths, plan_epoch([*range(4000)], lengths, 16, 0, 0)).tolist()
    assert sum(max(batch) * len(batch) for batch in plan) < 1.15 * sum(lengths)
    assert sum(len(set(batch)) for batch in plan) > 8 * len(plan)
    assert sum(max(a) > max(b) for a, b in pairwise(plan)) > len(plan) / 3
    keys = [i // 6 for i in range(600)]

    def planned_at(per_picture):
        plan = plan_epoch(keys, [10] * 600, 12, 0, 0, per_picture)
        return plan, sum(len(set(batch)) for batch in np.take(keys, plan).tolist())

    assert planned_at(1)[1] > 500
    assert planned_at(6)[1] == 100
    pairs, pictures = planned_at(2)
    assert 250 < pictures <= 300
    numbers = sum(pairs, [])
    assert any(abs(a - b) > 1 for a, b in zip(numbers[::2], numbers[1::2], strict=True))


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
    settings = Settings(batch_size=4, step_batch=8, epochs=3, seed=5)
    order = Order(records(), processor, settings, WORLD)

    def names(first):
        steps = []
        for step in order.steps(first, workers):
            steps.append([micro.names for micro in step])
        return steps

    state = torch.get_rng_state()
    whole = names(0)
    assert len(whole) == 15
    for first in (1, 5, 8, 14):
        assert names(first) == whole[first:]
    # else masks of dropout would change after a resume
    assert torch.equal(torch.get_rng_state(), state)


def test_processes_share_the_steps_of_one(processor, monkeypatch):
    """Breaks when two processes together do not read exactly what one process reads, no whole step
    ends as a run, the questions of a picture are parted, or a run without --epochs is shorter or
    longer than it should be."""
    settings = Settings(batch_size=4, step_batch=8, seed=5)

    def order(settings=settings, count=40, world=WORLD):
        return Order(records(count), processor, settings, world)

    pair = [order(world=World(rank, 2, WORLD.device)).steps(0) for rank in range(2)]
    for whole, first, second in zip(order().steps(0), *pair, strict=True):
        assert sorted(m.names for m in whole) == sorted(m.names for m in first + second)
    refused(lambda: order(count=4), "--step-batch", "--batch-size")
    for step in order(Settings(batch_size=4, per_picture=4)).steps(0):
        assert [len(micro.batch.pixel_values) for micro in step] == [1] * len(step)
    own = [Settings(batch_size=size, data=("jsonl:own.jsonl",)) for size in (1, 3, 4)]
    for steps, totals in {320: [320, 320, 320], 12: [40, 14, 12]}.items():
        monkeypatch.setattr(batches, "STEPS", steps)
        assert [order(settings).total for settings in own] == totals


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
    # filled literally, not as a format string
    made = vqav2_records(tmp_path, prompt="{ {0} {question}")

    def split(part, share=1.0, seed=0):
        return split_records(made, part, share, 0.2, seed)

    train = split("train")
    held_out = split("validation")
    assert (len(train), len(held_out)) == (48, 12)
    assert not {r.key for r in train} & {r.key for r in held_out}
    assert train[0].prefix.startswith("{ {0} What is")
    assert train[0].suffix == "yes"
    assert len({r.key for r in split("train", 0.5)}) == 8
    assert split("validation", seed=1) != held_out  # each seed has its own


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
    blank = [replace(record, answers=("", "yes", " ")) for record in made]
    assert {*answers(0, blank)} == {"yes"}  # what is empty is not learned
    said = [{}, {}]  # by a run of two epochs of three steps, on each record
    order = Order(made, processor, Settings(batch_size=20, epochs=2), WORLD)
    for number, (micro,) in enumerate(order.steps(0)):
        said[number // 3] |= zip(micro.names, micro.targets[:, 0].tolist(), strict=True)
    changed = [name for name in said[0] if said[0][name] != said[1][name]]
    assert 13 < len(changed) < 38  # 60 · 2 · 0.7 · 0.3 = 25 expected, four standard deviations
