"""Settings that change the speed and memory of a step, and not its meaning."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxpar.errors import nearest, refuse
from jaxpar.models.remat import POLICIES

DTYPES = {"fp32": None, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtype of matmuls, and which of them may have another. `"bf16"` alone stands for `{compute = "bf16"}`.

    Attributes:
      compute: fp32, or bf16: matmuls in bfloat16, parameters and optimizer in float32.
      allow: Matmuls that may stay in float32 although bf16 was asked for: "Router.__call__", "moe.py:41" or patterns
        such as "Router.*", by the names under which a refusal and `jaxpar inspect` list them.
    """

    SHORT: ClassVar[str] = "compute"  # the key that a text in place of a job's table stands for

    compute: Literal["fp32", "bf16"] = "fp32"
    allow: tuple[str, ...] = ()

    def __post_init__(self):
        if not isinstance(self.compute, str) or self.compute not in DTYPES:
            raise refuse(
                f"precision={self.compute!r}",
                rule=f"precision is one of {', '.join(DTYPES)}",
                fix=nearest(str(self.compute), DTYPES),
            )
        if isinstance(self.allow, str) or not all(isinstance(each, str) for each in self.allow):
            raise refuse(f"allow={self.allow!r:.60}", rule="allow is a list of patterns", fix='allow=("Router.*",)')
        if self.allow and not DTYPES[self.compute]:
            raise refuse(
                f"precision fp32 with allow={list(self.allow)}",
                rule="allow names what stays in float32 where all else is computed in bf16",
                fix='compute="bf16", or allow left out',
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings that change the speed and memory of a step, and not its meaning.

    Attributes:
      accumulate: Microbatches per step; their gradients are summed before the update.
      precision: `fp32`, `bf16`, or a `Precision`.
      remat: What the backward pass keeps, one of `jaxpar.models.remat.POLICIES`.
      offload: Keep the optimizer state in host memory between steps.
    """

    accumulate: int = 1
    precision: Precision | str = "fp32"
    remat: str = "none"
    offload: bool = False

    @property
    def matmuls(self) -> Precision:
        """The precision of matmuls."""
        return self.precision if isinstance(self.precision, Precision) else Precision(self.precision)  # pyright: ignore

    @property
    def dtype(self) -> Any:
        """What matmuls run in, or None for what the model says."""
        return DTYPES[self.matmuls.compute]

    def __post_init__(self):
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise refuse(f"accumulate={self.accumulate!r}", rule="a positive whole number", fix="accumulate=1")
        if not isinstance(self.remat, str) or self.remat not in POLICIES:
            raise refuse(
                f"remat={self.remat!r}",
                rule=f"remat is one of {', '.join(POLICIES)}",
                fix=nearest(str(self.remat), POLICIES),
            )
        _ = self.matmuls  # refuses one that is none
