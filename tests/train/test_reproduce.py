"""The paper's experiment in one command: its parts, its choice, its data, and its tables beside
those published."""

from types import SimpleNamespace

import numpy as np
import pytest

from eval.figures import heatmaps
from tests.files import read_json, write_mmneedle, write_vqav2
from tests.runs import cells_in, refused, times_in, words
from train.plan import StepCost
from train.settings import RECIPES
from train.studies import paper
from train.studies.paper import CONTROL, PART_2, VQA_SCORES, main, on_share, read_models
from train.studies.rules import Measure

SMALL = "--samples 20 --vqa-limit 12 --needle-limit 6 --device cpu --jobs 1"


def run(out, *flags):
    """The cells by row, with their folders."""
    main(words(*flags, "--out", out))
    return cells_in(out)


def vqa(cell):
    return 100 * float(np.mean(cell["scores"]["test"]["VQA"]))


def steps(folder):
    return len((folder / "metrics.jsonl").read_text().splitlines())


@pytest.mark.long
def test_the_plan_in_miniature(tmp_path):
    """Breaks when a part or a published figure is missing, Part 2 is not the best of Part 1 on all
    data, its control has another attention than plain, or a finished run is trained again."""
    cells = run(tmp_path, SMALL)
    assert cells.keys() == {"baseline", *VQA_SCORES, *PART_2}
    for name in VQA_SCORES:
        assert steps(cells[name][0]) == 2  # 8 of 20 samples, four rows a step
    for row, candidates in PART_2.items():
        folder, cell = cells[row]
        best = max(candidates, key=lambda name: vqa(cells[name][1]))
        assert cell["facts"]["chosen"] == best
        assert steps(folder) == 5
        config = read_json(folder / "adapter_config.json")
        of_best = read_json(cells[best][0] / "adapter_config.json")
        assert config["r"] == of_best["r"]
        if row == CONTROL:
            of_best.pop("differential", None)
        assert config.get("differential") == of_best.get("differential")
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    table_1 = next(line.split() for line in lines if "53.21" in line)
    table_2 = next(line.split() for line in lines if "28.75" in line)
    assert table_1[-4:-1] == ["53.21", "|", f"{vqa(cells['paper-1'][1]):.2f}"]
    assert f"{100 * np.mean(cells['baseline'][1]['scores']['test']['needle']):.2f}" in table_2
    assert (tmp_path / "figure-2.png").exists()
    times = times_in(tmp_path)
    run(tmp_path, SMALL)
    assert times == times_in(tmp_path)


@pytest.mark.long
def test_official_files_and_finished_runs(tmp_path, printed, monkeypatch):
    """Breaks when the official layouts are read otherwise than by the commands, or a finished run
    is trained again."""
    write_vqav2(tmp_path / "vqa", images=6)
    write_vqav2(tmp_path / "vqa", images=6, subset="val2014")
    coco = write_mmneedle(tmp_path / "coco")
    flags = words(
        f"--data vqav2:{tmp_path}/vqa --coco {coco} --captions {coco}/C",
        "--vqa-limit 4 --needle-limit 4 --rows paper-1 paper-4 --diff-in decoder --device cpu --jobs 1",
    )
    costs = [StepCost(1, 1, 1, 1, 1)] * 2  # test_plan has the true ones
    monkeypatch.setattr("train.plan.step_costs", lambda *_: costs)
    main([*flags, "--plan", "--gpu", "L4"])
    planned = {}
    for line in printed().splitlines():
        if line.startswith("| paper"):
            _, name, _, *numbers = line.split("|")
            planned[name.strip()] = [int(text) for text in numbers[:3]]
    every = {"paper-1, all pictures": [4, 18, 5]}
    assert planned == dict.fromkeys(("paper-1", "paper-4"), [4, 6, 2]) | every

    cells = run(tmp_path / "a", *flags)
    taken = {row: steps(folder) for row, (folder, _) in cells.items() if row != "baseline"}
    # 2 of 6 pictures, 3 questions
    assert taken == dict.fromkeys(("paper-1", "paper-4"), 2) | dict.fromkeys(PART_2, 5)
    assert [len(scores) for scores in cells["baseline"][1]["scores"]["test"].values()] == [4, 4]
    finished = [f"{row}={cells[row][0]}" for row in ("paper-1", "part-2-with")]
    again = run(tmp_path / "b", *flags, "--from", *finished)
    assert not (again["paper-1"][0] / "metrics.jsonl").exists()
    assert steps(again["paper-4"][0]) == 2
    assert cells.keys() - again.keys() == {CONTROL}  # nobody knows the settings of a finished run
    given = [*finished, f"{CONTROL}={cells[CONTROL][0]}"]
    assert CONTROL in paper.study_of(read_models([*flags, "--from", *given])).rows
    for row, (_, cell) in again.items():
        assert cells[row][1]["scores"] == cell["scores"]
    refused(
        lambda: run(tmp_path / "c", *flags, "--base", "tiny", "--from", finished[0]), "another base"
    )


def test_the_control_differs_in_attention_alone():
    """Breaks when the control has another rate, rank or feed-forward than its model, so that a
    difference says nothing of the attention."""
    for model in read_models(()).values():
        control = paper.plain(model)
        changed = {key for key, value in vars(model).items() if vars(control)[key] != value}
        assert changed <= {"attention", "option"}
        assert control.attention == "softmax"


def test_figure_2_has_the_needles_of_each_cell():
    """Breaks when a cell shows the needles of another cell or row."""
    places = [f"row {y}, column {x}" for x in (1, 2) for y in (1, 2)] * 2  # not in raster order
    hits = {"baseline": [0.0] * 8, paper.WITH: [0, 100, 0, 0, 0, 100, 0, 100]}
    run = SimpleNamespace(
        cells=hits,
        scores=lambda row: {"needle": np.array([hits[row]])},
        study=SimpleNamespace(measures={"needle": Measure("needles", places, rungs=places)}),
    )
    maps = {"baseline": [[0, 0], [0, 0]], paper.WITH: [[0, 0], [1, 0.5]]}
    title = "Figure 2: needles found, by the cell they lie in, %"
    assert paper.draw_needles(run) == heatmaps(maps, title)


def test_a_flag_overrides_a_recipe(tmp_path):
    """Breaks when a model of Table 1 has other settings than its recipe, but for what the command
    line says."""
    models = read_models("--diff-in decoder --samples 50".split())
    assert list(models) == [*VQA_SCORES]
    assert models["paper-1"].seeds == 1
    for name, own in models.items():
        recipe = RECIPES[name] | {"diff_in": "decoder", "fraction": 1.0}
        assert {field: getattr(own, field) for field in recipe} == recipe
        assert (on_share(own).fraction, on_share(own).samples) == (0.4, 20)


@pytest.mark.parametrize(
    "flags", "--fraction 0.1|--rates 1|--coco C|--from paper-1=/nowhere".split("|")
)
def test_mistakes_are_told_before_anything_is_trained(flags, tmp_path):
    """Breaks when a wrong flag costs hours, or leaves a folder."""
    refused(lambda: run(tmp_path / "out", flags, "--device cpu"), flags.split()[0])
    assert not (tmp_path / "out").exists()
