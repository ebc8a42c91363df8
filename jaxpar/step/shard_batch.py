"""A global batch becomes arrays where the layout wants them.

    numbers of any kind ─► rows that divide ─► arrays over data x fsdp, each process giving what is here of them

A batch divides by everything that splits it: the replicas, and the microbatches of a step or of a pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlacement:
    """The placement of a step's batches.

    Attributes:
      layout: Whose devices they go to.
      accumulate: Microbatches per step, one after the other.
    """

    layout: Layout
    accumulate: int = 1

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the batch on its devices; arrays that are there already are left alone.

        Raises:
          JaxparError: If an entry is no array of numbers, or its first dim does not split.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise refuse(
                f"a batch that is {'{}' if isinstance(batch, Mapping) else f'a {type(batch).__name__}'}",
                rule="a batch is a dict of arrays",
                fix='{"inputs": ..., "targets": ...}',
            )
        return {name: self._put(name, value) for name, value in batch.items()}

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the shape of a batch array with the sharding that it will have.

        Raises:
          JaxparError: If its first dim does not split.
        """
        if isinstance(value, jax.Array) or isinstance(getattr(value, "sharding", None), NamedSharding):
            return value
        self._check_rows(name, value)
        placed = self.layout.sharding(self.layout.batch_spec(value.shape))
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), sharding=placed)

    def _put(self, name: str, value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and len(value.sharding.device_set) == self.layout.devices:
            return value
        try:
            value = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise refuse(
                f"{name} in the batch: {error}",
                rule="a batch is a dict of arrays",
                fix=f"np.stack rows of one shape, or leave {name!r} out",
            ) from error
        if value.dtype.kind not in "biuf" and value.dtype != jnp.bfloat16:
            raise refuse(
                f"{name} in the batch has dtype {value.dtype}",
                rule="a batch holds numbers",
                fix=f"leave {name!r} out, or encode it",
            )
        self._check_rows(name, value)
        sharding = self.layout.sharding(self.layout.batch_spec(value.shape))
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])  # what is here of it

    def _check_rows(self, name: str, value: Any) -> None:
        ways = self.layout.replicas * self.accumulate * self.layout.microbatches
        rows = value.shape[0] if value.shape else 0
        if not rows or rows % ways:
            factors = {axis: self.layout.sizes[axis] for axis in self.layout.batch_axes}
            factors |= {"accumulate": self.accumulate, "microbatches": self.layout.microbatches}
            shown = " x ".join(f"{axis}={size}" for axis, size in factors.items() if size > 1) or "one device"
            raise refuse(
                f"{name} {list(value.shape)} in the batch has {rows} examples; {shown} needs a multiple of {ways}",
                rule="data x fsdp x accumulate (or microbatches of a pipeline) divides the global batch, the first dim "
                "of every array",
                fix=f"a global batch of {max(1, round(rows / ways)) * ways}",
            )
