"""Searches in rounds: members train anew in each round, by settings that follow from the scores of those before.

    round 0: every steps ─► scores ─► propose ─► round 1, from the initial parameters ─► scores ─► propose ─► ...

A member's score is its mean training loss over the last part of a round. All see the same examples, so scores compare.
A round's scores are read, and the next one begins, at the end of the next round's first step, whose update is thrown
away. So a run ends with the trained models of its last round, which can be evaluated and saved.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import Replicas, Tree
from jaxpar.exchange.population.population import Population
from jaxpar.exchange.settings import STEPS

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.between import Between

SCORED = 0.2  # share of a round, its last, whose losses are averaged


@dataclass(frozen=True, kw_only=True)
class Rounds(Population):
    """A search over settings in rounds; a subclass proposes the settings of the next round.

    It works on settings as coordinates in [0, 1]: where a value lies in its range, by its logarithm if the range is
    logarithmic. Draws follow from `seed`, the round and the member, so that a run that is resumed makes the same.

    Attributes:
      name: rounds.
      values: Setting to the value with which each member begins.
      every: Steps of a round.
      within: Setting to the lowest and highest value that it may get. All of `values` have one.
      logarithmic: Settings whose ranges are logarithmic.
      seed: Of the draws.
    """

    name: str = "rounds"
    every: int = 100
    within: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    logarithmic: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, "", {"every": (2, STEPS), "seed": (0, 2**32 - 1)})

    @abstractmethod
    def remember(self, places: "jax.Array") -> Tree:
        """Returns the initial state of the search, carried between rounds: arrays [member] or [member, setting].

        Args:
          places: Coordinates of the members' settings. Shape [member, setting].
        """

    @abstractmethod
    def propose(
        self, places: "jax.Array", scores: "jax.Array", memory: Tree, key: "jax.Array"
    ) -> "tuple[jax.Array, Tree]":
        """Returns the coordinates of the next round, [member, setting] in [0, 1], and what is remembered.

        Args:
          places: Of the round that is over. Shape [member, setting].
          scores: Of its members; less is better, infinity where losses were not finite. Shape [member].
          memory: As `remember` or the round before returned it.
          key: Of random draws.
        """

    def meeting(self, step: int) -> int:
        """Returns 1 for the first step of each round but the first."""
        return int(step > 1 and step % self.every == 1)

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns sums of losses, the number of the step and of the round, the search's memory, and the parameters."""
        import jax.numpy as jnp

        places = self.coordinates({name: jnp.asarray(values, jnp.float32) for name, values in self.values.items()})
        each = {"losses": jnp.zeros(replicas), "scores": jnp.zeros(replicas)}
        counts = {"step": jnp.zeros((), jnp.int32), "round": jnp.zeros((), jnp.int32)}
        return {"each": each, **counts, "memory": self.remember(places), "start": {"params": params}}

    def begin(self, replicas: Replicas) -> Replicas:
        """Returns the members, each with its own settings, and with the state that each round begins with."""
        import jax

        first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
        start = {**replicas.own["start"], "optimizer": first(replicas.optimizer), "model": first(replicas.model_state)}
        return super().begin(replace(replicas, own=replicas.own | {"start": start}))

    def watched(self, own: Tree, losses: "jax.Array") -> Tree:
        """Returns the state of its own with the losses of one more step of the round."""
        import jax.numpy as jnp

        step = own["step"] + 1
        counts = (step > self.every - self.scored) & (step <= self.every)
        each = own["each"] | {"losses": own["each"]["losses"] + jnp.where(counts, losses, 0.0)}
        return own | {"each": each, "step": step}

    @property
    def scored(self) -> int:
        """Steps at the end of a round whose losses are averaged."""
        return max(1, int(SCORED * self.every))

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the members at the start of the next round, after the first step of it, which is thrown away."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.population.copied import everywhere
        from jaxpar.optim.injected import with_settings

        own = replicas.own
        scores = everywhere(own["each"]["losses"], between.mesh) / self.scored
        scores = jnp.where(jnp.isfinite(scores), scores, jnp.inf)
        settings = {name: everywhere(x, between.mesh) for name, x in self.settings(replicas.optimizer).items()}
        key = jax.random.fold_in(jax.random.key(self.seed), own["round"])
        places, memory = self.propose(self.coordinates(settings), scores, own["memory"], key)
        spread = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (self.members, *x.shape)), tree)  # noqa: E731
        start = own["start"]
        optimizer = with_settings(spread(start["optimizer"]), self.settings_at(places, settings))
        own = own | {
            "each": {"losses": jnp.zeros_like(scores), "scores": scores},
            "step": jnp.ones_like(own["step"]),  # the one that is thrown away
            "round": own["round"] + 1,
            "memory": memory,
        }
        return replace(
            replicas, params=spread(start["params"]), optimizer=optimizer, model_state=spread(start["model"]), own=own
        )

    def coordinates(self, settings: "Mapping[str, jax.Array]") -> "jax.Array":
        """Returns where values lie in their ranges. Shape [member, setting]."""
        import jax.numpy as jnp

        columns = []
        for name, values in settings.items():
            scale = jnp.log if name in self.logarithmic else jnp.asarray
            low, high = (scale(jnp.float32(edge)) for edge in self.within[name])
            columns.append((scale(values.astype(jnp.float32)) - low) / (high - low))
        return jnp.stack(columns, axis=1)

    def settings_at(self, places: "jax.Array", settings: "Mapping[str, jax.Array]") -> "dict[str, jax.Array]":
        """Returns the values at coordinates, [member] each.

        Args:
          places: Shape [member, setting].
          settings: The values before, by name, whose dtypes they get.
        """
        import jax.numpy as jnp

        found = {}
        for (name, before), column in zip(settings.items(), places.T, strict=True):
            low, high = self.within[name]
            if name in self.logarithmic:
                value = low * (high / low) ** column
            else:
                value = low + column * (high - low)
            found[name] = jnp.clip(value, low, high).astype(before.dtype)
        return found

    def copies(self, own: Tree) -> "dict[str, jax.Array]":
        """Returns the scores of the round that is over."""
        return {"score": own["each"]["scores"]}

    def __str__(self) -> str:
        return f"{super().__str__()}, in rounds of {self.every} steps"
