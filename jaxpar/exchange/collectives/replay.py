"""Replays a table of messages on numbers, with the contents of each message.

A table is replayed as a check before it is compiled as an all-reduce.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxpar.errors import refuse
from jaxpar.exchange.collectives.messages import Round


def deliver(rounds: Iterable[Round], data: np.ndarray) -> np.ndarray:
    """Returns every device's array after all messages. Messages of a round carry the values from before it.

    Args:
      rounds: Messages.
      data: Of every device. Shape [devices, elements].
    """
    data = data.copy()
    for messages in rounds:
        carried = [data[message.source, slice(*message.part)].copy() for message in messages]
        for message, values in zip(messages, carried, strict=True):
            begin = message.part[0] if message.into is None else message.into
            target = (message.target, slice(begin, begin + len(values)))
            data[target] = data[target] + values if message.add else values
    return data


def check_all_reduce(rounds: Sequence[Round], group: int, name: str) -> None:
    """Refuses a table that leaves some device without the sum of all.

    Args:
      rounds: The table.
      group: Number of devices.
      name: Of the table, for the message.

    Raises:
      JaxparError: If it is no all-reduce.
    """
    elements = max((message.part[1] for messages in rounds for message in messages), default=1)
    data = np.arange(group)[:, None] + np.ones((1, elements), np.int64)
    result = deliver(rounds, data)
    if failing := [device for device in range(group) if (result[device] != data.sum(0)).any()]:
        raise refuse(
            f"algorithm {name!r}: device {failing[0]} of {group} ends without the sum of all",
            rule="after an all-reduce every device has the sum",
            fix="a table of `jaxpar.exchange.collectives.algorithms.ALL_REDUCE`",
        )
