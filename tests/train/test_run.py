"""A run is what it says it is: what has changed, is damaged or in use is refused by name, before a step is taken."""

import errno
import json
import os
import shutil
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from model.common import UserError
from model.source import BUNDLED_FOLDER
from tests.runs import SERVER, WORLD, metrics, start
from train import checkpoint, finetune, origin
from train.distributed import World
from train.flags import RunArguments
from train.run_folder import lock_folder, run_folder
from train.settings import Settings
from weights.export import export_model
from weights.load import load_model

pytestmark = pytest.mark.long

FLAGS = ["--base", "base", "--data", "jsonl:data.jsonl", "--validation", "0", "--epochs", "2", "--no-evaluate"]
FLAGS += ["--batch-size", "2", "--checkpoint-every", "2", "--measure-every", "0", "--device", "cpu"]


def picture(number: int) -> Image.Image:
    """Always of the same size in bytes."""
    return Image.new("RGB", (8, 8), (number * 20, 0, 0))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with a base, data, and a finished run `run` of 6 steps; paths are relative to it."""
    folder = tmp_path_factory.mktemp("template")
    model = load_model("tiny")
    export_model(model, folder / "base", companions=[BUNDLED_FOLDER / "tokenizer.model"])
    lines = []
    for number in range(6):
        picture(number).save(folder / f"{number}.bmp")
        lines.append({"image": f"{number}.bmp", "prefix": "caption en", "suffix": f"picture {number}"})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finetune.main([*FLAGS, "--out", "run"])
    return folder


@pytest.fixture
def run(template, tmp_path, monkeypatch) -> Path:
    """A copy of the run, cut after step 4 of 6, in the working folder."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run/checkpoints/step-6")
    (tmp_path / "run/adapter_model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    return Path("run")


def resume(*flags: str) -> None:
    finetune.main(["--resume", "run", *flags])


def state_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def lines() -> list[str]:
    return Path("data.jsonl").read_text().splitlines(keepends=True)


def change_answer():
    Path("data.jsonl").write_text("".join(lines()).replace("picture 3", "picture 4"))


def change_prompt():
    Path("data.jsonl").write_text("".join(lines()).replace("caption en", "caption de", 1))


def drop_a_line():
    Path("data.jsonl").write_text("".join(lines()[:-1]))


def reverse_lines():
    Path("data.jsonl").write_text("".join(reversed(lines())))


def replace_a_picture():
    size = Path("3.bmp").stat().st_size
    picture(7).save("3.bmp")
    assert Path("3.bmp").stat().st_size == size


def enlarge_a_picture():
    Image.new("RGB", (9, 9)).save("3.bmp")


def zero_the_base():
    file = next(Path("base").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name].zero_()
    save_file(tensors, file, {"format": "pt"})


def edit_json(path: str, **values):
    raw = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(raw | values, indent=1))


def change_a_setting():
    edit_json("run/config.json", lr=0.5, workers=0)


def cut_the_metrics():
    os.truncate("run/metrics.jsonl", 100)


def edit_the_metrics():
    file = Path("run/metrics.jsonl")
    content = file.read_text()
    place = content.index('"loss": ') + len('"loss": ')
    file.write_text(content[:place] + str((int(content[place]) + 1) % 10) + content[place + 1 :])


def delete_the_metrics():
    Path("run/metrics.jsonl").unlink()


def garble_the_metrics():
    content = Path("run/metrics.jsonl").read_bytes()
    Path("run/metrics.jsonl").write_bytes(b"\xff\x00not json\n" * 3 + content)


CHANGES = {
    change_answer: "the records",
    change_prompt: "the records",
    drop_a_line: "the records",
    reverse_lines: "the records",
    replace_a_picture: "the pictures",
    enlarge_a_picture: "the pictures",
    zero_the_base: "the base",
    change_a_setting: "--lr is 0.5, was 0.0015",
    cut_the_metrics: "metrics.jsonl",
    edit_the_metrics: "metrics.jsonl",
    delete_the_metrics: "metrics.jsonl",
    garble_the_metrics: "metrics.jsonl",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_changed_is_named_and_can_be_allowed(change, run, capsys):
    """Breaks when a run goes on, exit code 0, with other data, another base or another log than it began with."""
    change()
    before = state_of(run)
    with pytest.raises(UserError, match="^--resume run: changed since step-4.*--allow-changed$") as caught:
        resume()
    assert CHANGES[change] in str(caught.value)
    if change is not drop_a_line:  # its picture goes with it
        assert str(caught.value).count("; ") == 0
    assert state_of(run) == before
    resume("--allow-changed")
    assert CHANGES[change] in capsys.readouterr().err
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] >= 4
    resume()  # what was allowed is the run's own from then on


def damage(file: str, content: bytes | None):
    path = Path("run/checkpoints/step-4", file)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def swap_in(file: str):
    shutil.copy(Path("run/checkpoints/step-3", file), Path("run/checkpoints/step-4", file))


DAMAGES = {
    "no optimizer": (lambda: damage("optimizer.safetensors", None), "optimizer.safetensors is missing"),
    "no weights": (lambda: damage("trainable.safetensors", None), "trainable.safetensors is missing"),
    "no state": (lambda: damage("state.json", None), "state.json: not found"),
    "no manifest": (lambda: damage("manifest.json", None), "manifest.json is missing"),
    "empty weights": (lambda: damage("trainable.safetensors", b""), "trainable.safetensors has been changed"),
    "garbled state": (lambda: damage("state.json", b"\xff" * 50), "state.json"),
    "deep state": (lambda: damage("state.json", b"[" * 10**6), "state.json"),
    "state of a type": (lambda: damage("state.json", b'{"step": 4, "progress": []}'), "progress is"),
    "garbled manifest": (lambda: damage("manifest.json", b'{"step": 4}'), "manifest.json: files is missing"),
    "weights of another": (lambda: swap_in("trainable.safetensors"), "trainable.safetensors has been changed"),
    "moments of another": (lambda: swap_in("optimizer.safetensors"), "optimizer.safetensors has been changed"),
    "manifest of another": (lambda: swap_in("manifest.json"), "holds step 3"),
    "another file": (lambda: damage("more.safetensors", b"x"), "more.safetensors does not belong to it"),
    "another step": (lambda: edit_json("run/checkpoints/step-4/state.json", step=5), "holds step 5"),
    "another progress": (
        lambda: edit_json("run/checkpoints/step-4/state.json", scaler={"scale": 2.0}),
        "state.json has been changed",
    ),
    "a negative step": (lambda: edit_json("run/checkpoints/step-4/state.json", step=-5), "step is -5"),
    "another name": (lambda: Path("run/checkpoints/step-4").rename("run/checkpoints/step-5"), "holds step 4"),
}


@pytest.fixture
def cut_at_3(run, template) -> Path:
    """The run with a checkpoint at step 3 before that of step 4."""
    shutil.move("run/checkpoints/step-4", "step-4")
    edit_json("run/config.json", steps=3)
    shutil.rmtree("other", ignore_errors=True)
    finetune.main([*FLAGS, "--checkpoint-every", "3", "--out", "other"])
    shutil.copytree("other/checkpoints/step-3", "run/checkpoints/step-3")
    shutil.move("step-4", "run/checkpoints/step-4")
    shutil.copy(template / "run/config.json", "run/config.json")
    return run


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(name, cut_at_3):
    """Breaks when a checkpoint resumes with fresh moments, weights of another run, or at another step."""
    harm, message = DAMAGES[name]
    harm()
    before = state_of(cut_at_3)
    with pytest.raises(UserError) as caught:
        resume()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith("delete this folder to go on from step-3")
    assert state_of(cut_at_3) == before


def test_files_of_the_system_do_not_matter(run, template):
    """Breaks when a file that a network drive or a desktop leaves in the folder ends the run for good."""
    for name in (".nfs000000000001", ".DS_Store"):
        damage(name, b"x")
    resume()
    assert metrics(run) == metrics(template / "run")


def test_a_checkpoint_is_read_once_to_be_checked(run, monkeypatch):
    """Breaks when the files of a checkpoint of many gigabytes are hashed twice before training goes on."""
    digest, hashed = checkpoint.file_digest, []
    monkeypatch.setattr(checkpoint, "file_digest", lambda path: hashed.append(str(path)) or digest(path))
    resume()
    of_step_4 = [path for path in hashed if "/step-4/" in path]
    assert len(of_step_4) == len(set(of_step_4)) == 3


def test_processes_that_see_different_checkpoints_are_refused(run):
    """Breaks when each process begins at a step of its own, where the folder is not on a drive that all share."""

    class Pair(World):
        def gather(self, value):
            return [value, [] if isinstance(value, list) else value]

    pair = Pair(0, 2, torch.device("cpu"))
    with (
        pytest.raises(UserError, match="run: .*process 0: step-4; process 1: none"),
        run_folder(RunArguments(resume=run), None, "", "", pair),
    ):
        raise AssertionError
    with run_folder(RunArguments(resume=run), None, "", "", WORLD):  # the lock is free again
        pass


def test_the_one_before_goes_on_to_the_same_end(cut_at_3, template):
    damage("optimizer.safetensors", None)
    shutil.rmtree("run/checkpoints/step-4")
    shutil.copy("other/metrics.jsonl", "run/metrics.jsonl")  # their clocks differ
    edit_json("run/checkpoints/step-3/state.json")  # the same content in other words
    with pytest.raises(UserError, match="state.json has been changed.*there is none before: start anew"):
        resume()
    shutil.copy("other/checkpoints/step-3/state.json", "run/checkpoints/step-3/state.json")
    resume("--allow-changed")  # --checkpoint-every differs, which is free
    ours, whole = (load_file(folder / "run/adapter_model.safetensors") for folder in (Path(), template))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def make_old(folder: Path) -> None:
    """A checkpoint as versions before the manifest wrote it."""
    (folder / "manifest.json").unlink()
    state = json.loads((folder / "state.json").read_text())
    del state["format"], state["progress"]["origin"], state["progress"]["metrics_sha256"]
    (folder / "state.json").write_text(json.dumps(state))


def test_old_checkpoints_resume_with_a_warning(run, template, capsys):
    """Breaks when the runs of today's users cannot go on."""
    make_old(run / "checkpoints/step-4")
    resume()
    said = capsys.readouterr().err
    assert "older version, without manifest.json" in said and "its base and data have changed is not checked" in said
    assert metrics(run) == metrics(template / "run")


def test_an_old_checkpoint_without_moments_is_refused(run):
    make_old(run / "checkpoints/step-4")
    damage("optimizer.safetensors", None)
    with pytest.raises(UserError, match="optimizer.safetensors is missing: there is none before"):
        resume()


def test_another_number_of_threads_is_mentioned(run, capsys):
    """Breaks when losses differ in the last digits without a word."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        resume()
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().err
    assert f"threads: {threads} threads before, {threads + 1} threads now: losses may differ by rounding" in said


def test_another_machine_is_mentioned(run, capsys):
    """Breaks when a run goes on elsewhere, with losses that differ in the last digits, without a word."""
    numerics = origin.numerics(torch.device("cpu")) | {"dtype": "torch.float32", "processes": "1 processes"}
    found = origin.origin_of(Settings(autocast="bf16"), {}, WORLD, torch.bfloat16)["numerics"]
    assert found == numerics | {"dtype": "torch.bfloat16", "autocast": "torch.bfloat16"}
    for name, other in {
        "processor": "another",
        "device": "cuda",
        "autocast": "torch.bfloat16",
        "dtype": "x",
        "processes": "2 processes",
    }.items():
        state = state_with(numerics | {name: other})
        state["progress"]["origin"]["settings"]["dropout"] = 0.1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(origin, "read_state", lambda folder, state=state: state)
            origin.check_resume(run, state["progress"]["origin"] | {"numerics": numerics}, False)
        masks = " and masks of dropout" * (name == "processes")  # each process draws its own
        assert capsys.readouterr().err == (
            f"run: {name}: {other} before, {numerics[name]} now: losses may differ by rounding{masks}\n"
        )


def test_a_commit_is_of_this_code(tmp_path, monkeypatch):
    """Breaks when a result names the commit of another repository, in whose folder this code is installed."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b", *arguments], check=True)

    (tmp_path / "origin.py").touch()
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "origin.py"))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another's")
    assert origin.commit_of_code() == "no commit"
    git("add", "origin.py")
    git("commit", "-q", "-m", "own")
    assert len(origin.commit_of_code()) == 10


def state_with(numerics: dict) -> dict:
    """The state of the run's checkpoint, as another machine would have written it."""
    state = json.loads(Path("run/checkpoints/step-4/state.json").read_text())
    state["progress"]["origin"]["numerics"] = numerics
    return state


def hold(folder: Path, pipe: Connection) -> None:
    lock = lock_folder(folder)
    pipe.send("held")
    pipe.recv()
    del lock


@pytest.mark.parametrize("what", ["resume", "out"])
def test_a_folder_in_use_is_refused(what, run):
    """Breaks when two processes write into one run: its metrics would hold lines of both."""
    folder = run if what == "resume" else Path("new")
    folder.mkdir(exist_ok=True)
    pipe, theirs = SERVER.Pipe()
    holder = SERVER.Process(target=hold, args=(folder.resolve(), theirs), daemon=True)
    holder.start()
    assert pipe.recv() == "held"
    before = state_of(folder)
    with pytest.raises(UserError, match="another process is training in this folder"):
        finetune.main(["--resume", "run"] if what == "resume" else [*FLAGS, "--out", "new"])
    assert state_of(folder) == before
    pipe.send("let go")
    holder.join()
    finetune.main(["--resume", "run"] if what == "resume" else [*FLAGS, "--steps", "1", "--out", "new"])


@pytest.mark.parametrize(
    "wrong",
    [
        ["--base", "nowhere"],
        ["--data", "jsonl:nowhere"],
        ["--targets", "nothing"],
        ["--option", "mew=1"],
        ["--batch-size", "2", "--accumulate", "50"],
        ["--device", "nonsense"],
    ],
)
def test_a_mistake_leaves_no_folder_behind(wrong, run):
    """Breaks when the corrected command is refused, since the mistaken one has made the folder."""
    with pytest.raises(UserError):
        finetune.main([*FLAGS, *wrong, "--out", "deep/new"])
    assert not Path("deep/new").exists()
    finetune.main([*FLAGS, "--steps", "1", "--out", "deep/new"])


def test_records_that_are_all_bad_are_no_run(run):
    """Breaks when an untrained adapter is written, exit code 0, since there were fewer bad records than --max-bad; or
    when the command is refused once they are mended."""
    for number in range(6):
        Path(f"{number}.bmp").write_bytes(b"broken")
    with pytest.raises(UserError, match="all 6 records were unusable; the first: .*0.bmp|all 6 records"):
        finetune.main([*FLAGS, "--epochs", "1", "--out", "new"])
    assert not Path("new").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A full disk
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["save_file", "_write_manifest", "metrics"])
def test_a_full_disk_leaves_the_last_checkpoint_whole(victim, run, template, monkeypatch):
    """Breaks when a partial checkpoint stays, takes the place of a whole one, or the user sees a traceback."""

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if victim == "metrics":
            patch.setattr("train.metrics.os.fsync", full)
        else:
            patch.setattr(checkpoint, victim, full)
        with pytest.raises(UserError, match="run.*no space left on the disk"):
            resume()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-4"]
    resume()
    assert metrics(run) == metrics(template / "run")


@pytest.mark.parametrize("kilobytes", [1000, 1400, 2200, 5000])
def test_a_small_disk(kilobytes, run, tmp_path):
    """The same with a real one, where the system lets the test mount it: it fills up at another place each time."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        command = [*FLAGS, "--out", str(disk / "run"), "--epochs", "20", "--keep", "50"]
        command[command.index("base")] = str(tmp_path / "base")
        command[command.index("jsonl:data.jsonl")] = f"jsonl:{tmp_path}/data.jsonl"
        done = start(command, tmp_path / "errors")
        done.join(120)
        errors = (tmp_path / "errors").read_text()
        last = errors.splitlines()[-1]
        assert done.exitcode == 2 and last.startswith("error: ") and "no space left" in last, errors[-2000:]
        assert "Traceback" not in errors
        assert not list(disk.rglob("*.partial"))
        for folder in checkpoint.checkpoints(disk / "run"):
            checkpoint.verify(folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
