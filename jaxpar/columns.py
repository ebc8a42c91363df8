"""Tables and lines of text that wrap to the width of the terminal; unwrapped if the output is no terminal."""

import io
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

LEAST = 40  # columns: least width of a line, also on narrower terminals
_ESCAPE = "\033"


def terminal_width() -> int:
    """Returns the width of the terminal in columns; 0 if stdout is a file or a pipe."""
    if sys.stdout is None or not sys.stdout.isatty():
        return 0
    return max(LEAST, shutil.get_terminal_size().columns)


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "  ", width: int = 0) -> str:
    """Formats rows as a table; if it is too wide, cells in columns of words wrap.

    Args:
      rows: Rows with equally many cells.
      right: Columns of numbers: right-aligned, never wrapped.
      indent: Text before each row.
      width: Most columns of a line; 0 for no limit.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        indent
        + "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if not width or max(map(len, lines)) <= width:
        return "\n".join(lines)
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column, size in enumerate(_column_widths(widths, right, width - len(indent))):
        numbers = column in right
        grid.add_column(justify="right" if numbers else "left", no_wrap=numbers, overflow="fold", width=size)
    for row in rows:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(Padding(grid, (0, 0, 0, len(indent))))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _column_widths(widths: Sequence[int], right: Collection[int], room: int) -> list[int]:
    """Shrinks the widest column of words until all columns fit; returns their widths."""
    sizes = list(widths)
    words = [column for column in range(len(sizes)) if column not in right]
    while words and sum(sizes) + 2 * (len(sizes) - 1) > room:
        widest = max(words, key=lambda column: sizes[column])
        if sizes[widest] <= 1:
            break
        sizes[widest] -= 1
    return sizes


def fold(text: str, width: int) -> str:
    """Wraps lines longer than a width, in columns; 0 for no limit. Coloured lines are not wrapped."""
    if not width:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or _ESCAPE in line:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False)
    return "\n".join(lines)
