"""Mistakes of the user are one clear line, files are written whole or not at all, and devices and sources exist."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import device
from model.common import (
    UserError,
    atomic_path,
    file_errors,
    parse_json,
    quoted,
    read_json,
    read_text,
    run_command,
    shown,
    write_text,
)
from model.device import choose_device, choose_dtype
from model.processor import Processor
from model.source import resolve


def refused(call, *arguments, **options) -> str:
    """The message of the UserError that a call raises: one printable line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000, message
    return message


def test_names_are_one_short_printable_line():
    """Breaks when a file name moves the cursor, hides its ending, breaks the line of an error or fills the terminal."""
    for text in ("\x1b[2Jred\x07", "two\nlines\t", "\u202egnp.exe\u200b", "half \ud800", b"bytes\xff", {"a": "\n"}):
        assert shown(text).isprintable() and shown(text)
    assert shown("plain é 日本 → ½.png") == "plain é 日本 → ½.png" and quoted("5") == "'5'" and quoted(5) == "5"
    text = shown("a" * 10**6 + ".png")
    assert len(text) <= 200 and text.endswith(".png") and len(quoted("x" * 1000)) <= 80
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert quoted(nested) == "<list>"


def test_what_cannot_be_read(tmp_path):
    """Breaks when a hostile file ends in a traceback, or in a message that does not say where."""
    path = tmp_path / "a.json"
    for content in (
        *(b"", b'{"a": 1', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"{} {}", b"nan", b"\x00"),
        *(b"\xff\xfe{\x00}\x00", b'{"a": "\xe9"}', b"\x80\x04\x95", b"[]", b"null"),
    ):
        path.write_bytes(content)
        assert refused(read_json, path).startswith(f"{path}: "), content
    assert "line 2, column 6" in refused(parse_json, '{\n"a": }', "x")
    for bad in (tmp_path, tmp_path / "gone", path / "below", tmp_path / ("n" * 300)):
        assert refused(read_text, bad).startswith(f"{shown(bad)}: ")
    assert "gone: not found" in refused(read_json, tmp_path / "gone")
    path.write_bytes(b"\xef\xbb\xbf" + rb'{"a": "\ud83d\udc2e", "b": 123456789012345678901234567890, "c": 1e999}')
    assert read_json(path) == {"a": "🐮", "b": 123456789012345678901234567890, "c": float("inf")}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """Breaks when a full disk ends in a traceback, a half-written file, or the loss of the one before."""
    path = tmp_path / "a.txt"
    write_text(path, "before \ud800")
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: full (os error 28)")):
        with pytest.raises(UserError, match=r"a\.txt: "), atomic_path(path) as temporary:
            temporary.write_text("ha")
            raise error
    for error in (KeyError("x"), ValueError("bad value")):  # bugs
        with pytest.raises(type(error)), atomic_path(path) as temporary:
            raise error
    for bad in (tmp_path, path / "below", tmp_path / ("n" * 300), "/proc/nothing/a.txt"):
        assert refused(write_text, bad, "text").startswith(shown(bad))
    assert path.read_text() == "before \\ud800" and [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(UserError, match="gone: not found"), file_errors("gone"):
        load_file(tmp_path / "gone")  # of a library in Rust


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


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("a.json: \x1b[31mred\nline"), "error: a.json: \\x1b[31mred\\nline"),
        (OSError(errno.ENOSPC, "No space left", "/out/\x07a"), "error: /out/\\x07a: no space left"),
        (OSError("2048 requested and 0 written"), "error: the system: 2048 requested and 0 written"),
    ],
)
def test_commands_end_in_one_line(error, line, capsys):
    """Breaks when an error of the system, or a name in a message, becomes several lines or a traceback."""

    def main():
        print("half \ud800")
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and err.startswith(line) and err.strip().isprintable() and out == "half \\ud800\n"


@pytest.mark.parametrize("there", [(), ("mps",), ("cuda", "mps")])
def test_the_best_device_that_is_there(there, monkeypatch):
    """Breaks when a Mac computes on its CPU although it has a GPU, or an absent one ends in pages of PyTorch's text."""
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setitem(device._IS_THERE, kind, lambda kind=kind: kind in there)
    assert choose_device("auto").type == [*there, "cpu"][0]
    for name in ("xpu", "nonsense", "CPU", "meta", "cuda:998", "\x1b[2J", "x" * 10_000):
        assert refused(choose_device, name).startswith("--device ")
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert "--dtype fp8: expected " in refused(choose_dtype, "fp8", torch.device("cpu"))


@pytest.mark.parametrize("source", ["~nobody-here/model", "n" * 5000, "\x1b[2J/x", "é/model", "a//b", "/dev/null"])
def test_sources_that_are_no_model(source, tmp_path, monkeypatch):
    """Breaks when the name of a model ends in a traceback, or reaches the hub though it cannot be an id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    for path in (source, Path(source)):
        refused(resolve, path, ["config.json"])
        refused(Processor.from_source, path)
