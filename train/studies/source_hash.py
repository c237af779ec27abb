"""A hash of the source that decides a cell. It is part of the cell's name, so that no changed code finds old cells.

In: the function that makes a cell. Of its file count the definitions that it needs, so that predictions and tables may
change; of the files that these import, and that those import in turn, everything but comments and docstrings.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
JUDGING = {Path(__file__).with_name(f"{name}.py") for name in ("engine", "rules", "report")}  # they only read cells


def source_hash(make: Callable) -> str:
    """16 hexadecimal digits. The arguments that a `partial` binds are no source: they belong to `Study.key`."""
    function = make.func if isinstance(make, partial) else make
    body = _needed(parse(Path(inspect.getfile(function))), function.__name__)
    found, waiting = set(), [file for node in body for file in _imported(node)]
    while waiting:
        file = waiting.pop()
        if file not in found and file not in JUDGING:
            found.add(file)
            waiting += _imported(parse(file))
    texts = [ast.dump(node) for node in [*body, *(parse(file) for file in sorted(found))]]
    return sha256("\n".join(texts).encode()).hexdigest()[:16]


@cache
def parse(file: Path) -> ast.Module:
    """The syntax tree of a file, without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _needed(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements of a module that bind `name`, and the names that these read; imports one name at a time."""
    by_name: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                one = ast.ImportFrom(node.module, [alias], node.level)
                by_name.setdefault(alias.asname or alias.name, []).append(one)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            by_name.setdefault(node.name, []).append(node)
        else:
            bound = [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and _is_bound(part)]
            for each in bound:
                by_name.setdefault(each, []).append(node)
    found: dict[str, list[ast.stmt]] = {}
    waiting = [name]
    while waiting:
        if (here := waiting.pop()) not in found:
            found[here] = by_name.get(here, [])
            waiting += [p.id for node in found[here] for p in ast.walk(node) if isinstance(p, ast.Name)]
    return [node for here in sorted(found) for node in found[here]]


def _is_bound(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _imported(tree: ast.AST) -> Iterator[Path]:
    """The files of the project that a tree imports, and the packages around them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for parts in (name.split(".") for name in names):
            files = [ROOT.joinpath(*parts).with_suffix(".py")]
            files += [ROOT.joinpath(*parts[: end + 1], "__init__.py") for end in range(len(parts))]
            yield from (file for file in files if file.is_file())
