"""Stops all processes after the same step, however late they read each other's heartbeats.

    one gets a signal        reports it                                          stop
    process 0 reads that     asks all to hold                                    stop
    each process             promises not to pass the step after the next
                             until process 0 names the last one                  hold
    process 0, once all have promised
                             names the highest of these steps                    stop_at

A process that reaches its own `hold` before it knows `stop_at` waits there. No `hold` is above `stop_at`, so no process
can pass that step without knowing it: a shared folder that shows old files makes the stop late, not wrong. Promises are
made by the watchdog's thread, which goes on while the training waits in a collective: so they always come.
"""

from dataclasses import replace

from jaxpar.train.watchdog.beat import Heartbeat
from jaxpar.train.watchdog.digest import Digest


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
