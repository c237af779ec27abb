"""Flags made of dataclass fields: what they accept on the command line and in a run's config.json."""

import dataclasses
import json

import pytest

from tests.runs import refused, words
from train import finetune
from train.flags import flag_name, from_values
from train.settings import Settings, parse
from train.systems.text import TextSettings


@pytest.mark.parametrize("settings", [Settings, TextSettings])
def test_no_number_is_outside_its_range(settings):
    """Breaks when a value that no run can use starts one: NaN, infinity, a negative rate, a seed of 20 digits."""
    numbers = [field.name for field in dataclasses.fields(settings) if type(field.default) in (int, float)]
    for name in numbers:
        for value in (float("nan"), float("inf"), -1, 10**20, "3", True):
            refused(lambda wrong={name: value}: from_values(settings, wrong), flag_name(name))


def test_patience_needs_evaluations():
    """Breaks when a run that was to stop early never looks whether it should."""
    refused(lambda: parse(words("--patience 2 --eval-every 0")), "--patience 2")


@pytest.mark.parametrize(
    ("change", "named"), [({"r": "16"}, "--r"), ({"option": [1]}, "--option"), ({"rate": 1}, "config.json")]
)
def test_a_run_s_config_is_checked_field_by_field(change, named, tmp_path):
    """Breaks when an edited config.json ends in a traceback, or in a run with other settings than it says."""
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(Settings()) | change))
    refused(lambda: finetune.main(["--resume", str(tmp_path)]), str(tmp_path), named)
    (tmp_path / "config.json").write_text("{")
    refused(lambda: finetune.main(["--resume", str(tmp_path)]), str(tmp_path))
