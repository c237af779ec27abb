"""The study of text-only forgetting: its measures, its matched rows, and a small whole run."""

from collections import Counter

import pytest
import torch

from eval.data.scenes import CATEGORIES
from lora import adapter
from model.systems.wings import attach, route
from tests.files import read_json
from tests.reference import relative_error
from tests.runs import stage_settings, times_in
from train.optim import parameter_count, parameter_names, trainable
from train.studies.cells import Job
from train.systems.studies import wings
from train.systems.studies.stages import read_stages
from train.systems.studies.wings import (
    DECODER,
    LEARNERS,
    PROJECTOR,
    ROWS,
    VISUAL,
    lora_rank,
    open_first,
    share_named,
)
from train.systems.text_base import TASKS, make_text_base, sentence
from weights.load import load_model

SMALL = "--device cpu --steps 1 --batch-size 4 --step-batch 4 --seeds 1 --rates 1 --limit 8 --jobs 1 --samples 40"


def read(task, prefix):
    """The right answer, from the prompt alone."""
    words = prefix.replace(".", "").replace(",", "").replace("?", "").split()
    if task == "add":
        return str(int(words[3]) + int(words[5]))
    if task == "copy":
        return " ".join(words[1 : words.index("What")])
    if task == "lookup":
        return words[int(words[-1])]
    return next(kind for kind, names in CATEGORIES.items() if words[-1] in names)


@pytest.mark.parametrize("task", TASKS)
def test_sentences_have_one_right_answer(task):
    """Breaks when an answer is wrong, or a test prompt was learned."""
    prompts = {}
    for split in ("train", "test"):
        drawn = [sentence(task, split, i) for i in range(300)]
        for prompt, answer in drawn:
            assert answer == read(task, prompt), prompt
        prompts[split] = {prompt for prompt, _ in drawn}
    if task in ("copy", "lookup"):
        assert not prompts["train"] & prompts["test"]
        assert len(prompts["test"]) > 290
        assert max(Counter(answer for _, answer in drawn).values()) < 15  # no answer can be guessed


def test_the_share_of_named_objects():
    """Breaks when an empty square counts, an object counts in another place, or more words than
    squares help."""
    squares = "dog none cat none key"
    assert share_named(squares, "dog none cat none key") == 1
    assert share_named(squares, "dog dog dog dog dog key") == pytest.approx(1 / 3)
    assert share_named(squares, "none none none") == share_named(squares, "") == 0


def test_rows_train_what_they_say():
    """Breaks when LoRA has fewer parameters than its control, or a pattern names what is
    another's."""
    base = load_model("embedded")
    model = attach(load_model("embedded"), 16)
    rank = lora_rank(model)
    routed = route(model)
    sizes = []
    for r in (rank - 1, rank):
        plain = attach(load_model("embedded"), 16)
        adapter.inject(plain, adapter.DECODER_TARGETS, r, 2.0 * r)
        sizes.append(parameter_count(trainable(plain).values()))
    assert (
        sizes[0]
        < parameter_count(routed.parameters()) - parameter_count(base.parameters())
        <= sizes[1]
    )
    parts = [parameter_names(routed, pattern) for pattern in (PROJECTOR, DECODER, LEARNERS)]
    assert sorted(sum(parts, [])) == sorted(parameter_names(routed, r"(?!vision_tower\.).*"))
    assert {*parts[1]} == {*parameter_names(base, r"language_model\..*")}


def test_the_miniature_starts_from_the_text_base_of_its_seed(tmp_path):
    """Breaks when stage 1 has another decoder, or learners that change what it says."""
    text = make_text_base(3, tmp_path / "model", steps=1).eval()
    settings = stage_settings("wings", "--stage 1 --device cpu --seed 3")
    model, processor = open_first(settings, tmp_path)
    learned = text.language_model.embed_tokens.weight
    assert torch.equal(model.language_model.embed_tokens.weight, learned)
    ids = processor.pad([processor.row_of(0, [("What is a tiger?", None)])]).input_ids
    assert relative_error(*[each(ids, None, torch.ones_like(ids)) for each in (model, text)]) == 0


def test_stage_1_trains_the_visual_learners_of_rows_that_have_some(tmp_path, monkeypatch):
    """Breaks when a row starts stage 2 with learners that have seen no picture."""
    stages = read_stages(wings.Options, f"--base embedded {SMALL}".split(), "", {})
    learned = {}

    def stop(model, processor, records, settings, factors, folder):
        learned[row] = {*factors}
        raise InterruptedError

    monkeypatch.setattr(wings, "train_stage", stop)
    for row, factors in ROWS.items():
        with pytest.raises(InterruptedError):
            wings.make(stages, {}, Job(row, tuple(factors.items()), 1.0, 0), tmp_path, tmp_path)
    both = dict.fromkeys(("visual", "wings", "learners"), {PROJECTOR, VISUAL})
    assert learned == both | dict.fromkeys(("full", "lora"), {PROJECTOR})


@pytest.mark.long
def test_the_study_from_end_to_end_and_again(tmp_path, monkeypatch):
    """Breaks when a small study fails, trains another number of parameters, or computes finished
    cells again."""
    monkeypatch.setattr(wings, "LOOKED_AT", 4)  # pictures whose attention is measured
    command = f"--base embedded {SMALL} --out {tmp_path}".split()
    wings.main(command)
    made = times_in(tmp_path)
    summary = read_json(tmp_path / "comparison.json")
    text = (tmp_path / "comparison.md").read_text()
    facts = {row: cells["facts"][0] for row, cells in summary["rows"].items()}
    sizes = {row: of_row["parameters"] for row, of_row in facts.items()}
    base = load_model("embedded")
    projector = parameter_count(base.multi_modal_projector.parameters())
    decoder = parameter_count(base.language_model.parameters())
    assert sizes["full"] == projector + decoder < sizes["visual"] < sizes["wings"]
    assert sizes["wings"] - sizes["full"] == sizes["learners"] - projector
    assert sizes["learners"] <= sizes["lora"]
    for of_row in facts.values():
        assert of_row["unusable"]  # one step teaches nobody to read
        for layer in of_row["laws"]:
            assert sum(layer) == pytest.approx(100, abs=0.1)
    assert "\n| before" not in text
    assert all(f"\n| {row} " in text for row in ROWS)
    assert all(f" {task} " in text for task in TASKS)
    wings.main(command)
    assert made == times_in(tmp_path)
