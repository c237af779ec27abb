"""Study: is an attention variant better than plain LoRA with as many parameters, beyond chance?

    python -m train.compare                                  every variant, on the embedded base and scenes
    python -m train.compare --quick                          three rows and short runs, to see what it does
    python -m train.compare --rows paper                     the five models of the paper's Table 1
    python -m train.compare --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE --rows twin

In: a base, data, and rows (what is trained). Out: comparison.md, comparison.json, figure2.png and differences.png: the
paper's Table 1 (VQA), Table 2 (needle) and Figure 2 (needle by place), with 95 % intervals. Every other flag is one of
`train.finetune` and holds for all rows. `train.reproduce paligemma` is the paper's own experiment, without controls.

The rules are those of `train/studies/rules.py`. Of this study's own are:
- Two controls of each row: plain LoRA of the smallest rank that has at least as many trainable parameters, and the same
  trained on so many more samples that it takes as long. Rows may share them.
- The positive control, `train/studies/built.py`: a task in which two maps are known to help, and by how much.
- Needles of the embedded scenes are found by the likelier word of those asked for. In free answers, short runs say one
  word to "Top or Bottom?" and to "Left or Right?" alike: over 14 runs that found 90 to 99 % by the likelier word, such
  answers were right in 0 to 97 %, which says what was learned of the wording, not of the picture. So it is with yes and
  no about a picture of 16 objects, which looks like a needle's.
- PREDICTIONS, written before the study was run.
- The main difference of a row is the mean over its measures: it decides how many seeds the row gets.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from model.common import UserError
from train.settings import Settings
from train.studies import attention_mechanism, built, engine, rules
from train.studies.attention_data import HARDEST, LADDERS, TASKS, embedded_measure, make_measures
from train.studies.attention_report import draw, summarize, to_markdown
from train.studies.attention_rows import QUICK, QUICK_SAMPLES, SAMPLES, AttentionOptions, pick_rows
from train.studies.attention_runs import compare, first_rates, mean_score
from train.studies.cells import FineTuningRow, FineTuningStudy, open_study, read_study, run_ahead, run_cells

DECIDED = (*"attention feed_forward option tasks lr seed arch stage wings".split(),)
DECIDED += ("resume", "plan", "show_batch", "evaluate", "eval_limit", "eval_data")


def read_arguments(argv: Sequence[str] | None) -> tuple[list[FineTuningRow], AttentionOptions, Settings]:
    """The rows, the study's flags, and the settings that all rows start from. Raises UserError."""
    defaults = ("--samples", str(SAMPLES))
    options, base, given, _ = read_study(AttentionOptions, argv, "train.compare", __doc__, DECIDED, defaults)
    if base.full:
        raise UserError("--recipe paligemma trains every weight, but rows are compared with LoRA: take another recipe")
    if options.quick:
        options = replace(options, **QUICK)
        base = base if "samples" in given else replace(base, samples=QUICK_SAMPLES)
    options = replace(
        options,
        processes=options.processes or engine.default_processes(base.device),
        protocol=options.protocol or ("constrained" if base.is_embedded else "paper"),
    )
    return pick_rows(options.rows, given), options, replace(base, tasks=",".join(TASKS), measure_every=25)


@lru_cache(maxsize=2)
def open_for(base: Settings, options: AttentionOptions, rungs: tuple[str, ...]) -> FineTuningStudy:
    """The study with measures of these difficulties; on the split "pilot", of all."""
    limits = {"validation": max(1, options.limit // 2), "test": options.limit}
    measures = {split: make_measures(base, split, limit, options, rungs) for split, limit in limits.items()}
    if base.is_embedded and not options.rungs:
        tests = max(1, limits["validation"] // 32) * 16
        every = [rung for ladder in LADDERS.values() for rung in ladder]
        measures["pilot"] = [embedded_measure(rung, tests, options.protocol, "validation") for rung in every]
    study = open_study(base, options.out, measures, options.protocol)
    if options.processes == 1:
        return study
    return replace(study, ahead=partial(run_ahead, partial(open_for, base, options, rungs), options.processes))


def choose_rungs(base: Settings, options: AttentionOptions) -> tuple[tuple[str, ...], dict[str, dict]]:
    """The difficulty of each measure at which plain LoRA, at its best rate on one seed, is neither lost nor perfect."""
    if options.rungs or not base.is_embedded:
        return tuple(options.rungs.split(",")) if options.rungs else HARDEST, {}
    study, plain = open_for(base, options, HARDEST), FineTuningRow("fine-tuned")
    rates = first_rates(study, [plain], options)
    cells = run_cells(study, [(plain, rate, 0, "pilot") for rate in rates])
    scores = {name: 100 * float(np.mean(values)) for name, values in max(cells, key=mean_score)["scores"].items()}
    ladders = rules.choose_rungs(LADDERS, scores, {m.name: m.chance or 0.0 for m in study.measures["pilot"]})
    return tuple(one["chosen"] for one in ladders.values()), ladders


def main(argv: Sequence[str] | None = None) -> None:
    rows, options, base = read_arguments(argv)

    def find() -> dict:
        rungs, ladders = choose_rungs(base, options)
        study = open_for(base, options, rungs)
        positive = built.find(options.out, options.processes or 1) if options.positive else None
        results = compare(study, rows, options)
        mechanism = attention_mechanism.find(study, results) if options.mechanism else None
        return summarize(study, results) | {"ladders": ladders, "positive": positive, "mechanism": mechanism}

    engine.run_study(options.out, find, to_markdown, draw, processes=options.processes, print_json=options.json)
