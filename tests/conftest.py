"""What many tests share. Session fixtures are read-only: a test that changes one makes a copy."""

import gc
import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one of a process a core: no further threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from model.processor import Processor
from tests.files import write_prose

# torch and transformers are a million objects: to pass over them takes a tenth
gc.set_threshold(200_000, 20, 1000)


@pytest.fixture(scope="session")
def processor() -> Processor:
    """The processor of the embedded base."""
    return Processor.from_source("embedded")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """A folder of plain text."""
    return write_prose(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def corpus(text_folder, tmp_path_factory):
    """The corpus of `text_folder`, with 1,024 pieces."""
    from eval.systems.text.corpus import open_corpus
    from eval.systems.text.tasks import SYMBOLS

    return open_corpus(tmp_path_factory.mktemp("corpus"), [text_folder], 1024, SYMBOLS)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A random Llama that reads 2,048 tokens, and its tokenizer."""
    from tests.pieces import language_folder

    folder = tmp_path_factory.mktemp("language") / "llama"
    language_folder(folder, "llama", 2048)
    return folder


@pytest.fixture
def printed(capsys):
    """A function: what the commands have printed since its last call."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def warned(capsys):
    """A function: what the commands have said on stderr since its last call."""
    return lambda: capsys.readouterr().err


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def seeded() -> None:
    """Fresh weights are the same in every run."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m fast` selects what is not marked as long, and needs neither a GPU nor published
    weights."""
    for item in items:
        if not {"long", "slow", "gpu", "weights"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker("fast")
