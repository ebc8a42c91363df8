"""DiLoCo: the parameter change since the last sync round is the outer optimizer's gradient.

anchor ──► each replica makes `every` steps of its own ──► anchor - mean(replicas) ──► outer optimizer ──► anchor
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import SECTION, STEPS, Exchange, Replicas, Tree, check_algorithm
from jaxpar.exchange.traffic import Traffic

if TYPE_CHECKING:
    import optax

    from jaxpar.exchange.replica_mesh import ReplicaMesh


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer(Exchange):
    """Settings of an outer optimizer, by default SGD with Nesterov's momentum.

    Attributes:
      lr: The outer optimizer's learning rate.
      momentum: The outer momentum; 0 for none.
      nesterov: Whether the outer momentum is Nesterov's.
      outer: In Python, an optax chain that replaces these three settings.
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
        """Refuses invalid settings.

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


def outer_step(chain: "optax.GradientTransformation", anchor: Tree, mean: Tree, state: Tree) -> tuple[Tree, Tree]:
    """Applies the outer optimizer to the gradient anchor - mean; returns the new anchor and optimizer state.

    It computes the new anchor as mean + (update + gradient), so that with a rate of 1 and no momentum the anchor equals
    the mean bit for bit.
    """
    import jax
    import jax.numpy as jnp

    gradient = jax.tree.map(jnp.subtract, anchor, mean)
    updates, state = chain.update(gradient, state, anchor)
    return jax.tree.map(
        lambda mean, update, gradient: mean + (update + gradient).astype(mean.dtype), mean, updates, gradient
    ), state


@dataclass(frozen=True, kw_only=True)
class DiLoCo(OuterOptimizer):
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105): any inner optimizer, and an outer one at every sync round.

    With a rate of 1 and no momentum it is `local`. Each replica keeps its inner optimizer's state.

    Attributes:
      name: diloco (every N steps the replicas' mean is a gradient for an outer optimizer).
      every: Number of steps from one sync round to the next.
      lr: The outer optimizer's learning rate.
      momentum: The outer momentum; 0 for none.
      nesterov: Whether the outer momentum is Nesterov's.
      outer: In Python, an optax chain that replaces these three settings.
      algorithm: The all-reduce: ring, halving, butterfly, tree or two_levels; "" is XLA's.
    """

    name: str = "diloco"
    every: int = 20
    algorithm: str = ""
    replicas_differ = True
    global_model = "anchor"

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS)})
        self.check()
        check_algorithm(self.algorithm)

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the anchor, which is the initial parameters, and the outer optimizer's state."""
        return {"anchor": params, "outer": self.chain.init(params)}

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Sets all replicas to the new anchor."""
        mean = between.mean(replicas.params, self.algorithm)
        anchor, state = outer_step(
            self.chain, replicas.exchange_state["anchor"], mean, replicas.exchange_state["outer"]
        )
        params = between.spread(anchor)
        return dataclasses.replace(replicas, params=params, exchange_state={"anchor": anchor, "outer": state})

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the parameters per sync round."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas, every=self.every, algorithm=self.algorithm)
