"""The study of language models: real cells end to end, fair pairs, and what is computed from their
scores."""

import numpy as np
import pytest

from eval.systems.text.corpus import kept_corpus
from eval.systems.text.measures import Scores, chance, examples, nll, recall
from model.common import UserError
from tests.files import read_json
from tests.runs import read_cells
from train.systems.studies.text import Options, hardest, main, study_of, window_losses
from weights.load import load_model

FLAGS = "--sizes nano --length 128 --batch-size 2 --rates 1e-3 --tokens 1280 --limit 5 --seeds 2 --jobs 1"


def run(text_folder, out, *more):
    main([*FLAGS.split(), "--text", str(text_folder), "--out", str(out), "--no-positive", *more])
    return read_json(out / "comparison.json")


@pytest.mark.long
def test_the_study_runs_end_to_end_and_each_cell_once(text_folder, tmp_path, printed):
    """Breaks when a cell is scored on another model, split or difficulty than its row says, or is
    trained twice."""
    summary = run(text_folder, tmp_path)
    plain, ours = (
        summary["rows"][f"{kind}, nano"]["facts"][0] for kind in ("plain", "differential")
    )
    assert plain["parameters"] < ours["parameters"] < 1.01 * plain["parameters"]
    assert not plain["lambda"]
    assert len(ours["lambda"]) == 2

    lines = [
        line for line in read_cells(tmp_path / "comparison.csv") if line.row == "differential, nano"
    ]
    cells = {file.parent: read_json(file) for file in tmp_path.glob("cells/*/cell.json")}
    (folder,) = [
        f for f, cell in cells.items() if (cell["row"], cell["seed"]) == ("differential, nano", 1)
    ]
    settings = read_json(folder / "config.json")
    assert (settings["attention"], settings["seed"], settings["tokens"]) == (
        "differential",
        1,
        1280,
    )
    model = load_model(folder / "model")
    corpus = kept_corpus(tmp_path / "corpus")
    losses = [line for line in lines if (line.seed, line.measure) == (1, "loss")]
    assert {line.split for line in losses} == {"validation", "test"}
    for line in losses:
        asked = nll(model, corpus, 128, 5, line.split)["nll"]
        assert line.right == pytest.approx(sum(window_losses(asked)))
    tried = summary["rates"]["differential, nano"]["tried"]["0.001"]
    validation = [
        line.right / line.n
        for line in lines
        if (line.split, line.measure) == ("validation", "loss")
    ]
    assert tried == pytest.approx(-np.mean(validation))
    assert len(validation) == 2
    cell = cells[folder]["scores"]["test"]
    assert cell["recall"] == hardest(recall(model, corpus, 128, 5)["recall"])
    assert len(cell["recall"]) == 5
    assert cell["order"] == [
        1 - margin for margin in hardest(examples(model, corpus, 128, 5)["examples-margin"])
    ]

    report = (tmp_path / "comparison.md").read_text()
    times = {f: f.stat().st_mtime for f in tmp_path.rglob("*.json")}
    assert report in printed()
    assert "| attention on the answer |  0.05 |         0.32 |" in report
    assert not list(tmp_path.rglob("checkpoints"))
    run(text_folder, tmp_path)
    assert [file.name for file, then in times.items() if file.stat().st_mtime != then] == [
        "comparison.json"
    ]


def test_the_loss_is_that_of_a_token_and_a_task_is_asked_at_its_largest_number():
    """Breaks when the few tokens with little context weigh as much as all others, tests that plain
    attention solves dilute a difference, or guessing is that of another number."""
    values = [1.0] * 5 + [2.0] * 5
    values[0] = 2.0
    values[5] = 5.0  # of 16 in 256 tokens, in two windows
    panel = Scores([16, 32, 64, 128, 256] * 2, ["a"] * 5 + ["b"] * 5, values)
    assert window_losses(panel) == [1 + 1 / 16, 2 + 3 / 16]
    assert hardest(Scores([4, 64, 4, 64], list("abcd"), [1.0, 0.0, 1.0, 0.5])) == [0.0, 0.5]
    assert chance("needle", 64) == pytest.approx(1 / 64 + 63 / 64 / 8)


def test_a_run_that_diverges_knows_nothing(corpus):
    """Breaks when a loss that is not finite counts as a small one."""
    loss = study_of(Options(length=128, sizes=("nano",)), corpus).measures["loss"]
    assert loss.failed == pytest.approx(np.log(1024))
    assert loss.less_is_better


@pytest.mark.parametrize("more", ["--length 8", "--text /nowhere", "--seed 2"])
def test_mistakes_are_told_in_a_line(text_folder, tmp_path, more):
    """Breaks when a wrong flag costs a run or ends in a traceback."""
    with pytest.raises(UserError, match=more.split()[0]):
        run(text_folder, tmp_path, *more.split())
