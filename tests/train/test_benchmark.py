"""The benchmark: both sides do the same work, each in a process of its own, and ratios follow from
times."""

from contextlib import nullcontext
from importlib import metadata

import pytest
import torch

from model.common import UserError, run_command
from tests.files import read_json
from train.benchmark.__main__ import Process, Work, main, write_folder

SETTINGS = {"device": "cpu", "dtype": "float32", "tokens": 6, "compiled": False}


def test_ratios_are_taken_within_a_round():
    """Breaks when a ratio is that of medians, so that a slow minute counts for one side, or is
    upside down."""
    row = Work("train", 4, seconds=[(1.0, 2.0), (20.0, 80.0), (3.0, 4.0)], peak=(3 << 20, 4 << 20))
    assert row.ratio() == (0.5, 0.25, 0.75)
    assert row.cells()[:6] == [
        "train, batch 4",
        "3e+03 ms",
        "4e+03 ms",
        "0.50 [0.25, 0.75]",
        "3 MiB",
        "4 MiB",
    ]
    row.seconds = [(float(number), 10.0) for number in (9, 1, 8, 2, 7, 3, 6, 4, 5)]
    assert row.ratio() == (
        0.5,
        0.2,
        0.8,
    )  # of nine, P(fewer than two are below the median) = 10 / 512


@pytest.fixture(scope="module")
def sides():
    """A process of each side, whose imports take seconds; nothing is timed here, so that none waits
    for the other."""
    with pytest.MonkeyPatch.context() as patch, Process("ours") as ours, Process("peer") as peer:
        patch.setattr("train.benchmark.__main__.PAUSE", 0)
        yield {"ours": ours, "peer": peer}


@pytest.mark.long
def test_both_sides_do_the_same_work_apart(sides, tmp_path):
    """Breaks when sides have other weights, inputs or adapters, or a setting of ours can reach the
    peer."""
    write_folder("embedded", tmp_path / "model", torch.float32)
    settings = SETTINGS | {"folder": str(tmp_path / "model"), "quantize": None}
    numbers = {}
    opened = [side.ask("open", **settings) for side in sides.values()]
    assert opened[0]["weights"] == pytest.approx(
        opened[1]["weights"], rel=1e-3
    )  # but position tables
    for work, batch in {
        "prefill": 2,
        "eval": 20,
        "decode": 2,
        "train": 2,
    }.items():  # 24 questions: 20, and 4
        for side in sides.values():
            side.ask("prepare", work=work, batch=batch)
        numbers[work], imported = [], []
        for side in sides.values():
            first, second = side.ask("run"), side.ask("run")
            numbers[work].append(first["numbers"] + second["numbers"])
            for answer in (first, second):
                assert answer["seconds"] > 0
                assert answer["peak"] > 0
            imported.append({*second["imports"]})
    assert numbers["prefill"][0] == pytest.approx(numbers["prefill"][1], abs=1e-4)
    assert numbers["eval"][0] == numbers["eval"][1]
    assert len({*numbers["eval"][0]}) > 3
    assert numbers["decode"][0] == numbers["decode"][1]
    assert len(numbers["decode"][0]) == 2 * 2 * SETTINGS["tokens"]
    # B = 0 at first: the second loss is the first that depends on LoRA
    assert numbers["train"][0] == pytest.approx(numbers["train"][1], abs=1e-5)
    assert numbers["train"][0][0] != numbers["train"][0][1]
    assert {"model", "lora", "weights", "eval"} <= imported[0]
    assert not {"transformers", "peft"} & imported[0]
    assert {"transformers", "peft"} <= imported[1]
    assert not {"model", "lora", "weights", "eval"} & imported[1]
    sides["ours"].ask("open", **settings | {"quantize": "int8"})
    sides["ours"].ask("prepare", work="train", batch=2)
    assert sides["ours"].ask("run")["numbers"] == pytest.approx(numbers["train"][0][:1], rel=0.02)


@pytest.mark.long
def test_the_command_writes_its_report_or_one_line(sides, tmp_path, capfd, monkeypatch):
    """Breaks when the command cannot run, its report lacks what the numbers depend on, or a broken
    or missing library ends in a traceback, or in numbers of one side."""
    command = f"--base embedded --sections load --rounds 1 --out {tmp_path / 'report.md'}".split()
    with monkeypatch.context() as patch:
        patch.setattr("train.benchmark.__main__.Process", lambda name: nullcontext(sides[name]))
        main(command)
    result = read_json(tmp_path / "report.json")
    assert {*"base dtype commit processor threads torch transformers peft".split()} <= result.keys()
    (row,) = result["rows"]
    assert len(row["seconds"]) == 1
    assert min(row["seconds"]) > [0, 0]
    assert row["same"] == [2, 2]
    assert "| load, batch 1 |" in (tmp_path / "report.md").read_text()
    (tmp_path / "peft.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended, Process("peer") as peer:
        run_command(lambda: peer.ask("hello"))
    assert ended.value.code == 2
    assert capfd.readouterr() == ("", "error: peer: RuntimeError: broken\n")
    monkeypatch.setattr(
        metadata, "version", lambda package: metadata.distribution("no such package")
    )
    with pytest.raises(UserError, match="is not installed: pip install transformers peft"):
        main([])
