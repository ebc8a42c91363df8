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

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.replica_mesh import ReplicaMesh

SCORE_SHARE = 0.2  # last share of a round whose losses are averaged


@dataclass(frozen=True)
class SearchSpace:
    """Converts settings to coordinates in [0, 1] and back.

    Attributes:
      within: Lowest and highest value of each setting.
      logarithmic: Settings whose coordinate is the position of their logarithm.
    """

    within: Mapping[str, tuple[float, float]]
    logarithmic: tuple[str, ...]

    def coordinates(self, settings: "Mapping[str, jax.Array]") -> "jax.Array":
        """Returns the positions of values, [member] each, in their ranges. Shape [member, setting]."""
        import jax.numpy as jnp

        columns = []
        for name, values in settings.items():
            scale = jnp.log if name in self.logarithmic else jnp.asarray
            low, high = (scale(jnp.float32(edge)) for edge in self.within[name])
            columns.append((scale(values.astype(jnp.float32)) - low) / (high - low))
        return jnp.stack(columns, axis=1)

    def settings(self, places: "jax.Array", previous: "Mapping[str, jax.Array]") -> "dict[str, jax.Array]":
        """Returns the values of settings at coordinates, [member] each.

        Args:
          places: Coordinates. Shape [member, setting].
          previous: The previous values, by name; the new values get their dtypes.
        """
        import jax.numpy as jnp

        result = {}
        for (name, values), column in zip(previous.items(), places.T, strict=True):
            low, high = self.within[name]
            if name in self.logarithmic:
                value = low * (high / low) ** column
            else:
                value = low + column * (high - low)
            result[name] = jnp.clip(value, low, high).astype(values.dtype)
        return result


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
        from jaxpar.optim.step_inputs import with_settings

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
    return max(1, int(SCORE_SHARE * every))


@dataclass(frozen=True, kw_only=True)
class Evolution(Rounds):
    """A genetic algorithm over settings, following Young et al. 2015, doi:10.1145/2834892.2834896.

    After each round the best `share` of the members keep their settings (elitism), and train again. Every other member
    becomes a child of two parents; a parent is the better of two members drawn at random (tournament). The child takes
    each setting from either parent (uniform crossover), and adds a normal number times `spread` (mutation), clipped to
    the range.

    Attributes:
      name: evolution (the best settings survive, others become children of the better ones).
      share: Share of the members that survive, at least one member.
      spread: Standard deviation of a mutation, as a share of the range.
    """

    name: str = "evolution"
    share: float = 0.2
    spread: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, "", {"share": (0.0, 0.5), "spread": (0.0, 1.0)})

    @property
    def survivors(self) -> int:
        """The number of members that keep their settings."""
        return max(1, int(self.share * self.members))

    def remember(self, places: "jax.Array") -> Tree:
        """Returns nothing: the search has no state beyond the members."""
        return ()

    def propose(
        self, places: "jax.Array", scores: "jax.Array", memory: Tree, key: "jax.Array"
    ) -> "tuple[jax.Array, Tree]":
        """Returns the settings of the survivors, and of children in place of the others; see `Rounds.propose`."""
        import jax
        import jax.numpy as jnp

        members, settings = places.shape
        rank = jnp.argsort(jnp.argsort(scores))  # 0 is the best
        draw, cross, mutate = jax.random.split(key, 3)
        rivals = jax.random.randint(draw, (members, 2, 2), 0, members)  # [child, parent, rival]
        parents = jnp.take_along_axis(rivals, jnp.argmin(rank[rivals], -1)[..., None], -1)[..., 0]
        from_mother = jax.random.bernoulli(cross, 0.5, (members, settings))
        children = jnp.where(from_mother, places[parents[:, 0]], places[parents[:, 1]])
        children = jnp.clip(children + self.spread * jax.random.normal(mutate, places.shape), 0.0, 1.0)
        return jnp.where((rank < self.survivors)[:, None], places, children), memory


@dataclass(frozen=True, kw_only=True)
class Swarm(Rounds):
    """Particle swarm optimization (Kennedy and Eberhart 1995) of settings.

    For a member at x with velocity v, its best position p so far and the best position g of all members:

        v <- inertia v + pull r1 (p - x) + pull r2 (g - x)        x <- x + v

    r1 and r2 are drawn from [0, 1) for each member and setting. The defaults are Clerc and Kennedy's constriction
    (2002, IEEE Trans. Evol. Comput. 6: 58-73). A member that would leave a range stops at its edge.

    Attributes:
      name: swarm (settings move towards each member's best, and the best of all).
      inertia: Factor of the old velocity.
      pull: Weight of each of the two best positions.
    """

    name: str = "swarm"
    inertia: float = 0.7298
    pull: float = 1.49618

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, "", {"inertia": (0.0, 1.0), "pull": (0.0, 4.0)})

    def remember(self, places: "jax.Array") -> Tree:
        """Returns velocities of 0, and each member's best position with a score of infinity."""
        import jax.numpy as jnp

        return {"velocity": jnp.zeros_like(places), "best": places, "score": jnp.full(len(places), jnp.inf)}

    def propose(
        self, places: "jax.Array", scores: "jax.Array", memory: Tree, key: "jax.Array"
    ) -> "tuple[jax.Array, Tree]":
        """Returns the next positions of all members; see `Rounds.propose`."""
        import jax
        import jax.numpy as jnp

        better = scores < memory["score"]
        best = jnp.where(better[:, None], places, memory["best"])
        score = jnp.where(better, scores, memory["score"])
        r1, r2 = jax.random.uniform(key, (2, *places.shape))
        attraction = r1 * (best - places) + r2 * (best[jnp.argmin(score)] - places)
        velocity = self.inertia * memory["velocity"] + self.pull * attraction
        position = places + velocity
        clipped = jnp.clip(position, 0.0, 1.0)
        velocity = jnp.where(position == clipped, velocity, 0.0)
        return clipped, {"velocity": velocity, "best": best, "score": score}
