"""What many tests share. Session fixtures are read-only: a test that changes one makes a copy."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch

from eval.text.corpus import Corpus, open_corpus
from eval.text.tasks import SYMBOLS
from model.processor import Processor
from tests.files import write_prose


def pytest_collection_finish() -> None:
    """What is imported stays: no collection of garbage looks at it; a command and a benchmark do many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def processor() -> Processor:
    """The processor of the embedded base."""
    return Processor.from_source("embedded")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """A folder of plain text."""
    return write_prose(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def corpus(text_folder, tmp_path_factory) -> Corpus:
    """The corpus of `text_folder`, with 1,024 pieces."""
    return open_corpus(tmp_path_factory.mktemp("corpus"), [text_folder], 1024, SYMBOLS)


@pytest.fixture
def seeded() -> None:
    """Fresh weights are the same in every run."""
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """`--dist loadfile` hands out files in the order of `pytest_collection_modifyitems`, not the fullest first."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m fast` selects what is not marked as long, and needs neither a GPU nor published weights.

    Files with many long tests come first: one that is begun last keeps one process busy and the others idle.
    """
    work: Counter[Path] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not {"long", "slow", "gpu", "weights"} & marks:
            item.add_marker("fast")
        work[item.path] += 20 if "long" in marks else 1
    items.sort(key=lambda item: -work[item.path])
