"""The makers of embedded models: processes that share a batch do what one does, and each command leaves a model."""

import json
from dataclasses import replace

import pytest
import torch

from eval import scenes
from model.common import UserError
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from tests.pair import in_pair
from train import finetune
from train.distributed import World
from train.embedded import text
from train.embedded.base import STAGES, batches, losses, main, matched
from weights.load import load_model

ALONE, *PAIR = (World(rank, size, torch.device("cpu")) for rank, size in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_gradient_of_two_processes_is_that_of_one(processor, number):
    """Fails if a sample is seen twice or not at all, or a mean is taken over one process's tokens or patches."""
    model = initialize(PaliGemma(PRESETS["tiny"]), position_std=0.5)
    stage = replace(STAGES[number], samples=8)
    weights = torch.tensor(stage.weights)

    def gradients(*worlds: World) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parts = [losses(model, *next(batches(stage, number, processor, 0, w, 8)), stage, processor) for w in worlds]
        terms = torch.stack([part[1] for part in parts]).sum(0)
        for sums, _ in parts:
            (sums / terms.clamp(min=1) @ weights).backward()
        taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return terms, taken

    (terms, pair), (whole, alone) = gradients(*PAIR), gradients(ALONE)
    assert torch.equal(whole, terms) and whole.bool().tolist() == weights.bool().tolist()
    for name, gradient in alone.items():
        torch.testing.assert_close(pair[name], gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max().item() + 1e-8)


def test_names_are_matched_with_the_patches_that_show_them(processor):
    """Fails if a name of the text is compared with another picture's patches, or its place in the row is lost."""
    micro, cells = next(batches(replace(STAGES[1], samples=32), 1, processor, 0, ALONE))
    rows, width = micro.batch.input_ids.shape
    first = (micro.batch.input_ids == processor.config.image_token_id).long().argmax(1)
    weights, hits = torch.zeros(rows, 4, width, width), 0
    pieces = [processor.tokenizer.id_to_piece(token) for token in range(processor.tokenizer.vocab_size())]
    for row, ids in enumerate(micro.batch.input_ids.tolist()):
        shown = [pieces[cell].lstrip("▁") for cell in cells[micro.batch.image_index[row]].tolist()]
        for place, token in enumerate(ids):
            word = pieces[token].lstrip("▁") if token < len(pieces) else ""
            if word in shown and (word in scenes.NAMES or pieces[token] == "▁none"):
                weights[row, :2, place, first[row] + shown.index(word)] = 1.0
                hits += 1
    mass = matched(weights, micro, cells, processor)
    assert hits > 32 and torch.equal(mass, torch.ones(2 * hits))


@pytest.mark.long
def test_two_processes_make_a_base_that_opens(tmp_path):
    """Fails if the processes end with different weights, one of them writes over the other's, or a port is needed."""
    in_pair(main, f"--scale 0.0005 --out {tmp_path}/pair", meet=tmp_path)
    main(["--scale", "0.0005", "--out", f"{tmp_path}/alone"])
    assert json.loads((tmp_path / "pair" / "pretraining.json").read_text())["processes"] == 2
    models = load_model(tmp_path / "pair"), load_model(tmp_path / "alone"), initialize(PaliGemma(PRESETS["tiny"]))
    pair, alone, start = (torch.nn.utils.parameters_to_vector(model.language_model.parameters()) for model in models)
    moved, apart = (alone - start).norm(), (pair - alone).norm()
    assert apart < 0.2 * moved, (apart, moved)  # Muon's bf16 carries rounding on; other samples give 1
    with pytest.raises(UserError, match="not empty"):
        main(["--out", f"{tmp_path}/pair"])


@pytest.mark.long
def test_the_text_base_learns_causally_and_is_made_once(processor, tmp_path, monkeypatch):
    """Fails if a token sees a later one, the tower or the projector learns, or a folder that is there is made again."""
    monkeypatch.setattr(text, "ROWS", 4)
    micro = text.sentences(1, 3, processor)
    assert micro.batch.token_type_ids.all() and len(micro.names) == 4
    made = text.make_text_base(3, tmp_path / "made", steps=2).state_dict()
    again, fresh = text.make_text_base(4, tmp_path / "made"), initialize(PaliGemma(PRESETS["tiny"]), 3)
    assert all(torch.equal(made[name], tensor) for name, tensor in again.state_dict().items())
    fresh.vision_tower.load_state_dict(load_model("embedded").vision_tower.state_dict())
    changed = {name.split(".")[0] for name, tensor in fresh.state_dict().items() if not torch.equal(made[name], tensor)}
    assert changed == {"language_model"}


def test_wings_without_its_base_names_the_command(tmp_path, monkeypatch):
    """Fails if a run makes its own base, or leaves a folder before it says that the base is missing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"runs/embedded-text .* python -m train\.embedded\.text"):
        finetune.main(["--arch", "wings", "--stage", "1"])
    assert not list(tmp_path.glob("runs/*"))
