"""Findings of a check, and the time limit that keeps it from hanging."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      what: Its subject, in a word or two.
      state: ok; warning: a run will go, slower or less safely; problem: a run will not go, or not to its end.
      text: The observation, with its numbers.
      fix: The remedy, "" where all is well.
    """

    what: str
    state: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.what:<12} {self.text}"
        return f"{line}\n{'':21} fix: {self.fix}" if self.fix else line


def limited(what: str, check: Callable[[], Iterable[Finding]], *, seconds: float, fix: str) -> list[Finding]:
    """Returns what a check finds; where the system does not come back from it, that, after so many seconds.

    Args:
      what: Its subject, for that finding.
      check: A function that may hang, as on a dead file server or name server.
      seconds: How long it may take.
      fix: The remedy if it hangs.
    """
    found: list[list[Finding]] = []
    thread = threading.Thread(target=lambda: found.append(list(check())), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else [Finding(what, "problem", f"no answer within {seconds:g} s", fix)]
