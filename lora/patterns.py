"""Regular expressions from files, matched in bounded time: a few characters can keep Python's `re` busy for years."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from model.common import UserError, quoted

MAX_SECONDS = 10.0
MAX_STEPS = 3 * 10**8  # of backtracking in this process, a few seconds; the bound is far above what most take
ENDING = r"(.*\.)?"  # put before a pattern, it matches whatever precedes an ending that begins at a dot

_CHILD = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = []
for pattern in patterns:
    try:
        matcher = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        found.append(str(error))
    else:
        found.append([name for name in names if matcher.fullmatch(name)])
json.dump(found, sys.stdout)
"""


def full_matches(patterns: Sequence[str], names: Iterable[str]) -> list[set[str]]:
    """For each regular expression those of `names` that it matches from end to end.

    Raises UserError for a pattern that is no regular expression, and if all of them take more than MAX_SECONDS.
    Patterns that are not known to be fast are matched in another process, because a running match cannot be stopped
    from within Python.
    """
    names = sorted(set(names))
    longest = max(map(len, names), default=0)
    if sum(_steps(pattern, longest) for pattern in patterns) * len(names) <= MAX_STEPS:
        return [set(filter(_compiled(pattern).fullmatch, names)) for pattern in patterns]
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([patterns, names]),
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        raise UserError(
            f"the regular expressions {', '.join(map(quoted, patterns[:3]))} cannot be matched within "
            f"{MAX_SECONDS:.0f} s: simplify them, or list the names"
        ) from None
    found = json.loads(child.stdout)
    for pattern, matched in zip(patterns, found, strict=True):
        if isinstance(matched, str):
            raise _no_expression(pattern, matched)
    return list(map(set, found))


def _steps(pattern: str, longest: int) -> float:
    """An upper bound of the steps of backtracking on one name of up to `longest` characters; infinite if unknown.

    Each repeat multiplies the steps by at most `longest`, each alternative or optional part by 2, as long as no group
    is repeated, except for `ENDING` at the beginning. Literal characters in classes may be counted too.
    """
    bare = re.sub(r"\\.", "x", pattern.removeprefix(ENDING), flags=re.DOTALL)
    if len(pattern) > 300 or re.search(r"\)[*+?{]", bare):
        return float("inf")
    is_ending = pattern.startswith(ENDING)
    repeats, choices = len(re.findall(r"[*+{]", bare)) + is_ending, len(re.findall(r"[|?]", bare)) + is_ending
    return len(pattern) * longest**repeats * 2**choices


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _no_expression(pattern, error) from None


def _no_expression(pattern: str, error: object) -> UserError:
    return UserError(f"LoRA targets: {quoted(pattern)} is no regular expression ({error}): correct it")
