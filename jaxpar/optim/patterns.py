"""Patterns of paths: which parameters of a model are meant.

embed        the parameter `embed`, or all parameters whose paths begin with `embed/`
blocks/0*    as in a shell; `*` crosses "/" too
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jaxpar.errors import Problem, nearest


def matches(path: str, pattern: str) -> bool:
    """Returns whether a path is meant by a pattern."""
    return fnmatchcase(path, pattern) or begins(path, pattern)


def begins(path: str, prefix: str) -> bool:
    """Returns whether a path is this one, or begins with it and a "/"."""
    return path == prefix.strip("/") or path.startswith(prefix.strip("/") + "/")


def meant(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the paths that one of the patterns means."""
    patterns = list(patterns)
    return [path for path in paths if any(matches(path, pattern) for pattern in patterns)]


def unmatched(key: str, patterns: Iterable[str], paths: Sequence[str], *, what: str = "parameter") -> list[Problem]:
    """Returns a problem for each pattern that means no path, with the path that was probably meant.

    Args:
      key: What the user gave the patterns as, such as `train.freeze`.
      patterns: The patterns.
      paths: The paths that there are.
      what: What each of these is.
    """
    rule = f"each pattern matches at least one {what}"
    return [
        Problem(f"{key}: {pattern!r} matches nothing", rule, nearest_path(pattern, paths))
        for pattern in patterns
        if not meant(paths, [pattern])
    ]


def nearest_path(pattern: str, paths: Iterable[str]) -> str:
    """Returns the path, or beginning of one, that was probably meant."""
    paths = list(paths)
    beginnings = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 2)}
    words = beginnings if "/" in pattern.strip("/*") else {path.split("/")[0] for path in paths}
    return nearest(pattern.rstrip("*").strip("/"), words)
