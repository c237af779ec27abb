"""Random tiny models, as folders that the commands open. Session fixtures are read-only."""

import pytest
import torch

from lora import adapter
from model.config import PRESETS
from model.differential import graft
from model.paligemma import PaliGemma, initialize
from model.source import BUNDLED_FOLDER
from weights.export import export_model

TOKENIZER = BUNDLED_FOLDER / "tokenizer.model"


def random_model(seed: int = 0) -> PaliGemma:
    model = initialize(PaliGemma(PRESETS["tiny"]), seed, position_std=0.5).eval()
    with torch.no_grad():  # a fresh model with a tied head repeats the last token
        for layer in model.language_model.layers:
            layer.self_attn.o_proj.weight *= 6
            layer.mlp.down_proj.weight *= 6
    return model


@pytest.fixture(scope="session")
def model():
    return random_model()


@pytest.fixture(scope="session")
def source(model, tmp_path_factory):
    """A folder that --model opens."""
    folder = tmp_path_factory.mktemp("model") / "random"
    export_model(model, folder, companions=[TOKENIZER])
    return str(folder)


@pytest.fixture(scope="session")
def twin(source, tmp_path_factory):
    """A folder that --adapter opens: a twin graft whose branches differ."""
    other, folder = random_model(), tmp_path_factory.mktemp("runs") / "twin"
    torch.manual_seed(0)
    graft(other, "twin", r=4)
    adapter.inject(other, adapter.DECODER_TARGETS, 4, 8.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.adapter_parameters(other).values():
            parameter += 0.2 * torch.randn_like(parameter)
    adapter.save(other, folder, base=source)
    return str(folder)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
