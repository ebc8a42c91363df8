"""The judgement: from the digest of all processes to the one that is at fault, and why."""

from jaxpar.errors import Problem
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
