"""Settings that change the speed and memory of a step, and not its meaning."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax.numpy as jnp

from jaxpar.errors import nearest, refuse
from jaxpar.mesh.preset import Preset
from jaxpar.models.settings.computing import POLICIES, Precision

DTYPES = {"fp32": None, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings that change the speed and memory of a step, and not its meaning.

    Attributes:
      accumulate: Microbatches per step; their gradients are summed before the update.
      precision: `fp32`, `bf16`, or as a job has it, {"compute": "bf16", "allow": ["Router.*"]}: see `Precision`.
      remat: What the backward pass keeps, one of `jaxpar.models.settings.computing.POLICIES`.
      offload: Keep the optimizer state in host memory between steps.
      collectives: overlapped tells XLA of several GPUs what `jaxpar.mesh.preset` says, so that less of their
        communication is waited for; plain tells it nothing.
    """

    accumulate: int = 1
    precision: Precision | Mapping[str, Any] | str = "fp32"
    remat: str = "none"
    offload: bool = False
    collectives: Preset = "overlapped"

    @property
    def matmuls(self) -> Precision:
        """The precision of matmuls."""
        return self.precision if isinstance(self.precision, Precision) else Precision(self.precision)  # pyright: ignore

    def _precision(self) -> Precision | Any:
        """Returns the precision that a table says, or what there is, to be checked by `Precision`."""
        if not isinstance(self.precision, Mapping):
            return self.precision
        known = [field.name for field in dataclasses.fields(Precision)]
        if wrong := [key for key in self.precision if key not in known]:
            raise refuse(
                f"precision with {wrong[0]!r:.60}",
                rule=f"a precision has {', '.join(known)}",
                fix='precision={"compute": "bf16", "allow": ["Router.*"]}',
            )
        given: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in self.precision.items()}
        return Precision(**given)

    @property
    def dtype(self) -> Any:
        """What matmuls run in, or None for what the model says."""
        return DTYPES[self.matmuls.compute]

    def __post_init__(self):
        object.__setattr__(self, "precision", self._precision())
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise refuse(f"accumulate={self.accumulate!r}", rule="a positive whole number", fix="accumulate=1")
        if not isinstance(self.remat, str) or self.remat not in POLICIES:
            raise refuse(
                f"remat={self.remat!r}",
                rule=f"remat is one of {', '.join(POLICIES)}",
                fix=nearest(str(self.remat), POLICIES),
            )
        if self.collectives not in (known := get_args(Preset)):
            raise refuse(
                f"collectives={self.collectives!r:.60}",
                rule=f"collectives is one of {', '.join(known)}",
                fix=nearest(str(self.collectives), known),
            )
        _ = self.matmuls  # refuses one that is none
