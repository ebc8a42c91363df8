"""TOML that is read at bounded cost: Python's parser takes the square of the words of a dotted key."""

import re
import tomllib
from typing import Any

LARGEST = 2**22  # characters of a file
DEEPEST = 20  # tables and lists in each other, and words of a dotted key
# strings and comments, in which dots mean nothing
_TEXT = re.compile(r'"""(?s:.*?)"""|' r"'''(?s:.*?)'''|" r'"(?:\\.|[^"\\\n])*+"|' r"'[^'\n]*+'|#[^\n]*+")
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{DEEPEST}}}")


def loads(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML text.

    Raises:
      ValueError: If it is no TOML, is too long, or has a dotted key of too many words.
      RecursionError: If it has brackets without end.
    """
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST} characters")
    if found := _DOTTED.search(_TEXT.sub("_", text)):
        raise ValueError(f"a dotted key of more than {DEEPEST} words, which begins {found[0]:.40}")
    return tomllib.loads(text)
