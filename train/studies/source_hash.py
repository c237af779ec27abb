"""A hash of the source that decides a cell. It is part of the cell's name, so that changed code never meets old cells.

In: the function that makes a cell. Its file counts, and so do the files of the project that this imports, and that
those import in turn: all but comments and docstrings. Files that only judge finished cells do not count.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
JUDGING = {Path(__file__).with_name(f"{name}.py") for name in ("engine", "rules", "report", "pool")}


@cache
def source_hash(make: Callable) -> str:
    """16 hexadecimal digits. What a `partial` binds is no source: it belongs to `Study.key`."""
    waiting, texts = {Path(inspect.getfile(make.func if isinstance(make, partial) else make))}, {}
    while waiting:
        tree = ast.parse((file := waiting.pop()).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)  # a docstring
        texts[file] = ast.dump(tree)
        waiting |= imported(tree) - texts.keys() - JUDGING
    return sha256("\n".join(texts[file] for file in sorted(texts)).encode()).hexdigest()[:16]


def imported(tree: ast.Module) -> set[Path]:
    """The files of the project that a module imports, and the packages around them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):  # the last part is a module, or a name in one
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {f"{module}{alias.name}" for alias in node.names}
    paths = [ROOT.joinpath(*name.split(".")) for name in names]
    around = {path for full in paths for path in (full, *full.parents) if path.is_relative_to(ROOT)}
    return {file for path in around for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()}
