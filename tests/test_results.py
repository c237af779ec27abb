"""RESULTS.md: every table is one that a study's command wrote, as kept in docs/results/."""

import json
from pathlib import Path

from train.studies.engine import tables_of

ROOT = Path(__file__).parent.parent


def test_every_table_was_written_by_a_command():
    """Breaks when a number of RESULTS.md is changed by hand, or a table has no file that says what it was made with."""
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "docs/results").glob("*.json"))]
    assert all(set(one) == {"made_by", "tables"} and one["made_by"] for one in kept)
    known = [table for one in kept for table in one["tables"]]
    tables = tables_of((ROOT / "RESULTS.md").read_text(encoding="utf-8"))
    assert len(tables) >= 5
    foreign = [table for table in tables if table not in known]
    assert not foreign, f"not in docs/results: {foreign[0][0]}"
