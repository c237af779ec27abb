"""The study on a pretrained model, on a tiny random one: rows are trained and asked as it says."""

import random
import shutil

import pytest
import torch

from eval.systems.needles import Haystack, measure
from tests.files import read_json, write_json
from tests.runs import cells_in, refuses, words
from train.systems.studies import real


@pytest.fixture
def short(monkeypatch):
    """Rungs that a tokenizer of bytes fills."""
    monkeypatch.setattr(real, "LENGTHS", {"few": 500, "prose": 60})
    monkeypatch.setattr(real, "QUIET", (300, 1))
    monkeypatch.setattr(real, "LOUD", ((400, 2), (500, 3)))
    monkeypatch.setattr(real, "ASKED", 1)


def test_rows_to_learn_from(llama, short):
    """Breaks when a row asks about another fact, or learns anything but the answers."""
    haystack: Haystack = real.haystacks(str(llama), None)["train"]
    decode = haystack.tokenizer.decode
    ids, labels = real.row_of(haystack, "few", random.Random(2))
    assert len(ids) == len(labels) > 500
    answers = [id_ for id_, label in zip(ids, labels, strict=True) if label != -100]
    assert answers == [label for label in labels if label != -100]
    for word in decode(answers).split():
        assert word in decode(ids[:500])
    ids, labels = real.row_of(haystack, "prose", random.Random(2))
    assert ids == labels
    assert len(ids) == 60
    assert ids[:1] == haystack.tokenizer.begin


def test_a_cell_is_of_its_configuration(llama, tmp_path):
    """Breaks when cells of equal weights are mixed that compute otherwise, or a flag is ignored."""
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"rms_norm_eps": 0.1})
    keys = {real.study_of(real.Options(base=str(base))).key for base in (llama, llama, tmp_path)}
    assert len(keys) == 2
    refuses(real, f"--base {llama} --rates 1", "--rates")


def test_each_seed_has_its_own_contexts(llama, short, monkeypatch):
    """Breaks when all seeds are asked about the same contexts, or two seeds share some."""
    seen = []

    def spy(model, haystack, length, facts, contexts, asked):
        seen.extend(contexts)
        return measure(model, haystack, length, facts, contexts, asked)

    monkeypatch.setattr(real, "measure", spy)
    options = real.Options(base=str(llama), contexts=2)
    for seed in range(3):
        real.train(options, seed, "prose", 1, "softmax")
    assert sorted(seen) == sorted([*range(6)] * 3)


@pytest.mark.long
def test_the_study(llama, short, tmp_path, printed):
    """Breaks when a row cannot be trained, a measure is missing, or equal rows are not equal."""
    flags = f"--quick --steps 1 --contexts 2 --jobs 1 --out {tmp_path}"
    real.main(words("--base", llama, flags))
    refuses(real, flags, "--base")
    assert "twin-small, few" in printed()
    cells = {row: cell["scores"]["test"] for row, (_, cell) in cells_in(tmp_path).items()}
    assert len(cells) == 2 * len(real.ROWS) + 1  # a control that trains longer
    scores = cells["plain, few"]
    assert [len(scores[name]) for name in "exact quiet fall loss".split()] == [4, 2, 2, 2]
    assert scores["fall"] == [1, 1]  # of a model that finds nothing
    assert scores["loss"] != cells["plain again, few"]["loss"]
    assert scores["loss"] != cells["plain, prose"]["loss"]
    assert torch.tensor(cells["dex, few"]["signal"]).isfinite().all()
