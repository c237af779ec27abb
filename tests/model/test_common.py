"""Files that are no files, values that are no values, names that would move the cursor: each is one clear line."""

import errno
import json
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import torch
from safetensors.torch import load_file

from model import device
from model.common import (
    Expected,
    UserError,
    atomic_path,
    field_problems,
    file_errors,
    open_regular,
    parse_json,
    quoted,
    read_bytes,
    read_field,
    read_json,
    read_jsonl,
    read_text,
    run_command,
    shown,
    write_text,
)
from model.device import choose_device, choose_dtype
from model.processor import Processor
from model.source import resolve

DEEP = 100_000


def refused(call, *arguments, **options) -> str:
    """The message of the UserError that a call raises: one printable line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000, message
    return message


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain é 日本 → ½.png", "plain é 日本 → ½.png"),
        ("\x1b[2Jred\x07", r"\x1b[2Jred\x07"),
        ("two\nlines\r\t", r"two\nlines\r\t"),
        ("\u202egnp.exe\u200b\u2028", r"\u202egnp.exe\u200b\u2028"),
        ("half \ud800", r"half \ud800"),
        ("\x9b31m\x00", r"\x9b31m\x00"),
        (b"bytes\xff", r"bytes\udcff"),
        (7, "7"),
        (None, "None"),
        ({"a": "\n"}, r"{'a': '\n'}"),
    ],
)
def test_names_are_one_printable_line(value, expected):
    """Breaks when a file name moves the cursor, hides its ending, or breaks the line of an error."""
    assert shown(value) == expected and shown(value).isprintable()


def test_long_and_hostile_values_are_short():
    """Breaks when a name of a megabyte fills the terminal, or describing a value raises."""
    text = shown("a" * 10**6 + ".png")
    assert len(text) <= 200 and text.startswith("aaa") and text.endswith(".png") and "…" in text
    assert len(shown("\x1b" * 10**6)) <= 4 * 200
    assert len(quoted("x" * 1000)) <= 80 and quoted("5") == "'5'" and quoted(5) == "5"
    nested: list = []
    for _ in range(DEEP):
        nested = [nested]
    assert quoted(nested) == "<list>" and quoted(10**10_000) == "<int>"


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "good", "bad"),
    [
        (Expected(int), [0, -5, 2**63 - 1], [True, 1.0, "1", None, 2**63, 10**400, [1]]),
        (Expected(int, 1, 8), [1, 8], [0, 9, -1, False]),
        (Expected(float, 0, 1), [0, 1, 0.5], [-0.1, 1.1, True, "0.5", float("nan"), float("inf"), 10**400]),
        (Expected(float), [1e300, -1, 10**400], [float("nan"), float("-inf"), None]),
        (Expected(bool), [True, False], [0, 1, "true", None]),
        (Expected(str), ["", "a"], [1, None, b"a", ["a"]]),
        (Expected(str, 1, 3), ["a", "abc"], ["", "abcd", 1]),
        (Expected(str, choices=("a", "b")), ["a"], ["c", None, 1, ["a"]]),
        (Expected(list, 1, 2), [[1], [1, 2]], [[], [1, 2, 3], (1,), "a", {}]),
        (Expected(dict), [{}, {"a": 1}], [[], None, "{}"]),
    ],
)
def test_what_a_value_may_be(expected, good, bad):
    """Breaks when a boolean passes as a number, NaN as a size, or an integer is too large for a tensor."""
    assert all(expected.accepts(value) for value in good)
    for value in bad:
        assert not expected.accepts(value), value
        message = refused(read_field, {"x": value}, "x", expected, "f.json")
        assert message.startswith("f.json: x is ") and f"expected {expected}: correct the file" in message


def test_expectations_are_put_into_words():
    """Breaks when an error does not say what would be right."""
    assert str(Expected(int, 1, 8)) == "an integer from 1 to 8"
    assert str(Expected(float, 0)) == "a number of at least 0" and str(Expected(bool)) == "true or false"
    assert str(Expected(str, 1, 3)) == "a text of 1 to 3 characters" and str(Expected(list)) == "a list"
    assert str(Expected(str, choices=("a", "b"))) == "'a' or 'b'"


def test_absent_fields():
    """Breaks when an absent field is read as null, or a default hides a wrong value."""
    assert read_field({"x": 3}, "x", Expected(int), "f") == 3
    assert read_field({}, "x", Expected(int), "f", default=None) is None
    assert refused(read_field, {}, "x", Expected(int), "f:3") == (
        "f:3: x is missing, expected an integer: correct the file"
    )
    assert "x is None" in refused(read_field, {"x": None}, "x", Expected(int), "f", default=4)


def test_annotated_fields_are_checked():
    """Breaks when a configuration's field is left out of the check, or null passes where it must not."""
    Size = Annotated[int, Expected(int, 1, 8)]

    @dataclass
    class Sizes:
        width: Size = 4
        depth: Size | None = None
        on: bool = True
        name: str = "free"

    assert field_problems(Sizes()) == []
    assert field_problems(Sizes(9, "3", 1), "text.") == [
        "text.width is 9, expected an integer from 1 to 8",
        "text.depth is '3', expected an integer from 1 to 8 or null",
        "text.on is 1, expected true or false",
    ]
    assert field_problems(Sizes(None)) == ["width is None, expected an integer from 1 to 8"]


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def special_files(tmp_path) -> dict:
    """Paths that are no readable regular file, with a word of the message."""
    fifo, link, loop = tmp_path / "fifo", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "gone")
    loop.symlink_to(loop)
    (tmp_path / "file").write_text("x")
    address = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)  # a socket's name has few characters
        server.bind("s")
    return {
        fifo: "is a pipe",
        address: "is a pipe, socket or device",
        link: "not found",
        loop: "links that point",
        tmp_path: "is a folder",
        tmp_path / "gone": "not found",
        tmp_path / "file" / "below": "a part of the path is a file",
        "/dev/zero": "device",
        "/dev/stdin": "",
        "nul\0byte": "not a valid file name",
        "half\ud800": "not a valid file name",
        str(tmp_path / ("n" * 300)): "name is too long",
        "p/" * 5000: "name is too long",
        "": "not found",
    }


@pytest.mark.parametrize("read", [open_regular, read_bytes, read_text, read_json, lambda path: list(read_jsonl(path))])
def test_what_is_no_file_is_refused_at_once(read, tmp_path, monkeypatch):
    """Breaks when a FIFO or device blocks the run, or a path ends in a traceback."""
    monkeypatch.chdir(tmp_path)
    for path, part in special_files(tmp_path).items():
        if path == "/dev/stdin" and os.path.isfile("/dev/stdin"):
            continue
        messages: list[str] = []
        thread = threading.Thread(target=lambda path=path, out=messages: out.append(refused(read, path)), daemon=True)
        thread.start()
        thread.join(20)
        assert messages and part in messages[0], path


def test_unreadable_files(tmp_path):
    """Breaks when a file without permissions ends in a traceback."""
    path = tmp_path / "secret"
    path.write_text("{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads everything")
    assert "permission denied" in refused(read_json, path)


def test_a_size_bound(tmp_path):
    """Breaks when a file of any size is read into memory, sparse ones and files of /proc included."""
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "larger than 1073741824 bytes" in refused(read_bytes, path)
    path.write_bytes(b"x" * 10)
    assert read_bytes(path, 10) == b"x" * 10 and "larger than 9 bytes" in refused(read_bytes, path, 9)
    if os.path.exists("/proc/self/maps"):
        assert "larger than 5 bytes" in refused(read_bytes, "/proc/self/maps", 5)


BAD_JSON = {
    "": "line 1, column 1",
    '{"a": 1': "line 1, column 8",
    '{\n"a": }': "line 2, column 6",
    "[" * DEEP: "nested too deeply",
    '{"a":' * DEEP: "nested too deeply",
    "1" * 10_000: "digits",
    "[-" + "9" * 10_000 + "]": "digits",
    '"\\ud800"': "half of a surrogate pair",
    '{"\\uDFFF": 1}': "half of a surrogate pair",
    "{} {}": "Extra data",
    "nan": "line 1, column 1",
    "\x00": "line 1, column 1",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=[text[:12] for text in BAD_JSON])
def test_bad_json_is_one_line(text, tmp_path):
    """Breaks when a hostile file ends in a traceback, or in a message that does not say where."""
    (tmp_path / "a.json").write_text(text)
    message = refused(read_json, tmp_path / "a.json", object)
    assert message.startswith(f"{tmp_path}/a.json: ") and BAD_JSON[text] in message


@pytest.mark.parametrize("content", [b"\xff\xfe{\x00}\x00", b'{"a": "\xe9"}', b"\x80\x04\x95", b'"\xed\xa0\x80"'])
def test_bytes_that_are_not_utf8(content, tmp_path):
    """Breaks when UTF-16, Latin-1 or a pickle is read as something else."""
    (tmp_path / "a.json").write_bytes(content)
    assert "is not UTF-8 text (byte " in refused(read_json, tmp_path / "a.json")


def test_good_json(tmp_path):
    """Breaks when a byte order mark, a paired surrogate or a large integer is refused."""
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + rb'{"a": "\ud83d\udc2e", "b": 123456789012345678901234567890, "c": 1e999}')
    assert read_json(path) == {"a": "🐮", "b": 123456789012345678901234567890, "c": float("inf")}
    assert parse_json("\ufeff[1]", "x") == [1] and parse_json("NaN", "x") != 0


def test_the_kind_of_a_file(tmp_path):
    """Breaks when a list is taken for an object."""
    path = tmp_path / "a.json"
    for text, name in (("[]", "list"), ('"a"', "text"), ("null", "null"), ("3", "integer"), ("true", "bool")):
        path.write_text(text)
        assert f"holds a JSON {name}, expected an object" in refused(read_json, path)
    path.write_text("{}")
    assert "holds a JSON object, expected a list" in refused(read_json, path, list)


def test_repeated_keys():
    """Breaks when the first of two equal keys is dropped without a word where that matters."""
    assert parse_json('{"a": 1, "a": 2}', "x") == {"a": 2}
    assert "the key a stands there twice" in refused(parse_json, '{"b": {"a": 1, "a": 2}}', "x", unique_keys=True)


def test_json_lines(tmp_path):
    """Breaks when one bad line ends a run that could go on without it, or moves the numbers of the others."""
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"n": n, "text": "a\u2028b"}, ensure_ascii=False).encode() for n in range(3)]
    bad = [b"{", b"\xff{}", b"[1]", b"[" * DEEP, rb'{"a": "\ud800"}', b'{"n": ' + b"1" * 9999 + b"}"]
    path.write_bytes(b"\xef\xbb\xbf" + good[0] + b"\r\n\n" + b"\n".join(bad) + b"\n \n" + b"\n".join(good[1:]))
    messages: list[UserError] = []
    records = list(read_jsonl(path, messages.append))
    assert records == [(f"{path}:{line}", json.loads(good[n])) for n, line in enumerate((1, 10, 11))]
    assert [str(error).split(": ")[0] for error in messages] == [f"{path}:{line}" for line in range(3, 9)]
    assert "a.jsonl:3: not valid JSON (" in refused(lambda: list(read_jsonl(path)))


# ---------------------------------------------------------------------------------------------------------------------
# Writing, and what nothing else caught
# ---------------------------------------------------------------------------------------------------------------------


def test_paths_that_cannot_be_written(tmp_path):
    """Breaks when a bad target ends in a traceback, or leaves a temporary file behind."""
    (tmp_path / "file").write_text("x")
    for path, part in {
        tmp_path: "is a folder",
        tmp_path / "file" / "a.txt": "a part of the path is a file|exists already",
        tmp_path / "file" / "b" / "a.txt": "a part of the path is a file",
        tmp_path / ("n" * 300): "name is too long",
        tmp_path / "nul\0": "not a valid file name",
        tmp_path / "half\ud800": "not a valid file name",
        "/proc/nothing/a.txt": "not found|permission|read-only",
    }.items():
        message = refused(write_text, path, "text")
        assert any(word in message for word in part.split("|")), message
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_previous_file(tmp_path):
    """Breaks when a full disk ends in a traceback, a half-written file, or the loss of the one before."""
    path = tmp_path / "a.txt"
    write_text(path, "before")
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: full (os error 28)")):
        with pytest.raises(UserError, match=r"a\.txt: no space left on the disk"), atomic_path(path) as temporary:
            temporary.write_text("ha")
            raise error
    assert path.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_other_errors_pass_through(tmp_path):
    """Breaks when a bug in the block of `atomic_path` is reported as a bad path."""
    for error in (KeyError("x"), ValueError("bad value"), UnicodeEncodeError("ascii", "é", 0, 1, "no")):
        with pytest.raises(type(error)), atomic_path(tmp_path / "a"):
            raise error
    with pytest.raises(UserError, match="b: not found"), atomic_path(tmp_path / "a"):
        (tmp_path / "b").read_text()
    with pytest.raises(UserError, match="gone: not found"), file_errors("gone"):
        load_file(tmp_path / "gone")  # of a library in Rust


def test_text_that_is_no_unicode_is_written_as_escapes(tmp_path):
    """Breaks when one lone surrogate in an answer loses the whole file."""
    write_text(tmp_path / "a.json", json.dumps({"a": "\ud800é"}, ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": "\ud800é"}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("a.json: \x1b[31mred\nline"), "error: a.json: \\x1b[31mred\\nline"),
        (OSError(errno.ENOSPC, "full", "/out/\x07a"), "error: /out/\\x07a: no space left on the disk: free"),
        (PermissionError(errno.EACCES, "denied"), "error: permission denied"),
        (OSError("2048 requested and 0 written"), "error: 2048 requested and 0 written"),
    ],
)
def test_commands_end_in_one_line(error, line, capsys):
    """Breaks when an error of the system, or a name in a message, becomes several lines or a traceback."""

    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and printed.startswith(line) and printed.count("\n") == 1
    assert printed.strip().isprintable()


def test_answers_that_the_terminal_cannot_show(capsys):
    """Breaks when an answer with a character that the terminal lacks ends the command."""
    run_command(lambda: print("half \ud800"))
    assert capsys.readouterr().out == "half \\ud800\n"


# ---------------------------------------------------------------------------------------------------------------------
# Devices and sources
# ---------------------------------------------------------------------------------------------------------------------

NO_DEVICES = [
    "",
    "nonsense",
    "CPU",
    " cpu",
    "cpu\0",
    "meta",
    "hpu",
    "privateuseone",
    "mkldnn",
    "cuda:-1",
    "cuda:9999999999",
]


@pytest.mark.parametrize("name", [*NO_DEVICES, "cuda:998", "\x1b[2J", "x" * 10_000])
@pytest.mark.filterwarnings("error")
def test_devices_that_do_not_exist(name):
    """Breaks when a device's name ends in a traceback, pages of text, or a model without numbers (meta)."""
    assert refused(choose_device, name).startswith("--device ")


CPUS = {  # what /proc/cpuinfo holds, and `lscpu` and `sysctl` print
    "AMD EPYC": {"file": "vendor_id\t: AMD\nmodel name\t: AMD EPYC\n\nmodel name\t: AMD EPYC\n"},
    "Neoverse-N1": {
        "file": "CPU part\t: 0xd0c\n",
        "env": "BIOS Model name: none\n  Model name:    Neoverse-N1\nModel: 1\n",
    },
    "Cortex-A55 + Cortex-A76": {"file": "", "env": "Model name: Cortex-A55\nModel: 0\nModel name: Cortex-A76\n"},
    "Apple M1": {"sysctl": "machdep.cpu.brand_string: Apple M1\n"},
    "unknown processor": {"env": "Model name:  -\n"},
}


@pytest.mark.parametrize("name", CPUS)
def test_a_processor_has_one_clear_name(name, monkeypatch):
    """Breaks when results of an ARM machine or a Mac are of "arm", or of nothing."""

    def run(command, **_):
        if command[0] not in CPUS[name]:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=CPUS[name][command[0]])

    monkeypatch.setattr(device.subprocess, "run", run)
    monkeypatch.setattr(device, "Path", lambda path: SimpleNamespace(read_text=lambda: run(["file"]).stdout))
    for function in ("processor", "machine"):
        monkeypatch.setattr(device.platform, function, str)
    assert device.processor_name.__wrapped__() == name


def test_a_written_file_has_the_mode_of_the_users_mask(tmp_path, monkeypatch):
    """Breaks when the mask of the whole process is changed for an instant, in which another thread may make a file."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("the mask was changed"))
            write_text(tmp_path / "a.txt", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("there", [(), ("mps",), ("cuda", "mps")])
def test_the_best_device_that_is_there(there, monkeypatch):
    """Breaks when a Mac computes on its CPU although it has a GPU, or an absent one ends in pages of PyTorch's text."""
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setitem(device._IS_THERE, kind, lambda kind=kind: kind in there)
    assert choose_device("auto").type == [*there, "cpu"][0]
    if "mps" not in there:
        message = "--device mps: none that this PyTorch can use: take cpu"
        assert refused(choose_device, "mps") == message == refused(choose_device, "mps:0").replace("mps:0", "mps")


def test_dtypes_that_do_not_exist():
    """Breaks when a dtype of another name is a KeyError."""
    assert choose_dtype("auto", choose_device("cpu")) == torch.float32
    assert "--dtype fp8: expected auto, fp32, bf16, fp16" in refused(choose_dtype, "fp8", choose_device("cpu"))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "~nobody-here/model",
        "a\0b",
        "half\ud800",
        "n" * 5000,
        "a/" + "n" * 300,
        "\x1b[2J/x",
        "é/model",
        "a//b",
        "/dev/null",
    ],
)
def test_sources_that_are_no_model(source, tmp_path, monkeypatch):
    """Breaks when the name of a model ends in a traceback, or reaches the hub though it cannot be an id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("model.source._download", lambda *_: pytest.fail("asked the hub"))
    for path in (source, Path(source)) if source else ():
        refused(resolve, path, ["config.json"])
        refused(Processor.from_source, path)
