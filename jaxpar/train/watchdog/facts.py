"""Facts: values that must be equal on all processes, and where they differ if they are not."""

import difflib
import hashlib
from collections.abc import Mapping

from jaxpar.errors import JaxparError, refuse
from jaxpar.train.watchdog.beat import Files, unknown
from jaxpar.train.watchdog.digest import Digest


def digest_of(text: str) -> str:
    """Returns the hash by which a fact is compared: its text may be long, and is read only if hashes differ."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agreed(known: Digest, index: int, count: int) -> bool:
    """Whether all processes have stated this fact, with the same value."""
    stated = known.stated(index)
    return len(stated) == 1 and sum(n for n, _ in stated.values()) == count


def disagreement(what: str, stated: Mapping[str, tuple[int, tuple[int, ...]]], files: Files) -> JaxparError:
    """Returns the error that names the processes that differ, and the first lines in which they do.

    Args:
      what: The name of the fact.
      stated: Its values by their hash: how many stated each, and the first of them.
      files: Where their texts lie.
    """
    # the value of most processes is taken for the right one; where two are as frequent, that of the lowest process
    common = max(stated, key=lambda value: (stated[value][0], -min(stated[value][1])))
    odd = [process for value, (_, first) in stated.items() if value != common for process in first]
    number = sum(count for value, (count, _) in stated.items() if value != common)
    names = ", ".join((files.read(process) or unknown(process)).name for process in sorted(odd))
    more = f" and {number - len(odd)} more" if number > len(odd) else ""
    lines = [
        line
        for line in difflib.unified_diff(
            files.stated(stated[common][1][0]).splitlines(), files.stated(min(odd)).splitlines(), lineterm="", n=0
        )
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    shown = "; ".join(f"{'it has' if line[0] == '+' else 'others have'} {line[1:]}" for line in lines[:4])
    return refuse(
        f"{names}{more} has another {what} than the other {stated[common][0]}: {shown}"[:600],
        rule="all processes run the same program on the same job",
        fix="the same jaxpar, job file and model code on all hosts",
    )
