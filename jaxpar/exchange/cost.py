"""Seconds of one collective between devices that are all alike, in alpha-beta-gamma form.

    all-reduce of n bytes        latencies        bytes sent one after another   bytes added
    tree                         2 ceil(lg P)     2 n ceil(lg P)                 n ceil(lg P)
    butterfly                    lg P             n lg P                         n lg P
    ring                         2 (P-1)          2 n (P-1)/P                    n (P-1)/P
    halving (Rabenseifner)       2 lg P           2 n (P-1)/P                    n (P-1)/P
    parameter server, s of them  2                2 n P/s                        n (P-1)/s
    lower bound                  ceil(lg P)       2 n (P-1)/P                    n (P-1)/P

All are modelled, and exact for devices that send one message and receive one at a time: `replay`
plays every one of them. Butterfly and halving are for powers of two; with any other P the devices
past the largest power of two send all they have to another first, and get the result last.

Source: Thakur, Rabenseifner, Gropp (2005), sections 3 and 4, but for the parameter server: Ben-Nun,
Hoefler (2019), arXiv:1802.09941.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpar.errors import refuse
from jaxpar.mesh.collective import wire_bytes
from jaxpar.mesh.links import Link

Algorithm = Callable[[Link, float, int], float]
CHUNKS = tuple(1 << power for power in range(17))


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of a collective, and the algorithm.

    Attributes:
      seconds: Modelled.
      algorithm: By which that is.
    """

    seconds: float
    algorithm: str


def tree(link: Link, size: float, group: int) -> float:
    """Returns the seconds of an all-reduce that reduces to one device by a binomial tree and broadcasts back."""
    check(size, group)
    return (group - 1).bit_length() * (2 * link.time(size) + link.combine * size)


def butterfly(link: Link, size: float, group: int) -> float:
    """Returns the seconds of an all-reduce by recursive doubling: partners exchange all they have."""
    check(size, group)
    rounds = group.bit_length() - 1
    return rounds * (link.time(size) + link.combine * size) + _fold(link, size, group)


def ring(link: Link, size: float, group: int) -> float:
    """Returns the seconds of an all-reduce that is a ring's reduce-scatter and its all-gather; for any group."""
    return reduce_scatter(link, size, group) + all_gather(link, size, group)


def halving(link: Link, size: float, group: int) -> float:
    """Returns the seconds of Rabenseifner's all-reduce: recursive halving, then recursive doubling."""
    check(size, group)
    rounds = group.bit_length() - 1
    wire = wire_bytes("all-reduce", size, 1 << rounds)
    return 2 * rounds * link.latency + wire / link.bandwidth + wire / 2 * link.combine + _fold(link, size, group)


def parameter_server(link: Link, size: float, group: int, servers: int = 1) -> float:
    """Returns the seconds of a push to servers that each own a part of the array, and a pull.

    The servers are devices of their own. Messages of different workers are under way together, so
    only two latencies show; no other algorithm here does that, and `lower_bound` is not a bound of
    one that does: for small arrays a parameter server is below it.

    Args:
      link: Between all of them.
      size: Bytes of the whole array.
      group: Workers.
      servers: How many own a part.

    Raises:
      JaxparError: Unless the servers divide the workers: past as many as workers, the workers' own ports are full.
    """
    check(size, group)
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1 or group % servers:
        raise refuse(
            f"{servers!r} parameter servers for {group} workers",
            rule="the servers divide the workers evenly",
            fix=f"servers={group}, or 1",
        )
    part = size / servers
    return 2 * (link.latency + group * part / link.bandwidth) + (group - 1) * part * link.combine


def lower_bound(link: Link, size: float, group: int) -> float:
    """Returns the least latencies, bytes and additions of any all-reduce, one after another.

    Where a device takes one message at a time with its latency, no algorithm here is below it.
    """
    check(size, group)
    wire = wire_bytes("all-reduce", size, group)
    return (group - 1).bit_length() * link.latency + wire / link.bandwidth + wire / 2 * link.combine


ALL_REDUCE: Mapping[str, Algorithm] = {"ring": ring, "halving": halving, "butterfly": butterfly, "tree": tree}


def cheapest(link: Link, size: float, group: int, *, among: Mapping[str, Algorithm] = ALL_REDUCE) -> Cost:
    """Returns the algorithm that takes least; of several that do, the first of `among`.

    >>> cheapest(Link(latency=5e-6, bandwidth=12e9), 80_000, 64).algorithm
    'butterfly'
    """
    seconds = {name: algorithm(link, size, group) for name, algorithm in among.items()}
    best = min(seconds, key=lambda name: seconds[name])
    return Cost(seconds[best], best)


def crossover(link: Link, group: int) -> float:
    """Returns the bytes below which a butterfly is faster than halving; infinite in groups of up to three.

    >>> round(crossover(Link(latency=5e-6, bandwidth=12e9), 8))
    144000
    """
    check(0, group)
    rounds = group.bit_length() - 1  # both fold alike
    share = 1 - 0.5**rounds
    more = (rounds - 2 * share) / link.bandwidth + (rounds - share) * link.combine
    return rounds * link.latency / more if more > 0 else math.inf


def reduce_scatter(link: Link, size: float, group: int) -> float:
    """Returns the seconds of a ring's reduce-scatter of an array of `size` bytes."""
    return all_gather(link, size, group) + wire_bytes("reduce-scatter", size, group) * link.combine


def all_gather(link: Link, size: float, group: int) -> float:
    """Returns the seconds of a ring's all-gather into an array of `size` bytes."""
    check(size, group)
    return (group - 1) * link.latency + wire_bytes("all-gather", size, group) / link.bandwidth


def all_to_all(link: Link, size: float, group: int) -> float:
    """Returns the seconds in which every device sends a P-th of its `size` bytes to each, in pairwise exchanges."""
    check(size, group)
    return (group - 1) * link.latency + wire_bytes("all-to-all", size, group) / link.bandwidth


def broadcast(link: Link, size: float, group: int, *, chunks: int | None = None) -> float:
    """Returns the seconds of a broadcast along a chain of devices, each passing on chunks as they come.

    Args:
      link: Between neighbours.
      size: Bytes.
      group: Devices, with the one that has the array.
      chunks: In how many the array travels; without it, the power of two that takes least.
    """
    check(size, group)
    if group == 1:
        return 0.0
    return min((group - 2 + m) * link.time(size / m) for m in ([chunks] if chunks else CHUNKS))


def check(size: float, group: int) -> None:
    """Refuses what is no collective.

    Raises:
      JaxparError: Unless the size is a number of bytes, and the group a number of devices.
    """
    if not 0 <= size < math.inf:
        raise refuse(f"a collective of {size!r} bytes", rule="0 bytes or more", fix="size=1e8")
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise refuse(f"a collective of {group!r} devices", rule="a whole number of devices, at least 1", fix="group=8")


def _fold(link: Link, size: float, group: int) -> float:
    """Returns what it takes to leave out the devices past the largest power of two, and to tell them the result."""
    return 0.0 if group & (group - 1) == 0 else 2 * link.time(size) + link.combine * size
