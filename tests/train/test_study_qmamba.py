"""The study of Q-Mamba compares what it says: one thing changed at a time, same pictures, same
questions."""

from functools import cache

import pytest
import torch

from model.common import UserError
from tests.files import read_json, write_json, write_vqav2
from tests.reference import dice
from tests.runs import cells_in, stage_settings, times_in, words
from train.loop import Diverged
from train.studies.cells import Job
from train.systems.studies import qmamba
from train.systems.studies.qmamba import ROWS, needs, open_row
from weights.export import export_model
from weights.load import load_model

SMALL = "--option hidden_size=16 --option num_blocks=1 --device cpu"
FIRST = stage_settings("qmamba", "--stage 1", SMALL)


def test_rows_differ_in_what_they_name_alone():
    """Breaks when a row starts from other weights than the row beside it, beyond its change."""
    names = ("from scratch", "global", "half the queries", "all queries", "connector")
    models = {name: open_row(FIRST, ROWS[name], 3) for name in names}
    scratch = models["from scratch"].state_dict()
    queries = "multi_modal_projector.queries"
    for name, model in models.items():
        for key, value in model.state_dict().items():
            is_same = torch.equal(value, scratch[key])
            assert is_same or key == queries and name != "global", (name, key)
    projectors = {name: model.config.projector for name, model in models.items()}
    assert [projectors[name].queries for name in names[1:4]] == [8, 4, 16]  # of 16 features
    assert projectors["from scratch"].local_attention
    assert not projectors["global"].local_attention
    other = open_row(FIRST, ROWS["from scratch"], 4).state_dict()
    assert not torch.equal(other[queries], scratch[queries])


def test_a_trained_connector_is_the_one_that_was_trained(tmp_path):
    """Breaks when Table 3 compares two connectors from scratch, or takes over more than the
    connector."""
    donor = open_row(FIRST, ROWS["connector"], 9)
    export_model(donor, tmp_path / "model")
    model = open_row(FIRST, ROWS["local"], 0, tmp_path)
    scratch = open_row(FIRST, ROWS["from scratch"], 0, tmp_path)
    taken = ("vision_proj.", "vision_norm.", "connector.")
    for name, parameter in model.multi_modal_projector.state_dict().items():
        source = donor if name.startswith(taken) else scratch
        assert torch.equal(parameter, source.multi_modal_projector.state_dict()[name]), name


def test_a_model_that_was_deleted_has_not_diverged(tmp_path):
    """Breaks when a folder without its model is a cell that failed, scored 0 for ever."""
    job = Job("local", ROWS["local"], 1.0, 0)
    for facts, kind in ({"diverged": "at step 3"}, Diverged), ({}, UserError):
        write_json(tmp_path / "cell.json", {"facts": facts})
        with pytest.raises(UserError) as told:
            qmamba.make((FIRST, FIRST), {}, job, tmp_path / "own", tmp_path)
        assert told.type is kind


def test_rows_need_the_models_that_they_start_from():
    """Breaks when a connector is another seed's, or a scan in one direction is of a model with
    another rate."""

    def job(row, rate):
        return Job(row, ROWS[row], rate, 3)

    assert needs(job("global", 0.5)) == [job("connector", 1.0)]
    assert needs(job("all queries, forward", 0.5)) == [job("all queries", 0.5)]
    assert not needs(job("linear", 1.0))


cached_sample = cache(qmamba.scenes.sample)


def study_folder(out, *flags):
    """Run a study of one seed; its cells by row."""
    small = "--steps 1 --batch-size 4 --step-batch 4 --seeds 1 --rates 1 --jobs 1 --limit 4 --samples 40"
    with pytest.MonkeyPatch.context() as patch:  # thousands of training scenes are read again
        patch.setattr(qmamba.scenes, "sample", cached_sample)
        qmamba.main(words(SMALL, small, "--out", out, *flags))
    return cells_in(out)


@pytest.mark.long
def test_the_study_from_end_to_end_and_again(tmp_path):
    """Breaks when a row is missing, is asked in another direction than it says, or a finished cell
    is made again."""
    cells = study_folder(tmp_path)
    made = times_in(tmp_path)
    assert set(cells) == {*ROWS}
    queries = {}
    for row, (folder, _) in cells.items():
        if not ROWS[row].order:
            model = load_model(folder / "model")
            queries[row] = model.config.num_image_tokens
        if row == "all queries":
            projector = model.multi_modal_projector
    eight = dict.fromkeys(("local", "global", "from scratch"), 8)
    sixteen = dict.fromkeys(("all queries", "connector", "linear"), 16)
    assert queries == eight | sixteen | {"half the queries": 4}
    features = torch.randn(1, 16, 128, generator=dice(0))
    read = set()
    for projector.connector.order in ("bidirectional", "forward", "backward"):
        read.add(projector(features).sum().item())
    assert len(read) == 3  # the order decides what Mamba reads
    tables = read_json(tmp_path / "comparison.json")["tables"]
    table = tables["the row that the paper compares with"]
    assert {line["row"] for line in table} == {*ROWS} - {"from scratch"}
    assert study_folder(tmp_path) == cells
    assert made == times_in(tmp_path)


@pytest.mark.long
def test_a_table_is_made_of_data_on_disk(tmp_path):
    """Breaks when a table needs the embedded scenes, or trains rows of others."""
    write_vqav2(tmp_path / "data")
    flags = f"--data vqav2:{tmp_path}/data --validation 0.5 --tables 2"
    cells = study_folder(tmp_path / "study", flags)
    assert set(cells) == {"local", "global", "connector"}  # whose connector the others start from
    assert set(cells["global"][1]["scores"]["test"]) == {"VQA"}
