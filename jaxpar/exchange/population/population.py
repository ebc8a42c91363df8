"""Populations: members with different optimizer settings that never synchronize, or of which the worst copy the best.

Population based training (PBT) does so every N steps:

    losses of a window ─► ranks ─► exploit: a bad member copies a good one ─► explore: its settings times 0.8 or 1.2
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, check_ranges, refuse
from jaxpar.exchange.base import NO_MODEL, STEPS, Exchange, Replicas, Tree
from jaxpar.mesh.collective import Traffic

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.replica_mesh import ReplicaMesh


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

        from jaxpar.optim.step_inputs import settings, with_settings

        defaults = settings(replicas.opt_state, self.values)
        values = {name: jnp.asarray(values, defaults[name].dtype) for name, values in self.values.items()}
        return replace(replicas, opt_state=with_settings(replicas.opt_state, values))

    def settings(self, optimizer: Any) -> "dict[str, jax.Array]":
        """Returns the settings of all members, [member] each, from their optimizer states."""
        from jaxpar.optim.step_inputs import settings

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


@dataclass(frozen=True, kw_only=True)
class Pbt(Population):
    """Population based training (Jaderberg et al. 2017, arXiv:1711.09846), an evolutionary search.

    Exploit is the paper's truncation selection: each member among the worst `share` copies parameters, optimizer state,
    other state and settings of a member drawn from the best `share`. Explore multiplies each copied setting by one of
    `factors`, drawn at random. A member's score is the mean of its training losses since the last sync round; scores
    are comparable because all members see the same examples. The paper allows any score, such as a held-out loss.

    Draws depend on `seed`, the number of the sync round and the member: a resumed run repeats them.

    Attributes:
      name: pbt (the worst members copy the best and continue with changed settings).
      values: Initial values of each setting, one per member.
      every: Number of steps from one sync round to the next.
      share: Share of the members that are replaced, and of the best members that they may copy; at least one each.
      factors: Factors, one of which multiplies each setting of a copy.
      within: Lowest and highest value of each setting.
      seed: Seed of the random draws.
    """

    name: str = "pbt"
    every: int = 100
    share: float = 0.2
    factors: tuple[float, ...] = (0.8, 1.2)
    within: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, "", {"every": (1, STEPS), "share": (0.0, 0.5), "seed": (0, 2**32 - 1)})
        check_factors(self.factors)

    @property
    def selection_size(self) -> int:
        """The number of members that copy, which is also the number that may be copied."""
        return max(1, int(self.share * self.members))

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the members' sums of losses in a window, the source of each copy, and the count of sync rounds."""
        import jax.numpy as jnp

        per_member = {"losses": jnp.zeros(replicas), "from": jnp.arange(replicas)}
        return {"each": per_member, "met": jnp.zeros((), jnp.int32)}

    def observe(self, state: dict[str, Any], losses: "jax.Array") -> Tree:
        """Adds the losses of one more step to the exchange's state."""
        return state | {"each": state["each"] | {"losses": state["each"]["losses"] + losses}}

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Replaces the worst members by copies of the best, with changed settings."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.population.copying import copy_members, replicate
        from jaxpar.optim.step_inputs import with_settings

        state, mesh = replicas.exchange_state, between.mesh
        key = jax.random.fold_in(jax.random.key(self.seed), state["met"])
        source, copies = self.exploit(replicate(state["each"]["losses"], mesh), key)
        params, optimizer, model_state = copy_members(
            (replicas.params, replicas.opt_state, replicas.model_state), source, mesh
        )
        settings = {name: replicate(value, mesh) for name, value in self.settings(optimizer).items()}
        optimizer = with_settings(optimizer, self.explore(settings, copies, key))
        per_member = {"losses": jnp.zeros_like(state["each"]["losses"]), "from": source}
        state = {"each": per_member, "met": state["met"] + 1}
        return replace(replicas, params=params, opt_state=optimizer, model_state=model_state, exchange_state=state)

    def exploit(self, losses: "jax.Array", key: "jax.Array") -> "tuple[jax.Array, jax.Array]":
        """Returns the member that each member copies (its own number for none), and whether it copies; [member] each.

        Args:
          losses: Loss of each member; a loss that is not finite is the worst.
          key: PRNG key of the draws from the best members.
        """
        import jax
        import jax.numpy as jnp

        order = jnp.argsort(jnp.where(jnp.isfinite(losses), losses, jnp.inf))  # best first
        copies = jnp.argsort(order) >= self.members - self.selection_size
        models = order[jax.random.randint(jax.random.fold_in(key, 0), (self.members,), 0, self.selection_size)]
        return jnp.where(copies, models, jnp.arange(self.members)), copies

    def explore(
        self, settings: "Mapping[str, jax.Array]", copies: "jax.Array", key: "jax.Array"
    ) -> "dict[str, jax.Array]":
        """Returns the settings of all members; multiplies each setting of a copy by a factor.

        Args:
          settings: Values by name, [member] each.
          copies: Whether a member is a copy. Shape [member].
          key: PRNG key of the draws of factors.
        """
        import jax
        import jax.numpy as jnp

        result = {}
        for index, (name, values) in enumerate(settings.items()):
            choices = jax.random.randint(jax.random.fold_in(key, 1 + index), values.shape, 0, len(self.factors))
            explored = jnp.clip(values * jnp.asarray(self.factors, values.dtype)[choices], *self.within.get(name, ()))
            result[name] = jnp.where(copies, explored, values)
        return result

    def round_metrics(self, state: dict[str, Any]) -> "dict[str, jax.Array]":
        """Returns the source of each member's copy."""
        return {"from": state["each"]["from"]}

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns the permutes of parameters, without the permutes of optimizer states and other state."""
        from jaxpar.exchange.population.copying import rotation_traffic

        return rotation_traffic(shards, replicas, self.members // replicas, every=self.every)

    def __str__(self) -> str:
        return f"{super().__str__()}, every {self.every} steps"


def check_factors(factors: tuple[float, ...]) -> None:
    """Refuses factors that cannot multiply a setting.

    Raises:
      JaxparError: If there are no factors, or a factor is not positive.
    """
    if not factors or not all(0 < factor < float("inf") for factor in factors):
        raise refuse(
            f"factors = {factors!r:.200}",
            rule="a setting is multiplied by one of some positive numbers",
            fix="factors = [0.8, 1.2]",
        )
