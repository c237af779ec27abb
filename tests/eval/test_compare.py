"""Several models in one call: one table, with intervals and paired differences."""

import json

import numpy as np
import pytest
import torch

from eval import open, pope
from eval.bench import Benchmark, Row, comparison_table, values_of
from eval.question import Question
from eval.report import bootstrap
from lora.adapter import lora_layers
from tests.eval.test_eval_commands import subjects
from tests.runs import refused

SMALL = "--limit 6 --max-new-tokens 2 --json".split()


def rows(scores, *measures):
    return [
        Row(Question(n, f"picture {n // 2}", (), "?"), "", dict.fromkeys(measures, s))
        for n, s in scores.items()
    ]


def test_bootstrap_by_hand():
    """Breaks when a benchmark's interval is of another level, parts a picture's questions, or
    weighs them alike."""
    half = [0.0, 1.0] * 50  # scipy.stats.binom.ppf((0.025, 0.975), 100, 0.5) / 100
    assert bootstrap(half) == pytest.approx((0.5, 0.4, 0.6))
    assert bootstrap(np.repeat(half, 3), np.repeat(np.arange(100), 3)) == pytest.approx(
        (0.5, 0.4, 0.6)
    )
    assert bootstrap([1.0, 1, 1, 0], [*"aaab"]) == (0.75, 0, 1)


def test_differences_are_paired():
    """Questions that one model was not asked count, or a difference is of two means, or of
    another's blind answers."""
    half = {n: float(n % 2) for n in range(40)}
    better = {n: 1.0 for n in range(20, 40)}
    blind = rows({20: 0.0, 21: 1.0}, "exact")
    results = {"a": rows(half, "exact"), "b": rows(better, "exact", "vqa"), "b, blind": blind}
    values = {title: of["measures"] for title, of in values_of(Benchmark(), results).items()}
    assert values["a"]["exact"]["mean"] == 50
    assert "difference" not in values["a"]["exact"]
    assert values["b"]["exact"]["mean"] == 100
    assert values["b"]["exact"]["questions"] == 20
    assert values["b"]["exact"]["difference"] == {
        "mean": 50,
        "low": 50,
        "high": 50,
    }  # each picture: one of two
    assert values["b, blind"]["exact"]["difference"] == {
        "mean": -50,
        "low": -50,
        "high": -50,
    }  # to b
    assert "difference" not in values["b"]["vqa"]  # which a lacks
    head, _, *table = comparison_table(values_of(Benchmark(), results))
    assert head.startswith("40 questions, ")
    assert "b has answered 20 of them" in table
    assert "+50.00" in table[3]
    assert comparison_table(values_of(Benchmark(), {"a": rows(half)})) == []  # nothing to score


@pytest.mark.long
def test_several_models_are_one_table(source, twin, workplace, monkeypatch, capsys):
    """A base and its adapter are asked as one model, or share files; --quantize forgets the
    adapter."""
    opened = []
    original = open.open_subject
    monkeypatch.setattr(
        open, "open_subject", lambda *args, **text: opened.append(original(*args)) or opened[-1]
    )
    flags = f"--model {source} --adapter none --adapter {twin} --quantize none --quantize int8 --device cpu --out out"
    pope.main([*flags.split(), *SMALL])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == "random random-int8 twin twin-int8".split()
    _, _, (whole, _), (small, _) = opened
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
    files = [flag for title in printed for flag in ("--results", f"out/{title}/results.json")]
    pope.main(["--limit", "6", "--json", *files])
    assert list(json.loads(capsys.readouterr().out).values()) == list(printed.values())
    refused(lambda: subjects("--model a/x --model b/x --model c"), "named x")
