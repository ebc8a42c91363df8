"""Model averaging: every N steps replicas take the mean of their parameters, or move towards a center (EASGD).

An ensemble's replicas never synchronize; evaluation averages their predictions.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import NO_MODEL, SECTION, STEPS, Exchange, Replicas, Tree, check_algorithm
from jaxpar.exchange.traffic import ShardShape, Traffic

if TYPE_CHECKING:
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

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the parameters per sync round."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas, every=self.every, algorithm=self.algorithm)

    def optimizer_traffic(self, opt_state: Mapping[str, ShardShape], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the optimizer's averages, if they are averaged; its counts are not sent."""
        import jax.numpy as jnp

        from jaxpar.exchange.replica_mesh import mean_traffic

        if self.optimizer == "kept":
            return ()
        floats = {
            f"{_HELD}{path}": part for path, part in opt_state.items() if jnp.issubdtype(part.dtype, jnp.floating)
        }
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

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce of the parameters per sync round."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas, every=self.every)
