"""Settings that change the speed and memory of a step, and not its meaning."""

import dataclasses

import jax.numpy as jnp

from jaxpar.errors import nearest, refuse
from jaxpar.models.remat import POLICIES

PRECISIONS = {"fp32": None, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings that change the speed and memory of a step, and not its meaning.

    Attributes:
      accumulate: Microbatches per step; their gradients are summed before the update.
      precision: `fp32`, or `bf16`: products in bfloat16, parameters and optimizer in float32.
      remat: What the backward pass keeps, one of `jaxpar.models.remat.POLICIES`.
      offload: Keep the optimizer state in host memory between steps.
    """

    accumulate: int = 1
    precision: str = "fp32"
    remat: str = "none"
    offload: bool = False

    def __post_init__(self):
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise refuse(f"accumulate={self.accumulate!r}", rule="a positive whole number", fix="accumulate=1")
        for key, known in (("precision", PRECISIONS), ("remat", POLICIES)):
            if not isinstance(getattr(self, key), str) or getattr(self, key) not in known:
                raise refuse(
                    f"{key}={getattr(self, key)!r}",
                    rule=f"{key} is one of {', '.join(known)}",
                    fix=nearest(str(getattr(self, key)), known),
                )
