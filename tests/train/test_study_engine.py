"""The engine of all studies, on made-up studies: cells, rates, ranges, controls, differences, and
the report."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from eval.report import interval_text
from tests.files import read_json
from tests.runs import SERVER, read_cells, refused
from train.estimates import estimate
from train.loop import Diverged
from train.run import lock_folder
from train.studies import cells, engine, report, rules
from train.studies.engine import MEAN, Study, StudyOptions
from train.studies.rules import Measure

GROUPS = [f"picture {number // 2}" for number in range(40)]
MEASURES = {
    "first": Measure("the first", GROUPS, chance=25.0, rungs=["easy", "hard"] * 20),
    "perfect": Measure("right on validation", GROUPS),
    "loss": Measure(
        "loss, nats", GROUPS, is_share=False, margin=0.06, less_is_better=True, in_mean=False
    ),
}
POOLED = "the mean of all plain rows"
SIZED = "plain"


def make(job, folder):
    """Scores that are drawn: "better" is 30 points above "plain", and 0.02 is the best rate."""
    time.sleep(dict(job.changes).get("sleep", 0))
    level = 0.8 if job.row == "better" else 0.5
    level -= abs(np.log2(job.rate / 0.02)) / 20
    scores = {}
    for split in ("validation", "test"):
        draw = np.random.default_rng([job.seed, *job.row.encode(), *split.encode()])
        first = (draw.random(40) < level).astype(float)
        loss = 1 - level + draw.random(40)
        perfect = [float(split == "validation" or n < 20) for n in range(40)]
        scores[split] = {"first": first.tolist(), "loss": loss.tolist(), "perfect": perfect}
    return {"scores": scores, "facts": {}}


def study(**changes):
    given = {
        "name": "made-up",
        "title": "A study",
        "rows": {"plain": (), "plain too": (), "better": (("kind", "good"),)},
        "make": make,
        "key": "base",
        "measures": MEASURES,
        "beside": {POOLED: {"better": ("plain", "plain too")}, SIZED: {"better": ("plain",)}},
        "rates": (0.01, 0.02),
        "plain": ("plain", "plain too"),
    }
    return Study(**given | changes)


SLOW = {name: (*changes, ("sleep", 0.1)) for name, changes in study().rows.items()}


def run(out, jobs=1, seeds=5, **changes):
    return engine.run(study(**changes), StudyOptions(seeds=seeds, jobs=jobs, out=out))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    made = run(
        tmp_path_factory.mktemp("study"),
        lengthen=("ratio", 10, {"better": 1.5}),
        predictions=[("better", MEAN, "worse", "why")],
    )
    report.write(made)
    return made


def test_a_study_from_end_to_end(done):
    """Breaks when a rate at the edge is taken, a control by time is missing, or the sign of a loss
    is turned."""
    summary = read_json(done.out / "comparison.json")
    text = (done.out / "comparison.md").read_text()
    assert all(list(tried) == [0.01, 0.02, 0.04] for tried in done.tried.values())
    assert set(done.rates.values()) == {0.02}
    assert list(done.study.rows)[3:] == ["plain, 1.5 × steps"]
    assert done.study.rows["plain, 1.5 × steps"] == (("ratio", 15),)
    assert list(summary["tables"]) == [POOLED, SIZED, "plain, trained as long"]
    first = {gap["measure"]: gap for gap in summary["tables"][POOLED]}
    verdicts = {name: gap["verdict"] for name, gap in first.items()}
    better = dict.fromkeys((MEAN, "first", "loss"), "better")
    assert verdicts == better | {"perfect": "out of range"}
    assert first["loss"]["mean"] < 0 < first[MEAN]["mean"] == first["first"]["mean"]
    assert "| right on validation |         0.0 |                    100 to 100 |     no |" in text
    assert "| better |    mean |     worse | better |" in text


def test_the_tables_can_be_computed_from_the_csv(done):
    """Breaks when the CSV misses a cell, rounds a score, or has others than those of the tables."""
    lines = read_cells(done.out / "comparison.csv")
    assert [list(vars(line).values()) for line in lines] == report.lines_of(done)
    # rungs of a measure on test; three more rows of three seeds
    assert len(lines) == (4 * 5 + 3 * 3 * 2) * (3 + 4)
    means = defaultdict(float)
    for line in lines:
        if (line.measure, line.split, line.rate) == ("first", "test", 0.02):
            means[line.row] += 100 * line.right / 40 / 5
    gap = done.tables[POOLED]["better", "first"]
    expected = means["better"] - (means["plain"] + means["plain too"]) / 2
    assert gap["mean"] == pytest.approx(expected, abs=1e-12)
    own, *plain = (done.scores(row)["first"] for row in ("better", "plain", "plain too"))
    # pictures are groups
    assert (gap["low"], gap["high"]) == estimate(own - sum(plain) / 2, GROUPS)[1:3]
    text = interval_text(estimate(own, GROUPS), 1)
    assert text in (done.out / "comparison.md").read_text()
    assert text != interval_text(estimate(own), 1)


def test_a_folder_has_one_call_whose_cells_name_what_made_them(tmp_path, monkeypatch):
    """Breaks when cells of two commits are reported as those of the call, or two calls train one
    cell at once."""
    for seeds, commit in enumerate(("old", "new"), 1):
        made_by = {"commit": commit, "processor": "p", "torch": "t"}
        monkeypatch.setattr(cells, "provenance", lambda made_by=made_by: made_by)
        made = run(tmp_path, seeds=seeds)
        text = report.write(made)
        with ProcessPoolExecutor(1, SERVER) as pool:
            refused(pool.submit(lock_folder, tmp_path).result, "another process")
        made.lock.close()
    assert "commit new, p, PyTorch t; commit old, p, PyTorch t" in text
    assert "2 seed(s): fewer than 5 decide nothing" in text
    lines = read_cells(tmp_path / "comparison.csv")
    assert {line.commit for line in lines if line.seed == 1} == {"new"}


def test_a_run_that_diverges_scores_its_worst(tmp_path):
    """Breaks when one rate that is too high ends a study, is chosen, or its seed is left out of the
    mean; or a rate is chosen whose mean makes up for a seed that may not be counted."""

    def diverging(job, folder):
        if job.rate > 0.04 or (job.row, job.seed) == ("better", 3):
            raise Diverged("step 7: the loss is nan")
        made = make(job, folder)
        return made | {"facts": {"unusable": "why"}} if job.rate > 0.02 and job.seed == 1 else made

    made = run(
        tmp_path,
        seeds=4,
        make=diverging,
        rates=(0.02, 0.04, 0.08),
        measures=MEASURES | {"loss": replace(MEASURES["loss"], failed=9.0)},
    )
    assert set(made.rates.values()) == {0.02}
    assert [*made.tried["better"].values()][2:] == [engine.UNUSABLE] * 2
    scores = made.scores("better")
    assert not scores["first"][3].any()
    assert (scores["loss"][3] == 9).all()
    assert scores["first"][:3].any(1).all()
    assert "- better, seed 3: step 7" in report.write(made)


def test_a_margin_may_be_relative_and_a_ladder_has_to_fall(tmp_path):
    """Breaks when a control that knows little makes all rows equivalent, a task that grows no
    harder is counted, or rates are chosen on runs that are tested."""
    more = {"relative_margin": 0.1, "tuning_seeds": (7, 8), "tuned": ("plain",), "seeds": 2}
    for last in (0.6, 0.4):
        ladder = {"facts": {"ladders": {"first": [0.5, last]}}}
        climbing = lambda job, _, ladder=ladder: make(job, _) | ladder  # noqa: E731
        made = run(tmp_path / f"{last}", make=climbing, **more)
        assert (made.tables[POOLED]["better", "first"]["verdict"] == "out of range") == (last > 0.5)
    plain = ("plain", "plain too")
    known = [made.validation(made.cells[row])["first"] for row in plain]
    margin = made.with_margins(plain)["first"].margin
    assert margin == pytest.approx((np.mean(known) - 25) / 10)
    assert made.with_margins(plain)[MEAN].margin == margin  # what is out of range has no part
    assert list(made.tried) == ["plain"]
    chosen = made.rates["plain"]
    assert made.rates["better"] == chosen
    others = {(job.row, job.seed) for job in made.used if job.rate != chosen}
    assert others == {("plain", 7), ("plain", 8)}


def test_rates_are_chosen_in_the_unit_of_the_score(tmp_path):
    """Breaks when rates that differ by 0.05 nats are equally good, a single rate is searched for,
    or 0 is one."""
    made = run(tmp_path, main="loss", rates=(0.005, 0.01, 0.02, 0.04), seeds=3)
    assert set(made.rates.values()) == {0.02}
    assert max(made.tried["better"].values()) < 0
    assert "at the edge" not in report.rate_table(made)[-1]
    made.rates["better"] = 0.04
    assert "at the edge" in report.rate_table(made)[-1]
    assert set(run(tmp_path / "one", rates=(0.01,), seeds=3).rates.values()) == {0.01}
    for rates in ((1e-3, 0.0), (float("nan"),), (-1.0,)):
        refused(lambda rates=rates: run(tmp_path, rates=rates), "--rates")


def test_plain_rows_share_a_rate_and_the_lowest_of_a_tie_is_taken(tmp_path):
    """Breaks when chance chooses a rate for each control, of equally good rates the highest is
    taken, or a measure of many examples weighs more in the mean."""
    rates = (0.005, 0.01, 0.02, 0.04, 0.08)
    hits = {
        "plain": (4, 24, 20, 8, 4),
        "plain too": (4, 8, 20, 24, 4),  # by themselves 0.01 and 0.04
        "better": (4, 24, 20, 24.1, 4),  # 60 and 60.25 %: a tie
    }

    def made_up(job, folder):
        right = hits[job.row][rates.index(job.rate)]
        scores = {"first": [right / 40] * 40, "few": [right / 80] * 8}
        return {"scores": {"validation": scores, "test": scores}, "facts": {}}

    measures = {"first": MEASURES["first"], "few": Measure("of few examples", GROUPS[:8])}
    made = run(tmp_path, make=made_up, rates=rates, measures=measures, seeds=1)
    assert made.rates == {"plain": 0.02, "plain too": 0.02, "better": 0.01}
    gaps = {name: gap["mean"] for (_, name), gap in made.tables[SIZED].items()}
    assert gaps == {"first": 10, "few": 5, MEAN: 7.5}  # each measure weighs the same


@pytest.mark.long
def test_a_killed_study_goes_on_in_other_processes(tmp_path, done, monkeypatch):
    """Breaks when a finished cell is lost or half-written, a process goes on alone, or processes
    change a result."""
    script = tmp_path / "slow.py"
    out = tmp_path / "out"
    script.write_text(
        "import sys; from pathlib import Path; from tests.train import test_study_engine as t\n"
        "if __name__ == '__main__': t.run(Path(sys.argv[1]), jobs=2, rows=t.SLOW)"
    )
    start = [sys.executable, str(script), str(out)]
    env = os.environ | {"PYTHONPATH": "."}
    with subprocess.Popen(start, env=env, stderr=subprocess.PIPE) as first:
        while len(list(out.glob("cells/*/cell.json"))) < 8:
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
        first.communicate(timeout=30)  # until the last process that has its stderr is gone
    before = {file: file.read_text() for file in out.glob("cells/*/cell.json")}
    assert len(before) < len(list(done.out.glob("cells/*/cell.json")))  # it was interrupted
    assert all(json.loads(text)["scores"] for text in before.values())
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # nothing kills the rest
    report.write(run(out, rows=SLOW))
    assert all(file.read_text() == text for file, text in before.items())
    tables, alone = (read_json(folder / "comparison.json")["tables"] for folder in (out, done.out))
    assert tables == {title: alone[title] for title in tables}


def test_changed_source_makes_new_cells(tmp_path, monkeypatch):
    """Breaks when a cell is read after its scorer or renderer has changed, or lost when a comment
    or judge has."""
    files = {
        "eval/judge.py": "LEVEL = 5",
        "eval/renderer.py": '"""It draws."""\nSIZE = 2',
        "eval/scorer.py": "from eval import renderer\nSCORE = 1",
        "study.py": "from eval.judge import LEVEL\nfrom eval.scorer import SCORE\nROWS = 3",
    }
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    monkeypatch.setattr(cells, "JUDGING", {tmp_path / "eval/judge.py"})
    (tmp_path / "eval").mkdir()
    names = {}
    exec(compile("def make(job): ...", tmp_path / "study.py", "exec"), names)

    def changed(old, new):
        for file, text in files.items():
            (tmp_path / file).write_text(text.replace(old, new))
        cells.hash_of.cache_clear()
        return cells.source_hash(partial(names["make"], 1))

    first = changed("", "")
    for old, new in (("draws", "paints"), ("= 2", "= 2  # pixels"), ("= 5", "= 6")):
        assert changed(old, new) == first
    others = [("SCORE = 1", "SCORE = 2"), ("SIZE = 2", "SIZE = 3"), ("= 3", "= 4")]
    assert len({first, *(changed(*change) for change in others)}) == 4


def test_verdicts_are_computed():
    """Breaks when a verdict is not that of its table's p-values, or what is out of range weakens
    the others."""
    spread = np.array([[-1.2649], [-0.6325], [0], [0.6325], [1.2649]]) * 5**0.5

    def gap(mean, error):
        return estimate(mean + error * spread)

    def verdicts(gaps, inside=None, less=False):
        columns = {MEAN: Measure("", (), margin=3.0, less_is_better=less)}
        usable = {(name, MEAN) for name in inside or gaps}
        placed = {(name, MEAN): difference for name, difference in gaps.items()}
        judged = rules.judge(placed, usable, columns)
        return {name: difference["verdict"] for (name, _), difference in judged.items()}

    rows = {
        "better": gap(9, 1),
        "worse": gap(-9, 1),
        "equivalent": gap(0.5, 0.3),
        "undecided": gap(2, 2),
    }
    assert verdicts(rows | {"small": gap(1, 0.2)}) == {n: n for n in rows} | {"small": "equivalent"}
    assert verdicts({"a": gap(9, 1)}, less=True) == {"a": "worse"}
    four = {name: gap(4, 1.08) for name in "abcd"}  # p 0.02 alone, 0.08 among four
    assert set(verdicts(four).values()) == {"undecided"}
    near = dict.fromkeys("abcd", gap(1, 0.77))  # within 3, p 0.03 alone, 0.12 among four
    assert set(verdicts(near).values()) == {"undecided"}
    assert verdicts(near, "a")["a"] == "equivalent"
    assert verdicts(four, "a") == dict.fromkeys("bcd", "out of range") | {"a": "better"}
    # 2 points from the margin: t 2.86 and 2.11 of 4 degrees, p 0.023 and 0.052
    assert verdicts({"a": gap(1, 0.7)}) == {"a": "equivalent"}
    assert verdicts({"a": gap(1, 0.95)}) == {"a": "undecided"}
    # scipy's binomtest
    assert rules.exact_interval(8, 10) == pytest.approx((0.443905, 0.974789), abs=1e-6)
    assert rules.exact_interval(0, 10) == (0.0, pytest.approx(0.308497, abs=1e-6))
    assert rules.exact_interval(9, 9)[1] == 1
    assert [rules.is_inside(score, 25) for score in (30, 37, 96, 97)] == [False, True, True, False]
