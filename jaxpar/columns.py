"""Tables and lines of text that fold to the width of the terminal; whole where no terminal shows them."""

import io
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

LEAST = 40  # columns: narrower terminals get lines of these
_ESCAPE = "\033"


def terminal_width() -> int:
    """Returns the columns of the terminal that shows what is printed; 0 where it goes to a file or another program."""
    if sys.stdout is None or not sys.stdout.isatty():
        return 0
    return max(LEAST, shutil.get_terminal_size().columns)


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "  ", width: int = 0) -> str:
    """Returns rows one below the other; where they are too wide, the cells of columns of words fold.

    Args:
      rows: Cells, as many in each.
      right: Columns of numbers: they end at one place, and never fold.
      indent: Before each row.
      width: Of a line, in columns; 0 is without limit.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    whole = [
        indent
        + "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if not width or max(map(len, whole)) <= width:
        return "\n".join(whole)
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column, size in enumerate(_column_widths(widths, right, width - len(indent))):
        numbers = column in right
        made.add_column(justify="right" if numbers else "left", no_wrap=numbers, overflow="fold", width=size)
    for row in rows:
        made.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(Padding(made, (0, 0, 0, len(indent))))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _column_widths(widths: Sequence[int], right: Collection[int], room: int) -> list[int]:
    """Returns widths of columns for which there is room: the widest column of words gives up its own first."""
    made = list(widths)
    words = [column for column in range(len(made)) if column not in right]
    while words and sum(made) + 2 * (len(made) - 1) > room:
        widest = max(words, key=lambda column: made[column])
        if made[widest] <= 1:
            break
        made[widest] -= 1
    return made


def fold(text: str, width: int) -> str:
    """Returns text whose lines are no longer than a width, in columns; 0 is without limit. Coloured lines stay."""
    if not width:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or _ESCAPE in line:
            lines.append(line)
            continue
        more = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, width, subsequent_indent=more, drop_whitespace=True, break_on_hyphens=False)
    return "\n".join(lines)
