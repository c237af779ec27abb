"""A hash of the source that decides a cell. It is part of the cell's name, so that changed code never meets old cells.

In: the function that makes a cell. Of its file count the statements that it depends on, so that predictions and tables
may change; of the files that these import, and that those import in turn, all but comments, docstrings and type hints.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
JUDGING = {
    Path(__file__).with_name(f"{name}.py") for name in ("engine", "rules", "report", "pool")
}  # they only read cells


def source_hash(make: Callable) -> str:
    """16 hexadecimal digits. What a `partial` binds is no source: it belongs to `Study.key`."""
    function = make.func if isinstance(make, partial) else make
    body = needed(parse(Path(inspect.getfile(function))), function.__name__)
    files, waiting = set(), imported(body)
    while waiting:
        files |= waiting
        waiting = imported([parse(file) for file in waiting]) - files
    texts = [ast.dump(node) for node in [*body, *map(parse, sorted(files))]]
    return sha256("\n".join(texts).encode()).hexdigest()[:16]


@cache
def parse(file: Path) -> ast.Module:
    """The syntax tree of a file, each name imported by a statement of its own; no docstrings and type hints."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    body = []
    for node in tree.body:
        is_from = isinstance(node, ast.ImportFrom)
        body += [ast.ImportFrom(node.module, [alias], 0) for alias in node.names] if is_from else [node]
    tree.body = body
    return tree


def needed(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements of a module that bind `name`, and in turn the names that they read."""
    names, known = {name}, set()
    while names != known:
        known = set(names)
        body = [node for node in tree.body if names & bound(node)]
        names |= {part.id for node in body for part in ast.walk(node) if isinstance(part, ast.Name)}
    return body


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def imported(trees: list) -> set[Path]:
    """The files of the project that syntax trees import, and the packages around them, but for `JUDGING`."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = set()
    for parts in (name.split(".") for name in names):
        for end in range(1, len(parts) + 1):  # the last part may be a name in a module
            place = ROOT.joinpath(*parts[:end])
            files |= {place.with_suffix(".py"), place / "__init__.py"}
    return {file for file in files if file.is_file()} - JUDGING
