"""A job's `[sweep]`: the optimizer settings that differ between members, and the search method."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from jaxpar.errors import JaxparError, Problem, check_ranges, refuse, suggest
from jaxpar.exchange.base import STEPS
from jaxpar.exchange.population import draws
from jaxpar.exchange.population.evolution import Evolution
from jaxpar.exchange.population.pbt import Pbt, check_factors
from jaxpar.exchange.population.population import Population
from jaxpar.exchange.population.swarm import Swarm
from jaxpar.optim.optimizer import SWEPT, Optimizer

ROOM = "optimizer."  # prefix of the settings that may differ between members
MOST = 4096  # members, at most
IN_ROUNDS = ("evolution", "swarm")  # methods in which members train anew in each round
OF_METHOD = {  # settings of a sweep to the methods that use them
    "every": ("pbt", "evolution", "swarm"), "share": ("pbt", "evolution"), "factors": ("pbt",), "spread": ("evolution",)
}  # fmt: skip


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
        for key, methods in OF_METHOD.items():
            if getattr(self, key) != fields[key].default and self.method not in methods:
                raise refuse(
                    f"sweep.{key} = {getattr(self, key)} with sweep.method = {self.method!r}",
                    rule=f"{key} is a setting of {' and '.join(methods)}",
                    fix=f'sweep.method = "{methods[0]}", or leave {key} out',
                )
        if self.method in IN_ROUNDS and self.every < 2:
            raise refuse(f"sweep.every = {self.every}", rule="a round has two steps or more", fix="sweep.every = 100")
        settings, is_random = draws.flatten(self.over), self.method != "grid"
        draws.check(settings, self.method)
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
        settings = {name.removeprefix(ROOM): value for name, value in draws.flatten(self.over).items()}
        return draws.grid(settings) if self.method == "grid" else draws.draw(settings, self.members, self.seed)

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
            for name in draws.flatten(self.over)
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
        if self.method not in draws.MOVING:
            return Population(values=self.values)
        settings = {name.removeprefix(ROOM): value for name, value in draws.flatten(self.over).items()}
        options: dict[str, Any] = {
            "values": self.values, "every": self.every, "within": draws.ranges(settings), "seed": self.seed
        }  # fmt: skip
        if self.method == "pbt":
            return Pbt(**options, share=self.share, factors=self.factors)
        options["logarithmic"] = draws.logarithmic(settings)
        if self.method == "swarm":
            return Swarm(**options)
        return Evolution(**options, share=self.share, spread=self.spread)

    def steps(self, steps: int) -> int:
        """Returns the number of steps that a member trains for: one round if the method has rounds, else `steps`."""
        return self.every if self.over and self.method in IN_ROUNDS else steps
