"""Settings that change the speed and memory of a step, but not the function that it computes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse, suggest
from jaxpar.mesh.xla import Preset
from jaxpar.models.settings.computing import POLICIES, Precision

DTYPES = {"fp32": None, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings that change the speed and memory of a step, but not the function that it computes.

    Attributes:
      accumulate: Number of microbatches per step, whose gradients are summed before the update.
      precision: `fp32`, `bf16`, or a table as in a job, {"compute": "bf16", "allow": ["Router.*"]}: see `Precision`.
      remat: Rematerialization policy, one of `jaxpar.models.settings.computing.POLICIES`.
      offload: Whether the optimizer state is in host memory between steps.
      collectives: `overlapped` sets the XLA options of `jaxpar.mesh.xla` on several GPUs, which overlap more
        communication with compute; `plain` sets none.
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
        """Parses a [precision] table; any other value is returned for `Precision` to validate."""
        if not isinstance(self.precision, Mapping):
            return self.precision
        names = [field.name for field in dataclasses.fields(Precision)]
        if wrong := [key for key in self.precision if key not in names]:
            raise refuse(
                f"precision with {wrong[0]!r:.60}",
                rule=f"a precision has {', '.join(names)}",
                fix='precision={"compute": "bf16", "allow": ["Router.*"]}',
            )
        table: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in self.precision.items()}
        return Precision(**table)

    @property
    def dtype(self) -> Any:
        """The matmul dtype, or None for the model's own."""
        return DTYPES[self.matmuls.compute]

    def __post_init__(self):
        object.__setattr__(self, "precision", self._precision())
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise refuse(f"accumulate={self.accumulate!r}", rule="a positive whole number", fix="accumulate=1")
        if not isinstance(self.remat, str) or self.remat not in POLICIES:
            raise refuse(
                f"remat={self.remat!r}",
                rule=f"remat is one of {', '.join(POLICIES)}",
                fix=suggest(str(self.remat), POLICIES),
            )
        if self.collectives not in (presets := get_args(Preset)):
            raise refuse(
                f"collectives={self.collectives!r:.60}",
                rule=f"collectives is one of {', '.join(presets)}",
                fix=suggest(str(self.collectives), presets),
            )
        _ = self.matmuls  # refuses an invalid precision


def are_finite(params: object) -> jax.Array:
    """Whether all numbers of all arrays are finite. Shape [], bool."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]).all()
