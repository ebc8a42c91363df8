"""Parses TOML at bounded cost: Python's parser is quadratic in the number of words of a dotted key."""

import re
import tomllib
from typing import Any

LARGEST = 2**22  # characters of a file
DEEPEST = 20  # most words of a dotted key, and nested tables of a job file
# strings and comments, whose dots do not count
_TEXT = re.compile(r'"""(?s:.*?)"""|' r"'''(?s:.*?)'''|" r'"(?:\\.|[^"\\\n])*+"|' r"'[^'\n]*+'|#[^\n]*+")
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{DEEPEST}}}")


def loads(text: str) -> dict[str, Any]:
    """Parses a TOML text.

    Raises:
      ValueError: If it is not TOML, too long, or has a dotted key of too many words.
      RecursionError: If its brackets are nested too deeply.
    """
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST} characters")
    if match := _DOTTED.search(_TEXT.sub("_", text)):
        raise ValueError(f"a dotted key of more than {DEEPEST} words, which begins {match[0]:.40}")
    return tomllib.loads(text)
