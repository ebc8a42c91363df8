"""Keys of `Parallel.activations`: arrays of a line of the model's source, such as `model.py:31 [..., 4096]`.

A line that computes several arrays of one shape has a column too: `model.py:31:17 [..., 4096]` is the expression that
begins at column 17, counted from 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.errors import Problem

_KEY = re.compile(
    r"(?P<file>[^:\[\]]+):(?P<line>[1-9]\d*)(?::(?P<column>[1-9]\d*))?"
    r"(?: \[\.\.\.(?P<sizes>(?:, \d+)+)\])?"
)


@dataclass(frozen=True)
class SourceLine:
    """The activations that a line of source computes.

    Attributes:
      file: The end of the file's path.
      line: The number of the line.
      sizes: The sizes of the activations' last dims; () for any.
      column: The column at which the expression that computes them begins, counted from 1; None for any.
    """

    file: str
    line: int
    sizes: tuple[int, ...] = ()
    column: int | None = None

    def __str__(self) -> str:
        sizes = f" [..., {', '.join(map(str, self.sizes))}]" if self.sizes else ""
        column = f":{self.column}" if self.column else ""
        return f"{self.file}:{self.line}{column}{sizes}"

    def wins_over(self, other: "SourceLine") -> bool:
        """Whether this key, which a user gave, takes the place of another one, which was found."""
        files = sorted(("/" + self.file, "/" + other.file), key=len)
        count = min(len(self.sizes), len(other.sizes))
        same_sizes = not count or self.sizes[-count:] == other.sizes[-count:]
        same_line = files[1].endswith(files[0]) and self.line == other.line and self.column in (None, other.column)
        return same_line and same_sizes

    def matches(self, file: str, line: int, shape: Sequence[int], column: int | None = None) -> bool:
        """Whether an array of this shape, which an expression of a file computes, is one of these."""
        same_file = file == self.file or file.endswith("/" + self.file)
        same_expression = same_file and line == self.line and self.column in (None, column)
        return same_expression and tuple(shape[len(shape) - len(self.sizes) :]) == self.sizes


def parse_line(text: str) -> SourceLine | None:
    """Parses a key; None if it names no line.

    >>> parse_line("model.py:31 [..., 4096]")
    SourceLine(file='model.py', line=31, sizes=(4096,), column=None)
    """
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    sizes = tuple(int(size) for size in (match["sizes"] or "").split(", ") if size)
    return SourceLine(match["file"], int(match["line"]), sizes, int(match["column"]) if match["column"] else None)


def line_problems(activations: object) -> list[Problem]:
    """Returns the problems of `Parallel.activations` that do not depend on the model."""
    rule = "a line of source, perhaps with a column and sizes of the last dims, maps to a name or None for each dim"
    fix = 'activations={"model.py:31 [..., 4096]": ("batch", None, "mlp")}'
    if not isinstance(activations, dict):
        return [Problem(f"activations={activations!r:.60}", rule, fix)]
    problems = []
    for key, names in activations.items():
        named = isinstance(names, list | tuple) and all(name is None or isinstance(name, str) for name in names)
        if not isinstance(key, str) or parse_line(key) is None or not named or not names:
            problems.append(Problem(f"activations={{{key!r}: {names!r:.60}}}", rule, fix))
    return problems
