"""A few of many cases that have in them what all have."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], chosen: Collection[Any], slow: Collection[Any] | None = None) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`, of which all but the chosen are marked slow.

    If what is slow is given too, the rest is marked full: of each thing that the cases differ in, what CI runs has all.
    """
    cases = list(cases)
    assert all(case in cases for case in (*chosen, *(slow or ()))), "what is chosen is one of the cases"
    values = [case if type(case) is tuple else (case,) for case in cases]

    def mark(case):
        if case in chosen:
            return ()
        return pytest.mark.slow if slow is None or case in slow else pytest.mark.full

    return [pytest.param(*value, marks=mark(case)) for case, value in zip(cases, values, strict=True)]


def covering(cases: Iterable[tuple], parts: Callable[..., set]) -> list[tuple[Any, ...]]:
    """Returns cases that have the parts of all: one after another, the one with the most new parts."""
    found = {case: parts(*case) for case in cases}
    wanted, chosen = set().union(*found.values()), []
    while wanted:
        chosen.append(max(found, key=lambda case: len(found[case] & wanted)))
        wanted -= found[chosen[-1]]
    return chosen
