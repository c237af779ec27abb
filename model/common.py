"""What every floor needs: mistakes of the user, files that are read, files that are written whole.

A mistake of the user (a flag, a file, weights) is a `UserError`: one line that says what is wrong,
where, and what to do. `run_command` turns it into exit code 2. Other exceptions are bugs and keep
their traceback.
"""

import ctypes
import hashlib
import json
import os
import re
import secrets
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

# Python imports a command's modules: Ctrl-C ends that without a traceback
if sys.argv[:1] == ["-m"]:
    sys.excepthook = lambda kind, *more: (
        None if kind is KeyboardInterrupt else sys.__excepthook__(kind, *more)
    )

# of a text that is read whole; LLaVA's 665,000 conversations have 1.03 GB
MOST_BYTES = 2_000_000_000
# in what libraries say of it
NO_MEMORY = "out of memory|can't allocate memory"


def busy_cores(seconds: float = 0.05) -> float:
    """How many cores other programs use, while this one sleeps. Raises OSError where there is no
    /proc/stat."""

    def ticks() -> int:
        with open("/proc/stat") as file:
            user, nice, system = file.readline().split()[1:4]
        return int(user) + int(nice) + int(system)

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    # PyTorch's idle threads wait in a loop, by default so long that beside other work two threads
    # take ten times the time of one, while on a quiet machine a short wait costs a fifth. Its
    # library reads this once, as torch is imported
    with suppress(OSError, ValueError):
        if busy_cores() > (os.cpu_count() or 1) - 1.5:  # a small model takes two cores
            os.environ["GOMP_SPINCOUNT"] = "1000"


class UserError(ValueError):
    """A mistake in the input, described in one line: what, where, and the remedy."""


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`: a mistake, an OSError or too little memory is one line on stderr and
    exit code 2.

    Ctrl-C is exit code 130, a closed stdout, as of `| head`, 141. What a stream cannot take is lost
    in silence.
    """
    keep_memory()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-` or in a service
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        # an answer may hold characters that the terminal's encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with file_errors():
            main()
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except BaseException as error:
        message = shown(error, 4000)
        if isinstance(error, MemoryError) or re.search(NO_MEMORY, str(error)):
            message = f"too little memory: {message}"
        # the latter of Rust
        elif not (isinstance(error, UserError) or type(error).__name__ == "PanicException"):
            raise
        with suppress(OSError):
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Python would say at its end that it cannot
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Parser(ArgumentParser):
    """argparse's parser, whose error says first what is wrong, with the nearest flag to a typo."""

    def error(self, message: str):
        if typo := re.search(r"unrecognized arguments: .*?(--?\w[\w-]*)", message):
            for flag in get_close_matches(typo[1], self._option_string_actions, 1):
                message += f": did you mean {flag}?"
        self.exit(2, f"error: {shown(message, 4000)}\n{self.format_usage()}")


def keep_memory() -> None:
    """Let glibc keep freed memory: to request it again in every step costs a tenth of the time on a
    CPU."""
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_threshold, 32 << 20)  # the maximum of glibc
        mallopt(trim_threshold, 1 << 30)


def cpuinfo(entry: str) -> str:
    """What Linux tells of the processor, such as its "vendor_id"; "" where the system does not."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    told = re.search(rf"^{entry}\s*:\s*(\S.*)", text, re.M)
    return told[1] if told else ""


def shown(value: Any, width: int = 200) -> str:
    """A text or path as one printable line of at most `width` characters.

    Control characters become escapes such as \\x1b. A longer text loses its middle: the end of a
    path says most.
    """
    text = str(value)
    if len(text) > width:
        text = f"{text[: width // 2]}…{text[-(width // 2 - 1) :]}"
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(escaped)


def check_text(text: str) -> str:
    """The text. Raises UserError for bytes of the command line that are not UTF-8, and for half of
    a surrogate pair: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{quoted(text)}: is not UTF-8 text: write it in UTF-8") from None
    return text


def quoted(value: Any, width: int = 80) -> str:
    """The repr of a value as one printable line of at most `width` characters."""
    return shown(repr(value), width)


@contextmanager
def file_errors(path: str | os.PathLike | None = None) -> Iterator[None]:
    """Turn what the system refuses within the block into a UserError that names `path`, or the
    error's own file."""
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        if not (isinstance(error, OSError) or "(os error" in str(error)):  # the second in Rust
            raise
        reason = str(getattr(error, "strerror", None) or error)
        reason = reason[:1].lower() + reason[1:]
        if isinstance(error, FileNotFoundError):
            reason = "not found"
        name = path or getattr(error, "filename", None) or "the system"
        raise UserError(
            f"{shown(name)}: {shown(reason)}: check the path, its permissions and the disk"
        ) from None


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a file of text. Raises UserError, also for one that no memory holds."""
    file = Path(path)
    with file_errors(path):
        if file.stat().st_size > MOST_BYTES or file.is_char_device():
            raise UserError(
                f"{shown(path)}: more than {MOST_BYTES:,} bytes of text: give several smaller files"
            )
        return file.read_bytes()


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Raises UserError."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{shown(path)}: is not UTF-8 text ({error}): check that this is the right file"
        ) from None


def read_json(path: str | os.PathLike, kind: type = dict) -> Any:
    """The value in a JSON file, which must be of `kind` (dict, list, or object for any). Raises
    UserError."""
    value = parse_json(read_text(path), shown(path))
    if not isinstance(value, kind):
        raise UserError(
            f"{shown(path)}: holds a {type(value).__name__}, expected a {kind.__name__}: check that "
            "this is the right file"
        )
    return value


def read_json_if(path: str | os.PathLike) -> dict:
    """The object in a JSON file, {} where there is no file. Raises UserError."""
    return read_json(path) if Path(path).is_file() else {}


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text, in UTF-8 if it is bytes. Raises UserError that begins with `where`.

    NaN and Infinity are read as floats, as Python writes them.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: not valid JSON ({error}): correct the file or download it again"
        ) from None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text. Raises ValueError for a key that stands twice: which one counts?"""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key of {len(pairs)} stands twice")
    return value


def short_hash(text: str) -> str:
    """Sixteen hexadecimal digits that name a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_none(values: Mapping) -> dict:
    """The values by name, without those that are None."""
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, flushed to disk and renamed onto it if the block succeeds,
    else removed.

    >>> with atomic_path("loss.png") as temporary: image.save(temporary)

    A crash leaves the previous file intact. Raises UserError for what the system refuses, also
    within the block.
    """
    path = Path(path)
    # the suffix is kept: Pillow and others choose the format by it
    temporary = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(4)}{path.suffix}")
    with file_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync_folder(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically; a lone surrogate is written as its escape.
    Raises UserError."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def sync_files(folder: Path) -> None:
    """Make the files in `folder`, and their names, survive a power cut."""
    for path in (*folder.iterdir(), folder):
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
