"""Matches patterns with paths of parameters.

embed        the parameter `embed`, or all parameters whose paths begin with `embed/`
blocks/0*    as in a shell; `*` crosses "/" too
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jaxpar.errors import Problem, suggest


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path."""
    return fnmatchcase(path, pattern) or has_prefix(path, pattern)


def has_prefix(path: str, prefix: str) -> bool:
    """Whether a path equals this prefix, or begins with it and a "/"."""
    return path == prefix.strip("/") or path.startswith(prefix.strip("/") + "/")


def matching(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the paths that at least one pattern matches."""
    patterns = list(patterns)
    return [path for path in paths if any(matches(path, pattern) for pattern in patterns)]


def unmatched(key: str, patterns: Iterable[str], paths: Sequence[str], *, noun: str = "parameter") -> list[Problem]:
    """Reports each pattern that matches no path, with the nearest path.

    Args:
      key: The setting of the patterns, such as `train.freeze`.
      patterns: The patterns.
      paths: All paths.
      noun: Word for a path in the message.
    """
    rule = f"each pattern matches at least one {noun}"
    return [
        Problem(f"{key}: {pattern!r} matches nothing", rule, nearest_path(pattern, paths))
        for pattern in patterns
        if not matching(paths, [pattern])
    ]


def nearest_path(pattern: str, paths: Iterable[str]) -> str:
    """Returns the path, or prefix of a path, that is most similar to a pattern."""
    paths = list(paths)
    beginnings = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 2)}
    words = beginnings if "/" in pattern.strip("/*") else {path.split("/")[0] for path in paths}
    return suggest(pattern.rstrip("*").strip("/"), words)
