"""What a check found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      what: Its name, in a word or two.
      state: ok; warning: a run will go, slower or less safely; problem: a run will not go, or not to its end.
      text: What was seen, with its figures.
      fix: What to do about it, "" where it is ok.
    """

    what: str
    state: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.what:<12} {self.text}"
        return f"{line}\n{'':21} fix: {self.fix}" if self.fix else line
