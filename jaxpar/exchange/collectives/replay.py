"""Messages between devices, one by one, with what they carry: what a table of messages does, on numbers.

A table that is to be an all-reduce is replayed before it is compiled, so that one that is none is refused.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxpar.errors import refuse
from jaxpar.exchange.collectives.messages import Round


def deliver(rounds: Iterable[Round], data: np.ndarray) -> np.ndarray:
    """Returns every device's array after all messages. Those of a round carry what there was before it.

    Args:
      rounds: Messages.
      data: Of every device. Shape [devices, elements].
    """
    data = data.copy()
    for messages in rounds:
        carried = [data[message.source, slice(*message.part)].copy() for message in messages]
        for message, values in zip(messages, carried, strict=True):
            begin = message.part[0] if message.into is None else message.into
            to = (message.target, slice(begin, begin + len(values)))
            data[to] = data[to] + values if message.add else values
    return data


def check_all_reduce(rounds: Sequence[Round], group: int, name: str) -> None:
    """Refuses a table after which some device has not the sum of all.

    Args:
      rounds: The table.
      group: Devices.
      name: What the table is called.

    Raises:
      JaxparError: If it is no all-reduce.
    """
    elements = max((message.part[1] for messages in rounds for message in messages), default=1)
    data = np.arange(group)[:, None] + np.ones((1, elements), np.int64)
    done = deliver(rounds, data)
    if wrong := [device for device in range(group) if (done[device] != data.sum(0)).any()]:
        raise refuse(
            f"algorithm {name!r}: device {wrong[0]} of {group} ends without the sum of all",
            rule="after an all-reduce every device has the sum",
            fix="a table of `jaxpar.exchange.collectives.algorithms.ALL_REDUCE`",
        )
