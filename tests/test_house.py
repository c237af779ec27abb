"""The house: a file imports only from its own floor or below, no circle, and nothing grows too long
to read."""

import ast
from functools import cache

import pytest

from tests import house

# from the ground up: what a module may import stands on its own floor or on a lower one
FLOORS = """model
lora weights
eval
train
train.model
train.validation train.summary train.plan train.show_batch
train.finetune
train.studies train.benchmark
train.systems
train.compare train.reproduce""".splitlines()
FLOORS = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
# tokens, see house.py
MAX_TOKENS = {"main": 120_100, "aside": 54_500, "tests": 163_600}
MAX_NODES = {"model": 6.0, "lora": 6.7, "weights": 6.5, "eval": 6.2, "train": 6.0, "tests": 7.1}
MAX_STATEMENTS = 40
# tokens of a module and of all that it imports, inside functions too
MAX_CLOSURE = {
    "model.generate": 17_700,
    "weights.load": 18_200,
    "train.finetune": 104_000,
    "eval.needle": 53_300,
    "eval.pope": 46_500,
}


FILES = house.files("")
NAMES = [
    ".".join(file.relative_to(house.ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
]
MODULES = {
    name: ast.parse(file.read_text(encoding="utf-8"))
    for name, file in zip(NAMES, FILES, strict=True)
}


@cache
def imports():
    """The project's modules that each module imports, inside functions too."""
    house = {}
    for name, tree in MODULES.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) for node in nodes}
        for node in nodes:
            names |= {
                f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names
            }
        house[name] = names & MODULES.keys() - {name}
    return house


def floor(module):
    return FLOORS[module] if module in FLOORS else floor(module.rpartition(".")[0])


def test_no_arrow_runs_up():
    """Breaks when a lower floor imports a higher one, also inside a function."""
    assert not [
        f"{a} -> {b}" for a, others in imports().items() for b in others if floor(b) > floor(a)
    ]


def test_no_circle():
    """Breaks when modules import each other, directly or through others."""
    left = {name: set(others) for name, others in imports().items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "in a circle, or above one"


@pytest.mark.parametrize("module", MAX_CLOSURE)
def test_a_module_is_read_with_little_else(module):
    """Breaks when a reader of a module has to know half of the house, or the main job imports a
    sister or an experiment."""
    loaded = set()
    left = {module}
    while left:
        name = left.pop()
        loaded.add(name)
        left |= imports()[name] | {name.rpartition(".")[0]} & MODULES.keys()
        left -= loaded
    files = [file for name, file in zip(NAMES, FILES, strict=True) if name in loaded]
    size = sum(sum(house.tokens_by_line(file).values()) for file in files)
    assert 0 < size <= MAX_CLOSURE[module], sorted(loaded)
    assert not [file for file in files if house.is_aside(file)]


@pytest.mark.parametrize("room", MAX_TOKENS)
def test_rooms_stay_small(room):
    """Breaks when the main story, what stands aside, or the tests outgrow their budget of
    tokens."""
    assert 0 < house.tokens(room) <= MAX_TOKENS[room]


@pytest.mark.parametrize("room", MAX_NODES)
def test_rooms_stay_unfolded(room):
    """Breaks when a statement of a room says more at once, on average, or in one of the folded
    forms."""
    assert 0 < house.measure(room)[3] <= MAX_NODES[room]
    places = house.folded(room)
    assert not places, "\n".join(places)


def test_functions_stay_short():
    """Breaks when a function is two."""
    long = [
        f"{file.name}: {function.name}"
        for file, function in house.functions("")
        if house.statements(function) > MAX_STATEMENTS
    ]
    assert not long


def test_the_ruler_sees_what_is_folded():
    """Breaks when the ruler overlooks a folded form, or takes plain code for one."""
    folded = """a, b = None, 1 if c else 2
rows = [[x for x in row] for row in table]
y = x * (a > b)
z = text[: 1 + is_chat]
f(w := 1)"""
    plain = """a = 1 if c else 2
rows = [list(row) for row in table]
if (m := f()) and (a > b):
    y = x * z
mask = (a > b) & (b > c)"""
    assert sorted(line for line, _ in house.folded_forms(ast.parse(folded))) == [1, 2, 3, 4, 5]
    assert not list(house.folded_forms(ast.parse(plain)))
