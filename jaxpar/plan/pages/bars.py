"""Stacked bars for a terminal: where each layout's step goes, and how much of a device's memory it takes.

A column is a letter, the cause's own, so that the bars say the same without colours.
"""

from collections.abc import Sequence
from itertools import pairwise

from jaxpar.plan.causes import Look
from jaxpar.plan.pages.looks import looks
from jaxpar.plan.search import Plan
from jaxpar.units import show_seconds

_TIME, _MEMORY = 56, 16  # columns of the longest bar
_BESIDE = 5 + 2 + 8 + 2 + _MEMORY + 5  # columns of a line that no bar of time has


def bars(plan: Plan, *, colour: bool, width: int = 0) -> str:
    """Returns a line for each layout: its step by cause on one scale for all, its memory against what there is.

    Args:
      plan: The layouts.
      colour: Whether to colour the causes.
      width: Of a line, in columns; 0 is without limit.
    """
    most = min(_TIME, width - _BESIDE) if width else _TIME
    scale, room = max(each.time.total for each in plan.best), plan.question.room
    lines, met, drawn_as = [], set(), looks()
    for rank, each in enumerate(plan.best, 1):
        parts = list(each.time.items())
        met |= {cause for cause, seconds in parts if seconds > 0}
        columns = lengths([seconds for _, seconds in parts], scale, most)
        drawn = "".join(
            _run(drawn_as[cause], count, colour=colour) for (cause, _), count in zip(parts, columns, strict=True)
        )
        full = round(_MEMORY * each.memory.total / room)
        lines.append(
            f"{rank:>3}  {drawn}{' ' * (most - sum(columns))}  {show_seconds(each.time.total):>8}  "
            f"{'█' * full}{'░' * (_MEMORY - full)} {each.memory.total / room:>4.0%}"
        )
    shown = [cause for cause in plan.best[0].time if cause in met]
    legend: list[list[str]] = [[]]
    for cause in shown:  # as many to a line as there is room for: a letter, a blank, the cause, two blanks
        if width and sum(len(each) + 4 for each in [*legend[-1], cause]) > width - 5:
            legend.append([])
        legend[-1].append(cause)
    told = ["  ".join(f"{_run(drawn_as[cause], 1, colour=colour)} {cause}" for cause in line) for line in legend]
    head = "Where the step goes, and how much of the memory it takes (modelled):"
    return "\n".join([head, *(f"     {line}" for line in told), *lines])


def lengths(parts: Sequence[float], scale: float, columns: int) -> list[int]:
    """Returns columns for parts, so that their sum is the rounded length of the whole.

    >>> lengths([1.0, 1.0, 1.0], scale=3.0, columns=10)
    [3, 4, 3]
    """
    edges, at = [0], 0.0
    for part in parts:
        at += part
        edges.append(round(at / scale * columns))
    return [end - start for start, end in pairwise(edges)]


def _run(look: Look, count: int, *, colour: bool) -> str:
    if not colour or not count:
        return look.letter * count
    return f"\033[38;5;{look.ink};48;5;{look.shade}m{look.letter * count}\033[0m"
