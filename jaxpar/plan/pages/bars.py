"""Stacked bars for a terminal, and the letters and colours of causes that all drawings of a plan share.

Each bar is a layout's step time by cause, or its share of a device's memory. Each column is the letter of its cause, so
that the bars can be read without colours. The model's letters are here, each technique has its own.
"""

from collections.abc import Sequence
from itertools import pairwise

from jaxpar.html.markup import Markup
from jaxpar.plan.causes import PALE, Style
from jaxpar.plan.search import Plan
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_seconds

_TIME, _MEMORY = 56, 16  # columns of the longest bar
_BESIDE = 5 + 2 + 8 + 2 + _MEMORY + 5  # columns of a line besides the bar of time
_ON_DARK = f"light-dark({PALE}, #10151b)"
SECONDS = {  # colours of the causes of time: computation is blue
    "matmuls": Style(letter="M", shade=25, ink=231, light="#1f4e79", dark="#4f93d6", text=_ON_DARK),
    "attention": Style(letter="A", shade=74, light="#3f87bd", dark="#86bde8", text=_ON_DARK),
    "elementwise": Style(letter="E", shade=153, light="#a9cfea", dark="#c4e0f5"),
    "recompute": Style(letter="R", shade=140, light="#7264ad", dark="#a698e2", text=_ON_DARK),
    "stragglers": Style(letter="W", shade=244, light="#c9ced6", dark="#8b93a0"),
    "host": Style(letter="H", shade=137, light="#a17a4c", dark="#c9a679"),
    "optimizer": Style(letter="O", shade=78, light="#2f8f6b", dark="#58c79d"),
}
# causes of a model's memory, to the classes of the inspector's page
BYTES = {"parameters": 0, "gradients": 5, "optimizer": 1, "state": 2, "activations": 7, "logits": 8, "working": 6}


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


def styles() -> dict[str, Style]:
    """Maps the causes of time, and the causes of bytes of techniques, to letters and colours."""
    return SECONDS | {cause: look for technique in TECHNIQUES.values() for cause, look in technique.styles.items()}


def css() -> Markup:
    """Returns CSS classes with these colours: `jx-t-` and the cause."""
    rows = (
        f"  .jx-t-{cause} {{ --c: light-dark({look.light}, {look.dark}); --on: {look.text}; }}\n"
        for cause, look in styles().items()
    )
    return Markup("\n" + "".join(rows))


def seconds_class(cause: str) -> str:
    """Returns the CSS class of a cause of seconds."""
    return f"jx-t-{cause}"


def bytes_class(cause: str) -> str:
    """Returns the CSS class of a cause of bytes: the inspector's, or a technique's."""
    return f"jx-c{BYTES[cause]}" if cause in BYTES else seconds_class(cause)
