"""A few of many cases that have in them what all have."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`, of which all but the chosen are marked slow."""
    cases = list(cases)
    assert set(chosen) <= set(cases), "what is chosen is one of the cases"
    values = [case if type(case) is tuple else (case,) for case in cases]
    marks = [() if case in chosen else pytest.mark.slow for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def covering(cases: Iterable[tuple], parts: Callable[..., set]) -> list[tuple[Any, ...]]:
    """Returns cases that have the parts of all: one after another, the one with the most new parts."""
    found = {case: parts(*case) for case in cases}
    wanted, chosen = set().union(*found.values()), []
    while wanted:
        chosen.append(max(found, key=lambda case: len(found[case] & wanted)))
        wanted -= found[chosen[-1]]
    return chosen
