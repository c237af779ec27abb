"""Flags made of dataclass fields: what they accept on the command line and in a run's config.json."""

import dataclasses
import json
import shlex

import pytest

from model.common import UserError
from train import finetune
from train.flags import check_ranges, read_config
from train.settings import Settings, command_of, parse, step_layout
from train.systems.text import TextSettings

NUMBERS = [
    (settings, field.name)
    for settings in (Settings, TextSettings)
    for field in dataclasses.fields(settings)
    if type(field.default) in (int, float)
]


@pytest.mark.parametrize(("settings", "name"), NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1, 10**20, "3", [1], True])
def test_no_number_is_outside_its_range(settings, name, value):
    """Breaks when a value that no run can use starts one: NaN, infinity, a negative rate, a seed of 20 digits."""
    with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} is .*, expected a") as caught:
        check_ranges(dataclasses.replace(settings(), **{name: value}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--recipe", "paper-2", "--data", "vqav2:a dir", "--step-batch", "8"],
        [
            "--data",
            "jsonl:it's.jsonl@0.3",
            "--data",
            "embedded@0.7",
            "--no-evaluate",
            "--full",
            "--attention",
            "softmax",
        ],
        ["--wings", "--stage", "2", "--base", "runs/1/model", "--lr", "0.0015"],
        ["--arch", "qmamba", "--stage", "1", "--option", "queries=8", "--option", "text=true"],
        ["--attention", "dex", "--option", "heads=[0, 1]", "--seed", "3", "--checkpointing"],
    ],
)
def test_the_command_of_a_run_gives_its_settings(flags):
    """Breaks when the command in a summary or model card trains something else."""
    settings = parse(flags)[0]
    assert parse(shlex.split(command_of(settings))[3:])[0] == settings
    again = parse(shlex.split(command_of(settings, 2))[3:])
    assert again[0] == settings and again[1].processes == 2


@pytest.mark.parametrize("without", [["--no-evaluate"], ["--eval-every", "0"]])
def test_patience_needs_evaluations(without):
    """Breaks when a run that was to stop early never looks whether it should."""
    with pytest.raises(UserError, match="^--patience 2 counts evaluations") as caught:
        parse(["--patience", "2", *without])
    assert "\n" not in str(caught.value)


def test_defaults_are_in_range():
    for settings in (Settings(), TextSettings()):
        check_ranges(settings)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--lora-r", "--r"),
        ("--lora-alpha", "--alpha"),
        ("--batchsize", "--batch-size"),
        ("--weight_decay", "--weight-decay"),
        ("--epoch", None),  # argparse takes the beginning of a flag
    ],
)
def test_a_flag_of_another_program_is_named_as_it_is_here(flag, meant, capsys):
    """Breaks when a user of another program has to read all of --help."""
    if meant is None:
        assert parse([flag, "3"])[0].epochs == 3
        return
    with pytest.raises(SystemExit) as stopped:
        parse([flag, "3"])
    assert stopped.value.code == 2
    assert f"(did you mean {meant}?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": "16"}, "--r is '16', expected an integer"),
        ({"r": 10**400}, "--r is "),
        ({"lr": None}, "--lr is None, expected a number"),
        ({"evaluate": 1}, "--evaluate is 1, expected true or false"),
        ({"option": "mu=1"}, "--option is 'mu=1', expected a list"),
        ({"option": [1]}, "--option is"),
        ({"attention": "tween"}, "--attention is 'tween', expected 'softmax' or"),
        ({"base": "a\0b"}, "without NUL"),
        ({"learning_rate": 1}, "no run folder .*learning_rate"),
    ],
)
def test_a_run_s_config_is_checked_field_by_field(change, message, tmp_path):
    """Breaks when an edited config.json ends in a traceback, or in a run with other settings than it says."""
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(Settings()) | change))
    with pytest.raises(UserError, match=message) as caught:
        finetune.main(["--resume", str(tmp_path)])
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"r": ' + "1" * 5000 + "}", "\ufeff{}x"])
def test_a_file_that_is_no_config_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="no run folder of train.finetune"):
        finetune.main(["--resume", str(tmp_path)])


def test_a_config_of_an_older_version_has_the_defaults_of_newer_flags(tmp_path):
    old = dataclasses.asdict(Settings(lr=0.5, batch_size=4, accumulate=4))
    del old["quantize"], old["cache_features"], old["step_batch"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    settings = read_config(Settings, tmp_path, "train.finetune")
    assert settings == Settings(lr=0.5, batch_size=4, accumulate=4) and step_layout(settings, 2) == (4, 8)
