"""Elastic averaging: each replica is drawn to a center, and the center to the replicas' mean."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import Exchange, Replicas, Tree
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS

if TYPE_CHECKING:
    from jaxpar.exchange.between import Between


@dataclass(frozen=True, kw_only=True)
class Easgd(Exchange):
    """Elastic averaging SGD (Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, equations 5 and 6).

    At a meeting each replica w becomes w - alpha (w - center), and the center (1 - beta) center + beta mean(w), of the
    replicas before it. The paper's beta is alpha times their number, and its alpha the learning rate times rho: here it
    stays as it is where the rate changes. A meeting is after the replicas' own updates; the paper's algorithm 1 draws
    before the gradient step. With alpha 0 no replica hears of another.

    Attributes:
      name: easgd (every so many steps each replica is drawn to a center, and the center to their mean).
      every: Steps from one meeting to the next.
      alpha: How much of its way to the center a replica goes.
      beta: How much of its way to their mean the center goes.
    """

    name: str = "easgd"
    every: int = 10
    alpha: float = 0.1
    beta: float = 0.9
    differ = True
    global_model = "center"

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS), "alpha": (0.0, 1.0), "beta": (0.0, 1.0)})

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the center, with the parameters that all begin with."""
        return {"center": params}

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns replicas and center after each has been drawn to the other."""
        import jax

        center = replicas.own["center"]
        mean = between.mean(replicas.params)
        params = jax.tree.map(lambda w, c: w - self.alpha * (w - c), replicas.params, between.spread(center))
        center = jax.tree.map(lambda c, m: (1 - self.beta) * c + self.beta * m, center, mean)
        return dataclasses.replace(replicas, params=params, own={"center": center})

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the all-reduce of parameters."""
        from jaxpar.exchange.between import averaged

        return averaged(shards, replicas, every=self.every)
