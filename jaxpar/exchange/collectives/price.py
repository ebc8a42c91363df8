"""Seconds of a table of messages, in alpha-beta-gamma form: read off its rounds and their bytes.

A round takes as long as its longest message: the latency, its bytes over the wire, and where they are added that too.
For devices that are all alike these are the closed forms of Thakur, Rabenseifner, Gropp (2005), sections 3 and 4.
"""

from collections.abc import Iterable

from jaxpar.exchange.collectives.algorithms import ALL_REDUCE, table
from jaxpar.exchange.collectives.messages import Round, padded
from jaxpar.exchange.sent import Sent
from jaxpar.mesh.links import Link


def seconds(rounds: Iterable[Round], link: Link, *, item: float = 1.0) -> float:
    """Returns the seconds of a table on one kind of link.

    Args:
      rounds: Messages.
      link: Between any two devices.
      item: Bytes of an element.
    """

    def one(messages: Round) -> float:
        return max((link.time(item * m.size) + m.add * link.combine * item * m.size for m in messages), default=0.0)

    return sum(one(messages) for messages in rounds)


def cheapest(link: Link, size: float, group: int) -> tuple[str, float]:
    """Returns the all-reduce of `size` bytes that takes least, and its seconds.

    >>> cheapest(Link(latency=5e-6, bandwidth=12e9), 80_000, 64)[0]
    'butterfly'
    """
    elements = padded(1, group)  # as many pieces as any algorithm cuts
    priced = {name: seconds(table(name, group, elements), link, item=size / elements) for name in ALL_REDUCE}
    return min(priced.items(), key=lambda each: each[1])


def of_sent(sent: Iterable[Sent], link: Link) -> float:
    """Returns the seconds of what replicas send when they meet: permutes one after another, the rest as `cheapest`."""
    each = [one.collective for one in sent]
    permuted = sum((c.times or 1) * link.time(c.payload) for c in each if c.kind == "collective-permute")
    whole = sum(c.step_payload for c in each if c.kind != "collective-permute")
    return permuted + (cheapest(link, whole, each[0].group)[1] if whole else 0.0)
