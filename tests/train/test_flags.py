"""Flags made of dataclass fields: what they accept on the command line and in a run's
config.json."""

import dataclasses
import re
import subprocess
import sys

import pytest

from eval import ask
from model.config import PRESETS
from tests.files import json_lines, write_json
from tests.runs import refused, refuses, settings_of
from train import finetune
from train.flags import flag_name, from_values
from train.settings import GROUPS, RECIPES, Settings
from train.systems.text import TextSettings
from weights import export


@pytest.mark.parametrize("settings", [Settings, TextSettings])
def test_no_number_is_outside_its_range(settings):
    """Breaks when a value that no run can use starts one: NaN, infinity, a negative rate, a seed of
    20 digits."""
    numbers = [
        field.name for field in dataclasses.fields(settings) if type(field.default) in (int, float)
    ]
    for name in numbers:
        for value in (float("nan"), float("inf"), -1, 10**20, "3", True):
            refused(lambda wrong={name: value}: from_values(settings, wrong), flag_name(name))


def test_patience_needs_evaluations():
    """Breaks when a run that was to stop early never looks whether it should."""
    refused(lambda: settings_of("--patience 2 --eval-every 0"), "--patience 2")


EDITS = """[{"r": "16"}, "--r"]
[{"option": [1]}, "--option"]
[{"rate": 1}, "config.json"]"""


@pytest.mark.parametrize("change, named", json_lines(EDITS))
def test_a_run_s_config_is_checked_field_by_field(change, named, tmp_path):
    """Breaks when an edited config.json ends in a traceback, or in a run with other settings than
    it says."""
    write_json(tmp_path / "config.json", dataclasses.asdict(Settings()) | change)
    refuses(finetune, f"--resume {tmp_path}", str(tmp_path), named)
    (tmp_path / "config.json").write_text("{")
    refuses(finetune, f"--resume {tmp_path}", str(tmp_path))


def test_a_base_of_published_size_has_defaults_of_its_own(tmp_path, printed):
    """Breaks when 3B is trained at the toy's rate, a flag or a recipe is overruled, or the recipe
    is not named."""

    def chosen(flags):
        settings = settings_of(flags)
        return settings.recipe, settings.lr, settings.checkpointing

    one_gpu = ("one-gpu", 1e-4, True)
    assert (
        chosen("--base google/paligemma-3b-pt-224 --data jsonl:a.jsonl")
        == one_gpu
        == chosen("--base paligemma-3b-448")
    )
    assert chosen("--base paligemma-3b-224 --lr 0.5 --no-checkpointing") == ("one-gpu", 0.5, False)
    assert chosen("--base paligemma-3b-224 --recipe paper-1") == ("paper-1", 4e-4, False)
    assert chosen("--base paligemma-3b-224 --full --attention softmax") == (
        "paligemma",
        1e-5,
        False,
    )
    for flags in ("", "--base tiny"):
        assert chosen(flags)[0] == ""
    for name, recipe in (
        ("paligemma2-3b-224", "one-gpu"),
        ("mini", ""),
    ):  # a folder is known by its config.json
        write_json(tmp_path / "config.json", PRESETS[name].to_dict())
        assert chosen(f"--base {tmp_path}")[0] == recipe
    finetune.print_recipe(settings_of("--base paligemma-3b-224 --lr 0.5"))
    assert printed().count("0.5") == 1


@pytest.mark.parametrize(
    "command, flags, near",
    [
        (finetune, "--lrr 1", "--lr"),
        (finetune, "--batch_size=3 --seed 1", "--batch-size"),
        (ask, "--promt a", "--prompt"),
        (export, "a b --mereg", "--merge"),
        (finetune, "\x1b[2J", None),
    ],
)
def test_a_typo_in_a_flag_is_one_line_with_the_nearest(command, flags, near, warned):
    """Breaks when the flag that was meant is lost below a page of usage, or none is named."""
    with pytest.raises(SystemExit) as caught:
        command.main(flags.split(" "))
    first, usage, *more = warned().splitlines()
    assert caught.value.code == 2
    assert first.isprintable()
    assert usage.startswith("usage: ")
    assert first.startswith("error: ")
    assert (f"did you mean {near}?" in first) == bool(near)
    assert command is not finetune or not more


def test_a_typo_in_python_is_one_line_with_the_nearest():
    """Breaks when a name that no flag has ends in a bare TypeError."""
    refused(lambda: finetune.finetune(lrr=1), "lrr: no setting has this name: see lr")


def test_a_typo_does_not_wait_for_several_gpus():
    """Breaks when every command of training imports for a second what only a resumed or a spread
    run needs."""
    code = "import sys, train.finetune; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    slow = {"torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"}
    assert "torch" in done.stdout.split()
    assert not slow & {*done.stdout.split()}


def test_help_shows_what_own_pictures_take(printed):
    """Breaks when --help shows a rate, a variant or a beta2 that the recipe for own pictures or for
    a large base does not use, an empty choice, or None for what is chosen elsewhere."""
    with pytest.raises(SystemExit):
        finetune.main(["--help"])
    text = printed()
    entries = re.split(r"\n  (?=--)", text)
    helps = {re.match(r"[\w-]*", entry)[0]: "".join(entry.split()) for entry in entries}
    for name in ("own", "one-gpu"):
        for field, value in RECIPES[name].items():
            assert f";{name}:{value}" in helps[flag_name(field)]
    assert "{," not in text
    assert "(default: None)" not in text
    assert "(default: ())" not in text


def test_help_has_groups():
    """Breaks when a flag of training stands in no group of --help, or in two, or a group is too
    long to read."""
    names = [name for fields in GROUPS.values() for name in fields.split()]
    assert sorted(["recipe", *names]) == sorted(
        field.name for field in dataclasses.fields(Settings)
    )
    assert all(len(fields.split()) < 16 for fields in GROUPS.values())
