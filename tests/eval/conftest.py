"""Random tiny models, as folders that the commands open. Session fixtures are read-only."""

import json
import os
import shutil

import pytest
import torch

from lora import adapter
from model.config import PRESETS
from model.differential import graft
from model.paligemma import PaliGemma, initialize
from model.source import BUNDLED_FOLDER
from tests.files import write_json
from tests.runs import words
from weights.export import export_model

TOKENIZER = BUNDLED_FOLDER / "tokenizer.model"


def random_model(seed: int = 0) -> PaliGemma:
    model = initialize(PaliGemma(PRESETS["tiny"]), seed, position_std=0.5).eval()
    for (
        layer
    ) in model.language_model.layers:  # a fresh model with a tied head repeats the last token
        layer.self_attn.o_proj.weight.data *= 6
        layer.mlp.down_proj.weight.data *= 6
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
    other = random_model()
    folder = tmp_path_factory.mktemp("runs") / "twin"
    torch.manual_seed(0)
    graft(other, "twin", r=4)
    adapter.inject(other, adapter.DECODER_TARGETS, 4, 8.0)
    for parameter in adapter.adapter_parameters(other).values():
        parameter.data += 0.2 * torch.randn_like(parameter)
    adapter.save(other, folder, base=source)
    return str(folder)


@pytest.fixture
def told(printed):
    """A function: what a command prints with --json."""

    def run(command, *flags):
        printed()
        command.main(words(*flags, "--json"))
        return json.loads(printed())

    return run


@pytest.fixture
def told_of_one(told):
    """The same of one model or file, whose name is left out."""

    def run(command, *flags):
        (values,) = told(command, *flags).values()
        return values

    return run


@pytest.fixture
def scored(workplace, told_of_one):
    """A function: what a command prints of a file of answers."""

    def run(command, flags, answers):
        return told_of_one(command, flags, "--results", write_json(workplace / "R", answers))

    return run


@pytest.fixture
def new_page():
    """A function that opens an address in this system's headless Chromium, without which the test
    is skipped. Errors that the page logs, and what it requests from elsewhere, fail the test."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser: pip install playwright"
    )
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    problems = []
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )

        def open_page(url: str, width: int = 1400, scheme: str = "light"):
            page = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            ).new_page()
            local = (url.partition("#")[0], "data:", "blob:")
            page.problems = problems
            page.set_default_timeout(60_000)
            page.on(
                "console",
                lambda message: problems.append(message.text) if message.type == "error" else None,
            )
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "request",
                lambda request: request.url.startswith(local) or problems.append(request.url),
            )
            page.goto(url)
            return page

        yield open_page
    assert not problems
