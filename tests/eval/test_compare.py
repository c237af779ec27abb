"""Several models in one call: one table, with intervals and paired differences."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eval import open, pope
from eval.bench import Benchmark, Row, comparison_table, values_of
from eval.question import Question
from eval.report import interval_of
from lora.adapter import lora_layers
from tests.eval.test_eval_commands import subjects
from tests.runs import refused
from train.estimates import estimate

SMALL = "--limit 6 --max-new-tokens 2"


def rows(scores, *measures):
    made = []
    for n, score in scores.items():
        question = Question(n, f"picture {n // 2}", (), "?")
        made.append(Row(question, "", dict.fromkeys(measures, score)))
    return made


def test_intervals_by_hand():
    """Breaks when a benchmark's interval is of another level, parts a picture's questions, weighs
    them alike, or is too narrow where there are few."""
    half = [0.0, 1.0] * 50  # scipy.stats.t.ppf(0.975, 99), and the variance of a sample
    reach = 1.9842169515086827 * (0.25 / 99) ** 0.5
    expected = pytest.approx({"mean": 0.5, "low": 0.5 - reach, "high": 0.5 + reach})
    assert interval_of(half) == expected
    assert interval_of(np.repeat(half, 3), np.repeat(np.arange(100), 3)) == expected
    reach = 12.706204736174694 * 0.375  # scipy.stats.t.ppf(0.975, 1)
    uneven = interval_of([1.0, 1, 1, 0], [*"aaab"])
    assert uneven == pytest.approx({"mean": 0.75, "low": 0.75 - reach, "high": 0.75 + reach})
    assert [*uneven.values()] == pytest.approx(
        estimate([1.0, 1, 1, 0], [*"aaab"])[:3]
    )  # of one run
    # one group says nothing of others
    assert interval_of([1.0, 0], [*"aa"]) == {"mean": 0.5, "low": -np.inf, "high": np.inf}


def test_differences_are_paired():
    """Questions that one model was not asked count, or a difference is of two means, or of
    another's blind answers."""
    half = {n: float(n % 2) for n in range(40)}
    better = {n: 1.0 for n in range(20, 40)}
    blind = rows({20: 0.0, 21: 1.0, 22: 0.0, 23: 1.0}, "exact")
    results = {"a": rows(half, "exact"), "b": rows(better, "exact", "vqa"), "b, blind": blind}
    values = {title: of["measures"] for title, of in values_of(Benchmark(), results).items()}
    assert values["a"]["exact"]["mean"] == 50
    assert "difference" not in values["a"]["exact"]
    assert values["b"]["exact"]["mean"] == 100
    assert values["b"]["exact"]["questions"] == 20
    # each picture: one of two; to b
    for title, difference in (("b", 50), ("b, blind", -50)):
        assert {*values[title]["exact"]["difference"].values()} == {difference}
    assert "difference" not in values["b"]["vqa"]  # which a lacks
    head, _, *table = comparison_table(values_of(Benchmark(), results))
    assert head.startswith("40 questions, ")
    assert "b has answered 20 of them" in table
    assert "+50.00 [+50.00, +50.00] *" in table[3]
    assert comparison_table(values_of(Benchmark(), {"a": rows(half)})) == []  # nothing to score
    results["b"] = rows({n: 1.0 for n in range(30, 70)}, "exact")
    results["b, blind"] = rows({n: float(n != 30) for n in range(30, 70)}, "exact")
    table = comparison_table(values_of(Benchmark(), results))
    assert "b, blind: not shown to use the picture: exact" in table
    assert "b: its difference is of 10 of 40 questions" in table
    for number, row in enumerate(results["b"]):  # other questions of the same names
        results["b"][number] = row._replace(question=replace(row.question, choices=("x",)))
    values = values_of(Benchmark(), results)["b"]
    assert "difference" not in values["measures"]["exact"]


@pytest.mark.long
def test_several_models_are_one_table(source, twin, workplace, monkeypatch, told):
    """A base and its adapter are asked as one model, or share files; --quantize forgets the
    adapter."""
    opened = []
    load = open.load_subject

    def watched(*args):
        opened.append(load(*args))
        return opened[-1]

    monkeypatch.setattr(open, "load_subject", watched)
    flags = f"--model {source} --adapter none --adapter {twin} --device cpu --out out"
    printed = told(pope, SMALL, flags, "--quantize none --quantize int8")
    assert list(printed) == "random random-int8 twin twin-int8".split()
    _, _, whole, small = opened
    assert whole.quantized is None
    assert small.quantized == "int8"
    assert small.grafts == whole.grafts
    assert {layer.base_layer.dtype for layer in lora_layers(small).values()} == {torch.bfloat16}
    assert len(lora_layers(small)) == len(lora_layers(whole)) > 0
    for title, values in printed.items():
        measure = values["measures"]["accuracy, random"]
        assert measure["mean"] == values["summary"]["random"]["accuracy"]
        assert measure["questions"] == 6
        assert ("difference" in measure) == (title != "random")
        assert (workplace / "out" / title / "results.json").is_file()
    files = [f"--results out/{title}/results.json" for title in printed]
    assert [*told(pope, "--limit 6", *files).values()] == [*printed.values()]
    refused(lambda: subjects("--model a/x --model b/x --model c"), "named x")
