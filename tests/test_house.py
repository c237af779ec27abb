"""The house: a file imports only from its own floor or below, no circle, and nothing grows too long to read.

Imports are read from the syntax tree, so those inside functions and under TYPE_CHECKING count too.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "lora", "weights", "eval", "train")
COMMANDS = ("finetune", "text", "pretrain", "pretrain_mamba", "tokenizer", "shard", "compare", "reproduce")
# from the ground up: what a module may import stands on its own floor or on a lower one
FLOORS = {"model": 0, "lora": 1, "weights": 1, "eval": 2, "train": 3, "train.data": 3}
FLOORS |= {f"train.{name}": 4 for name in ("systems", "embedded", "studies", "benchmark", "plan", "show_batch")}
FLOORS |= {f"train.{name}": 5 for name in COMMANDS}
MAX_FILE, MAX_FUNCTION = 460, 65


@cache
def modules() -> dict[str, ast.Module]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {name_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The project's modules that a module imports anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def floor(module: str) -> int:
    return next(FLOORS[part] for part in parents(module) if part in FLOORS)


def parents(module: str) -> list[str]:
    """The module and the packages around it, from the inside out."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


@pytest.fixture(scope="module")
def house() -> dict[str, set[str]]:
    trees = modules()
    return {name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}


def test_no_arrow_runs_up(house):
    """Breaks when a lower floor imports a higher one, also inside a function."""
    up = [f"{name} -> {other}" for name, others in house.items() for other in others if floor(other) > floor(name)]
    assert not up


def test_no_circle(house):
    """Breaks when modules import each other, directly or through others."""
    left = {name: set(others) for name, others in house.items()}
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert not left, "in a circle, or above one"


def test_nothing_is_imported_by_name():
    """Breaks when an import is hidden from this test."""
    hidden = []
    for name, tree in modules().items():
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
        hidden += [name] if names & {"import_module", "__import__", "TYPE_CHECKING"} else []
    assert not hidden


def test_files_and_functions_stay_short():
    """Breaks when a file or a function has grown too long to read."""
    long = []
    for name, tree in modules().items():
        last = max((getattr(node, "end_lineno", 0) or 0 for node in ast.walk(tree)), default=0)
        long += [f"{name}: {last} lines"] if last > MAX_FILE else []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                long.append(f"{name}.{node.name}: {length} lines")
    assert not long
