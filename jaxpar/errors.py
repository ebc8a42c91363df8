"""What went wrong, the rule, and the way out.

JaxparError: mesh axes fsdp=4 x tensor=3 need 12 devices, 8 are visible (cpu).
  rule: the product of the axis sizes equals the number of devices
  fix:  tensor=2, or fsdp=-1 to infer it
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with what the user gave.

    Attributes:
      got: What was given, as the user wrote it.
      rule: The rule it breaks.
      fix: What to type instead.
    """

    got: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.got}\n  rule: {self.rule}\n  fix:  {self.fix}"


class JaxparError(ValueError):
    """The one error jaxpar raises for input it refuses; carries every problem found at once."""

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def refuse(got: str, *, rule: str, fix: str) -> JaxparError:
    """Returns the error for a single problem, to be raised."""
    return JaxparError(Problem(got, rule, fix))


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns how a misspelt `word` was probably meant: "did you mean 'x'?", or the known words."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(choices)}"
