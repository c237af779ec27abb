"""A run is what it says it is: what has changed, is damaged or in use is refused by name, before a
step is taken."""

import errno
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from eval.data.records import Record
from model.source import BUNDLED_FOLDER
from tests.files import draw, write_lines
from tests.runs import SERVER, assert_same_tensors, metrics, refused, refuses, train
from train import finetune
from train.checkpoint import file_digest
from train.run import data_fingerprints, lock_folder
from weights.export import export_model
from weights.load import load_model

pytestmark = pytest.mark.long

FLAGS = "--base base --data jsonl:data.jsonl --validation 0 --epochs 2 --no-evaluate --batch-size 2 --device cpu"
FLAGS = f"{FLAGS} --checkpoint-every 2 --keep 3"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with a base, data, and a finished run `run` of 6 steps; paths are relative to it."""
    folder = tmp_path_factory.mktemp("template")
    export_model(
        load_model("tiny"), folder / "base", companions=[BUNDLED_FOLDER / "tokenizer.model"]
    )
    lines = []
    for number in range(6):
        draw(folder / f"{number}.bmp", (number * 20, 0, 0))
        lines.append(
            {"image": f"{number}.bmp", "prefix": "caption en", "suffix": f"picture {number}"}
        )
    write_lines(folder / "data.jsonl", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(FLAGS, "--out run")
    return folder


@pytest.fixture
def run(template, workplace):
    """A copy of the run, cut after step 4 of 6, in the working folder."""
    shutil.copytree(template, workplace, dirs_exist_ok=True)
    shutil.rmtree("run/checkpoints/step-6")
    Path("run/adapter_model.safetensors").unlink()
    return Path("run")


def contents(run):
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def edit(file, old, new):
    Path(file).write_text(Path(file).read_text().replace(old, new))


def zero_base():
    (file,) = Path("base").glob("*.safetensors")
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("up_proj.weight")).zero_()
    save_file(tensors, file, {"format": "pt"})


CHANGES = {
    "records": lambda: edit("data.jsonl", "picture 3", "picture 4"),
    "pictures": lambda: draw("3.bmp", (140, 0, 0)),  # of the same size in bytes
    "base": zero_base,
    "--lr": lambda: edit("run/config.json", '"lr": 0.0015', '"lr": 0.5'),
    "--seed": lambda: edit("run/config.json", '"seed": 0', '"seed": 1'),
}


@pytest.mark.parametrize("named", CHANGES)
def test_what_has_changed_is_named_and_can_be_allowed(named, run, warned):
    """Breaks when a run goes on, exit code 0, with other data, another base or other settings than
    it began with."""
    CHANGES[named]()
    edit(
        "run/config.json", '"workers": null', '"workers": 0'
    )  # which changes nothing that is learned
    before = contents(run)
    message = refused(lambda: train("--resume run"), "--resume run", named, "--allow-changed")
    assert "--workers" not in message
    assert contents(run) == before
    train("--resume run --allow-changed")
    assert named in warned()
    train("--resume run")  # what was allowed is the run's from then on
    assert [record["step"] for record in metrics(run)] == [*range(6)]


def test_fingerprints_see_answers_files_and_their_ends(tmp_path):
    """Breaks when a resumed run goes on although an annotator's answer, a file's end, or the size
    of one of many files is another; or stops for an answer that is not learned."""
    for number in range(2048):  # every second one is read
        (tmp_path / f"{number:04}").write_bytes(b"x")
    (tmp_path / "0000").write_bytes(bytes(5 << 18))
    paths = tuple(sorted(tmp_path.iterdir()))

    def seen(answers=("a", "b"), sampled=True, shown=paths):
        return tuple(
            data_fingerprints([Record("r", "k", shown, (("q", "a"),), answers, sampled)]).values()
        )

    records, pictures = seen()
    for other in (seen(("a", "c")), seen(sampled=False)):
        assert other[0] != records
        assert other[1] == pictures
    assert seen(("a", "c"), sampled=False) == seen(sampled=False)
    assert seen(shown=paths[::-1]) == (records, pictures)  # sorted
    for place, content in (
        (0, bytes(6 << 18)),
        (0, bytes((6 << 18) - 1) + b"y"),
        (2, b"z"),
        (1, b"xx"),
    ):
        paths[place].write_bytes(content)
        assert seen()[0] == records
        assert seen()[1] != pictures
        pictures = seen()[1]
    whole = file_digest(paths[0])  # as a checkpoint's, to the middle
    paths[0].write_bytes(bytes(3 << 18) + b"y" + bytes((3 << 18) - 2) + b"y")
    assert file_digest(paths[0]) != whole
    assert seen()[1] == pictures


STEP_2 = Path("run/checkpoints/step-2")
STEP_4 = Path("run/checkpoints/step-4")
DAMAGES = {
    "no optimizer": ("optimizer.safetensors", lambda file: file.unlink()),
    "weights of step 2": (
        "trainable.safetensors",
        lambda file: shutil.copy(STEP_2 / file.name, file),
    ),
    "garbled state": ("state.json", lambda file: file.write_bytes(b"\xff" * 50)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(name, run, template):
    """Breaks when a checkpoint resumes with fresh moments or weights of another step, or a run is
    lost with its last checkpoint."""
    file, damage = DAMAGES[name]
    damage(STEP_4 / file)
    before = contents(run)
    refuses(finetune, "--resume run", "step-4", file, "step-2")
    assert contents(run) == before
    shutil.rmtree(STEP_4)
    (STEP_2 / ".nfs0001").touch()  # as a network drive leaves
    left = [
        run / ".adapter_config-0123abcd.json",
        run / ".loss-0123abcd.png",
        run / ".best.partial",
    ]
    left[0].touch()  # as kill -9 leaves
    left[1].touch()
    left[2].mkdir()
    train("--resume run")
    assert not any(path.exists() for path in left)
    ours, whole = (
        load_file(folder / "run/adapter_model.safetensors") for folder in (Path(), template)
    )
    assert_same_tensors(ours, whole)
    assert metrics(run) == metrics(template / "run")


@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "all lost"])
def test_damaged_metrics_are_named_before_training(damage, run, monkeypatch):
    """Breaks when a run goes on behind a log that lacks steps or has others, or trains to the end
    before it says so."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)[:4]
    damaged = {"lost": [*lines[:1], *lines[2:]], "cut": [*lines[:3], lines[3][:30]], "all lost": []}
    damaged["changed"] = [lines[0].replace('"loss": ', '"loss": 1'), *lines[1:]]
    file.write_text("".join(damaged[damage]))
    before = contents(run)
    monkeypatch.setattr("train.loop.count_records", None)
    refuses(finetune, "--resume run", "metrics.jsonl", "step 4")
    assert contents(run) == before


def hold(folder, pipe):
    with lock_folder(folder):
        pipe.send("held")
        pipe.recv()


def test_a_folder_in_use_or_not_empty_is_refused(run):
    """Breaks when two processes write into one run, whose metrics would hold lines of both, or a
    run is overwritten."""
    pipe, theirs = SERVER.Pipe()
    holder = SERVER.Process(target=hold, args=(run.resolve(), theirs), daemon=True)
    holder.start()
    assert pipe.recv() == "held"
    before = contents(run)
    refuses(finetune, "--resume run", "run: another process")
    pipe.send("let go")
    holder.join()
    refuses(finetune, f"{FLAGS} --out run", "--out run")
    assert contents(run) == before


@pytest.mark.parametrize("name", [".lock", "checkpoints", "checkpoints/step-4/state.json"])
def test_a_link_in_a_run_is_refused(name, run):
    """Breaks when the run of somebody else empties, overwrites or deletes files outside of its
    folder."""
    (run / name).symlink_to((run / name).rename("elsewhere").absolute())
    before = contents(Path())
    refuses(finetune, "--resume run", name, "link")
    assert contents(Path()) == before


def test_a_run_that_learns_nothing_leaves_no_folder(run, monkeypatch):
    """Breaks when an untrained adapter is written, exit code 0, or the corrected command finds its
    folder taken."""
    refuses(finetune, f"{FLAGS} --step-batch 50 --out deep/new", "--step-batch")
    for error in (OSError(errno.EIO, "I/O"), MemoryError(), KeyboardInterrupt()):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(finetune, "load_start", Mock(side_effect=error))
            train(FLAGS, "--out deep/new")
    for number in range(6):
        Path(f"{number}.bmp").write_bytes(b"broken")
    new = f"{FLAGS} --out deep/new"
    refuses(finetune, f"{new} --epochs 1", "2 records", "more than 1", ".bmp")
    refuses(finetune, f"{new} --max-bad 3", "4 records", "more than 3", ".bmp")
    assert not Path("deep/new").exists()


@pytest.mark.parametrize(
    "place, said, is_kept", [("load_start", "nothing", False), ("write_trained", "new", True)]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_or_after_the_steps_is_said(
    number, place, said, is_kept, run, monkeypatch, warned
):
    """Breaks when a signal while a base is read leaves a folder, or one after the last step does
    not say how to go on."""

    def stopped(*_):
        with suppress(Exception):  # as around a damaged picture
            os.kill(os.getpid(), number)

    monkeypatch.setattr(finetune, place, stopped)
    with pytest.raises(SystemExit) as ended:
        train(FLAGS, "--epochs 1 --out new")
    assert ended.value.code == 128 + number
    assert Path("new").exists() == is_kept
    assert said in warned().splitlines()[-1]


def test_a_path_that_is_not_utf_8_is_refused_before_training(run):
    """Breaks when the weights of a finished training cannot be written."""
    refuses(finetune, f"{FLAGS} --out caf\udce9", "udce9", "UTF-8")
    assert not Path("caf\udce9").exists()


def test_a_run_with_too_many_known_bad_records_does_not_start(run, monkeypatch):
    """Breaks when a run that cannot end is started, its corrected command finds a folder, or no
    flag lets it go on."""
    Path("3.bmp").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "load_start", None)
        flags = f"{FLAGS} --max-bad 0 --out new"
        refuses(finetune, flags, "1 of 6 records", "--max-bad", "data.jsonl:4", "3.bmp")
    assert not Path("new").exists()
    edit("run/config.json", '"max_bad": null', '"max_bad": 0')
    refuses(finetune, "--resume run --allow-changed", "1 of 6 records")
    train("--resume run --allow-changed --max-bad 1")
    assert metrics(run)[-1]["step"] == 5


@pytest.mark.parametrize("victim", ["train.checkpoint.save_tensors", "train.run.os.fsync"])
def test_a_full_disk_leaves_the_last_checkpoint_whole(victim, run, template, monkeypatch):
    """Breaks when a partial checkpoint stays, takes the place of a whole one, or the user sees a
    traceback."""
    with monkeypatch.context() as patch:
        patch.setattr(victim, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        refuses(finetune, "--resume run", "run", "no space left")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-4"]
    train("--resume run")
    assert metrics(run) == metrics(template / "run")
