"""Messages between devices, one by one, with what they carry: what the formulas of `cost` are checked against.

    rounds of messages + data of every device ─► deliver ─► when all is there, the data, the bytes each one sent

A device sends one message at a time over each of its ports, and receives one; both ports are busy
for the latency and for the bytes, and the receiver's for adding too. Nothing waits for a round to
end: a message leaves as soon as what it carries is there and both ports are free.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxpar.mesh.links import Link


@dataclass(frozen=True, slots=True)
class Message:
    """Elements of one device's array that go to another's.

    Attributes:
      source: The device that sends.
      target: The device that receives.
      part: First element, and the one past the last.
      add: Whether they are added to what is there.
      into: First element at the target; the same as at the source unless said.
      posted: Whether the ports are free for others during the latency.
    """

    source: int
    target: int
    part: tuple[int, int]
    add: bool = False
    into: int | None = None
    posted: bool = False


Round = list[Message]


@dataclass(frozen=True)
class Delivery:
    """The result of a replay of messages.

    Attributes:
      seconds: When the last device has all that it was sent.
      data: Every device's array. Shape [devices, elements].
      sent: Bytes that each device sent. Shape [devices].
    """

    seconds: float
    data: np.ndarray
    sent: np.ndarray


def deliver(
    rounds: Iterable[Round], data: np.ndarray, between: Link | Callable[[int, int], tuple[str, Link]]
) -> Delivery:
    """Returns what messages do to the data of devices, and how long that takes.

    Args:
      rounds: Messages; those of a round carry what there was before it. A port takes its messages in this order.
      data: Of every device. Shape [devices, elements].
      between: The link of all, or a function of a source and a target: the port that both use, and its link.
    """
    data = data.copy()
    ready = np.zeros(data.shape)  # seconds at which each element is there
    sends: dict[tuple[int, str], float] = {}
    receives: dict[tuple[int, str], float] = {}
    sent = np.zeros(len(data), np.int64)
    last = 0.0
    for messages in rounds:
        carried = [
            (data[m.source, slice(*m.part)].copy(), ready[m.source, slice(*m.part)].max(initial=0.0)) for m in messages
        ]
        for message, (values, there) in zip(messages, carried, strict=True):
            port, link = between(message.source, message.target) if callable(between) else ("", between)
            begin = message.part[0] if message.into is None else message.into
            to = (message.target, slice(begin, begin + len(values)))
            away, at = (message.source, port), (message.target, port)
            early = link.latency if message.posted else 0.0
            start = max(there, sends.get(away, 0.0), receives.get(at, 0.0) - early)
            end = start + link.time(values.nbytes)
            sends[away] = end - early
            if message.add:
                end = max(end, ready[to].max(initial=0.0)) + link.combine * values.nbytes
                data[to] += values
            else:
                data[to] = values
            receives[at] = end
            ready[to] = end
            sent[message.source] += values.nbytes
            last = max(last, end)
    return Delivery(last, data, sent)
