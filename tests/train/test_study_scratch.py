"""The study of bases pretrained from nothing: paired rows, needles that training never had, cells done once."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval import scenes
from train import compare
from train.optim import count, make_adamw
from train.studies import scratch
from train.studies.attention_data import Measure
from train.studies.cells import FACTS
from train.studies.scratch_report import LOOKED_AT, LOOKS, summarize_shares


def fake_measures(settings, split: str, limit: int, options, rungs) -> list[Measure]:
    return [
        Measure(name, name, [1, 2], ["a", "b"], ["x", "y"], 25.0, lambda *_, name=name: [1.0, float(name == "n2d1")])
        for name in ("VQA", *rungs)
    ]


@pytest.mark.long
def test_no_row_has_an_advantage_and_no_cell_is_done_twice(tmp_path, monkeypatch, capsys):
    """Breaks when rows begin with other weights, differ in size or learn other questions; when a needle of the hard
    tests is trained on; when a finished run is trained again; or the report lacks a table."""
    learned = []
    monkeypatch.setattr(scratch, "ROWS_A_STEP", 4)
    monkeypatch.setattr(scratch, "SIGHT", replace(scratch.SIGHT, samples=4))
    monkeypatch.setattr(scratch, "MARKS", 2)
    monkeypatch.setattr(scratch, "HELD_OUT", 4)
    monkeypatch.setattr(scratch, "LADDERS", {"2×2": ("n2d1", "n2o1")})
    monkeypatch.setattr(scratch, "make_measures", fake_measures)
    monkeypatch.setattr(scratch, "MuonAdamW", lambda groups, betas, ratio: make_adamw(groups, betas))  # it is faster
    monkeypatch.setattr(scratch, "paired_ratio", lambda steps: 1.46)
    monkeypatch.setattr(scratch, "ask", lambda *_: None)
    monkeypatch.setattr(scratch, "measure_layers", lambda *_: [dict.fromkeys(LOOKS, 0.25)] * 4)
    row, gap = {"mean": 84.0, "low": 83.0, "high": 85.0, "rate": 0.1}, {"mean": 15.0, "low": 14.0, "high": 16.0}
    gap |= {"significant": True, "verdict": "better"}

    def built_task(out, processes, predictions):
        rows, gaps = {"softmax": row, predictions[0].row: row}, {predictions[0].row: gap}
        return {"best_of_one_map": 84.7, "rows": rows, "differences": gaps, "predictions": [], "seeds": 5}

    monkeypatch.setattr(scratch.built, "find", built_task)
    real = scratch.encoded_loss

    def loss(model, micro):
        learned.append((micro.names, micro.batch.input_ids.sum().item(), micro.features.sum().item()))
        return real(model, micro)

    monkeypatch.setattr(scratch, "encoded_loss", loss)
    given = ["--rows", "scratch", "--out", str(tmp_path), "--samples", "8", "--seeds", "1", "--most-seeds", "1"]
    given += ["--rates", "0.01", "--processes", "1"]
    compare.main(given)
    printed = capsys.readouterr().out
    plain, split, narrow, longer = learned[:4], learned[4:8], learned[8:12], learned[12:]  # two steps of each phase
    assert plain == split == narrow and len(longer) == 5 and longer[:2] == plain[:2]

    summary = json.loads((tmp_path / "comparison.json").read_text())
    plain, split, narrow = (row["trainable"] for row in summary["rows"][:3])
    assert plain == narrow < split < 1.001 * plain
    assert summary["rows"][1]["control"] == "plain" and set(summary["rows"][1]["difference"]) == {"VQA", "n2o1", "all"}
    assert summary["rows"][1]["timed"] == "plain, 1.5 × steps" and summary["ladders"]["2×2"]["chosen"] == "n2o1"
    assert summary["positive"]["differences"] == {"split": gap} and "+15.0 [+14.0, +16.0] better" in printed
    assert summary["attention"]["mean"]["split"] == {f"{look}, {kind}": 25.0 for kind in LOOKED_AT for look in LOOKS}
    assert [len(layers) for layers in summary["curves"]["pretraining"]["lambda"]["split"]] == [4, 4]
    for title in (
        "Table 2",
        "Table 4",
        "Attention on",
        "Loss of held-out",
        "λ by layer",
        "Range",
        "Predictions",
        "Positive control",
    ):
        assert f"## {title}" in printed

    sight = scratch.sight_of(tmp_path, 0)
    bases = [
        scratch.start(replace(scratch.Settings(seed=0, attention="softmax"), **row.changes), sight)
        for row in scratch.ROWS
    ]
    weights = bases[0].state_dict()
    for base in bases[1:]:
        own = base.state_dict()
        assert all(torch.equal(own[name], weight) for name, weight in weights.items())
        assert count(base.parameters()) < 1.001 * count(bases[0].parameters())
    assert bases[2].language_model.layers[0].self_attn.num_heads == 8
    most = {scenes.layout_of(task)[2] for task in scratch.TUNING if task.startswith("n")}
    assert max(most) == 3 < scenes.layout_of(LOOKED_AT[-1])[2]

    monkeypatch.setattr(scratch, "fit", None)
    compare.main(given)
    assert capsys.readouterr().out.splitlines()[:20] == printed.splitlines()[:20]


def test_a_run_that_is_killed_while_it_writes_goes_on(tmp_path, monkeypatch):
    """Breaks when weights that are half written end each further call, or checkpoints go before they are whole."""
    monkeypatch.setattr(scratch, "sight_of", lambda *_: None)
    monkeypatch.setattr(scratch, "start", lambda *_: torch.nn.Linear(2, 2))
    monkeypatch.setattr(scratch, "parameter_groups", lambda *_: None)
    monkeypatch.setattr(
        scratch, "learn", lambda model, name, settings, folder, *_: (folder / name).mkdir(exist_ok=True)
    )

    def killed(tensors, file):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    given = SimpleNamespace(seed=0, lr=0.01), tmp_path, SimpleNamespace(out=tmp_path, processor=None)
    with monkeypatch.context() as patch:
        patch.setattr(scratch, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            scratch.from_nothing(*given)
    assert all((tmp_path / name).is_dir() for name in scratch.PHASES)
    model = scratch.from_nothing(*given)
    assert {path.name for path in tmp_path.iterdir()} == {FACTS, "model.safetensors"}
    assert torch.equal(scratch.from_nothing(*given).weight, model.weight)


def test_less_attention_on_distractors_is_better():
    """Breaks when more attention on what disturbs is called better."""

    def runs(on_needle, on_others):
        layer = {look: on_others if "distractors" in look else on_needle for look in LOOKS}
        return [{kind: [layer] * 2 for kind in LOOKED_AT}] * 5

    found = summarize_shares({"plain": runs(20.0, 50.0), "split": runs(30.0, 40.0)})["difference"]["split"]
    assert {one["verdict"] for one in found.values()} == {"better"} and len(found) == len(LOOKS) * len(LOOKED_AT)
    for (needle, others), verdict in ((21.0, 5.4), "equivalent"), ((21.0, 6.0), "worse"):  # by a twelfth, by a fifth
        found = summarize_shares({"plain": runs(20.0, 5.0), "split": runs(needle, others)})["difference"]["split"]
        assert {one["verdict"] for name, one in found.items() if "distractors" in name} == {verdict}
