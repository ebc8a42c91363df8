"""Expands SLURM's host lists: node[01-03,07],gpu5."""

import re
from collections.abc import Iterator

from jaxpar.errors import JaxparError, refuse


def hosts(text: str) -> Iterator[str]:
    """Yields the hosts of a node list in order, lazily: a list may name millions.

    >>> list(hosts("node[01-03,07],gpu5"))
    ['node01', 'node02', 'node03', 'node07', 'gpu5']
    >>> list(hosts("rack[1-2]n[8-9]-ib"))
    ['rack1n8-ib', 'rack1n9-ib', 'rack2n8-ib', 'rack2n9-ib']

    Raises:
      JaxparError: At the first host that cannot be parsed.
    """
    for name in re.split(r",(?![^\[]*\])", text.strip()):
        if not re.fullmatch(r"([\w.-]|\[[\d,-]+\])+", name, re.ASCII):
            raise _no_list(text, f"{name!r} is no host")
        yield from _expand(re.split(r"\[([^\]]*)\]", name), text)


def _expand(parts: list[str], text: str) -> Iterator[str]:
    """Yields every host of [name, ranges, name, ranges, ..., name]."""
    if len(parts) == 1:
        yield parts[0]
        return
    for number in _numbers(parts[1], text):
        for suffix in _expand(parts[2:], text):
            yield f"{parts[0]}{number}{suffix}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _no_list(text, f"[{piece}] is no range")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield str(number).zfill(len(match[1]))  # node[08-10]: all numbers have the width of the first


def _no_list(text: str, why: str) -> JaxparError:
    return refuse(
        f"the node list {text!r:.80}: {why}",
        rule="hosts are written as SLURM does: node[01-03,07],gpu5",
        fix="JAXPAR_COORDINATOR=HOST:PORT of process 0, which needs no node list",
    )
