"""Model averaging: every N steps replicas take the mean of their parameters, or move towards a center (EASGD).

An ensemble's replicas never synchronize; evaluation averages their predictions. In DiLoCo the parameter change since
the last sync round is the outer optimizer's gradient:

    anchor ──► each replica makes `every` steps of its own ──► anchor - mean(replicas) ──► outer optimizer ──► anchor
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import NO_MODEL, SECTION, STEPS, Exchange, Replicas, Tree, check_algorithm
from jaxpar.mesh.collective import ShardShape, Traffic

if TYPE_CHECKING:
    import optax

    from jaxpar.exchange.replica_mesh import ReplicaMesh

_HELD = "optimizer/"  # prefix of the cause of an optimizer's traffic


@dataclass(frozen=True, kw_only=True)
class Local(Exchange):
    """Local SGD, also called model averaging (Stich 2019, arXiv:1805.09767; Lin et al. 2020, arXiv:1808.07217).

    With `every=1`, plain SGD and equally many tokens on each replica, it equals synchronous SGD.

    Attributes:
      name: local (every N steps replicas take the mean of their parameters).
      every: Number of steps from one sync round to the next.
      optimizer: "kept" if each replica keeps its optimizer's averages, such as momentum; "averaged" if replicas take
        the mean of these too.
      algorithm: The all-reduce: ring, halving, butterfly, tree or two_levels; "" is XLA's.
    """

    name: str = "local"
    every: int = 20
    optimizer: Literal["kept", "averaged"] = "kept"
    algorithm: str = ""
    replicas_differ = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS)})
        check_algorithm(self.algorithm)

    @property
    def leaves_optimizers(self) -> bool:
        """Whether each replica keeps its optimizer's averages."""
        return self.optimizer == "kept"

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Sets all replicas to the mean of their parameters."""
        averaged = dataclasses.replace(replicas, params=between.spread(between.mean(replicas.params, self.algorithm)))
        if self.optimizer == "kept":
            return averaged
        return dataclasses.replace(averaged, opt_state=between.for_optimizer.average(replicas.opt_state))

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the parameters per sync round."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas, every=self.every, algorithm=self.algorithm)

    def optimizer_traffic(self, opt_state: Mapping[str, ShardShape], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the optimizer's averages, if they are averaged; its counts are not sent."""
        import jax.numpy as jnp

        from jaxpar.exchange.replica_mesh import mean_traffic

        if self.optimizer == "kept":
            return ()
        floats = {f"{_HELD}{path}": part for path, part in opt_state.items() if jnp.issubdtype(part.dtype, jnp.inexact)}
        return mean_traffic(floats, replicas, every=self.every)

    def explain(self, sent: Iterable[Traffic]) -> str:
        """Describes in a sentence how replicas synchronize, and their traffic as far as the optimizer's is known."""
        sent = tuple(sent)
        complete = self.optimizer == "kept" or any(traffic.collective.cause.startswith(_HELD) for traffic in sent)
        return super().explain(sent) + ("" if complete else ", and the optimizer's averages on top")


# An ensemble: replicas never synchronize, and evaluation averages their predictions.


@dataclass(frozen=True, kw_only=True)
class Ensemble(Exchange):
    """Models that train in parallel from the same parameters, each on other examples and with other dropout masks.

    `evaluate` runs all models on all examples, and computes the loss of the mean of their outputs.

    Attributes:
      name: ensemble (replicas never synchronize; evaluation averages their predictions).
    """

    name: str = "ensemble"
    replicas_differ = True
    averages_predictions = True
    global_model = NO_MODEL


@dataclass(frozen=True, kw_only=True)
class Easgd(Exchange):
    """Elastic averaging SGD (Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, equations 5 and 6).

    A sync round sets each replica w to w - alpha (w - center), and the center to (1 - beta) center + beta mean(w), with
    the replicas' old w. In the paper, beta is alpha times the number of replicas and alpha is the learning rate times
    rho; here alpha does not depend on the rate. Here a sync round follows the replicas' updates; in the paper's
    algorithm 1 it precedes the gradient step. With alpha 0 the replicas are independent.

    Attributes:
      name: easgd (every N steps each replica is drawn to a center, and the center to their mean).
      every: Number of steps from one sync round to the next.
      alpha: Fraction of its distance to the center by which a replica moves.
      beta: Fraction of its distance to the replicas' mean by which the center moves.
    """

    name: str = "easgd"
    every: int = 10
    alpha: float = 0.1
    beta: float = 0.9
    replicas_differ = True
    global_model = "center"

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS), "alpha": (0.0, 1.0), "beta": (0.0, 1.0)})

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the center, which is the initial parameters."""
        return {"center": params}

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Moves the replicas and the center towards each other."""
        import jax

        center = replicas.exchange_state["center"]
        mean = between.mean(replicas.params)
        params = jax.tree.map(lambda w, c: w - self.alpha * (w - c), replicas.params, between.spread(center))
        center = jax.tree.map(lambda c, m: (1 - self.beta) * c + self.beta * m, center, mean)
        return dataclasses.replace(replicas, params=params, exchange_state={"center": center})

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the parameters per sync round."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas, every=self.every)


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

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the parameters per sync round."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas, every=self.every, algorithm=self.algorithm)
