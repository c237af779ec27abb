"""The verdicts of the study of language models: the difficulty of each measure, and differences by size.

In: cells of `train/studies/text.py`. Out: by size and measure, differential minus plain as `rules.judge` judges it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from eval.statistics import Estimate, estimate
from eval.text.measures import Scores, chance, context_bins
from train.studies import engine, rules
from train.studies.attention_report import by_label
from train.studies.rules import Prediction
from train.studies.text_report import KINDS, MAIN

LADDERS = ("recall", "needle", "examples")  # measures with a choice of difficulty, in percent
# from an earlier run of three seeds, in which nothing was retrieved, and from Ye et al. 2024
PREDICTIONS = (
    Prediction("differential", "loss", "worse", "+0.09 nats at 0.64 million parameters"),
    Prediction("differential", "recall", "better", "the paper: less attention goes to noise"),
    Prediction("differential", "needle", "better", "the paper, Table 2"),
    Prediction("differential", "examples", "better", "the paper, section 3.5"),
    Prediction("differential", "order", "better", "the paper, section 3.5"),
)


def climb(scores: Scores) -> dict[str, float]:
    """Percent right by difficulty."""
    return by_label(100 * np.array([scores.values]), scores.labels)


def choose_rungs(plain: Sequence[dict]) -> dict[str, dict]:
    """By measure, the difficulty at which plain attention is in range on the validation split, and its accuracies."""
    rungs = {}
    for name in LADDERS:
        each = {
            label: float(np.mean([cell["ladders"][name][label] for cell in plain]))
            for label in plain[0]["ladders"][name]
        }
        numbers = sorted(map(int, each), reverse=name == "examples")  # few examples are the harder test
        chances = {str(label): 100 * value for label, value in chance(name, numbers).items()}
        ladder = [str(number) for number in numbers if chances[str(number)] < 100]
        rung = rules.choose_rung(ladder, each, chances)
        rungs[name] = {
            "chosen": int(rung),
            "pilot": each,
            "chance": chances[rung],
            "inside": rules.is_inside(each[rung], chances[rung]),
        }
    return rungs


def window_losses(nll: Scores) -> tuple[np.ndarray, list]:
    """The loss of each window of text in nats a token, and its document: the panel "nll" has means over bins."""
    bins = context_bins(max(nll.labels))
    widths = [(last - first) / bins[-1][1] for first, last in bins]
    return np.reshape(nll.values, (-1, len(bins))) @ widths, nll.groups[:: len(bins)]


def gains(pair: Mapping[str, Sequence[dict]], rungs: Mapping[str, Mapping]) -> dict[str, Estimate]:
    """Differential minus plain by measure, paired by seed and example, so that more is better: points, or hundredths of
    a nat. MAIN: the mean over the measures of LADDERS that are in range, or if there are none, over all of them."""
    parts, found = {}, {}
    for measure, panel in ("loss", "nll"), *((name, name) for name in LADDERS), ("order", "examples-margin"):
        plain, ours = ([Scores(**cell["panels"][panel]) for cell in pair[kind]] for kind in KINDS)
        if measure == "loss":
            values = [np.array([window_losses(run)[0] for run in runs]) for runs in (ours, plain)]
            groups = window_losses(plain[0])[1]
        else:
            rung = rungs["examples" if measure == "order" else measure]["chosen"]
            chosen = [number for number, label in enumerate(plain[0].labels) if label == rung]
            values = [np.array([[run.values[number] for number in chosen] for run in runs]) for runs in (ours, plain)]
            groups = [f"{measure}/{plain[0].groups[number]}" for number in chosen]
        parts[measure] = 100 * plain[0].better * (values[0] - values[1]), groups
        found[measure] = estimate(*parts[measure])
    main = [parts[name] for name in LADDERS if rungs[name]["inside"]] or [parts[name] for name in LADDERS]
    whole = sum(values.shape[1] for values, _ in main)
    scaled = [values * whole / len(main) / values.shape[1] for values, _ in main]
    return found | {MAIN: estimate(np.hstack(scaled), [group for _, groups in main for group in groups])}


def judge_sizes(pairs: Mapping[str, Mapping], rungs: Mapping[str, Mapping]) -> dict[str, dict[str, dict]]:
    """By size and measure, the judged difference: the main ones are a family of their own, and those out of range."""
    found = {(size, name): one for size, pair in pairs.items() for name, one in gains(pair, rungs[size]).items()}

    def is_inside(size: str, name: str) -> bool:
        if name == MAIN:
            return any(one["inside"] for one in rungs[size].values())
        return name == "loss" or rungs[size]["examples" if name == "order" else name]["inside"]

    inside, judged = {key: is_inside(*key) for key in found}, {}
    seeds = {(size, name): len(pairs[size][KINDS[0]]) for size, name in found}
    for is_main in (True, False):
        family = {key: one for key, one in found.items() if (key[1] == MAIN) == is_main}
        judged |= rules.judge(family, inside, seeds=seeds)
    table: dict[str, dict[str, dict]] = {size: {} for size in pairs}
    for (size, name), one in found.items():
        table[size][name] = engine.verdict(one) | judged[size, name]
    return table
