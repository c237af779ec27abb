"""The house: a file imports only from its own floor or below, no circle, and nothing grows too long to read."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "lora", "weights", "eval", "train")
COMMANDS = ("finetune", "shard", "compare", "reproduce")
# from the ground up: what a module may import stands on its own floor or on a lower one
FLOORS = {"model": 0, "lora": 1, "weights": 1, "eval": 2, "train": 3, "train.systems": 4, "train.embedded": 5}
FLOORS |= {f"train.{name}": 5 for name in ("validation", "summary", "plan", "show_batch")}
FLOORS |= {"train.studies": 6, "train.benchmark": 6}
FLOORS |= {f"train.{name}": 7 for name in COMMANDS}
MAX_FILE, MAX_FUNCTION = 460, 72
MAX_LINES = {"model": 3900, "lora": 650, "weights": 900, "eval": 4900, "train": 6600, "train/studies": 2300}
# modules of the project that a reader of this one has to know; eval.pope imports what asks a model when it asks
MAX_MODULES = {"train.finetune": 45, "weights.load": 25, "eval.pope": 20}


FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
NAMES = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES]
MODULES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in zip(NAMES, FILES, strict=True)}


@cache
def imports(anywhere: bool = True) -> dict[str, set[str]]:
    """The project's modules that each module imports, inside functions too or as it is opened."""
    house = {}
    for name, tree in MODULES.items():
        nodes = ast.walk(tree) if anywhere else tree.body
        nodes = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) for node in nodes}
        for node in nodes:
            names |= {f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names}
        house[name] = names & MODULES.keys() - {name}
    return house


def floor(module: str) -> int:
    return FLOORS[module] if module in FLOORS else floor(module.rpartition(".")[0])


def test_no_arrow_runs_up():
    """Breaks when a lower floor imports a higher one, also inside a function."""
    assert not [f"{a} -> {b}" for a, others in imports().items() for b in others if floor(b) > floor(a)]


def test_no_circle():
    """Breaks when modules import each other, directly or through others."""
    left = {name: set(others) for name, others in imports().items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "in a circle, or above one"


@pytest.mark.parametrize("module", MAX_MODULES)
def test_a_module_is_read_in_few_files(module):
    """Breaks when a reader of a module has to know half of the house, or the main job imports an experiment."""
    loaded, left = set(), {module}
    while left:
        loaded.add(name := left.pop())
        left |= imports(anywhere=False)[name] | {name.rpartition(".")[0]} & MODULES.keys()
        left -= loaded
    assert len(loaded) <= MAX_MODULES[module], loaded
    experiments = tuple(f"train.{package}" for package in ("studies", "benchmark", "embedded"))
    assert not [name for name in loaded if name.startswith(experiments)]


def test_files_and_functions_stay_short():
    """Breaks when a file or a function has grown too long to read."""
    assert not [name for name, tree in MODULES.items() if tree.body and tree.body[-1].end_lineno > MAX_FILE]
    functions = [node for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if node.end_lineno - node.lineno >= MAX_FUNCTION]


@pytest.mark.parametrize("room", [*MAX_LINES, "tests", ""])
def test_rooms_stay_small(room):
    """Breaks when a room outgrows its budget of lines, or all of them together theirs."""
    folders = [ROOT / room] if room else [ROOT / package for package in PACKAGES]
    lines = sum(file.read_text(encoding="utf-8").count("\n") for folder in folders for file in folder.rglob("*.py"))
    assert 0 < lines <= {**MAX_LINES, "tests": 13_000, "": 17_000}[room]
