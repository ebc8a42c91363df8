"""Stacked bars for a terminal: each layout's step time by cause, and its share of a device's memory.

Each column is the letter of its cause, so that the bars can be read without colours.
"""

from collections.abc import Sequence
from itertools import pairwise

from jaxpar.plan.causes import Style
from jaxpar.plan.pages.style import styles
from jaxpar.plan.search import Plan
from jaxpar.units import show_seconds

_TIME, _MEMORY = 56, 16  # columns of the longest bar
_BESIDE = 5 + 2 + 8 + 2 + _MEMORY + 5  # columns of a line besides the bar of time


def bars(plan: Plan, *, colour: bool, width: int = 0) -> str:
    """Returns a line per layout: its step time by cause, on a common scale, and its share of a device's memory.

    Args:
      plan: The plan.
      colour: Whether to colour the causes.
      width: Width of a line in columns; 0 means unlimited.
    """
    longest = min(_TIME, width - _BESIDE) if width else _TIME
    scale, room = max(entry.time.total for entry in plan.best), plan.question.memory_limit
    lines, causes, drawn_as = [], set(), styles()
    for rank, entry in enumerate(plan.best, 1):
        parts = list(entry.time.items())
        causes |= {cause for cause, seconds in parts if seconds > 0}
        columns = lengths([seconds for _, seconds in parts], scale, longest)
        strip = "".join(
            _run(drawn_as[cause], count, colour=colour) for (cause, _), count in zip(parts, columns, strict=True)
        )
        full = round(_MEMORY * entry.memory.total / room)
        lines.append(
            f"{rank:>3}  {strip}{' ' * (longest - sum(columns))}  {show_seconds(entry.time.total):>8}  "
            f"{'█' * full}{'░' * (_MEMORY - full)} {entry.memory.total / room:>4.0%}"
        )
    shown_causes = [cause for cause in plan.best[0].time if cause in causes]
    legend: list[list[str]] = [[]]
    for cause in shown_causes:  # fills a line with entries: a letter, a blank, the cause, two blanks
        if width and sum(len(entry) + 4 for entry in [*legend[-1], cause]) > width - 5:
            legend.append([])
        legend[-1].append(cause)
    words = ["  ".join(f"{_run(drawn_as[cause], 1, colour=colour)} {cause}" for cause in line) for line in legend]
    head = "Where the step goes, and how much of the memory it takes (modelled):"
    return "\n".join([head, *(f"     {line}" for line in words), *lines])


def lengths(parts: Sequence[float], scale: float, columns: int) -> list[int]:
    """Returns the columns of each part; their sum is the rounded length of the whole bar.

    >>> lengths([1.0, 1.0, 1.0], scale=3.0, columns=10)
    [3, 4, 3]
    """
    edges, position = [0], 0.0
    for part in parts:
        position += part
        edges.append(round(position / scale * columns))
    return [end - start for start, end in pairwise(edges)]


def _run(look: Style, count: int, *, colour: bool) -> str:
    if not colour or not count:
        return look.letter * count
    return f"\033[38;5;{look.ink};48;5;{look.shade}m{look.letter * count}\033[0m"
