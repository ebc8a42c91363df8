"""The finding of a check, and a time limit for checks that may hang."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
      what: The subject, in a word or two.
      state: ok; warning: a run works, but slower or less safely; problem: a run fails to start or to finish.
      text: The observation, with its numbers.
      fix: The remedy, "" if all is well.
    """

    what: str
    state: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.what:<12} {self.text}"
        return f"{line}\n{'':21} fix: {self.fix}" if self.fix else line


def with_time_limit(what: str, check: Callable[[], Iterable[Finding]], *, seconds: float, fix: str) -> list[Finding]:
    """Runs a check with a time limit; if it hangs, that is the finding.

    Args:
      what: The subject of that finding.
      check: A function that may hang, e.g. on a dead file server or name server.
      seconds: The time limit.
      fix: The remedy if it hangs.
    """
    results: list[list[Finding]] = []
    thread = threading.Thread(target=lambda: results.append(list(check())), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else [Finding(what, "problem", f"no answer within {seconds:g} s", fix)]
