"""A genetic algorithm: the best settings survive, and children of two parents replace all others."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import Tree
from jaxpar.exchange.population.rounds import Rounds

if TYPE_CHECKING:
    import jax


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
