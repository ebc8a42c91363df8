"""Seconds of a table of messages, in alpha-beta-gamma form, from its rounds and their bytes.

A round takes as long as its longest message: the latency, its bytes over the wire, and the time to add them, if they
are added. For equal devices these are the closed forms of Thakur, Rabenseifner, Gropp (2005), sections 3 and 4.
"""

from collections.abc import Iterable

from jaxpar.exchange.collectives.algorithms import ALL_REDUCE, all_reduce_rounds
from jaxpar.exchange.collectives.messages import Round, padded_size
from jaxpar.exchange.traffic import Traffic
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
    """Returns the fastest all-reduce of `size` bytes, and its seconds.

    >>> cheapest(Link(latency=5e-6, bandwidth=12e9), 80_000, 64)[0]
    'butterfly'
    """
    elements = padded_size(1, group)  # as many pieces as any algorithm needs
    priced = {
        name: seconds(all_reduce_rounds(name, group, elements), link, item=size / elements) for name in ALL_REDUCE
    }
    return min(priced.items(), key=lambda item: item[1])


def traffic_seconds(sent: Iterable[Traffic], link: Link) -> float:
    """Returns the seconds of a sync round's traffic: permutes one by one, the rest as one `cheapest` all-reduce."""
    collectives = [item.collective for item in sent]
    permuted = sum((c.times or 1) * link.time(c.payload) for c in collectives if c.kind == "collective-permute")
    reduced = sum(c.step_payload for c in collectives if c.kind != "collective-permute")
    return permuted + (cheapest(link, reduced, collectives[0].group)[1] if reduced else 0.0)
