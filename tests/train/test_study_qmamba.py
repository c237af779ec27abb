"""The study of Q-Mamba compares what it says it compares: same samples, same questions, one thing changed at a time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import scenes, vqa
from model.common import UserError
from model.mamba import MambaLM, initialize_mamba
from model.processor import Processor
from model.qmamba import QMamba
from model.system_configs import MambaConfig
from tests.files import write_vqav2
from tests.reference import relative_error
from train import pretrain_mamba, supervised
from train.compare import main as compare
from train.data.batches import collate
from train.embedded import mamba as embedded_mamba
from train.optim import count
from train.studies import qmamba as study_qmamba
from train.studies import qmamba_language
from train.studies.encoded import encoded_loss
from train.studies.qmamba import QMambaStudy, encoded_samples, read_arguments, shuffled
from train.studies.qmamba_scenes import TASKS
from train.studies.qmamba_tables import CONTROL, SCENE_TABLES, SCENES, Table, conclusions, judge_tables
from train.systems import qmamba
from weights.export import export_model
from weights.load import load_mamba, load_model


def study_of(out: Path, *flags: str) -> QMambaStudy:
    return read_arguments(["--limit", "4", "--threads", "1", "--out", str(out), *flags])[0]


@pytest.fixture
def study(tmp_path) -> QMambaStudy:
    return study_of(tmp_path)


@pytest.fixture
def tiny(monkeypatch):
    """The study at a hundredth of its size."""
    small = replace(qmamba.TINY, hidden_size=16, num_blocks=1)
    monkeypatch.setattr(qmamba, "TINY", small)
    monkeypatch.setattr(qmamba_language, "SCENES_IN_WORDS", 32)
    monkeypatch.setattr(qmamba_language, "ASKED", 32)


def processor_of(model) -> Processor:
    return Processor(model.config, Processor.from_source("embedded").tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def test_rows_differ_in_what_they_name_alone(study):
    """Breaks when a row starts from other weights than the one it is compared with, beyond its own change."""
    models = {name: study_qmamba.make_qmamba(study, SCENES[name], 3) for name in ("local", "global", "4 queries")}
    local = models["local"].state_dict()
    for name, model in models.items():
        for key, value in model.state_dict().items():
            if key != "multi_modal_projector.queries" or name == "global":
                assert torch.equal(value, local[key]), (name, key)
    assert models["global"].config.projector == replace(models["local"].config.projector, local_attention=False)
    other = study_qmamba.make_qmamba(study, SCENES["local"], 4).multi_modal_projector
    assert not torch.equal(other.output.weight, local["multi_modal_projector.output.weight"])


def test_the_control_is_as_large_as_the_row(study):
    """Breaks when the transformer wins by its size."""

    def learns(model):
        return count(p for name, p in model.named_parameters() if not name.startswith("vision_tower."))

    local = learns(study_qmamba.make_qmamba(study, SCENES["local"], 0))
    assert abs(learns(study_qmamba.PaliGemma(CONTROL)) / local - 1) < 0.01


def test_the_connector_alone_passes_every_feature(study):
    """Breaks when the row without queries still has some, or its parts are not those of the row with them."""
    model = study_qmamba.make_qmamba(study, SCENES["connector"], 0)
    projector, whole = model.multi_modal_projector, study_qmamba.make_qmamba(study, SCENES["local"], 0)
    assert not any("queries" in name or "blocks" in name for name, _ in projector.named_parameters())
    features = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    twin = whole.multi_modal_projector
    expected = twin.output(twin.connector(twin.vision_norm(twin.vision_proj(features))))
    assert relative_error(projector(features), expected) <= 1e-6 and expected.shape == (2, 16, 128)
    assert model.config.num_image_tokens == 16


def test_a_trained_connector_is_the_one_that_was_trained(study, tmp_path, monkeypatch):
    """Breaks when Table 3 compares two connectors from scratch, or takes over more than the connector."""
    donor = study_qmamba.make_qmamba(study, SCENES["connector"], 9)
    export_model(donor, tmp_path / "donor")
    monkeypatch.setattr(study_qmamba, "run_row", lambda *_: {"file": "donor"})
    model = study_qmamba.make_qmamba(study, SCENES["trained connector"], 0)
    scratch = study_qmamba.make_qmamba(study, SCENES["local"], 0)
    for name, parameter in model.multi_modal_projector.named_parameters():
        taken = name.startswith(("vision_proj.", "vision_norm.", "connector."))
        source = donor if taken else scratch
        assert torch.equal(parameter, source.get_parameter(f"multi_modal_projector.{name}")), name


# ---------------------------------------------------------------------------------------------------------------------
# Training data
# ---------------------------------------------------------------------------------------------------------------------


def test_features_stand_for_pictures(study):
    """Breaks when what is learned from encoded pictures is not what is learned from the pictures themselves."""
    model = study_qmamba.make_qmamba(study, SCENES["local"], 0)
    processor, samples = processor_of(model), encoded_samples(12, 5)
    micro = samples.batch(processor, range(12))
    plain = collate(samples.records, processor)
    assert len(samples.features) == len(plain.batch.pixel_values) < 12  # questions on one picture share it
    with torch.no_grad():
        ours, theirs = encoded_loss(model, micro), supervised.supervised_loss(model, plain)
    assert relative_error(ours, theirs) <= 1e-5 and micro.tokens == plain.tokens


def test_all_rows_of_a_seed_learn_the_same(study):
    """Breaks when rows differ in what they learn, two seeds do not, or a stage repeats the one before."""
    samples = encoded_samples(32, 1)
    models = study_qmamba.make_qmamba(study, SCENES["16 queries"], 1), study_qmamba.PaliGemma(CONTROL)
    orders = [[micro.names for (micro,) in shuffled(samples, processor_of(model), 8, 1).steps(0)] for model in models]
    assert orders[0] == orders[1] and sorted(sum(orders[0], ())) == sorted(set(sum(orders[0], ())))
    assert [record.name.split("/")[0] for record in samples.records[:4]] == list(TASKS)
    first, other, later = samples, encoded_samples(32, 2), encoded_samples(32, 1, stage=2)

    def scenes_of(*lessons):
        return {record.pictures[0].__self__ for samples in lessons for record in samples.records}

    assert not scenes_of(first) & scenes_of(other, later)
    assert [micro.names for (micro,) in shuffled(samples, processor_of(models[0]), 8, 1).steps(2)] == orders[0][2:]


def test_the_stages_are_those_of_the_command(study, monkeypatch):
    """Breaks when a row trains other parts than `--arch qmamba` does, or at other rates."""
    seen = {}
    monkeypatch.setattr(
        study_qmamba,
        "fit",
        lambda model, optimizer, *rest, **more: (
            seen.update({name: group["base_lr"] for group in optimizer.param_groups for name in group["names"]})
            or {"seconds": 1.0}
        ),
    )
    monkeypatch.setattr(study_qmamba, "encoded_samples", lambda *_: encoded_samples(32, 0))
    model = study_qmamba.make_qmamba(study, SCENES["local"], 0)
    for stage, parts in ((1, {"multi_modal_projector"}), (2, {"multi_modal_projector", "language_model"})):
        seen.clear()
        settings = study.settings(stage, 0)
        study_qmamba.learn(study, model, processor_of(model), settings, study.out / "run")
        assert {name.split(".")[0] for name in seen} == parts and set(seen.values()) == {settings.lr}


# ---------------------------------------------------------------------------------------------------------------------
# The whole study
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_study_runs_and_goes_on(tiny, tmp_path, monkeypatch, capsys):
    """Breaks when a table lacks a row, a figure is not drawn, or a finished cell is trained again."""
    flags = [
        "--rows",
        "qmamba",
        "--seeds",
        "2",
        "--most-seeds",
        "2",
        "--limit",
        "4",
        "--out",
        str(tmp_path),
        "--threads",
        "1",
    ]
    flags += ["--samples", "32", "--factors", "1"]
    compare(flags)
    text = (tmp_path / "comparison.md").read_text()
    assert text in capsys.readouterr().out
    summary = json.loads((tmp_path / "comparison.json").read_text())
    assert set(summary["rows"]) == {*SCENES, "trained connector, forward", "trained connector, backward"}
    for title, table in SCENE_TABLES.items():
        section = text[text.index(f"## {title}") :].split("\n## ")[0]
        assert all(f"| {name} " in section for name in table.rows)
    for name in ("rows.png", "differences.png"):
        assert (tmp_path / name).stat().st_size > 1000
    for row in summary["rows"].values():
        assert set(row["test"]) == {"mean", *TASKS} and len(row["test"]["vqa"]["by_seed"]) == 2
    monkeypatch.setattr(study_qmamba, "fit", lambda *args, **kwargs: pytest.fail("trained again"))
    compare(flags)
    assert json.loads((tmp_path / "comparison.json").read_text()) == summary
    models = [load_model(tmp_path / file) for row in summary["rows"].values() for file in row["models"]]
    assert len(models) == 2 * (len(SCENES) + 1) and all(type(model) is QMamba for model in models)
    compare([*flags, "--quick"])  # which is as long as the whole here: one batch
    summary = json.loads((tmp_path / "comparison.json").read_text())
    assert list(summary["rows"]) == ["local", "global", "4 queries", "16 queries"] and summary["scale"] == 0.5
    assert "0.5 times as long as in the whole study" in capsys.readouterr().out


def test_the_tables_are_made_of_any_base_and_data(tmp_path, capsys):
    """Breaks when Tables 3 and 4 need the embedded scenes, a row does not start from the connector that it names, or
    eval.vqa asks in another order than the study."""
    write_vqav2(tmp_path / "data")
    flags = ["--data", f"vqav2:{tmp_path / 'data'}", "--validation", "0.5", "--step-batch", "4", "--steps", "1"]
    flags += ["--option", "hidden_size=8", "--option", "num_blocks=1", "--device", "cpu", "--threads", "1"]
    out = tmp_path / "study"
    assert study_of(out, *flags, "--tables", "3").names == ["connector", "local", "from scratch"]
    study_qmamba.main([*flags, "--seeds", "1", "--tables", "4", "--out", str(out)])
    summary = json.loads((out / "comparison.json").read_text())
    assert [*summary["rows"]] == ["connector", "all queries", "all queries, forward", "all queries, backward"]
    assert "| all queries, forward " in (text := (out / "comparison.md").read_text()) and "| guess " not in text
    kinds = {
        name: load_model(out / row["models"][0]).config.projector
        for name, row in summary["rows"].items()
        if "," not in name
    }
    assert (kinds["connector"].projector, kinds["all queries"].queries) == ("connector", 16)
    whole, asked = out / summary["rows"]["all queries"]["models"][0], tmp_path / "asked"
    orders = ["--scan-order", "forward", "--scan-order", "bidirectional", "--limit", "2", "--json", "--out", str(asked)]
    capsys.readouterr()
    vqa.main(["--data", f"vqav2:{tmp_path / 'data'}", "--model", str(whole), *orders])
    titles = [f"model-{order}" for order in orders[1:4:2]]
    assert [*json.loads(capsys.readouterr().out)["models"]] == titles
    logs = [(asked / title / "answers.jsonl").read_text().splitlines() for title in titles]
    one, other = ({json.loads(line)["mark"] for line in log} for log in logs)
    assert len(one) == 2 and not one & other  # what is answered in one order is not taken for another
    for flag in ("--quick", "--full"):
        with pytest.raises(UserError, match="--scale, --quick and --full are of the embedded scenes"):
            study_of(out, *flags, flag)
    with pytest.raises(UserError, match="--tables 5: choose of 1, 2, 3, 4"):
        study_of(out, "--tables", "5")


@pytest.mark.long
def test_differences_are_paired_and_told(study, monkeypatch):
    """Breaks when a difference has the wrong sign, ignores which example it is of, or its verdict is another."""
    right, wrong = [1.0] * 4, [0.0] * 4
    found = {
        name: [{"trainable": 1, "cpu_seconds": 1.0, "scores": dict.fromkeys(TASKS, right)}] * 2
        for name in (*SCENES, "trained connector, forward", "trained connector, backward")
    }
    language = {"answer_tokens": 12.345, "scenes": 32, "cpu_seconds": 1.0}
    monkeypatch.setattr(study_qmamba, "run_language", lambda _: language)
    monkeypatch.setattr(study_qmamba, "run_mamba", lambda _: {"answer_tokens": 64.4})
    found["global"] = [found["local"][0] | {"scores": dict.fromkeys(TASKS, wrong)}] * 2
    summary = study_qmamba.summarize(study, found)
    gain = summary["differences"]["global - local"]["mean"]
    assert (gain["mean"], gain["significant"]) == (-100.0, True)
    assert summary["differences"]["4 queries - local"]["vqa"]["significant"] is False
    told = conclusions(summary | {"rates": {}, "edges": []})
    noisy = {task: 50 + np.array([[0.0, 9, 0, 9], [9, 0, 9, 0]] * 3) for task in TASKS}
    shifts = {"local": (0, 0), "global": (-20, 20)}  # what one task gains another loses
    scores = {
        name: noisy | {TASKS[0]: noisy[TASKS[0]] + lost, TASKS[1]: noisy[TASKS[1]] + won}
        for name, (lost, won) in shifts.items()
    }
    scores = {name: {"mean": np.hstack(list(of_row.values()))} | of_row for name, of_row in scores.items()}
    table = Table("", {"local": None, "global": "local"})
    of_pair = judge_tables(study.measures, {"2": table}, scores, {})["global - local"]
    assert (
        of_pair["mean"]["verdict"] == "undecided"
        and of_pair["mean"]["mean"] == 0
        and of_pair[TASKS[0]]["verdict"] == "worse"
    )
    assert of_pair[TASKS[1]]["verdict"] == "better" and of_pair[TASKS[2]]["verdict"] == "equivalent"
    assert "global against local: -100.0 [-100.0, -100.0] out of range, 2 seeds." in told  # the control is perfect
    assert any(line.startswith("global cannot be told from guessing") for line in told)
    assert not any(line.startswith("local cannot") for line in told)
    assert any(
        "had 64.4 % of the answers' tokens right, the transformer, of 32 of them, 12.3 %" in line for line in told
    )


def test_seeds_are_added_where_a_difference_is_uncertain(study, monkeypatch):
    """Breaks when rows of a table get fewer seeds than the rules ask for, or rows of the other tables more."""
    asked = []

    def compute(_, wanted, processes):
        asked.append(dict(wanted))
        found = {}
        for name, seeds in wanted.items():
            noise = [float(seed % 2) if name in ("global", "local") else 0.5 for seed in range(seeds)]
            found[name] = [
                {"scores": dict.fromkeys(TASKS, [1 - one if name == "global" else one] * 4)} for one in noise
            ]
        orders = {f"trained connector, {order}": found["trained connector"] for order in ("forward", "backward")}
        return found | (orders if "trained connector" in found else {})

    monkeypatch.setattr(study_qmamba, "compute", compute)
    tables = {title: table for title, table in SCENE_TABLES.items() if title.split()[1] in ("2:", "4:")}
    study_qmamba.collect(replace(study, tables=tables), 2, 5)
    assert asked == [{"local": seeds, "global": seeds, "connector": 2, "trained connector": 2} for seeds in range(2, 6)]


def test_each_row_has_the_rate_that_is_best_for_it(study, monkeypatch):
    """Breaks when a rate is chosen on what is reported, a row is tried at other rates or seeds than another, trains at
    another's rate, or the second table has rows at different rates."""
    best, asked = {"local": 1.0, "global": 4.0, "connector": 1.0, "trained connector": 0.5}, []

    def run_row(study, name, seed):
        factor = study.factor(name)
        lr, examples = study.settings(2, seed, name).lr, study.measures[0].examples
        assert lr == pytest.approx(factor * study.stages[2].lr) and study.settings(1, 0).samples == 2000
        asked.append((name, seed, factor, study.split, study.factor(study.all_rows[name].connector)))
        assert str(examples[0]).startswith(study.split) == (study.split == "validation")
        scores = dict.fromkeys(TASKS, [float(factor == best[name]), 0.0, 1.0, 0.0])
        accuracy = 50 - abs(math.log2(factor / best[name]))
        read = {order: scores for order in ("forward", "backward")} if name == "trained connector" else {}
        return {"scores": scores, "read": read, "trainable": 1, "accuracy": accuracy, "cpu_seconds": 1.0, "file": "x"}

    monkeypatch.setattr(study_qmamba, "run_row", run_row)
    tables = {title: table for title, table in SCENE_TABLES.items() if title.split()[1] in ("2:", "4:")}
    options = read_arguments(["--seeds", "5", "--most-seeds", "5", "--out", str(study.out)])[1]
    assert options.factors == (0.5, 1.0, 2.0)
    summary = study_qmamba.compare(replace(study, tables=tables), options, 1)
    tried = {(name, seed, factor) for name, seed, factor, split, *_ in asked if split == "validation"}
    assert {one[4] for one in asked if one[3] == "validation"} == {1.0}
    assert tried == {(name, seed, 0.25 * 2**n) for name in best for seed in range(3) for n in range(6)}
    assert {row: one["factor"] for row, one in summary["rates"].items()} == best and not summary["edges"]
    told = [(name, seed, factor) for name, seed, factor, split, *_ in asked if split == "test"]
    assert told[: 4 * 5] == [(name, seed, best[name]) for seed in range(5) for name in best]
    assert set(told[4 * 5 :]) == {(name, seed, 1.0) for name in best for seed in range(3)}
    assert (
        summary["differences"]["global - local"]["mean"]["mean"]
        == 0
        > summary["common"]["global - local"]["mean"]["mean"]
    )
    report = study_qmamba.to_markdown(summary | {"language": {}})
    assert "| global            |      4 |" in report and "All rows at the rates of the first" in report


def test_the_transformer_knows_as_much_as_the_mamba(study, monkeypatch):
    """Breaks when the search for its number of scenes ends elsewhere, or does not end."""
    monkeypatch.setattr(qmamba_language, "run_mamba", lambda _: {"validation": 60.0})
    tried = []

    def learn(_, count):
        tried.append(count)
        return {"validation": count / 100, "scenes": count}

    monkeypatch.setattr(qmamba_language, "learn_language", learn)
    found = qmamba_language.run_language(study)
    assert tried[:3] == [9984, 4992, 7488] and abs(found["scenes"] - 6000) <= 100  # 20,000 halved, in batches
    assert len(tried) <= 6
    tried.clear()
    assert qmamba_language.run_language(replace(study, scale=0.01))["scenes"] == max(tried)  # never as much: the most


def test_what_models_know_is_measured_to_the_gap(study, monkeypatch):
    """Breaks when so few scenes are asked that the standard error of a difference is above GAP."""
    asked = {}
    monkeypatch.setattr(qmamba_language, "accuracy", lambda model, words, number, split: asked.update({split: number}))
    qmamba_language.run_mamba(study)
    processor, share = qmamba_language.open_processor(), 0.64  # of the tokens that the Mamba knows
    for split in ("validation", "test"):
        few = embedded_mamba.described_batches(processor, 320, 32, split)
        tokens = sum(int(((of.labels >= 0) & (of.labels != processor.config.eos_token_id)).sum()) for of in few)
        assert 100 * math.sqrt(2 * share * (1 - share) / (tokens * asked[split] / 320)) < qmamba_language.GAP
    monkeypatch.setattr(qmamba_language, "ASKED", 32)
    qmamba_language.run_mamba(study)
    assert set(asked.values()) == {32}  # what was measured on other scenes is not read again


@pytest.mark.parametrize(("flags", "told"), [(["--scale", "0"], "--scale is 0.0, expected a number of at least 1e-06")])
def test_senseless_flags_are_refused(flags, told, tmp_path):
    """Breaks when a study of no length is run."""
    with pytest.raises(UserError, match=told):
        study_qmamba.main([*flags, "--out", str(tmp_path)])


# ---------------------------------------------------------------------------------------------------------------------
# The embedded language model
# ---------------------------------------------------------------------------------------------------------------------


def test_scenes_are_told_right():
    """Breaks when words and questions are of different scenes, or a question carries loss."""
    processor = Processor.from_source("embedded")
    ids, types, _ = embedded_mamba.describe_scene(7, "train", processor)
    assert processor.decode(ids[:16]).split() == list(scenes.vqa_picture("train", 7)[0].scene.squares)
    text = [processor.decode([i for i, t in zip(ids, types, strict=True) if t and i != 1])]
    samples = scenes.vqa_picture("train", 7)
    assert all(sample.suffix in text[0] for sample in samples) and sum(types) > 2 * len(samples)
    batch = next(embedded_mamba.described_batches(processor, 3, 3))
    for row in range(3):
        valid = batch.attention_mask[row].bool()
        assert batch.token_type_ids[row][valid].tolist() == [0] * 16 + [1] * (int(valid.sum()) - 16)


@pytest.mark.long
def test_the_language_model_is_made_and_loads(tmp_path, monkeypatch, capsys):
    """Breaks when the command's folder is no published Mamba, or it does not learn."""
    monkeypatch.setattr(pretrain_mamba, "CONFIG", MambaConfig(1728, 32, 1, 4, eos_token_id=1, bos_token_id=2))
    monkeypatch.setattr(embedded_mamba, "RATE", 1e-2)
    before = MambaLM(pretrain_mamba.CONFIG)
    initialize_mamba(before.backbone)
    processor = Processor.from_source("embedded")
    pretrain_mamba.main(["--out", str(tmp_path), "--samples", "960"])
    model = load_mamba(tmp_path)
    assert pretrain_mamba.accuracy(before, processor, 32) < 5 < pretrain_mamba.accuracy(model, processor, 32)
    assert json.loads((tmp_path / "pretraining.json").read_text())["samples"] == 960
    assert {p.name for p in Path(tmp_path).iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.model",
        "pretraining.json",
    }
    with pytest.raises(UserError, match="--samples is 3"):
        pretrain_mamba.main(["--samples", "3"])


@pytest.mark.long
def test_the_shipped_language_model_knows_its_scenes(study):
    """Breaks when what is shipped is not what the command makes."""
    model, processor = load_mamba(qmamba.TINY_MAMBA), Processor.from_source("embedded")
    record = json.loads((qmamba.TINY_MAMBA / "pretraining.json").read_text())
    assert abs(pretrain_mamba.accuracy(model, processor) - record["answer_tokens"]) <= 0.3
    assert isinstance(study_qmamba.make_qmamba(study, SCENES["local"], 0), QMamba)
