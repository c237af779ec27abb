"""What results are written as: Markdown tables and intervals in words.

In: numbers and texts. Out: lines of Markdown, aligned so that a terminal shows them as well.
"""

from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table: the first column aligned to the left, the others to the right."""
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [f"-{'-' * width}{':' if number else '-'}" for number, width in enumerate(widths)]
    return [line(head), f"|{'|'.join(rule)}|", *map(line, rows)]
