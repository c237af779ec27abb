"""The notebook: it runs from top to bottom where a fresh clone puts it, and what it has stored is
what it says."""

import re
import resource
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from tests.house import PACKAGES, ROOT

TOUR = ROOT / "docs" / "tour.ipynb"
SECONDS = 300  # of CPU time, and at most for a cell
BYTES = 400_000
CELLS = 40
# a path of somebody's machine, a name, or a complaint
PRIVATE = re.compile(
    r"/(tmp|home|root|Users|opt|work|usr)\b|[A-Z]:\\|warn|Traceback|site-packages", re.I
)
ROW = re.compile(r"^  (loss|exact match).*? (\d+\.\d+) +(\d+\.\d+) +(\d+\.\d+) +(\d+\.\d+)$", re.M)
LOOKS = re.compile(r"^in (\d+) of (\d+) pictures", re.M)


def printed(notebook):
    """By cell of code, all text that it has put out."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [
                o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs
            ]
            texts.append("".join(outputs))
    return texts


def check_claims(text):
    """What the words of the notebook say about its numbers."""
    rows = {name: list(map(float, numbers)) for name, *numbers in ROW.findall(text)}
    losses, matches = rows["loss"], rows["exact match"]
    assert losses[0] == losses[1] and matches[0] == matches[1], "the graft is exact"
    assert losses[2] < losses[3] < losses[0], "it learns, and looks"
    assert matches[2] > matches[0] + 25 and matches[2] > matches[3] + 35 and matches[3] < 25
    right, wrong = [int(found) / max(1, int(total)) for found, total in LOOKS.findall(text)]
    assert right > wrong + 0.3, "a head finds the lone animal, where the answer is right"


def test_what_is_stored_is_fit_to_publish():
    """Breaks when the notebook grows large, is stored without outputs, or with somebody's paths."""
    stored = nbformat.read(TOUR, 4)
    nbformat.validate(stored)
    assert len(stored.cells) <= CELLS and TOUR.stat().st_size <= BYTES
    outputs = [o for cell in stored.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 4
    assert not [text for text in printed(stored) if PRIVATE.search(text)]
    assert not [cell for cell in stored.cells if cell.metadata]
    check_claims("\n".join(printed(stored)))


@pytest.mark.long
def test_it_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """Breaks when a call of the notebook is gone, it takes minutes, or its numbers are others:
    exactly up to the training, within bounds after it."""
    for room in PACKAGES:
        (tmp_path / room).symlink_to(ROOT / room)
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(TOUR, docs)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fresh = nbformat.read(docs / TOUR.name, 4)
    place = {"metadata": {"path": str(docs)}}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(fresh, timeout=SECONDS, resources=place).execute()
    assert 1 < resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before.ru_utime < SECONDS

    old, new = printed(nbformat.read(TOUR, 4)), printed(fresh)
    code = [cell.source for cell in fresh.cells if cell.cell_type == "code"]
    trains = next(number for number, source in enumerate(code) if "finetune(" in source)
    assert new[:trains] == old[:trains]
    assert [bool(text) for text in new] == [bool(text) for text in old]
    check_claims("\n".join(new))
    assert [path.parent.parent for path in tmp_path.rglob("explore.html")] == [tmp_path / "runs"]
