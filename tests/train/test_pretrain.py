"""Making the embedded base: processes that share a batch do what one does, and the command leaves a model.

How well the base sees after all stages is no test's matter: `weights/tiny/pretraining.json` has it, and the command
prints both.
"""

import json
from dataclasses import replace

import pytest
import torch

from eval import scenes
from model.common import UserError
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from tests.runs import spawn
from train.distributed import World
from train.embedded.base import ALONE, STAGES, batches, losses, make_optimizers, matched, shares
from train.pretrain import main
from weights.load import load_model


def process(rank: int) -> World:
    return World(rank, 2, torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_gradient_of_two_processes_is_that_of_one(processor, number):
    """Fails if a sample is seen twice or not at all, or a mean is taken over one process's tokens or patches."""
    model = initialize(PaliGemma(PRESETS["tiny"]), position_std=0.5)
    stage = replace(STAGES[number], samples=8)

    def sums(world: World):
        return losses(model, *next(batches(stage, number, 8, processor, 0, world)), stage, processor)

    weights = torch.tensor([stage.answer_weight, stage.alignment_weight, stage.attention_weight])
    parts = [sums(process(rank)) for rank in range(2)]
    over = sum(part[1] for part in parts)
    for part, _ in parts:
        (part / over.clamp(min=1) @ weights).backward()
    shared = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    summed, whole = sums(ALONE)
    assert torch.equal(whole, over)
    assert [bool(count) for count in whole] == [bool(weight) for weight in weights]
    (summed / whole.clamp(min=1) @ weights).backward()
    for name, p in model.named_parameters():
        assert (name in shared) == (p.grad is not None)
        if p.grad is not None:
            torch.testing.assert_close(shared[name], p.grad, rtol=1e-4, atol=1e-6 * p.grad.abs().max().item() + 1e-8)


def test_names_are_matched_with_the_patches_that_show_them(processor):
    """Fails if a name of the text is compared with another picture's patches, or its place in the row is lost."""
    micro, cells = next(batches(replace(STAGES[1], samples=32), 1, 32, processor, 0))
    rows, width = micro.batch.input_ids.shape
    first = (micro.batch.input_ids == processor.config.image_token_id).long().argmax(1)
    weights = torch.zeros(rows, 4, width, width)
    hits, pieces = 0, processor.tokenizer.vocab_size()
    for row, ids in enumerate(micro.batch.input_ids.tolist()):
        for place, token in enumerate(ids):
            piece = processor.tokenizer.id_to_piece(token) if token < pieces else ""
            word = piece.lstrip("▁")
            shows = [
                word == processor.tokenizer.id_to_piece(int(cell)).lstrip("▁") for cell in cells[micro.image_index[row]]
            ]
            if (word in scenes.NAMES or piece == "▁none") and any(shows):
                weights[row, :2, place, first[row] + shows.index(True)] = 1.0
                hits += 1
    mass = matched(weights, micro, cells, processor)
    assert hits > 32 and torch.equal(mass, torch.ones(2 * hits))


def test_every_parameter_is_moved_by_one_process_or_by_all():
    model = PaliGemma(PRESETS["tiny"])
    muons = [shares(model, process(rank))[rank] for rank in range(2)]
    assert not {id(p) for p in muons[0]} & {id(p) for p in muons[1]}
    sizes = [sum(p.numel() for p in own) for own in muons]
    assert max(sizes) < 1.2 * min(sizes)  # they wait for the slower one
    for rank in range(2):
        stepped = {id(p) for o in make_optimizers(model, process(rank)) for g in o.param_groups for p in g["params"]}
        assert stepped | {id(p) for p in muons[1 - rank]} == {id(p) for p in model.parameters()}


@pytest.mark.long
def test_no_stage_sees_a_sample_of_another(processor):
    """Fails if the numbering of two stages overlaps: the last one's decay would fit what was seen before."""
    seen = [set() for _ in STAGES]
    real = scenes.sample
    for number, stage in enumerate(STAGES):

        def record(task, split, index, seed, number=number):
            seen[number].add((task, index))
            return real(task, split, index, seed)

        scenes.sample = record
        try:
            list(batches(replace(stage, samples=64), number, 32, processor, 0))
        finally:
            scenes.sample = real
    assert not any(seen[i] & seen[j] for i in range(len(seen)) for j in range(i))


@pytest.mark.long
def test_two_processes_make_a_base_that_opens(tmp_path, monkeypatch):
    """Fails if the processes end with different weights, or one of them writes over the other's."""
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    main(["--processes", "2", "--scale", "0.0005", "--out", str(tmp_path / "two")])
    main(["--processes", "1", "--scale", "0.0005", "--out", str(tmp_path / "one")])
    record = json.loads((tmp_path / "two" / "pretraining.json").read_text())
    assert record["processes"] == 2 and set(record["accuracy"]) >= {"vqa", "detect", "n2o1"}
    two, one, start = (
        torch.nn.utils.parameters_to_vector(model.parameters())
        for model in (
            load_model(tmp_path / "two"),
            load_model(tmp_path / "one"),
            initialize(PaliGemma(PRESETS["tiny"]), position_std=0.5),
        )
    )
    moved, apart = (one - start).norm(), (two - one).norm()
    assert apart < 0.2 * moved, (apart, moved)  # Muon's bf16 carries rounding on; other samples give 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--scale", "0"], "scale"), (["--processes", "0"], "processes"), (["--threads", "0"], "threads")],
)
def test_bad_input(argv, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main([*argv, "--out", str(tmp_path / "new")])


@pytest.mark.long
def test_nothing_is_written_over(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="not empty"):
        main(["--out", str(tmp_path)])
