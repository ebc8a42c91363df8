"""A topology: devices as a symmetric tree of levels, such as GPUs in a server and servers in a cluster.

((8, 12e9), (4, Link(latency=2e-5, bandwidth=1.25e9)))      4 servers, each of 8 GPUs
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, prod

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.mesh.chips import Link
from jaxpar.units import parse_rate

Topology = Sequence[tuple[int, Link | float]]
EXAMPLE = "((8, 12e9), (4, 1.25e9)): 4 servers of 8 GPUs, 1.25e9 bytes/s (10 Gb/s) between servers"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree.

    Attributes:
      size: Number of parts: GPUs per server, servers per cluster.
      link: The link between any two parts, in one direction; each part has its own.
    """

    size: int
    link: Link


def levels(topology: Topology) -> tuple[Level, ...]:
    """Converts a topology to levels, innermost first; a plain number is the bandwidth of a link without latency.

    Raises:
      JaxparError: If parts of a level differ, or a bandwidth is not a positive number; the message lists all faults.
    """
    if not isinstance(topology, tuple | list) or not topology:
        raise refuse(f"topology {topology!r}", rule="a level is (size, bandwidth), one at least", fix=EXAMPLE)
    result, problems = [], []
    for number, level in enumerate(topology, 1):
        if not isinstance(level, tuple | list) or len(level) != 2:
            problems.append(Problem(f"level {number} is {level!r}", "a level is (size, bandwidth or Link)", EXAMPLE))
            continue
        size, link = level
        faults = _size_problems(number, size) + _link_problems(number, link)
        problems += faults
        if not faults:
            result.append(Level(size, link if isinstance(link, Link) else Link(latency=0.0, bandwidth=float(link))))
    if problems:
        raise JaxparError(*problems)
    return tuple(result)


def parse(words: Iterable[str]) -> Topology:
    """Parses words such as `4@12GB/s`, innermost level first, to a topology.

    Raises:
      JaxparError: If a word is invalid; the message lists all of them.

    >>> parse(["8@12GB/s", "4@10Gb/s"])
    ((8, 12000000000.0), (4, 1250000000.0))
    """
    result, problems = [], []
    for word in words:
        size, _, rate = word.partition("@")
        try:
            if not size.isdecimal() or not rate:
                rule = "a level is SIZE@BANDWIDTH: its parts, and bytes or bits per second of each, one way"
                raise refuse(f"level {word!r}", rule=rule, fix="8@12GB/s 4@10Gb/s: 4 servers of 8 GPUs")
            result.append((int(size), parse_rate(rate)))
        except JaxparError as error:
            problems += error.problems
    if problems:
        raise JaxparError(*problems)
    return tuple(result)


def devices(tree: Sequence[Level]) -> int:
    """Returns the number of devices of the tree.

    >>> devices(levels(((8, 12e9), (4, 1.25e9))))
    32
    """
    return prod(level.size for level in tree)


def _size_problems(number: int, size: object) -> list[Problem]:
    if isinstance(size, tuple | list):
        rule = "a topology is symmetric: at each level all groups have the same number of parts"
        least = min((part for part in size if type(part) is int and part > 0), default=1)
        return [Problem(f"level {number} has parts of sizes {size!r}", rule, f"({least}, ...): what all of them have")]
    if type(size) is not int or size < 1:
        return [Problem(f"level {number} has size {size!r}", "a size is a whole number, 1 at least", EXAMPLE)]
    return []


def _link_problems(number: int, link: object) -> list[Problem]:
    if isinstance(link, Link):
        return []
    if isinstance(link, bool) or not isinstance(link, int | float) or not isfinite(link) or not 1 <= link <= 1e18:
        rule = "a bandwidth is bytes per second of one part, one way, at least 1"
        return [Problem(f"level {number} has bandwidth {link!r}", rule, "1.25e9 for 10 Gb/s; or a Link")]
    return []
