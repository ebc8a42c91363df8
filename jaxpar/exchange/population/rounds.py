"""Searches in rounds: members restart training in each round, with settings proposed from earlier scores.

    round 0: every steps ─► scores ─► propose ─► round 1, from the initial parameters ─► scores ─► propose ─► ...

A member's score is its mean training loss over the last part of a round; scores are comparable because all members see
the same examples. The sync round comes after the first step of the next round: it reads the scores, discards that
step's update, and resets the members. So a run ends with the trained models of its last round, to evaluate and save.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import STEPS, Replicas, Tree
from jaxpar.exchange.population.population import Population
from jaxpar.exchange.population.search_space import SearchSpace

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.replica_mesh import ReplicaMesh

SCORED = 0.2  # last share of a round whose losses are averaged


@dataclass(frozen=True, kw_only=True)
class Rounds(Population):
    """A search over settings in rounds; a subclass proposes the settings of the next round.

    It works on the coordinates of a `SearchSpace`. Draws depend on `seed`, the round and the member, so a resumed run
    repeats them.

    Attributes:
      name: rounds.
      values: Initial values of each setting, one per member.
      every: Number of steps of a round.
      within: Lowest and highest value of each setting, for all settings in `values`.
      logarithmic: Settings whose ranges are logarithmic.
      seed: Seed of the random draws.
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
        """Returns the initial state of the search, which each round updates: arrays [member] or [member, setting].

        Args:
          places: Coordinates of the members' settings. Shape [member, setting].
        """

    @abstractmethod
    def propose(
        self, places: "jax.Array", scores: "jax.Array", memory: Tree, key: "jax.Array"
    ) -> "tuple[jax.Array, Tree]":
        """Returns the coordinates of the next round, [member, setting] in [0, 1], and the search's state.

        Args:
          places: Coordinates of the finished round. Shape [member, setting].
          scores: Scores of its members; lower is better, infinity if a loss was not finite. Shape [member].
          memory: The search's state, from `remember` or the round before.
          key: PRNG key.
        """

    def sync_round(self, step: int) -> int:
        """Returns 1 for the first step of each round except round 0, else 0."""
        return int(step > 1 and step % self.every == 1)

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the sums of losses, the counts of steps and rounds, the search's state, and initial parameters."""
        import jax.numpy as jnp

        values = {name: jnp.asarray(values, jnp.float32) for name, values in self.values.items()}
        places = SearchSpace(self.within, self.logarithmic).coordinates(values)
        per_member = {"losses": jnp.zeros(replicas), "scores": jnp.zeros(replicas)}
        counts = {"step": jnp.zeros((), jnp.int32), "round": jnp.zeros((), jnp.int32)}
        return {"each": per_member, **counts, "memory": self.remember(places), "start": {"params": params}}

    def begin(self, replicas: Replicas) -> Replicas:
        """Returns the members with their settings, and stores the state with which each round begins."""
        import jax

        entry = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
        start = {
            **replicas.exchange_state["start"],
            "optimizer": entry(replicas.opt_state),
            "model": entry(replicas.model_state),
        }
        return super().begin(replace(replicas, exchange_state=replicas.exchange_state | {"start": start}))

    def observe(self, state: dict[str, Any], losses: "jax.Array") -> Tree:
        """Adds the losses of one more step of the round to the exchange's state."""
        import jax.numpy as jnp

        step = state["step"] + 1
        is_scored = (step > self.every - _scored_steps(self.every)) & (step <= self.every)
        per_member = state["each"] | {"losses": state["each"]["losses"] + jnp.where(is_scored, losses, 0.0)}
        return state | {"each": per_member, "step": step}

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Starts the members' next round, and discards the update of its first step."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.population.copying import replicate
        from jaxpar.optim.injected import with_settings

        state, space = replicas.exchange_state, SearchSpace(self.within, self.logarithmic)
        scores = replicate(state["each"]["losses"], between.mesh) / _scored_steps(self.every)
        scores = jnp.where(jnp.isfinite(scores), scores, jnp.inf)
        settings = {name: replicate(x, between.mesh) for name, x in self.settings(replicas.opt_state).items()}
        key = jax.random.fold_in(jax.random.key(self.seed), state["round"])
        places, memory = self.propose(space.coordinates(settings), scores, state["memory"], key)
        tile = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (self.members, *x.shape)), tree)  # noqa: E731
        start = state["start"]
        optimizer = with_settings(tile(start["optimizer"]), space.settings(places, settings))
        state = state | {
            "each": {"losses": jnp.zeros_like(scores), "scores": scores},
            "step": jnp.ones_like(state["step"]),  # the discarded step
            "round": state["round"] + 1,
            "memory": memory,
        }
        return replace(
            replicas,
            params=tile(start["params"]),
            opt_state=optimizer,
            model_state=tile(start["model"]),
            exchange_state=state,
        )

    def round_metrics(self, state: dict[str, Any]) -> "dict[str, jax.Array]":
        """Returns the scores of the finished round."""
        return {"score": state["each"]["scores"]}

    def __str__(self) -> str:
        return f"{super().__str__()}, in rounds of {self.every} steps"


def _scored_steps(every: int) -> int:
    """Returns the number of steps at the end of a round whose losses are averaged."""
    return max(1, int(SCORED * every))
