"""What every floor needs: errors of the user, checked values, and files that are read and written safely.

A mistake of the user (a bad file, flag or record) is a `UserError`: one line that says what is wrong, where, and what
to do. `run_command` turns it into exit code 2. Other exceptions are bugs and keep their traceback.

    names on a terminal     shown, quoted
    values from a file      Expected, read_field, field_problems
    reading                 read_bytes, read_text, read_json, read_jsonl, parse_json, open_regular
    writing                 atomic_path, write_text, sync_files, sync_folder
    anything else           file_errors turns what the system refuses into a UserError
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import re
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """A mistake in the input, described in one line: what, where, and the remedy."""


# Commands


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`: a `UserError` becomes one line on stderr and exit code 2, Ctrl-C exit code 130.

    An OSError that nothing else turned into a UserError (a full disk, a read-only folder) is treated the same.
    """
    keep_memory()
    for stream in (sys.stdout, sys.stderr):  # an answer may hold characters that the terminal's encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
        sys.stdout.flush()  # raises BrokenPipeError here instead of at the interpreter's exit
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `python -m eval.ask … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        named = "" if error.filename is None else f"{shown(error.filename)}: "
        _fail(named + (_file_problem(error) or f"{type(error).__name__}: {error}"))


def _fail(message: str) -> None:
    print(f"error: {shown(message, 4000)}", file=sys.stderr)
    sys.exit(2)


def keep_memory() -> None:
    """Let this process keep freed memory, where the C library is glibc.

    By default it returns memory to the system and requests it again, page by page, in every step, which costs a tenth
    of the time on a CPU.
    """
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_threshold, 32 << 20)  # the maximum of glibc
        mallopt(trim_threshold, 1 << 30)


# Names on a terminal, and values from files


def shown(value: Any, width: int = 200) -> str:
    """A name as one short printable line: a text or path as it is, other values as `quoted`.

    Control characters, line breaks, ANSI escapes, invisible and bidirectional characters and lone surrogates become
    escapes such as \\x1b. What is longer than `width` loses its middle, since the end of a path says most.
    """
    if not isinstance(value, str | bytes | os.PathLike):
        return quoted(value, width)
    text = os.fsdecode(value)
    if len(text) > width:
        text = f"{text[: width // 2]}…{text[-(width // 2 - 1) :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def quoted(value: Any, width: int = 80) -> str:
    """The repr of a value as one short printable line."""
    try:
        return shown(repr(value), width)
    except (RecursionError, ValueError):  # nested too deeply; an integer of thousands of digits
        return f"<{type(value).__name__}>"


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Expected:
    """What a value may be: its type, and its range or choices. Ranges include both ends; of a text or list they bound
    the length. A bool is not a number, an integer is a float, and floats must be finite."""

    kind: type  # int, float, bool, str, list or dict
    low: float | None = None
    high: float | None = None
    choices: tuple = ()

    def accepts(self, value: Any) -> bool:
        """Whether `value` is of this type and in this range; a `kind` of int without limits is one of 64 bits."""
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            return False
        if self.choices or self.kind in (bool, dict):
            return not self.choices or value in self.choices
        size = len(value) if isinstance(value, str | list) else value
        if isinstance(size, float) and not math.isfinite(size):
            return False
        limit = 1 << 63 if self.kind is int else math.inf
        return (-limit if self.low is None else self.low) <= size <= (limit - 1 if self.high is None else self.high)

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(map(repr, self.choices))
        name = _NAMES[self.kind]
        if self.low is None and self.high is None:
            return name
        unit = "" if self.kind in (int, float) else " characters" if self.kind is str else " entries"
        if self.high is None:
            return f"{name} of at least {self.low}{unit}"
        return f"{name} {'of ' if unit else 'from '}{self.low or 0} to {self.high}{unit}"


_REQUIRED = object()


def read_field(
    record: Mapping,
    name: str,
    expected: Expected,
    where: str,
    *,
    default: Any = _REQUIRED,
    remedy: str = "correct the file",
) -> Any:
    """record[name] if it is as expected; an absent field is the `default`, or an error without one.

    Raises UserError that names `where` (a file, with the line or record), the field, its value and what is expected.
    """
    if name not in record and default is not _REQUIRED:
        return default
    if name not in record:
        raise UserError(f"{where}: {name} is missing, expected {expected}: {remedy}")
    if not expected.accepts(record[name]):
        raise UserError(f"{where}: {name} is {quoted(record[name])}, expected {expected}: {remedy}")
    return record[name]


def field_problems(values: Any, prefix: str = "") -> list[str]:
    """What is wrong with the fields of a dataclass whose types are annotated, a text for each.

    A type is `Annotated[int, Expected(int, 1, 64)]`, also with `| None`; `bool` needs no annotation. Fields of other
    types are not checked.
    """
    problems = []
    for name, hint in get_type_hints(type(values), include_extras=True).items():
        value, parts = getattr(values, name), get_args(hint)
        optional = type(None) in parts and get_origin(hint) is not Annotated
        for part in parts if optional else (hint,):
            extras = get_args(part)[1:] if get_origin(part) is Annotated else [Expected(bool)] if part is bool else []
            for expected in extras:
                if not expected.accepts(value) and not (optional and value is None):
                    more = " or null" if optional else ""
                    problems.append(f"{prefix}{name} is {quoted(value)}, expected {expected}{more}")
    return problems


# What the system refuses

_PROBLEMS = {
    errno.ENOENT: "not found: check the path",
    errno.ENOTDIR: "a part of the path is a file, not a folder: check the path",
    errno.EISDIR: "is a folder, expected a file: check the path",
    errno.EEXIST: "exists already, and is of another kind: remove it or choose another name",
    errno.EACCES: "permission denied: change its permissions or choose another path",
    errno.EPERM: "permission denied: change its permissions or choose another path",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.ELOOP: "links that point to each other: check the path",
    errno.ENOSPC: "no space left on the disk: free some, or choose another folder",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another folder",
    errno.EFBIG: "the file is too large for this file system: choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.EIO: "the disk reports an error: check it, or choose another folder",
}


def _file_problem(error: BaseException) -> str | None:
    """What the system refused, with a remedy; None for an exception that has another cause."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):  # libraries raise it without a number
        number = errno.ENOENT
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # from safetensors and tokenizers, which are in Rust
        number = int(found[1])
    if number is not None and number in _PROBLEMS:
        return _PROBLEMS[number]
    if isinstance(error, OSError):
        return f"{shown(error.strerror or str(error) or type(error).__name__)}: check the path and the disk"
    if isinstance(error, UnicodeEncodeError) or re.search("null (byte|character)", str(error)):
        return "is not a valid file name: check the path"
    return None


@contextlib.contextmanager
def file_errors(path: str | os.PathLike, own: str | os.PathLike | None = None) -> Iterator[None]:
    """Turn what the system refuses within the block into a UserError that names `path`, or the file of the error.

    own: the temporary file that stands for `path` while the block writes to it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = _file_problem(error)
        if problem is None or own is not None and isinstance(error, ValueError):
            raise
        named = getattr(error, "filename", None)
        if not isinstance(named, str | bytes | os.PathLike) or own is not None and os.fspath(named) == os.fspath(own):
            named = path
        raise UserError(f"{shown(named)}: {problem}") from None


# Reading

FILE_LIMIT = 1 << 30  # bytes of a file that is read as a whole
LINE_LIMIT = 1 << 24  # bytes of a line of JSON


def open_regular(path: str | os.PathLike, limit: int | None = None) -> BinaryIO:
    """The regular file at `path`, of up to `limit` bytes, open for reading. Anything else is a UserError.

    This cannot block: a folder, FIFO, socket or device is not opened at all.
    """
    with file_errors(path):
        _check_regular(path, os.stat(path).st_mode)
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(handle)
            _check_regular(path, status.st_mode)  # it may have been replaced meanwhile
            if limit is not None and status.st_size > limit:
                raise _too_large(path, limit)
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise


def _check_regular(path: str | os.PathLike, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", os.fspath(path))
    if not stat.S_ISREG(mode):
        raise UserError(f"{shown(path)}: is a pipe, socket or device, expected a file: check the path")


def read_bytes(path: str | os.PathLike, limit: int = FILE_LIMIT) -> bytes:
    """The contents of a regular file of up to `limit` bytes. Raises UserError."""
    with file_errors(path), open_regular(path, limit) as file:
        content = file.read(limit + 1)  # files of /proc have no size
    if content is None or len(content) > limit:
        raise _too_large(path, limit)
    return content


def _too_large(path: str | os.PathLike, limit: int) -> UserError:
    return UserError(f"{shown(path)}: is larger than {limit} bytes: check that this is the right file")


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Raises UserError."""
    return _decode(read_bytes(path), shown(path))


def read_json(path: str | os.PathLike, kind: type = dict, limit: int = FILE_LIMIT, unique_keys: bool = False) -> Any:
    """The value in a JSON file, which must be of `kind` (dict, list, or object for any). Raises UserError."""
    value = parse_json(read_bytes(path, limit), shown(path), unique_keys)
    if not isinstance(value, kind):
        found = f"holds a JSON {json_name(value)}, expected {_NAMES[kind]}"
        raise UserError(f"{shown(path)}: {found}: check that this is the right file")
    return value


def read_jsonl(path: str | os.PathLike, bad: Callable[[UserError], None] | None = None) -> Iterator[tuple[str, dict]]:
    """The objects of a JSON-lines file in order, each with its place ("file:line"). Blank lines are skipped.

    A line that is not one JSON object is a UserError, which is given to `bad` if there is one, and else raised; an
    interrupted writer may have left such a line at the end. The file is read line by line.
    """
    with file_errors(path), open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), start=1):
            where = f"{shown(path)}:{number}"
            try:
                if len(line) > LINE_LIMIT:
                    while line and not line.endswith(b"\n"):  # skip the rest
                        line = file.readline(LINE_LIMIT)
                    raise UserError(f"{where}: is longer than {LINE_LIMIT} bytes: check that this is the right file")
                if not line.strip():
                    continue
                record = parse_json(line, where, is_line=True)
                if not isinstance(record, dict):
                    raise UserError(f"{where}: holds a JSON {json_name(record)}: each line must hold one JSON object")
            except UserError as error:
                if bad is None:
                    raise
                bad(error)
                continue
            yield where, record


def parse_json(text: str | bytes, where: str, unique_keys: bool = False, is_line: bool = False) -> Any:
    """The value of a JSON text (UTF-8, a byte order mark is skipped). Raises UserError that begins with `where`.

    Refused, beside syntax errors: nesting that exceeds Python's recursion limit, integers of thousands of digits, lone
    surrogates, which no file or terminal can hold, and, if asked for, keys that an object has twice. NaN and Infinity
    are read as floats, as Python writes them: `Expected` refuses them where a number must be finite. `is_line`: the
    text is one line, and `where` has its number.
    """
    remedy = "correct the file or download it again"
    text = _decode(text, where) if isinstance(text, bytes) else text.removeprefix("\ufeff")
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
        if re.search(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]", text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        problem = "holds half of a surrogate pair, which is no character"
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        problem = f"not valid JSON at line {error.lineno}, {place} ({error.msg})"
        problem = f"not valid JSON ({error.msg} at {place})" if is_line else problem
    except RecursionError:
        problem = "not valid JSON (nested too deeply)"
    except ValueError as error:  # an integer of thousands of digits, a repeated key
        problem = f"not valid JSON ({str(error).split(';')[0]})"
    else:
        return value
    raise UserError(f"{where}: {problem}: {remedy}")


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} stands there twice")
    return found


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text (byte {error.start}): check that this is the right file") from None


def json_name(value: Any) -> str:
    """The JSON name of a value's type, such as "object" or "list"."""
    return {dict: "object", str: "text", type(None): "null", int: "integer", float: "number"}.get(
        type(value), type(value).__name__
    )


# Writing


@contextlib.contextmanager
def atomic_path(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`, flushed to disk and renamed onto it if the block succeeds, else removed.

    >>> with atomic_path("loss.png") as temporary: image.save(temporary)

    A crash leaves the previous file intact. Without `durable` the file is not flushed: after a power cut it may be
    broken, which its reader must notice. Raises UserError for what the system refuses, also within the block.
    """
    path, temporary = Path(path), None
    try:
        with file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
            # the suffix is kept: Pillow and others choose the format by it
            name = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(4)}{path.suffix}")
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less the user's mask
            temporary = name
        with file_errors(path, own=temporary):
            yield temporary
            if durable:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if durable:
                sync_folder(path.parent)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically; a lone surrogate is written as its escape. Raises UserError."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def sync_files(folder: Path) -> None:
    """Make the files in `folder`, and their names, survive a power cut."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
