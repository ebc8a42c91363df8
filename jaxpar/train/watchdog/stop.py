"""Stops all processes after the same step, however late they hear of each other.

    one gets a signal        it says so                                          stop
    process 0 hears of it    asks all to hold                                    stop
    each process             promises not to pass the step after the next
                             without a word from process 0                       hold
    process 0, once all have promised
                             names the highest of these steps                    stop_at

Who comes to its own `hold` before it knows `stop_at` waits there. No `hold` is above `stop_at`, so nobody
can pass that step unknowingly: a folder whose reads are seconds old makes the stop late, not wrong. Promises are given
by the watching thread, which goes on while the training waits in a collective: so they always come.
"""

from dataclasses import replace

from jaxpar.train.watchdog.beat import Heartbeat
from jaxpar.train.watchdog.digest import Digest


def promise(mine: Heartbeat, first: Heartbeat, reached: int) -> Heartbeat:
    """Returns a process's beat with the step that it does not pass, once process 0 asks for it.

    Args:
      mine: What it says.
      first: What process 0 says.
      reached: The last step after which it has asked whether to stop.
    """
    return replace(mine, hold=reached + 1) if first.stop and not mine.hold else mine


def decide(first: Heartbeat, known: Digest, count: int) -> Heartbeat:
    """Returns the beat of process 0 with the wish of any process, and the last step once all hold.

    Args:
      first: What process 0 says.
      known: What is known of all, itself among them.
      count: How many there are.
    """
    if known.stop and not first.stop:
        return replace(first, stop=known.stop)
    if first.stop and not first.stop_at and known.holding == count:
        return replace(first, stop_at=known.hold)
    return first


def holds(mine: Heartbeat, first: Heartbeat, step: int) -> bool:
    """Whether a process waits after this step for process 0 to say which one is the last."""
    return 0 < mine.hold <= step and not first.stop_at and not first.ended


def stops(first: Heartbeat, step: int) -> str | None:
    """Returns the signal because of which all stop after this step, or None."""
    return first.stop if 0 < first.stop_at <= step else None
