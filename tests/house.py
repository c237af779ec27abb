"""The ruler: how the source reads, by room, in tokens. `python tests/house.py` prints it beside the
field's numbers.

A token is one of Python's `tokenize`, without comments, docstrings and layout. So a line break, a
comment and a name for a value in between cost nothing or little.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = "model lora weights eval train".split()
# not of the main story: sister systems, studies and the benchmark of speed
ASIDE = ("systems", "studies", "benchmark")
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}
LONG_LINE = 20
# tokens, tokens a code line, code lines above 20 tokens in %, expression nodes a statement: from
# the projects' files
FIELD = {
    "nanoVLM": (29_400, 7.5, 3.5, 5.4),
    "nanochat": (40_800, 8.5, 5.1, 5.8),
    "lingua": (77_600, 7.0, 2.8, 5.6),
    "big_vision": (297_000, 8.5, 3.3, 7.5),
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files(room: str) -> list[Path]:
    """The Python files of a room; "" is the source, "main" its story, "aside" the rest of the
    source."""
    if room not in ("", "main", "aside"):
        return sorted((ROOT / room).rglob("*.py"))
    source = [file for package in PACKAGES for file in files(package)]
    if not room:
        return source
    return [file for file in source if is_aside(file) == (room == "aside")]


def is_aside(file: Path) -> bool:
    return any(part in ASIDE for part in file.relative_to(ROOT).parts)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def tokens_by_line(file: Path) -> dict[int, int]:
    """The number of tokens that start in each line which has some."""
    docstrings = {node.lineno for node in ast.walk(tree(file)) if is_docstring(node)}
    counts: dict[int, int] = {}
    source = io.StringIO(file.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        line = token.start[0]
        if token.type in LAYOUT or token.type == tokenize.STRING and line in docstrings:
            continue
        counts[line] = counts.get(line, 0) + 1
    return counts


def is_docstring(node: ast.AST) -> bool:
    """A text that stands as a statement."""
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def tokens(room: str) -> int:
    """The tokens of a room."""
    return sum(sum(tokens_by_line(file).values()) for file in files(room))


def measure(room: str) -> tuple[int, float, float, float]:
    """Tokens, tokens a code line, code lines above 20 tokens in %, expression nodes a statement."""
    lines = [count for file in files(room) for count in tokens_by_line(file).values()]
    long_lines = sum(count > LONG_LINE for count in lines)
    statements = expressions = 0
    for file in files(room):
        for node in ast.walk(tree(file)):
            statements += isinstance(node, ast.stmt)
            expressions += isinstance(node, ast.expr)
    return (
        sum(lines),
        sum(lines) / len(lines),
        100 * long_lines / len(lines),
        expressions / statements,
    )


def functions(room: str) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a room, those inside others too."""
    for file in files(room):
        for node in ast.walk(tree(file)):
            if isinstance(node, FUNCTIONS):
                yield file, node


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The statements of a function's body, nested ones and those of functions inside too, without
    docstrings."""
    below = [
        node for node in ast.walk(function) if isinstance(node, ast.stmt) and not is_docstring(node)
    ]
    return len(below) - 1


def folded(room: str) -> list[str]:
    """The places where one line says several things at once, as `file:line what`."""
    found = []
    for file in files(room):
        for line, what in folded_forms(tree(file)):
            found.append(f"{file.relative_to(ROOT)}:{line} {what}")
    return found


def folded_forms(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each folded form of a module."""
    tests = {id(node.test) for node in ast.walk(module) if isinstance(node, ast.If | ast.While)}
    in_a_test = set()
    for node in ast.walk(module):
        if id(node) in tests:
            in_a_test |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if any(isinstance(part, (ast.IfExp, *COMPREHENSIONS)) for part in node.value.elts):
                yield node.lineno, "a conditional or a comprehension in a packed assignment"
        elif isinstance(node, COMPREHENSIONS):
            inner = [part for part in ast.walk(node) if isinstance(part, COMPREHENSIONS)]
            if len(inner) > 1:
                yield node.lineno, "a comprehension in a comprehension"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
            if is_truth(node.left) or is_truth(node.right):
                yield node.lineno, "arithmetic with a truth value"
        elif isinstance(node, ast.NamedExpr) and id(node) not in in_a_test:
            yield node.lineno, "a walrus outside of an if or a while"


def is_truth(node: ast.expr) -> bool:
    """Whether an operand of + - * is a truth value, by its form or by its name."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return all(is_truth(value) for value in node.values)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in (
            "bool",
            "isinstance",
            "any",
            "all",
        )
    if isinstance(node, ast.Compare):
        return True
    return getattr(node, "id", getattr(node, "attr", "")).startswith(("is_", "has_"))


def table() -> str:
    """The measures by room, and those of the field."""
    rows = [f"{'':12}{'tokens':>9}{'a line':>9}{'> 20, %':>9}{'nodes':>9}"]
    measured = {
        room or "source": measure(room) for room in (*PACKAGES, "", "main", "aside", "tests")
    }
    for name, numbers in (measured | FIELD).items():
        count, a_line, long_lines, nodes = numbers
        rows.append(f"{name:12}{count:9,}{a_line:9.1f}{long_lines:9.1f}{nodes:9.1f}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
    for room in (*PACKAGES, "tests"):
        places = folded(room)
        print(f"\n{room}: {len(places)} folded places", *places[:5], sep="\n  ")
