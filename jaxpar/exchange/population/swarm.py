"""Particle swarm: each member's settings move towards the best that it has had, and the best of all members."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import Tree
from jaxpar.exchange.population.rounds import Rounds

if TYPE_CHECKING:
    import jax


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
