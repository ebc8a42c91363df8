"""Elastic averaging: each replica moves towards a center, and the center towards the replicas' mean."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import SECTION, STEPS, Exchange, Replicas, Tree
from jaxpar.exchange.traffic import Traffic

if TYPE_CHECKING:
    from jaxpar.exchange.replica_mesh import ReplicaMesh


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
