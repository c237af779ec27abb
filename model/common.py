"""What every floor needs and no library brings: the user's error, the end of a command, the atomic file.

A mistake of the user (a bad file, flag or record) is a `UserError`: one line that says what is wrong, where, and
what to do. `run_command` turns it into exit code 2. Everything else is a bug and keeps its traceback.
"""

import contextlib
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


class UserError(ValueError):
    """A mistake in the input, told in one clear line: what, where, and the remedy."""


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`: a `UserError` becomes one line on stderr and exit code 2, Ctrl-C exit code 130."""
    keep_memory()
    try:
        main()
        sys.stdout.flush()  # a reader that went away shows here, not in the interpreter's shutdown
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `python -m eval.ask … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def keep_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    It would give it back to the system and get it anew, page by page, in every step: on a CPU, a tenth of the time.
    """
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_threshold, 32 << 20)  # the most that glibc takes
        mallopt(trim_threshold, 1 << 30)


def read_json(path: str | Path) -> dict:
    """The object in a JSON file. Raises UserError if it is absent or no JSON object."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: not found: a model folder holds config.json beside its tensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}): download the file again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds a JSON {type(raw).__name__}, expected an object: download the file again")
    return raw


@contextlib.contextmanager
def atomic_path(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`, flushed to disk and renamed onto it if the block ends well, else removed.

    >>> with atomic_path("loss.png") as temporary: image.save(temporary)

    What is not `durable` is not flushed: a power cut may leave it broken, which its reader must notice.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the ending stays: Pillow and others read the format from it
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
