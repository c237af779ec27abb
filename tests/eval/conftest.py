"""Random tiny models, as folders that the commands open. Session fixtures are read-only."""

import os
import shutil

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


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium of this system; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser: pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])


@pytest.fixture
def new_page(browser):
    """A function that opens an address in a window of a width, light or dark. Errors that the page logs, and what it
    requests from elsewhere, fail the test."""
    problems, contexts = [], []

    def open_page(url: str, width: int = 1400, scheme: str = "light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page, local = contexts[-1].new_page(), (url.partition("#")[0], "data:", "blob:")
        page.set_default_timeout(60_000)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(local) else problems.append(request.url))
        page.goto(url)
        page.problems = problems
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems
