"""The tree of who reads whose heartbeat: a process opens a few files per turn, however many processes there are."""

WIDTH = 16  # files that a process reads per level of the tree, at most
EVERY = 0.5  # seconds between two heartbeats, where processes are few
OPENED = 3  # files per process and turn: its own, by its parent, and that of process 0
MOST = 15_000  # files that all processes open per second: a shared file system answers 100,000, and has other users
TURNS = 5  # turns of silence that may happen to a healthy process


def children(process: int, count: int) -> list[int]:
    """Returns the processes whose heartbeats a process reads, in order.

    >>> children(0, 50)[12:]
    [13, 14, 15, 16, 32, 48]
    >>> children(48, 50), children(7, 50)
    ([49], [])
    """
    found: list[int] = []
    stride = 1
    while stride < count and process % (stride * WIDTH) == 0:
        found += range(process + stride, min(count, process + stride * WIDTH), stride)
        stride *= WIDTH
    return found


def shortest(count: int) -> float:
    """Returns the least seconds between turns of `count` processes, so that they open no more than `MOST` files."""
    return count * OPENED / MOST


def interval(count: int, limit: float) -> float:
    """Returns the seconds between two turns.

    Args:
      count: Number of processes.
      limit: Seconds within which a silent one is to be found.

    >>> interval(3, 30.0), round(interval(4096, 30.0), 2)
    (0.5, 0.82)
    """
    return max(min(EVERY, limit / 10), shortest(count))


def patience(count: int, limit: float) -> float:
    """Returns the seconds of silence after which a process counts as lost: `limit`, or longer where turns are rare."""
    return max(limit, TURNS * interval(count, limit))
