"""Model averaging: every so many steps all replicas take the mean of their parameters."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import Exchange, Replicas
from jaxpar.exchange.part import Part
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS, check_algorithm

if TYPE_CHECKING:
    from jaxpar.exchange.between import Between

_HELD = "optimizer/"  # begins the cause of what is sent of an optimizer


@dataclass(frozen=True, kw_only=True)
class Local(Exchange):
    """Local SGD, also called model averaging (Stich 2019, arXiv:1805.09767; Lin et al. 2020, arXiv:1808.07217).

    With `every=1`, plain SGD and as many tokens on each replica, a step is a synchronous one.

    Attributes:
      name: local (every so many steps replicas take the mean of their parameters).
      every: Steps from one meeting to the next.
      optimizer: Whether an optimizer's averages, such as momentum, are "kept" by each replica or "averaged" too.
      algorithm: By whose messages they average: ring, halving, butterfly, tree or two_levels; "" is XLA's all-reduce.
    """

    name: str = "local"
    every: int = 20
    optimizer: Literal["kept", "averaged"] = "kept"
    algorithm: str = ""
    differ = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS)})
        check_algorithm(self.algorithm)

    @property
    def leaves_optimizers(self) -> bool:
        """Whether the optimizers' averages are kept by each replica."""
        return self.optimizer == "kept"

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the replicas, all with the mean of their parameters."""
        met = dataclasses.replace(replicas, params=between.spread(between.mean(replicas.params, self.algorithm)))
        if self.optimizer == "kept":
            return met
        return dataclasses.replace(met, optimizer=between.held.averaged(replicas.optimizer))

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the all-reduce of parameters."""
        from jaxpar.exchange.between import averaged

        return averaged(shards, replicas, every=self.every, algorithm=self.algorithm)

    def sends_held(self, held: Mapping[str, Part], replicas: int) -> tuple[Sent, ...]:
        """Returns the all-reduce of an optimizer's averages, if they are averaged; what it counts stays."""
        import jax.numpy as jnp

        from jaxpar.exchange.between import averaged

        if self.optimizer == "kept":
            return ()
        floats = {f"{_HELD}{path}": part for path, part in held.items() if jnp.issubdtype(part.dtype, jnp.floating)}
        return averaged(floats, replicas, every=self.every)

    def explain(self, sent: Iterable[Sent]) -> str:
        """Returns in a sentence how replicas agree, and what that sends, as far as the optimizer is known."""
        sent = tuple(sent)
        known = self.optimizer == "kept" or any(each.collective.cause.startswith(_HELD) for each in sent)
        return super().explain(sent) + ("" if known else ", and the optimizer's averages on top")
