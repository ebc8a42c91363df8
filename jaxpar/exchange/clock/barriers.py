"""The virtual clock of replicas that do run: each computes at its own pace, and where they meet all wait for the last.

replica 0  ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆      |
replica 1  ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆| meeting ...
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.exchange.clock.delays import Times
from jaxpar.exchange.collectives.price import of_sent
from jaxpar.exchange.sent import Sent
from jaxpar.mesh.links import Link


def seconds(sent: Sequence[Sent], replicas: int, steps: int, times: Times, link: Link) -> np.ndarray:
    """Returns when the last replica has made each step. Shape [steps].

    Args:
      sent: What replicas send each other; nothing where they never meet.
      replicas: How many.
      steps: Of each.
      times: Of each replica's steps.
      link: Between replicas.
    """
    kinds = len({each.meeting for each in sent})
    every = min((each.every for each in sent), default=0) // max(kinds, 1)
    meeting = of_sent(sent, link) / kinds if sent else 0.0
    now, found = np.zeros(replicas), []
    for step, each in enumerate(times.matrix(replicas, steps), 1):
        now = now + each
        if every and step % every == 0:
            now = np.full(replicas, now.max() + meeting)
        found.append(now.max())
    return np.array(found)


def sent_bytes(sent: Sequence[Sent]) -> float:
    """Returns the bytes that a device sends in a step, in the mean."""
    return sum(each.collective.step_wire / each.every for each in sent)
