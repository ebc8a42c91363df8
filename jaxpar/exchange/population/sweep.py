"""A job's `[sweep]`: the optimizer settings that differ between members, their initial values, and the search method.

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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from jaxpar.errors import JaxparError, Problem, check_ranges, refuse, suggest
from jaxpar.exchange.base import STEPS
from jaxpar.exchange.population.population import Pbt, Population, check_factors
from jaxpar.exchange.population.search_rounds import Evolution, Swarm
from jaxpar.optim.optimizer import SWEPT, Optimizer

RANGES = ("uniform", "log_uniform")
KINDS = ("choice", *RANGES)
MOVING = ("pbt", "evolution", "swarm")  # methods that change settings while members train
LARGEST = 3.4e38  # of float32
EXAMPLE = "{ log_uniform = [1e-4, 1e-2] }"
ROOM = "optimizer."  # prefix of the settings that may differ between members
MOST = 4096  # members, at most
ROUND_METHODS = ("evolution", "swarm")  # methods in which members train anew in each round
METHODS_BY_SETTING = {  # settings of a sweep to the methods that use them
    "every": ("pbt", "evolution", "swarm"), "share": ("pbt", "evolution"), "factors": ("pbt",), "spread": ("evolution",)
}  # fmt: skip


def flatten_values(over: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted names, such as {"optimizer.learning_rate": [1e-3, 3e-3]}."""
    result: dict[str, Any] = {}
    for name, value in over.items():
        is_nested = isinstance(value, Mapping) and value and not any(kind in value for kind in KINDS)
        result |= flatten_values(value, f"{prefix}{name}.") if is_nested else {prefix + name: value}
    return result


def check_values(over: Mapping[str, object], method: str) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Members of a population: the same job with different optimizer settings, one compiled program for all.

    Attributes:
      method: grid (every combination of the lists); random (draws); pbt (draws; every N steps the worst
        copy the best, with changed settings: population based training, Jaderberg et al. 2017, arXiv:1711.09846);
        evolution or swarm (draws; in rounds of so many steps, each from the start: a genetic algorithm, Young et al.
        2015, or particle swarm optimization, Kennedy and Eberhart 1995).
      over: Settings to their values: optimizer.learning_rate = [1e-3, 3e-3] in [sweep.over]; or, but for a grid,
        { log_uniform = [1e-4, 1e-2] } or { uniform = [0.8, 0.99] }. Of the optimizer's learning_rate, final,
        weight_decay, beta1, beta2 and clip. {} is no sweep. Each member sees all examples, and parallel.data divides
        the members.
      members: Number of draws; a grid has all combinations.
      seed: Seed of the draws.
      every: With pbt, steps between copies; members are ranked by their mean loss since then. With evolution and
        swarm, steps of a round, over which schedules run; members are ranked by the mean loss of its last fifth.
      share: With pbt, the share of members that are replaced, and of the best members that they may copy; with
        evolution, the share of members that survive a round.
      factors: With pbt, each setting of a copy is multiplied by one of these, and stays within the range of the draws.
      spread: With evolution, the standard deviation of a mutation, as a share of the range.
    """

    method: Literal["grid", "random", "pbt", "evolution", "swarm"] = "grid"
    over: dict[str, Any] = field(default_factory=dict)
    members: int = 0
    seed: int = 0
    every: int = 100
    share: float = 0.2
    factors: tuple[float, ...] = (0.8, 1.2)
    spread: float = 0.1

    def __post_init__(self):
        fields = Sweep.__dataclass_fields__
        check_ranges(self, "sweep", {
            "members": (0, MOST), "seed": (0, 2**32 - 1), "every": (1, STEPS), "share": (0.0, 0.5),
            "spread": (0.0, 1.0),
        })  # fmt: skip
        check_factors(self.factors)
        if not self.over:
            return
        for key, methods in METHODS_BY_SETTING.items():
            if getattr(self, key) != fields[key].default and self.method not in methods:
                raise refuse(
                    f"sweep.{key} = {getattr(self, key)} with sweep.method = {self.method!r}",
                    rule=f"{key} is a setting of {' and '.join(methods)}",
                    fix=f'sweep.method = "{methods[0]}", or leave {key} out',
                )
        if self.method in ROUND_METHODS and self.every < 2:
            raise refuse(f"sweep.every = {self.every}", rule="a round has two steps or more", fix="sweep.every = 100")
        settings, is_random = flatten_values(self.over), self.method != "grid"
        check_values(settings, self.method)
        if not is_random and (combinations := math.prod(map(len, settings.values()))) > MOST:
            raise refuse(
                f"sweep.over with {combinations} combinations",
                rule=f"a population has at most {MOST} members",
                fix='fewer values, or sweep.method = "random"',
            )
        if is_random != bool(self.members) or self.count < 2:
            raise refuse(
                f"sweep.members = {self.members} with sweep.method = {self.method!r}"
                + (f", whose lists have {self.count} combinations" if not is_random else ""),
                rule="a population has two members or more; draws are as many as members, a grid has all combinations",
                fix="sweep.members = 8" if is_random else "leave sweep.members out, and give a setting more values",
            )

    @cached_property
    def values(self) -> dict[str, tuple[float, ...]]:
        """Optimizer setting to each member's initial value."""
        settings = {name.removeprefix(ROOM): value for name, value in flatten_values(self.over).items()}
        return grid(settings) if self.method == "grid" else draw(settings, self.members, self.seed)

    @property
    def count(self) -> int:
        """The number of members; 0 for no sweep."""
        return len(next(iter(self.values.values()))) if self.over else 0

    def check(self, optimizer: Optimizer) -> None:
        """Refuses settings that the optimizer lacks, that change the program, or that are out of their range.

        Raises:
          JaxparError: If there are such settings; the message has all of them.
        """
        names = [ROOM + name for name in SWEPT]
        problems = [
            Problem(
                f"sweep.over.{name}",
                f"a sweep varies arrays in the optimizer's state: {', '.join(names)}",
                "a job of its own for each value"
                if "." in name and not name.startswith(ROOM)
                else suggest(name, names),
            )
            for name in flatten_values(self.over)
            if name not in names
        ]
        if problems:
            raise JaxparError(*problems)
        if optimizer.reference_batch and "learning_rate" in self.values:
            problems.append(
                Problem(
                    f"sweep.over.optimizer.learning_rate with optimizer.reference_batch = {optimizer.reference_batch}",
                    "a sweep searches the rate at the job's own global batch, without rescaling",
                    "optimizer.reference_batch = 0",
                )
            )
        for member in range(self.count):
            try:
                replace(optimizer, **{name: values[member] for name, values in self.values.items()})
            except JaxparError as error:
                problems += [problem for problem in error.problems if problem not in problems]
        if problems:
            raise JaxparError(*problems)

    def population(self) -> Population:
        """Returns the exchange of the step, whose replicas are the members."""
        if self.method not in MOVING:
            return Population(values=self.values)
        settings = {name.removeprefix(ROOM): value for name, value in flatten_values(self.over).items()}
        options: dict[str, Any] = {
            "values": self.values, "every": self.every, "within": ranges(settings), "seed": self.seed
        }  # fmt: skip
        if self.method == "pbt":
            return Pbt(**options, share=self.share, factors=self.factors)
        options["logarithmic"] = logarithmic(settings)
        if self.method == "swarm":
            return Swarm(**options)
        return Evolution(**options, share=self.share, spread=self.spread)

    def steps(self, steps: int) -> int:
        """Returns the number of steps that a member trains for: one round if the method has rounds, else `steps`."""
        return self.every if self.over and self.method in ROUND_METHODS else steps
