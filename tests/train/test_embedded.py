"""The text base of WINGS is made by its command: it learns text alone, and no run makes it in
passing."""

import pytest
import torch

from model.common import UserError
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from train.systems import text_base as text
from train.systems import wings
from weights.load import load_model


@pytest.mark.long
def test_the_text_base_learns_causally_and_is_made_once(processor, tmp_path, monkeypatch):
    """Fails if a token sees a later one, the tower or the projector learns, or a folder that is
    there is made again."""
    monkeypatch.setattr(text, "ROWS", 4)
    micro = text.sentences(1, 3, processor)
    assert micro.batch.token_type_ids.all()
    assert len(micro.names) == 4
    made = text.make_text_base(3, tmp_path / "made", steps=2).state_dict()
    again = text.make_text_base(4, tmp_path / "made")
    fresh = initialize(PaliGemma(PRESETS["tiny"]), 3)
    assert all(torch.equal(made[name], tensor) for name, tensor in again.state_dict().items())
    fresh.vision_tower.load_state_dict(load_model("embedded").vision_tower.state_dict())
    changed = {
        name.split(".")[0]
        for name, tensor in fresh.state_dict().items()
        if not torch.equal(made[name], tensor)
    }
    assert changed == {"language_model"}
    other = load_model("tiny").language_model.embed_tokens.weight  # of another seed
    assert not torch.equal(fresh.language_model.embed_tokens.weight, other)


def test_wings_without_its_base_names_the_command(workplace):
    """Fails if a run makes its own base, or leaves a folder before it says that the base is
    missing."""
    with pytest.raises(
        UserError, match=r"runs/embedded-text .* python -m train\.systems\.text_base"
    ):
        wings.main(["--stage", "1"])
    assert not list(workplace.glob("runs/*"))
