"""The virtual clock of real replicas: each computes at its own pace, and a sync round waits for the last.

replica 0  ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆      |
replica 1  ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆| sync round ...
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.exchange.clock.delays import Times
from jaxpar.exchange.collectives.price import traffic_seconds
from jaxpar.exchange.traffic import Traffic
from jaxpar.mesh.links import Link


def seconds(sent: Sequence[Traffic], replicas: int, steps: int, times: Times, link: Link) -> np.ndarray:
    """Returns the time at which the last replica ends each step. Shape [steps].

    Args:
      sent: The traffic between replicas; empty if they never synchronize.
      replicas: Number of replicas.
      steps: Of each.
      times: Of each replica's steps.
      link: Between replicas.
    """
    kinds = len({row.sync_round for row in sent})
    every = min((row.every for row in sent), default=0) // max(kinds, 1)
    meeting = traffic_seconds(sent, link) / kinds if sent else 0.0
    clocks, ends = np.zeros(replicas), []
    for step, row in enumerate(times.matrix(replicas, steps), 1):
        clocks = clocks + row
        if every and step % every == 0:
            clocks = np.full(replicas, clocks.max() + meeting)
        ends.append(clocks.max())
    return np.array(ends)


def sent_bytes(sent: Sequence[Traffic]) -> float:
    """Returns the mean bytes that a device sends in a step."""
    return sum(item.collective.step_wire / item.every for item in sent)
