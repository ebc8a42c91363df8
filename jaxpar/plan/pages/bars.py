"""Stacked bars for a terminal: where each layout's step goes, and how much of a device's memory it takes.

A column is a letter, the cause's own, so that the bars say the same without colours.
"""

from collections.abc import Sequence
from itertools import pairwise

from jaxpar.plan.search import Plan
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_seconds

LETTERS = {  # cause: letter, colour of 256; work is blue, waiting for the network warm, idling grey
    "products": ("P", 25), "attention": ("A", 74), "passes": ("p", 153), "recompute": ("R", 140),
    **{cause: (each.letter, each.colour) for cause, each in TECHNIQUES.items()},
    "sharding": ("S", 220), "bubble": (".", 250), "send": ("s", 205), "optimizer": ("O", 78),
}  # fmt: skip
_TIME, _MEMORY = 56, 16  # columns of the longest bar


def bars(plan: Plan, *, colour: bool) -> str:
    """Returns a line for each layout: its step by cause on one scale for all, its memory against what there is."""
    scale, room = max(each.time.total for each in plan.best), plan.question.room
    lines, met = [], set()
    for rank, each in enumerate(plan.best, 1):
        parts = list(each.time.items())
        met |= {cause for cause, seconds in parts if seconds > 0}
        columns = lengths([seconds for _, seconds in parts], scale, _TIME)
        drawn = "".join(_run(cause, count, colour=colour) for (cause, _), count in zip(parts, columns, strict=True))
        full = round(_MEMORY * each.memory.total / room)
        lines.append(
            f"{rank:>3}  {drawn}{' ' * (_TIME - sum(columns))}  {show_seconds(each.time.total):>8}  "
            f"{'█' * full}{'░' * (_MEMORY - full)} {each.memory.total / room:>4.0%}"
        )
    legend = "  ".join(f"{_run(cause, 1, colour=colour)} {cause}" for cause in LETTERS if cause in met)
    head = "Where the step goes, and how much of the memory it takes (modelled):"
    return "\n".join([head, f"     {legend}", *lines])


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


def _run(cause: str, count: int, *, colour: bool) -> str:
    letter, shade = LETTERS[cause]
    if not colour or not count:
        return letter * count
    ink = 231 if cause == "products" else 16
    return f"\033[38;5;{ink};48;5;{shade}m{letter * count}\033[0m"
