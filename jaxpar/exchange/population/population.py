"""A population: members with different optimizer settings that never synchronize."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, refuse
from jaxpar.exchange.base import NO_MODEL, Exchange, Replicas, Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Population(Exchange):
    """Members with the same initial parameters, examples and random numbers, and different settings.

    Each member trains as it would alone. A member whose loss or parameters are not finite is no longer updated.

    Attributes:
      name: population (members with different optimizer settings, which never synchronize).
      values: Values of each setting, one per member. It is part of the optimizer's state, as `optax.inject_hyperparams`
        stores it.
    """

    name: str = "population"
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    replicas_differ = True
    same_examples = True
    global_model = NO_MODEL

    def __post_init__(self):
        counts = {name: len(values) for name, values in self.values.items()}
        if len(set(counts.values())) != 1 or min(counts.values()) < 2:
            raise refuse(
                f"a population with these numbers of values per setting: {counts}",
                rule="a population has two members or more, and each setting a value for each of them",
                fix='values={"learning_rate": (1e-3, 3e-3)}',
            )

    @property
    def leaves_optimizers(self) -> bool:
        """False: a member's optimizer state is copied together with its parameters."""
        return False

    @property
    def members(self) -> int:
        """The number of members."""
        return len(next(iter(self.values.values())))

    def count(self, places: int) -> int:
        """Returns the number of members, on any number of devices."""
        return self.members

    def problems(self, replicas: int) -> list[Problem]:
        """Returns a problem if the number of devices does not divide the number of members."""
        if self.members % replicas == 0:
            return []
        return [
            Problem(
                f"{self.members} members over data={replicas}",
                "each device along `data` has equally many members",
                f"data={next(n for n in range(min(replicas, self.members), 0, -1) if self.members % n == 0)} and more "
                f"fsdp, or {-(-self.members // replicas) * replicas} members",
            )
        ]

    def begin(self, replicas: Replicas) -> Replicas:
        """Returns the members, each with its own settings."""
        import jax.numpy as jnp

        from jaxpar.optim.injected import settings, with_settings

        defaults = settings(replicas.opt_state, self.values)
        values = {name: jnp.asarray(values, defaults[name].dtype) for name, values in self.values.items()}
        return replace(replicas, opt_state=with_settings(replicas.opt_state, values))

    def settings(self, optimizer: Any) -> "dict[str, jax.Array]":
        """Returns the settings of all members, [member] each, from their optimizer states."""
        from jaxpar.optim.injected import settings

        return settings(optimizer, self.values)

    def observe(self, state: dict[str, Any], losses: "jax.Array") -> Tree:
        """Returns the exchange's state after a step.

        Args:
          state: The state before the step.
          losses: Loss of each member on the step's examples. Shape [member].
        """
        return state

    def round_metrics(self, state: dict[str, Any]) -> "dict[str, jax.Array]":
        """Returns the metrics that a sync round adds to the step's metrics, [member] each."""
        return {}

    def __str__(self) -> str:
        return f"{self.name} of {self.members} members that differ in {', '.join(self.values)}"
