"""Mistakes of the user are one clear line, files are written whole or not at all, and devices
exist."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eval.data.records import read_examples
from model import common
from model.common import UserError, quoted, run_command, shown
from model.device import choose_device, choose_dtype, use_threads
from tests.files import table
from tests.house import ROOT
from tests.runs import refused


def test_names_are_one_short_printable_line():
    """Breaks when a file name moves the cursor, hides its ending, breaks the line of an error or
    fills the terminal."""
    odd = "\x1b[2Jred\x07|two\nlines\t|\u202egnp.exe\u200b|half \ud800"
    for text in (*odd.split("|"), b"bytes\xff", {"a": "\n"}):
        assert shown(text).isprintable()
        assert shown(text)
    assert shown("plain é 日本 → ½.png") == "plain é 日本 → ½.png"
    assert quoted("5") == "'5'"
    assert quoted(5) == "5"
    text = shown("a" * 10**6 + ".png")
    assert len(text) <= 200
    assert text.endswith(".png")
    assert len(quoted("x" * 1000)) <= 80


def test_what_cannot_be_read(tmp_path):
    """Breaks when a hostile file ends in a traceback, or in a message that does not say where."""
    path = tmp_path / "a.json"
    bad = b'|{"a": 1|nan|{"a": "\xe9"}|\x80\x04\x95|{"a": {"b": 1, "b": 2}}|[]'
    for content in (*bad.split(b"|"), b"[" * 100_000, b"1" * 10_000):
        path.write_bytes(content)
        refused(lambda: common.read_json(path), "a.json: ")
    refused(lambda: common.parse_json('{\n"a": }', "x"), "x: ", "line 2 column 6")
    for bad in (tmp_path, tmp_path / "gone", path / "below", tmp_path / ("n" * 300)):
        refused(lambda bad=bad: common.read_text(bad), shown(bad))
    path.write_bytes(b"\xef\xbb\xbf" + rb'{"a": "\ud83d\udc2e", "c": 1e999}')
    assert common.read_json(path) == {"a": "🐮", "c": float("inf")}


@pytest.mark.parametrize("name", ["own.jsonl", "own.json", "own.csv"])
def test_a_file_beyond_all_memory_is_not_read(name, tmp_path):
    """Breaks when a file of nothing, or a link to an endless one, fills the memory."""
    huge = tmp_path / name
    endless = tmp_path / f"link-{name}"
    huge.touch()
    os.truncate(huge, 1 << 40)
    endless.symlink_to("/dev/zero")
    for file in (huge, endless):
        for read in (read_examples, common.read_json, common.read_text):
            refused(lambda read=read, file=file: read(file), file.name, "bytes of text")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """Breaks when a full disk ends in a traceback, a half-written file, or the loss of the one
    before."""
    path = tmp_path / "a.txt"
    common.write_text(path, "before \ud800")
    full = (
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: full (os error 28)"),
    )
    for error in (*full, KeyError("x")):  # the last is a bug
        with (
            pytest.raises(UserError if error in full else KeyError),
            common.atomic_path(path) as temporary,
        ):
            temporary.write_text("ha")
            raise error
    for bad in (tmp_path, path / "below", tmp_path / ("n" * 300), "/proc/nothing/a.txt"):
        refused(lambda bad=bad: common.write_text(bad, "text"), shown(bad))
    assert path.read_text() == "before \\ud800"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(UserError, match="gone: not found"), common.file_errors("gone"):
        load_file(tmp_path / "gone")  # of a library in Rust


def test_a_written_file_has_the_mode_of_the_users_mask(tmp_path):
    """Breaks when a file that is renamed into its place is closed to those who may read others."""
    before = os.umask(0o027)
    try:
        common.write_text(tmp_path / "a.txt", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


PANIC = type("PanicException", (BaseException,), {})  # as the package tokenizers raises
LINES = {
    "a.json: \\x1b[31mred\\nline": UserError("a.json: \x1b[31mred\nline"),
    "/out/\\x07a: no space left": OSError(errno.ENOSPC, "No space left", "/out/\x07a"),
    "too little memory: 9 GiB": MemoryError("9 GiB"),
    "too little memory: DefaultCPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"),
    "in Rust": PANIC("in Rust"),
}


@pytest.mark.parametrize("line", LINES)
def test_commands_end_in_one_line(line, capsys):
    """Breaks when an error of the system, or a name in a message, becomes several lines or a
    traceback."""

    def main():
        print("half \ud800")
        raise LINES[line]

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert err.startswith(f"error: {line}")
    assert err.strip().isprintable()
    assert out == "half \\ud800\n"


def test_a_lost_stream_or_ctrl_c_leaves_no_traceback(tmp_path):
    """Breaks when `| head -1`, a full disk behind a stream, a closed stream as of cron, or Ctrl-C
    before a command begins prints a traceback or changes the exit code."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    start = "from model.common import UserError, run_command\ndef main():\n    print('x')\n"

    def run(*arguments, **streams):
        environment = os.environ | {"PYTHONUNBUFFERED": "", "PYTHONPATH": str(tmp_path)}
        options = {"stderr": subprocess.PIPE, "env": environment, "cwd": ROOT} | streams
        done = subprocess.run([sys.executable, *arguments], text=True, **options)
        return done.returncode, done.stderr or ""

    reading, pipe = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full:
        for end, codes in {
            "": (141, 2, 0),
            "raise SystemExit": (0, 0, 0),
            "raise UserError": (2, 2, 2),
        }.items():
            command = "-c", f"{start}    {end}\nrun_command(main)"
            (closed, first) = run(*command, stdout=pipe)
            (no_space, second) = run(*command, stdout=full)
            assert (
                closed,
                no_space,
                run(*command, stdout=subprocess.DEVNULL, stderr=full)[0],
            ) == codes
            for stream in (1, 2):
                line = ["sh", "-c", f'exec "$0" "$@" {stream}>&-', sys.executable, *command]
                done = subprocess.run(line, capture_output=True, cwd=ROOT)
                assert done.returncode == codes[2]
                assert done.stderr in (b"", b"error: \n")
                assert done.stdout in (b"", b"x\n")
            assert first == ("error: \n" if closed == 2 else "")
            assert second.count("\n") == (no_space == 2)
    os.close(pipe)
    for module in ("train.finetune", "eval.ask", "weights.inspect"):
        assert run("-m", module) == (-signal.SIGINT, ""), module


def test_a_small_model_takes_few_threads(monkeypatch):
    """Breaks when a toy takes a thread for each of many cores, or the user's number is
    overruled."""
    small = nn.Linear(9, 9)
    large = nn.Linear(10**5, 10**4, device="meta")
    before = torch.get_num_threads()

    def taken(cores, number, model):
        torch.set_num_threads(cores)
        use_threads(number, model)
        return torch.get_num_threads()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        given = (None, large), (None, small), (3, small)
        assert [taken(6, *flags) for flags in given] == [6, 2, 3]
        assert taken(1, None, small) == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        assert [taken(6, *flags) for flags in given] == [6, 6, 3]
    finally:
        torch.set_num_threads(before)


# busy processors, the user's variables, and what is set; the first: one busy program, the last: not
# Linux
BUSY = """os.cpu_count() - 1 | {} | 1000
    os.cpu_count() - 1.8 | {} | None
    os.cpu_count() | {"OMP_WAIT_POLICY": "active"} | None
    os.cpu_count() | {"GOMP_SPINCOUNT": "7"} | 7
    None | {} | None"""


@pytest.mark.parametrize("busy, given, spins", table(BUSY))
def test_idle_threads_wait_shortly_on_a_busy_machine(busy, given, spins):
    """Breaks when threads that wait take the time of other programs, or those of a quiet machine are
    put to sleep, the user's choice is overruled, or PyTorch is imported before."""
    code = f"""import builtins, io, os, sys
usual, busy, second = builtins.open, {busy}, os.sysconf("SC_CLK_TCK")
looks = [0, 0, 0] if busy is None else [100, 100 + round(busy * second * 0.05)]
def look(name, *more, **options):
    if name != "/proc/stat": return usual(name, *more, **options)
    if busy is None: raise FileNotFoundError(name)
    return io.StringIO(f"cpu  {{looks.pop(0)}} 0 0 999 0")
builtins.open = look
import eval
print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"""
    names = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    bare = {name: value for name, value in os.environ.items() if name not in names}
    options = {"env": bare | json.loads(given), "cwd": ROOT, "text": True}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, **options)
    assert printed.stdout.split() == ["False", spins], printed.stderr


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:998", "\x1b[2J", "x" * 10_000])
def test_devices_that_are_not_there(name):
    """Breaks when an absent device ends in a traceback or in pages of PyTorch's text."""
    assert len(refused(lambda: choose_device(name), "--device ")) < 500
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
