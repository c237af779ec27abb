"""The study of language models: real cells end to end, fair pairs, and what is computed from their
scores."""

from unittest.mock import Mock

import numpy as np
import pytest

from eval.systems.text.corpus import kept_corpus
from eval.systems.text.measures import Scores, examples, nll, recall
from model.common import UserError
from tests.files import read_json
from tests.runs import refused, words
from train.systems.studies import text
from train.systems.studies.text import Options, hardest, main, study_of, window_losses
from weights.load import load_model

FLAGS = "--sizes nano --length 128 --batch-size 2 --rates 1e-3 --tokens 1280 --limit 5 --seeds 2 --jobs 1"


def run(text_folder, out, *more):
    main(words(FLAGS, f"--text {text_folder} --out {out} --no-positive", *more))
    return read_json(out / "comparison.json")


@pytest.mark.long
def test_the_study_runs_end_to_end_and_each_cell_once(text_folder, tmp_path, printed):
    """Breaks when a cell is scored on another model, split or difficulty than its row says, or is
    trained twice."""
    summary = run(text_folder, tmp_path)
    row = "differential, nano"
    plain, ours = (summary["rows"][name]["facts"][0] for name in ("plain, nano", row))
    assert plain["parameters"] < ours["parameters"] < 1.01 * plain["parameters"]
    assert (len(plain["lambda"]), len(ours["lambda"])) == (0, 2)
    cells = {file.parent: read_json(file) for file in tmp_path.glob("cells/*/cell.json")}
    places = {(cell["row"], cell["seed"]): folder for folder, cell in cells.items()}
    folder = places[row, 1]
    settings = read_json(folder / "config.json")
    assert settings.items() >= {"attention": "differential", "seed": 1, "tokens": 1280}.items()
    model = load_model(folder / "model")
    corpus = kept_corpus(tmp_path / "corpus")
    for split, scores in cells[folder]["scores"].items():
        asked = nll(model, corpus, 128, 5, split)["nll"]
        assert scores["loss"] == pytest.approx(window_losses(asked))
        assert scores["recall"] == hardest(recall(model, corpus, 128, 5, split)["recall"])
        margins = hardest(examples(model, corpus, 128, 5, split)["examples-margin"])
        assert scores["order"] == [1 - margin for margin in margins]
    validation = [cells[places[row, seed]]["scores"]["validation"]["loss"] for seed in (0, 1)]
    assert summary["rates"][row]["tried"]["0.001"] == pytest.approx(-np.mean(validation))

    report = (tmp_path / "comparison.md").read_text()
    times = {f: f.stat().st_mtime for f in tmp_path.rglob("*.json")}
    assert report in printed()
    assert "| attention on the answer |  0.05 |         0.32 |" in report
    assert not list(tmp_path.rglob("checkpoints"))
    run(text_folder, tmp_path)
    changed = [file.name for file, then in times.items() if file.stat().st_mtime != then]
    assert changed == ["comparison.json"]


def test_a_study_that_runs_keeps_its_corpus(text_folder, tmp_path, monkeypatch):
    """Breaks when a second command on its folder changes what its next cells learn."""
    busy = Mock(side_effect=UserError("another process writes to this folder"))
    monkeypatch.setattr(text, "lock_folder", busy)
    refused(lambda: run(text_folder, tmp_path), "another process")
    assert not [*tmp_path.iterdir()]


def test_the_loss_is_that_of_a_token_and_a_task_is_asked_at_its_largest_number():
    """Breaks when the few tokens with little context weigh as much as all others, or tests that
    plain attention solves dilute a difference."""
    values = [1.0] * 5 + [2.0] * 5
    values[0] = 2.0
    values[5] = 5.0  # of 16 in 256 tokens, in two windows
    panel = Scores([16, 32, 64, 128, 256] * 2, ["a"] * 5 + ["b"] * 5, values)
    assert window_losses(panel) == [1 + 1 / 16, 2 + 3 / 16]
    assert hardest(Scores([4, 64, 4, 64], list("abcd"), [1.0, 0.0, 1.0, 0.5])) == [0.0, 0.5]


def test_a_run_that_diverges_knows_nothing(corpus):
    """Breaks when a loss that is not finite counts as a small one."""
    loss = study_of(Options(length=128, sizes=("nano",)), corpus).measures["loss"]
    assert loss.failed == pytest.approx(np.log(1024))
    assert loss.less_is_better


@pytest.mark.parametrize("more", ["--length 8", "--text /nowhere", "--seed 2"])
def test_mistakes_are_told_in_a_line(text_folder, tmp_path, more):
    """Breaks when a wrong flag costs a run or ends in a traceback."""
    with pytest.raises(UserError, match=more.split()[0]):
        run(text_folder, tmp_path, more)
