"""Population based training: every so many steps the worst members copy the best, and go on with other settings.

losses of a window ─► ranks ─► exploit: a worst takes all of a best ─► explore: its settings times 0.8 or 1.2
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import Replicas, Tree
from jaxpar.exchange.population.population import Population
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import STEPS

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.between import Between


@dataclass(frozen=True, kw_only=True)
class Pbt(Population):
    """Population based training (Jaderberg et al. 2017, arXiv:1711.09846), an evolutionary search.

    Exploit is the paper's truncation selection: a member among the worst `share` copies parameters, optimizer state,
    other state and settings of one that is drawn among the best `share`. Explore multiplies each of its settings by one
    of `factors`, drawn at random. A member's score is the mean of its training losses since the last meeting: all see
    the same examples, so these compare; the paper takes any score, such as one of held-out examples.

    Draws follow from `seed`, the number of the meeting and the member: a run that is resumed makes the same.

    Attributes:
      name: pbt (the worst members copy the best, and go on with other settings).
      values: Setting to the value with which each member begins.
      every: Steps from one meeting to the next.
      share: Of all members, those that copy, and those that may be copied; at least one each.
      factors: By one of which a setting of a copy is multiplied.
      within: Setting to the lowest and highest value that it may get.
      seed: Of the draws.
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
    def few(self) -> int:
        """How many copy, and how many may be copied."""
        return max(1, int(self.share * self.members))

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the sums of losses of a window, whose copy each member is, and how often they met."""
        import jax.numpy as jnp

        each = {"losses": jnp.zeros(replicas), "from": jnp.arange(replicas)}
        return {"each": each, "met": jnp.zeros((), jnp.int32)}

    def watched(self, own: Tree, losses: "jax.Array") -> Tree:
        """Returns the state of its own with the losses of one more step."""
        return own | {"each": own["each"] | {"losses": own["each"]["losses"] + losses}}

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the members after the worst have become copies of the best, with other settings."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.population.copied import copied, everywhere
        from jaxpar.optim.injected import with_settings

        own, mesh = replicas.own, between.mesh
        key = jax.random.fold_in(jax.random.key(self.seed), own["met"])
        source, copies = self.exploit(everywhere(own["each"]["losses"], mesh), key)
        params, optimizer, model_state = copied(
            (replicas.params, replicas.optimizer, replicas.model_state), source, mesh
        )
        settings = {name: everywhere(value, mesh) for name, value in self.settings(optimizer).items()}
        optimizer = with_settings(optimizer, self.explore(settings, copies, key))
        each = {"losses": jnp.zeros_like(own["each"]["losses"]), "from": source}
        own = {"each": each, "met": own["met"] + 1}
        return replace(replicas, params=params, optimizer=optimizer, model_state=model_state, own=own)

    def exploit(self, losses: "jax.Array", key: "jax.Array") -> "tuple[jax.Array, jax.Array]":
        """Returns whose copy each member becomes, its own number for most, and which become one; [member] each.

        Args:
          losses: Of each; one that is not finite is the worst.
          key: Of the draws among the best.
        """
        import jax
        import jax.numpy as jnp

        order = jnp.argsort(jnp.where(jnp.isfinite(losses), losses, jnp.inf))  # best first
        copies = jnp.argsort(order) >= self.members - self.few
        drawn = order[jax.random.randint(jax.random.fold_in(key, 0), (self.members,), 0, self.few)]
        return jnp.where(copies, drawn, jnp.arange(self.members)), copies

    def explore(
        self, settings: "Mapping[str, jax.Array]", copies: "jax.Array", key: "jax.Array"
    ) -> "dict[str, jax.Array]":
        """Returns the settings of all members, those of copies multiplied by one of the factors each.

        Args:
          settings: Name to its values, [member] each.
          copies: Which members are. Shape [member].
          key: Of the draws among the factors.
        """
        import jax
        import jax.numpy as jnp

        found = {}
        for place, (name, values) in enumerate(settings.items()):
            drawn = jax.random.randint(jax.random.fold_in(key, 1 + place), values.shape, 0, len(self.factors))
            other = jnp.clip(values * jnp.asarray(self.factors, values.dtype)[drawn], *self.within.get(name, ()))
            found[name] = jnp.where(copies, other, values)
        return found

    def copies(self, own: Tree) -> "dict[str, jax.Array]":
        """Returns whose copy each member became."""
        return {"from": own["each"]["from"]}

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the permutes of parameters; the optimizer's and other state come on top."""
        from jaxpar.exchange.population.copied import rotated

        return rotated(shards, replicas, self.members // replicas, every=self.every)

    def __str__(self) -> str:
        return f"{super().__str__()}, every {self.every} steps"


def check_factors(factors: tuple[float, ...]) -> None:
    """Refuses factors by which no setting can be multiplied.

    Raises:
      JaxparError: If there are none, or one is not positive.
    """
    if not factors or not all(0 < factor < float("inf") for factor in factors):
        raise refuse(
            f"factors = {factors!r:.200}",
            rule="a setting is multiplied by one of some positive numbers",
            fix="factors = [0.8, 1.2]",
        )
