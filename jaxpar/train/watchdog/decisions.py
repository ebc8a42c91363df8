"""What follows from the digest of all processes: who is at fault, which facts differ, after which step all stop."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import replace

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.train.watchdog.beat import Files, Heartbeat, unknown
from jaxpar.train.watchdog.digest import Digest

SLOW = 10  # times the limit for activities that may take long on one host and be quick on another
PATIENT = ("compiling", "evaluating", "saving", "restoring", "starting")
TOGETHER = ("training",)  # processes wait for each other in it, so its duration says nothing about one of them
ON = "the same command goes on from the newest checkpoint; jaxpar launch does so by itself"


def judge(me: int, known: Digest, *, limit: float) -> Problem | None:
    """Returns the problem with a process of the run, or None.

    A process is lost once it has been silent for `limit`. It is late once all that are ahead of it have waited for
    `limit`, and it has itself taken longer than `allowed`.

    Args:
      me: The process that asks: it is not told of its own failure.
      known: The digest of all processes.
      limit: Seconds.
    """
    # in this order: a process that failed has a reason of its own, and its silence and lateness follow from it
    if known.failed and known.failed[0] != me:
        return Problem(known.failed[1], "all processes of a run train until its end", ON)
    if known.silent and known.silent[0] > limit:
        seconds, name, activity = known.silent
        return Problem(
            f"{name} has given no sign of life for {seconds:.0f} s; it was {activity}",
            f"a process that is gone or stopped ends the run after {limit:g} s",
            ON,
        )
    late, ahead = known.late, known.ahead
    # both must hold: others have waited for the limit, and the late one has been at it longer than it may. A process
    # whose compilation takes an hour is not late while the others compile too
    if late is None or ahead is None or ahead.stuck <= limit or late.stuck <= allowed(late.doing, known, limit=limit):
        return None
    return Problem(
        f"{late} {'is' if late.count == 1 else 'are'} late: {late.activity} for {late.stuck:.0f} s, while "
        f"{ahead.count} other{'s wait' if ahead.count > 1 else ' waits'}, {ahead.activity}",
        f"no process keeps the others waiting for more than {limit:g} s",
        ON,
    )


def allowed(doing: str, known: Digest, *, limit: float) -> float:
    """Returns the seconds that a process may take for an activity while others wait for it.

    That is `limit`, or ten times that for an activity that may be quick on one host and slow on another (a compilation
    that the others had in their cache), plus twice the longest time that it has taken any process so far.
    """
    needed = 0.0 if doing in TOGETHER else known.longest.get(doing, 0.0)
    return limit * (SLOW if doing in PATIENT else 1) + 2 * needed


# Facts: values that must be equal on all processes, and where they differ if they are not.


def digest_of(text: str) -> str:
    """Returns the hash by which a fact is compared: its text may be long, and is read only if hashes differ."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_agreed(known: Digest, index: int, count: int) -> bool:
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


# Stops all processes after the same step, however late they read each other's heartbeats.
#
#     one gets a signal        reports it                                          stop
#     process 0 reads that     asks all to hold                                    stop
#     each process             promises not to pass the step after the next
#                              until process 0 names the last one                  hold
#     process 0, once all have promised
#                              names the highest of these steps                    stop_at
#
# A process that reaches its own `hold` before it knows `stop_at` waits there. No `hold` is above `stop_at`, so no
# process can pass that step without knowing it: a shared folder that shows old files makes the stop late, not wrong.
# Promises are made by the watchdog's thread, which goes on while the training waits in a collective: so they always
# come.


def promise(mine: Heartbeat, first: Heartbeat, reached: int) -> Heartbeat:
    """Returns a process's heartbeat with the step that it will not pass, once process 0 asks for it.

    Args:
      mine: Its heartbeat.
      first: The heartbeat of process 0.
      reached: The last step after which it has asked whether to stop.
    """
    # the next step, not this one: the training is already in it, and cannot be held before it ends
    return replace(mine, hold=reached + 1) if first.stop and not mine.hold else mine


def decide(first: Heartbeat, known: Digest, count: int) -> Heartbeat:
    """Returns the heartbeat of process 0 with the signal that any process got, and the last step once all hold.

    Args:
      first: Its heartbeat.
      known: The digest of all processes, itself among them.
      count: Number of processes.
    """
    if known.stop and not first.stop:
        return replace(first, stop=known.stop)
    # the highest promise: no process has passed its own, and all can still reach this one
    if first.stop and not first.stop_at and known.holding == count:
        return replace(first, stop_at=known.hold)
    return first


def holds(mine: Heartbeat, first: Heartbeat, step: int) -> bool:
    """Whether a process waits after this step for process 0 to name the last one."""
    return 0 < mine.hold <= step and not first.stop_at and not first.ended


def stops(first: Heartbeat, step: int) -> str | None:
    """Returns the signal for which all stop after this step, or None."""
    return first.stop if 0 < first.stop_at <= step else None
