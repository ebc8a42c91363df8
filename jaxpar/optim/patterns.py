"""Matches patterns with paths of parameters.

embed        the parameter `embed`, or all parameters whose paths begin with `embed/`
blocks/0*    as in a shell; `*` crosses "/" too
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jaxpar.errors import Problem, refuse, suggest


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path."""
    return fnmatchcase(path, pattern) or has_prefix(path, pattern)


def has_prefix(path: str, prefix: str) -> bool:
    """Whether a path equals this prefix, or begins with it and a "/"."""
    return path == prefix.strip("/") or path.startswith(prefix.strip("/") + "/")


def as_patterns(key: str, texts: str | Iterable[str]) -> tuple[str, ...]:
    """Returns a user's patterns as a tuple; a text alone is one pattern.

    Raises:
      JaxparError: If one is no text.
    """
    patterns = (texts,) if isinstance(texts, str) or not isinstance(texts, Iterable) else tuple(texts)
    if invalid := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise refuse(f"{key}: {invalid[0]!r:.60}", rule="a pattern of paths is text", fix='["embed", "blocks/0*"]')
    return patterns


def matching(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the paths that at least one pattern matches."""
    patterns = list(patterns)
    return [path for path in paths if any(matches(path, pattern) for pattern in patterns)]


def unmatched(key: str, patterns: Iterable[str], paths: Sequence[str], *, noun: str = "parameter") -> list[Problem]:
    """Reports each pattern that matches no path, with a pattern that does, or the nearest path.

    Args:
      key: The setting of the patterns, such as `train.freeze`.
      patterns: The patterns.
      paths: All paths.
      noun: Word for a path in the message.
    """
    rule = f"each pattern matches at least one {noun}"
    return [
        Problem(f"{key}: {pattern!r} matches nothing", rule, nearest_pattern(pattern, paths))
        for pattern in patterns
        if not matching(paths, [pattern])
    ]


def nearest_pattern(pattern: str, paths: Iterable[str]) -> str:
    """Suggests a pattern that matches some path in place of one that matches none; else the nearest path.

    Users write the name of a layer alone, as in peft's `target_modules`, a regular expression, dots between names, or
    other letters than Linen, which calls a layer by its class.

    >>> nearest_pattern("query", ["blocks/0/query/kernel"]), nearest_pattern("*dense*", ["Dense_0/kernel"])
    ("did you mean '*/query/*'?", "did you mean '*Dense*'?")
    """
    paths = list(paths)
    word = pattern.replace(".*", "*").strip("/")
    forms = [form for text in (word, word.replace(".", "/")) for form in (text, f"*/{text}", f"*/{text}/*")]
    for form in forms:
        if path := next((path for path in paths if matches(path.lower(), form.lower())), None):
            return f"did you mean {_with_letters(form, path)!r}?"
    return nearest_path(pattern, paths)


def _with_letters(pattern: str, path: str) -> str:
    """Returns a pattern with the upper and lower case of a path that it matches without regard to case."""
    end, letters = 0, []
    for text in pattern.split("*"):
        start = path.lower().find(text.lower(), end)
        end = start + len(text) if start >= 0 else end
        letters.append(path[start:end] if start >= 0 else text)
    return "*".join(letters)


def nearest_path(pattern: str, paths: Iterable[str]) -> str:
    """Returns the path, or prefix of a path, that is most similar to a pattern."""
    paths = list(paths)
    beginnings = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 2)}
    words = beginnings if "/" in pattern.strip("/*") else {path.split("/")[0] for path in paths}
    return suggest(pattern.rstrip("*").strip("/"), words)
