"""Chooses the members' initial settings: every combination of lists, or draws from ranges.

    [1e-3, 3e-3]                      in a grid, every value; else one value, drawn at random
    { choice = [1e-3, 3e-3] }         one of the values, drawn at random
    { uniform = [0.8, 0.99] }         drawn between the two
    { log_uniform = [1e-4, 1e-2] }    drawn between the two, uniformly in the logarithm

A draw depends only on the seed, the setting and the member.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.errors import JaxparError, Problem, suggest

RANGES = ("uniform", "log_uniform")
KINDS = ("choice", *RANGES)
MOVING = ("pbt", "evolution", "swarm")  # methods that change settings while members train
LARGEST = 3.4e38  # of float32
EXAMPLE = "{ log_uniform = [1e-4, 1e-2] }"


def flatten(over: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted names, such as {"optimizer.learning_rate": [1e-3, 3e-3]}."""
    result: dict[str, Any] = {}
    for name, value in over.items():
        is_nested = isinstance(value, Mapping) and value and not any(kind in value for kind in KINDS)
        result |= flatten(value, f"{prefix}{name}.") if is_nested else {prefix + name: value}
    return result


def check(over: Mapping[str, Any], method: str) -> None:
    """Refuses values that are neither a list of numbers nor a range, or that the method does not support.

    Args:
      over: Dotted name of a setting to its values.
      method: grid, random, pbt, evolution or swarm.

    Raises:
      JaxparError: If there are such values; the message has all of them.
    """
    problems = [Problem(f"sweep.over.{name} = {value!r:.100}", *fault)
                for name, value in over.items() if (fault := _broken_rule(value, method))]  # fmt: skip
    if problems:
        raise JaxparError(*problems)


def grid(over: Mapping[str, list[float]]) -> dict[str, tuple[float, ...]]:
    """Returns each setting's values for all members: all combinations, the last setting changing fastest."""
    combinations = itertools.product(*over.values())
    return {name: tuple(map(float, values)) for name, values in zip(over, zip(*combinations, strict=True), strict=True)}


def draw(over: Mapping[str, Any], members: int, seed: int) -> dict[str, tuple[float, ...]]:
    """Draws each setting's values for all members."""
    return {
        name: tuple(_draw(value, random.Random(f"{seed}/{name}/{member}")) for member in range(members))
        for name, value in over.items()
    }


def ranges(over: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the lowest and the highest value of each setting that is drawn from a range."""
    kinds = {name: _kind(value) for name, value in over.items()}
    return {name: (min(values), max(values)) for name, (kind, values) in kinds.items() if kind in RANGES}


def logarithmic(over: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the settings that are drawn from a logarithmic range."""
    return tuple(name for name, value in over.items() if _kind(value)[0] == "log_uniform")


def _kind(value: Mapping[str, Sequence[float]] | Sequence[float]) -> tuple[str, Sequence[float]]:
    return next(iter(value.items())) if isinstance(value, Mapping) else ("choice", value)


def _draw(value: Mapping[str, Sequence[float]] | Sequence[float], source: random.Random) -> float:
    kind, values = _kind(value)
    share = source.random()
    if kind == "choice":
        return float(values[int(share * len(values))])
    low, high = values
    if kind == "log_uniform":
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return low + share * (high - low)


def _broken_rule(value: object, method: str) -> tuple[str, str] | None:
    """Returns the rule that a value breaks, and a fix; None if it breaks no rule."""
    if isinstance(value, Mapping):
        if len(value) != 1 or (kind := next(iter(value))) not in KINDS:
            return f"a draw is one of {', '.join(KINDS)}", suggest(str(next(iter(value), "")), KINDS)
        values = value[kind]
    else:
        kind, values = "list", value
    if not isinstance(values, (list, tuple)) or not values or not all(map(_is_number, values)):
        return "a setting is swept over a list of numbers, or a range of them", f"[1e-3, 3e-3], or {EXAMPLE}"
    if method == "grid":
        return None if kind == "list" else ("a grid is of lists", 'a list, or sweep.method = "random"')
    if kind in RANGES and (len(values) != 2 or not values[0] < values[1]):
        return "a range has its lowest and its highest number", EXAMPLE
    if kind == "log_uniform" and values[0] <= 0:
        return "a logarithm is of a positive number", EXAMPLE
    if method in MOVING and kind not in RANGES:
        return f"{method} changes settings within the range that they are drawn from", EXAMPLE
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
