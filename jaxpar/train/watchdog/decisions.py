"""Decides from the digest of all processes which one is at fault, which facts differ, and after which step all stop."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.train.watchdog.beat import Files, Heartbeat, unknown
from jaxpar.train.watchdog.digest import Digest

SLOW = 10  # factor on the limit for activities that may be slow on one host and quick on another
PATIENT = ("compiling", "evaluating", "saving", "restoring", "starting")
TOGETHER = ("training",)  # all processes wait for each other here, so the duration blames none of them
AGREEING = "agreeing on the"  # prefix of the activity of a process that waits for others to state a fact
ON = "the same command goes on from the newest checkpoint; jaxpar launch does so by itself"


def judge(me: int, digest: Digest, *, limit: float) -> Problem | None:
    """Returns the problem with a process of the run, or None.

    A process is lost if it has been silent for more than `limit`. It is late if all processes ahead of it have waited
    for more than `limit`, and its own activity has taken longer than `allowed`.

    Args:
      me: The calling process, whose own failure is not reported.
      digest: The digest of all processes.
      limit: Seconds.
    """
    # failures first: they have a reason, and silence and lateness are their consequences
    if digest.failed and digest.failed[0] != me:
        return Problem(digest.failed[1], "all processes of a run train until its end", ON)
    if digest.silent and digest.silent[0] > limit:
        seconds, name, activity = digest.silent
        return Problem(
            f"{name} has given no sign of life for {seconds:.0f} s; it was {activity}",
            f"a process that is gone or stopped ends the run after {limit:g} s",
            ON,
        )
    late, ahead = digest.late, digest.ahead
    # a process is late only if the others have waited for longer than the limit, and it takes longer than allowed: a
    # compilation of an hour is not late while all others still compile
    if (
        late is None
        or ahead is None
        or ahead.stuck <= limit
        or late.stuck <= allowed_seconds(late.doing, digest, limit=limit)
    ):
        return None
    return Problem(
        f"{late} {'is' if late.count == 1 else 'are'} late: {late.activity} for {late.stuck:.0f} s, while "
        f"{ahead.count} other{'s wait' if ahead.count > 1 else ' waits'}, {ahead.activity}",
        f"no process keeps the others waiting for more than {limit:g} s",
        ON,
    )


def allowed_seconds(doing: str, digest: Digest, *, limit: float) -> float:
    """Returns the seconds that a process may take for an activity while others wait for it.

    These are `limit`, or ten times `limit` for an activity that may be slow on one host only (e.g. a compilation that
    the other hosts have in their cache), plus twice the longest time that any process has needed for it so far.
    """
    needed = 0.0 if doing in TOGETHER else digest.longest.get(doing, 0.0)
    return limit * (SLOW if doing in PATIENT else 1) + 2 * needed


def next_activity(heartbeat: Heartbeat, seconds: float, **changes: Any) -> Heartbeat:
    """Returns the heartbeat of a process that begins its next activity, with the duration of the last one."""
    longest = heartbeat.longest
    if heartbeat.doing not in TOGETHER and not heartbeat.doing.startswith(AGREEING):
        longest = {**longest, heartbeat.doing: max(seconds, longest.get(heartbeat.doing, 0.0))}
    return replace(heartbeat, place=heartbeat.place + 1, longest=longest, **changes)


# Facts: values that must be equal on all processes. If they are not, an error shows the difference.


def hash_text(text: str) -> str:
    """Hashes a fact for comparison; processes read its text, which may be long, only if hashes differ."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_agreed(digest: Digest, index: int, count: int) -> bool:
    """Returns whether all processes have stated this fact, with the same value."""
    stated = digest.fact_counts(index)
    return len(stated) == 1 and sum(n for n, _ in stated.values()) == count


def disagreement(what: str, stated: Mapping[str, tuple[int, tuple[int, ...]]], files: Files) -> JaxparError:
    """Returns an error with the processes whose value differs, and the first differing lines.

    Args:
      what: The name of the fact.
      stated: Hash of each value to the number of processes that stated it, and the first of these processes.
      files: The folder with the texts.
    """
    # the most frequent value counts as right; at a tie, the value of the lowest process
    common = max(stated, key=lambda value: (stated[value][0], -min(stated[value][1])))
    deviating = [process for value, (_, first) in stated.items() if value != common for process in first]
    number = sum(count for value, (count, _) in stated.items() if value != common)
    names = ", ".join((files.read(process) or unknown(process)).name for process in sorted(deviating))
    more = f" and {number - len(deviating)} more" if number > len(deviating) else ""
    lines = [
        line
        for line in difflib.unified_diff(
            files.read_fact(stated[common][1][0]).splitlines(),
            files.read_fact(min(deviating)).splitlines(),
            lineterm="",
            n=0,
        )
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    shown = "; ".join(f"{'it has' if line[0] == '+' else 'others have'} {line[1:]}" for line in lines[:4])
    return refuse(
        f"{names}{more} has another {what} than the other {stated[common][0]}: {shown}"[:600],
        rule="all processes run the same program on the same job",
        fix="the same jaxpar, job file and model code on all hosts",
    )


# Stops all processes after the same step, even if they read outdated heartbeats of each other.
#
#     event                                    reaction                                            field
#     a process gets a signal                  it reports the signal                               stop
#     process 0 reads that                     it asks all processes to hold                       stop
#     each process reads that                  it promises not to pass the step that it is in
#                                              until process 0 names the last step                 hold
#     process 0 has read all promises          it names the highest promised step                  stop_at
#
# A process that reaches its own `hold` before it knows `stop_at` waits there. No `hold` is above `stop_at`, so no
# process can pass `stop_at` without knowing it: outdated files in a shared folder delay the stop, but keep it correct.
# The watchdog's thread makes the promises. It also runs while the training waits in a collective, so all promises
# arrive.


def promise(heartbeat: Heartbeat, first: Heartbeat, reached: int) -> Heartbeat:
    """Returns this process's heartbeat, with the step that it promises not to pass once process 0 asks to hold.

    Args:
      heartbeat: The heartbeat of this process.
      first: The heartbeat of process 0.
      reached: The last step after which this process has checked for a stop.
    """
    # not `reached` itself: the training is already in the step after it, which it cannot leave before its end
    return replace(heartbeat, hold=reached + 1) if first.stop and not heartbeat.hold else heartbeat


def decide(first: Heartbeat, digest: Digest, count: int) -> Heartbeat:
    """Returns the heartbeat of process 0: adds a signal that any process got, the last step, facts that all agree on.

    Args:
      first: The heartbeat of process 0.
      digest: The digest of all processes, including process 0.
      count: Number of processes.
    """
    agreed = first.agreed + is_agreed(digest, first.agreed + 1, count)
    if digest.stop and not first.stop:
        return replace(first, stop=digest.stop, agreed=agreed)
    # the highest promise: no process has passed its own promise, so all can still stop here
    if first.stop and not first.stop_at and digest.holding == count:
        return replace(first, stop_at=digest.hold, agreed=agreed)
    return replace(first, agreed=agreed)


def holds(heartbeat: Heartbeat, first: Heartbeat, step: int) -> bool:
    """Returns whether a process must wait after this step until process 0 names the last step."""
    return 0 < heartbeat.hold <= step and not first.stop_at and not first.ended


def stops(first: Heartbeat, step: int) -> str | None:
    """Returns the signal for which all processes stop after this step, or None."""
    return first.stop if 0 < first.stop_at <= step else None
