"""DiLoCo: the way that replicas have gone since they met is a gradient for an outer optimizer.

anchor ──► each replica makes `every` steps of its own ──► anchor - mean(replicas) ──► outer optimizer ──► anchor
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import Exchange, Replicas, Tree
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS, check_algorithm

if TYPE_CHECKING:
    import optax

    from jaxpar.exchange.between import Between


@dataclass(frozen=True, kw_only=True)
class Outer(Exchange):
    """Settings of an outer optimizer, by default SGD with Nesterov's momentum.

    Attributes:
      lr: The outer optimizer's learning rate.
      momentum: Its momentum; 0 for none.
      nesterov: Whether its momentum is Nesterov's.
      outer: In Python, any optax chain in place of these three.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    outer: Any = None

    @property
    def chain(self) -> "optax.GradientTransformation":
        """The outer optimizer."""
        import optax

        return self.outer or optax.sgd(self.lr, self.momentum or None, nesterov=self.nesterov and self.momentum > 0)

    def check(self) -> None:
        """Refuses settings that are none.

        Raises:
          JaxparError: If a number is out of its range, or `outer` is no optax chain.
        """
        check_ranges(self, SECTION, {"lr": (0.0, float("inf")), "momentum": (0.0, 1.0)}, below=("lr", "momentum"))
        if self.outer is not None and not all(callable(getattr(self.outer, name, None)) for name in ("init", "update")):
            raise refuse(
                f"outer={self.outer!r:.60}",
                rule="an outer optimizer is an optax chain",
                fix="outer=optax.sgd(0.7, 0.9, nesterov=True), or leave it out",
            )


def stepped(chain: "optax.GradientTransformation", anchor: Tree, mean: Tree, state: Tree) -> tuple[Tree, Tree]:
    """Returns the anchor and the outer optimizer's state after a step along the way that replicas have gone.

    The update is added to the mean as what it differs by from going all the way: where it goes all the way (a rate of
    1, no momentum) the anchor is the mean to the bit.
    """
    import jax
    import jax.numpy as jnp

    way = jax.tree.map(jnp.subtract, anchor, mean)
    updates, state = chain.update(way, state, anchor)
    return jax.tree.map(lambda mean, update, way: mean + (update + way).astype(mean.dtype), mean, updates, way), state


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Outer):
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105): any inner optimizer, and an outer one at every meeting.

    With a rate of 1 and no momentum it is `local`. The inner optimizer's state is kept by each replica.

    Attributes:
      name: diloco (every so many steps the replicas' mean is a gradient for an outer optimizer).
      every: Steps from one meeting to the next.
      lr: The outer optimizer's learning rate.
      momentum: Its momentum; 0 for none.
      nesterov: Whether its momentum is Nesterov's.
      outer: In Python, any optax chain in place of these three.
      algorithm: By whose messages they average: ring, halving, butterfly, tree or two_levels; "" is XLA's all-reduce.
    """

    name: str = "diloco"
    every: int = 20
    algorithm: str = ""
    differ = True
    global_model = "anchor"

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS)})
        self.check()
        check_algorithm(self.algorithm)

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the anchor, with the parameters that all begin with, and the outer optimizer's state."""
        return {"anchor": params, "outer": self.chain.init(params)}

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the replicas, all at the new anchor."""
        mean = between.mean(replicas.params, self.algorithm)
        anchor, state = stepped(self.chain, replicas.own["anchor"], mean, replicas.own["outer"])
        params = between.spread(anchor)
        return dataclasses.replace(replicas, params=params, own={"anchor": anchor, "outer": state})

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the all-reduce of parameters."""
        from jaxpar.exchange.between import averaged

        return averaged(shards, replicas, every=self.every, algorithm=self.algorithm)
