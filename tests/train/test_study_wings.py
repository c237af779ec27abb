"""The study of text-only forgetting: its text tasks, its matched controls, its tables, and that it goes on."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval import scenes
from eval.records import Record
from eval.scenes import CATEGORIES
from eval.shift import measure, put_slot
from eval.text import sentences
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model.common import UserError
from model.paligemma import PaliGemma
from model.processor import Processor
from model.wings import attach
from train import compare, finetune
from train.data.batches import collate
from train.embedded import text as text_base
from train.embedded.text import text_records
from train.optim import count, trainable
from train.settings import parse
from train.studies import rules, wings_front, wings_runs
from train.studies import wings as study_wings
from train.studies.encoded import EncodedOrder, answer, encoded_loss, prepare
from train.studies.rules import edges
from train.studies.wings import WingsOptions
from train.studies.wings_front import compare_at_levels, judge_levels, kept, main_gain, text_at
from train.studies.wings_runs import FULL, RATES, WingsStudy, lora_rank
from train.supervised import supervised_loss
from train.systems.open import open_stage
from weights.load import load_model

pytestmark = pytest.mark.long


def read(task: str, prefix: str) -> str:
    """The right answer, from the prompt alone."""
    words = prefix.replace(".", "").replace(",", "").replace("?", "").split()
    if task == "add":
        return str(int(words[3]) + int(words[5]))
    if task == "copy":
        return " ".join(words[1 : words.index("What")])
    if task == "lookup":
        return words[int(words[-1])]
    return next(kind for kind, names in CATEGORIES.items() if words[-1] in names)


@pytest.mark.parametrize("task", sentences.TASKS)
def test_sentences_have_one_right_answer(task, processor):
    """Breaks when an answer is wrong, a word is no piece of the tokenizer, or a test prompt was learned."""
    drawn = {split: [sentences.sentence(task, split, i) for i in range(300)] for split in ("train", "test")}
    for s in drawn["train"] + drawn["test"]:
        assert s.suffix == read(task, s.prefix), s
    prompts = {split: {s.prefix for s in of_split} for split, of_split in drawn.items()}
    if task not in sentences.BY_HEART:
        assert not prompts["train"] & prompts["test"] and len(prompts["test"]) > 290
        # no answer can be guessed: the most frequent one is rare
        assert Counter(s.suffix for s in drawn["test"]).most_common(1)[0][1] < 15
    pieces = processor.tokenizer.encode(drawn["train"][0].prefix, out_type=str)
    assert len(pieces) <= len(drawn["train"][0].prefix.split()) + 6  # words are pieces, not letters
    assert sentences.sentence(task, "test", 7) == sentences.sentence(task, "test", 7)
    assert sentences.sentence(task, "train", 7, seed=1) != sentences.sentence(task, "train", 7, seed=2)


def test_unknown_sentences_are_refused():
    """Breaks when a misspelt task or split gives something else, or a traceback."""
    for task, split in (("adds", "test"), ("add", "tests")):
        with pytest.raises(UserError, match="expected add, copy, lookup, fact"):
            sentences.sentence(task, split, 0)


def test_the_control_has_as_many_parameters():
    """Breaks when LoRA gets fewer parameters than the learners and routers it is compared with, or far more."""
    base = load_model("embedded")
    rank = lora_rank(base)
    learners = count(attach(base, wings_runs.RANK, routed=True).parameters()) - count(base.parameters())
    sizes = {}
    for r in (rank - 1, rank):
        model = load_model("embedded")
        adapter.inject(model, DECODER_TARGETS, r, 2.0 * r)
        sizes[r] = count(trainable(model).values())
    assert sizes[rank - 1] < learners <= sizes[rank]


def test_prepared_micro_batches_are_causal_and_seen(processor, tmp_path, monkeypatch):
    """Breaks when features made beforehand are another picture's, or the loss is not that of the pixels, causally."""
    base = load_model("embedded")
    study = WingsStudy(tmp_path, 0.02, 4, "", processor, base)
    drawn = [scenes.sample("scan", "train", number) for number in range(2)]
    turns = [("scan<image>", s.suffix) for s in drawn]
    records = [Record(s.task, str(i), (lambda s=s: s.image,), (turns[i],)) for i, s in enumerate(drawn)]
    (micro,) = prepare(records, processor, base.vision_tower, 2)
    # in this study every row takes the picture where it stands, as WINGS does
    monkeypatch.setattr(Processor, "in_place", lambda self, n_images, turns: list(turns))
    seen = collate(records, processor)
    causal = replace(seen, batch=replace(seen.batch, token_type_ids=torch.ones_like(seen.batch.input_ids)))
    expected = supervised_loss(base, causal)
    torch.testing.assert_close(encoded_loss(base, micro), expected, atol=1e-3, rtol=1e-5)
    assert abs(supervised_loss(base, seen) - expected) > 0.01  # reading the prompt both ways is another thing
    wings_runs.encode_training(study, tmp_path)
    first, second = wings_runs.pictures_to_learn(study, tmp_path, 0)
    assert [len(first), len(second)] == [2, 6] and len(first[0].names) == len(first[0].features)
    others = wings_runs.pictures_to_learn(study, tmp_path, 1)  # the same pictures in another order
    names = [[name for part in both for one in part for name in one.names] for both in ((first, second), others)]
    assert names[0] != names[1] and sorted(names[0]) == sorted(names[1]) and len(set(names[0])) == 8 * 32
    with_text = wings_runs.pictures_to_learn(study, tmp_path, 0, 0.25)
    assert with_text[0][0].names == first[0].names  # text comes in the second stage alone
    of_step = [[name for name in one.names if not name.startswith("scan/")] for one in with_text[1]]
    assert [len(texts) for texts in of_step] == [8] * 6 and len({name.split("/")[0] for name in of_step[0]}) == 4
    assert all(len(one.features) == 24 for one in with_text[1])
    assert {*with_text[1][0].names} - {*of_step[0]} < {*second[0].names}  # the other rows are the same
    shown = int(second[0].names[3].removeprefix("scan/"))
    pixels = [scenes.sample("scan", "train", shown).image]
    expected = base.vision_tower(processor.pad([processor.layout(1, "scan")], pixels).pixel_values)[0]
    torch.testing.assert_close(second[0].features[3], expected, atol=1e-4, rtol=1e-4)
    order = EncodedOrder(len(second), second.__getitem__)
    assert [[m] for m in second[1:]] == list(order.steps(1, 0, False)) and order.total == 6
    (text,) = prepare(text_records(1, 0)[:6], processor, base.vision_tower, 6)
    assert text.features.shape == (0, 16, 128) and text.tokens > 6


def test_attention_is_measured_in_batches_as_one_by_one(processor, tmp_path):
    """Breaks when LAWS of a batch are of other rows, other pictures, or not causal."""
    base = load_model("embedded")
    study, model = WingsStudy(tmp_path, 1, 3, "", processor, base), attach(base, 4)
    drawn = [scenes.sample("scan", "test", number) for number in range(3)]
    asked = [(sample.image, put_slot(wings_runs.QUESTION)) for sample in drawn]
    with torch.no_grad():
        found, expected = wings_runs.attend(study, model, 3), measure(model, processor, asked)
        assert wings_runs.attend(study, base, 3).laws == pytest.approx(found.laws, rel=1e-3)
    assert found.laws == pytest.approx(expected.laws, rel=1e-3) and found.laws[0] != pytest.approx(found.laws[1])
    assert found.queries.tolist() == expected.queries.tolist()


def test_answers_to_text_alone_and_to_pictures(processor):
    """Breaks when prompts and features are paired wrongly across batches, or text is read with a picture."""
    model = load_model("embedded")
    features = model.vision_tower(torch.rand(3, 3, 112, 112) * 2 - 1)
    prompts = ["detect<image> dog", "caption<image> en", "scan<image>"]
    whole = answer(model, processor, prompts, features)
    assert whole == [answer(model, processor, [p], features[i : i + 1])[0] for i, p in enumerate(prompts)]
    assert whole == answer(model, processor, prompts, features, rows=2)
    assert len(answer(model, processor, ["How many are 1 and 2?"])) == 1


def test_the_study_goes_on_and_tells_what_it_found(tmp_path, capsys, monkeypatch):
    """Breaks when a small study fails, does finished cells again, or leaves a pair or a result out."""
    monkeypatch.setattr(study_wings, "FULL", replace(FULL, factors=(1.0,), mixed=(0.5,)))
    monkeypatch.setattr(wings_front, "LEVELS", (0, 90, 95))
    predicted = [one._replace(measure="0", verdict="undecided") for one in study_wings.PREDICTIONS]
    monkeypatch.setattr(study_wings, "PREDICTIONS", predicted)
    monkeypatch.setattr(wings_runs, "ROWS_A_STEP", 4)
    monkeypatch.setattr(text_base, "ROWS", 6)
    command = [
        "--rows",
        "wings",
        "--seeds",
        "1",
        "--most-seeds",
        "1",
        "--scale",
        "0.01",
        "--limit",
        "3",
        "--out",
        str(tmp_path),
    ]
    command += ["--threads", str(torch.get_num_threads())]
    compare.main(command)
    told = capsys.readouterr().out
    assert "| wings - full" in told and "| learners - lora" in told
    assert "- wings against full: " in told and "- learners against lora: " in told
    summary = json.loads((tmp_path / "comparison.json").read_text())
    mixed = ["wings, 50 % text", "full, 50 % text"]
    assert list(summary["rows"]) == ["wings", "full", "learners", "lora", *mixed] and (tmp_path / "wings.png").exists()
    assert "wings against full: text where both have read 0 % of the pictures was predicted to be undecided" in told
    assert "| wings, 50 % text - full, 50 % text " in told and "reached by 0 and 0 of 1 seeds" in told
    plain = PaliGemma(load_model("embedded").config)
    decoder = count(plain.language_model.parameters())
    projector = count(plain.multi_modal_projector.parameters())
    trained = {name: row["trained"] for name, row in summary["rows"].items()}
    assert trained["full"] == decoder + projector
    assert trained["wings"] - trained["full"] == trained["learners"] - projector <= trained["lora"] - projector
    # of each run three steps
    assert summary["runs"] == 6 and [p["step"] for p in summary["checkpoints"]] == [1, 2, 3] * 6
    assert "18 checkpoints of 6 runs of stage 2" in told and "→" in told and "100 multimodal language models" in told
    with monkeypatch.context() as patch:
        patch.setattr(wings_runs, "learn", None)  # nothing is trained again
        compare.main(command)
    assert capsys.readouterr().out.split("\n\n")[:-1] == told.split("\n\n")[:-1]
    compare.main([*command, "--quick", "--seeds", "2"])  # with the text model of the whole study, for both seeds
    told = capsys.readouterr().out
    summary = json.loads((tmp_path / "comparison.json").read_text())
    assert list(summary["rows"]) == ["wings", "full"] and len(list(tmp_path.glob("cells/*/model"))) == 7
    for row in ("before", "after stage 1: projector", "after stage 1: projector, learners", "wings", "full"):
        assert f"\n| {row} " in told
    with pytest.raises(UserError, match="--scale is 0"):
        compare.main([*command, "--scale", "0"])


def test_a_run_starts_from_text_alone_and_says_what_is_left_of_it(tmp_path, monkeypatch, capsys):
    """Breaks when --wings starts from a base that knows pictures, trains text twice, or its table lacks the text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_base, "STEPS", 2)
    small = ["--steps", "1", "--batch-size", "4", "--step-batch", "4", "--samples", "64", "--tasks", "vqa"]
    small += ["--eval-limit", "4", "--eval-every", "0", "--measure-every", "0", "--device", "cpu"]
    finetune.main(["--wings", "--stage", "1", "--out", "one", *small])
    printed = capsys.readouterr().out
    assert "text alone, %" in printed and all(f"\n  {task} " in printed for task in sentences.TASKS)
    summary = json.loads(Path("one/summary.json").read_text())
    assert summary["before"]["text"].keys() == summary["after"]["text"].keys() == sentences.TASKS.keys()
    assert json.loads(Path("one/config.json").read_text())["base"] == "embedded-text"
    (folder,) = Path("runs").glob(".embedded-text-*")
    learned, given = load_model(folder / "model"), load_model("embedded")
    assert all(map(torch.equal, learned.vision_tower.parameters(), given.vision_tower.parameters()))
    assert not torch.equal(learned.language_model.norm.weight, given.language_model.norm.weight)
    start = load_model("one/model").state_dict()
    assert all(torch.equal(start[name], p) for name, p in learned.named_parameters() if "projector" not in name)

    monkeypatch.setattr(text_base, "train_text_base", None)  # it is kept
    settings = parse(["--wings", "--stage", "1"])[0]
    again = open_stage(settings, torch.float32, torch.device("cpu"))
    assert torch.equal(again.language_model.embed_tokens.weight, learned.language_model.embed_tokens.weight)
    assert open_stage(settings, torch.float32, torch.device("meta")).config == again.config
    assert parse(["--wings", "--stage", "1", "--data", "jsonl:x"])[0].base == "embedded"  # as older runs had


def point(pictures: float, *text: int) -> dict:
    return {"pictures": [pictures, pictures], "text": {"add": text[:2], "copy": text[2:]}}


def test_a_correlation_counts_decoders():
    """Breaks when runs of one decoder count as independent, levels of decoders as a correlation, or a constant does."""
    slopes, line = (1, 1, 1, -1, 0), range(8)  # of each decoder, over all of its checkpoints
    points = [
        {"seed": seed, "shift": x, "lost": 100 * seed + slope * x} for seed, slope in enumerate(slopes) for x in line
    ]
    found = study_wings.correlation(points)
    assert found is not None and found.mean == pytest.approx(0.5) and found.freedom == 3  # of 1, 1, 1, -1
    assert found.high == pytest.approx(0.5 + 3.182446305284263 * 0.5)  # scipy.stats.t.ppf(0.975, 3)
    assert study_wings.correlation(points[:8]) is None


def test_rows_are_compared_where_they_read_equally_many_pictures():
    """Breaks when text is taken at another moment, of another rate or seed, or a level that is not reached counts."""
    slow = [point(0.0, 1, 1, 1, 1), point(0.4, 1, 1, 1, 0), point(0.8, 1, 0, 0, 0), point(0.6, 0, 0, 0, 0)]
    fast = [point(0.0, 1, 1, 1, 1), point(0.9, 1, 1, 0, 0)]
    assert text_at(slow, 40, 2).tolist() == [100, 100, 100, 0]
    assert text_at(slow, 60, 2).tolist() == [100, 50, 50, 0]  # before the loss at the end
    assert text_at(slow, 60, 1).tolist() == [100, 50]
    assert text_at(slow, 90, 2) is None and text_at(slow, 0, 2).tolist() == [100] * 4
    assert text_at(fast, 45, 2) == pytest.approx([100, 100, 50, 50])
    found = compare_at_levels([slow, fast], [fast, fast], 2)
    assert found["50"]["difference"]["mean"] == pytest.approx(((75 + 0) / 2 - (100 + 100 * 4 / 9) / 2) / 2)
    assert found["90"] == {"reached": [1, 2], "seeds": 2}
    assert kept(slow, 2) == 0 and kept(fast, 2) == 0.5  # of sentences that the comparison has not


def test_runs_that_do_not_read_the_pictures_give_no_verdict():
    """Breaks when a difference that leaves out the runs that learn badly is judged, or ends the study early."""
    slow = [point(0.0, 1, 1, 1, 1), point(0.4, 1, 1, 1, 0)]
    fast = [point(0.0, 1, 1, 1, 1), point(0.95, 1, 1, 0, 0)]
    found = compare_at_levels([fast, slow, fast, fast], [fast] * 4, 2)
    assert found["90"]["reached"] == [3, 4] and found["90"]["difference"]["mean"] == 0
    assert len(compare_at_levels([fast, slow, slow, fast], [fast] * 4, 2)["90"]) == 2  # of two seeds, nothing
    judge_levels({"wings": found})
    levels = compare_at_levels([fast] * 4, [fast] * 4, 2)
    judge_levels({"wings": levels})
    assert "verdict" not in found["90"] and "verdict" in levels["90"]
    assert not main_gain([fast, slow, fast, fast], [fast] * 4, 2) and main_gain([fast] * 4, [fast] * 4, 2)
    assert not rules.enough([], 5) and rules.enough([], 10)


def test_each_row_has_the_rate_that_keeps_most_text(tmp_path, monkeypatch):
    """Breaks when a rate is chosen by the sentences that are reported, a row is tried at other factors than another,
    seeds end too early, or rows with text have another rate."""
    best, asked = {"wings": 0.25, "full": 0.5, "learners": 1.0, "lora": 0.5}, []

    def compute(_, job):
        asked.append(job)
        if job[0] != "tuned":
            return point(0.0, 1, 1, 1, 1)
        name, rate, seed, _ = job[1:]
        text = int(rate == best[name] * RATES[name])
        reached = point(1.0, text, seed % 2, text, seed % 2 if name == "wings" else 1 - seed % 2)
        return {"course": [reached], "validation": 99.0}

    cells = SimpleNamespace(
        study=WingsStudy(tmp_path, 1.0, 8, "", None, None),
        decoder=lambda seed: seed,
        get=lambda *job: compute(None, job),
    )
    monkeypatch.setattr(study_wings, "compute", compute)
    options = WingsOptions(seeds=5, most_seeds=6, out=tmp_path)
    results = study_wings.collect(options, cells, 1)
    assert {name: results.factor(name) for name in best} == best and not edges(results.tried)
    tuned = [job[1:] for job in asked if job[0] == "tuned"]
    tried = {(name, rate / RATES[name], seed) for name, rate, seed, text in tuned if not text and seed < 3}
    assert tried == {(name, 2.0**-n, seed) for name in best for n in range(-1, 4) for seed in range(3)}
    later = {(name, rate / RATES[name], seed) for name, rate, seed, text in tuned if not text and seed >= 3}
    assert later == {(name, factor, seed) for name, factor in best.items() for seed in (3, 4, 5)}  # to the most: noise
    mixed = {(name, rate / RATES[name], seed, text) for name, rate, seed, text in tuned if text}
    assert mixed == {(n, best[n], s, text) for n in ("wings", "full") for s in range(6) for text in FULL.mixed}
    assert len(results.before) == len(results.starts[True]) == len(results.points("wings", 0.2)) == 6


@pytest.mark.parametrize("stage", ["text", "first", "second"])
def test_checkpoints_are_kept_until_a_model_is_graded(stage, tmp_path, monkeypatch):
    """Breaks when a study that is interrupted while it asks its questions has to train the model again."""
    folder, model = tmp_path / "run", torch.nn.Linear(1, 1)

    def train(*_):
        folder.mkdir()
        return model if stage == "text" else {"course": []}

    def interrupted(*_):
        raise KeyboardInterrupt

    for name in ("learn", "train_text_base"):
        monkeypatch.setattr(wings_runs, name, train)
    monkeypatch.setattr(wings_runs, "load_model", lambda _: model)
    monkeypatch.setattr(wings_runs, "pictures_to_learn", lambda *_: ([], []))
    monkeypatch.setattr(wings_runs, "grade_pictures", lambda *_: [1.0])
    monkeypatch.setattr(wings_runs, "grade", interrupted)
    study = WingsStudy(tmp_path, 1.0, 4, "", None, None)
    work = {
        "text": lambda: wings_runs.train_text(study, 0, tmp_path),
        "first": lambda: wings_runs.first_stage(study, False, tmp_path, tmp_path, 0, tmp_path),
        "second": lambda: wings_runs.second_stage(study, "full", 1e-3, 0.0, tmp_path, tmp_path, 0, tmp_path),
    }
    with pytest.raises(KeyboardInterrupt):
        work[stage]()
    assert folder.is_dir()
