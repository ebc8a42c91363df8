"""A global batch becomes arrays where the layout wants them.

    numbers of any kind ─► rows that divide ─► arrays over data x fsdp, each process giving what is here of them

A batch divides by everything that splits it: the replicas, and the microbatches of a step or of a pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout

FEW = 8  # arrays of more than one dim in a list: so many are views rather than examples


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
        """Returns the batch on its devices; arrays that are on the layout's mesh already are left alone.

        Raises:
          JaxparError: If an entry is no array of numbers, or its first dim does not split.
        """
        check_dict(batch)
        check_lists(batch)
        return {name: self._put(name, value) for name, value in batch.items()}

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the shape of a batch array with the sharding that it will have.

        Raises:
          JaxparError: If its first dim does not split.
        """
        if self._is_placed(value):
            self._check_placed(name, value)
            return value
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            value = _array(name, value)
        self._check_rows(name, value)
        placed = self.layout.sharding(self.layout.batch_spec(value.shape))
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), sharding=placed)

    def _put(self, name: str, value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and self._is_placed(value):
            self._check_placed(name, value)
            return value
        if here := isinstance(value, jax.Array) and self._is_here(value):  # on another mesh, whose axes may be Explicit
            _check_numbers(name, value)
        else:
            value = _array(name, value)
        self._check_rows(name, value)
        sharding = self.layout.sharding(self.layout.batch_spec(value.shape))
        if here:
            return jax.device_put(value, sharding)
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])  # what is here of it

    def _is_placed(self, value: Any) -> bool:
        """Returns whether an array, or its shape, is on the mesh of the layout."""
        sharding = getattr(value, "sharding", None)
        return isinstance(sharding, NamedSharding) and sharding.mesh == self.layout.on

    def _is_here(self, value: jax.Array) -> bool:
        """Returns whether an array is on the devices of the layout, all of them."""
        devices = value.sharding.device_set
        return len(devices) == self.layout.devices and devices == set(self.layout.on.devices.flat)

    def _check_placed(self, name: str, value: Any) -> None:
        """Refuses an array whose examples the microbatches do not divide; which devices have which is the user's."""
        if self.accumulate * self.layout.microbatches > 1:
            self._check_rows(name, value)

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


def check_dict(batch: Any) -> None:
    """Refuses a batch that is no dict of something.

    Raises:
      JaxparError: If it is another collection of arrays, or has no entry.
    """
    if not isinstance(batch, Mapping) or not batch:
        fields = "batch._asdict(): " if hasattr(batch, "_asdict") else "vars(batch): " if is_dataclass(batch) else ""
        raise refuse(
            f"a batch that is {'{}' if isinstance(batch, Mapping) else f'a {type(batch).__name__}'}",
            rule="a batch is a dict of arrays",
            fix=f'{fields}{{"inputs": ..., "targets": ...}}',
        )


def _array(name: str, value: Any) -> np.ndarray:
    """Returns an entry of a batch as an array of numbers that JAX has."""
    if isinstance(value, Mapping):
        raise refuse(
            f"{name} in the batch is a dict of {', '.join(map(str, value))}",
            rule="a batch is a dict of arrays, and no dict is inside of it",
            fix='flax.traverse_util.flatten_dict(batch, sep="/"), and in the loss unflatten_dict(batch, sep="/")',
        )
    if isinstance(value, jax.Array):
        _check_numbers(name, value)
    try:
        value = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor of PyTorch's that wants a gradient
        raise refuse(
            f"{name} in the batch: {error}",
            rule="a batch is a dict of arrays",
            fix=f"np.stack rows of one shape, or leave {name!r} out",
        ) from error
    if value.dtype.kind not in "biufc" and value.dtype != jnp.bfloat16:
        raise refuse(
            f"{name} in the batch has dtype {value.dtype}",
            rule="a batch holds numbers",
            fix=f"leave {name!r} out, or encode it",
        )
    _check_range(name, value)
    return value


def _check_numbers(name: str, value: jax.Array) -> None:
    """Refuses random keys."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise refuse(
            f"{name} in the batch has random keys",
            rule="a batch holds numbers; a loss of (model, batch, key) is given a key in every step",
            fix=f"that key, or jax.random.key_data({name}), and in the loss jax.random.wrap_key_data",
        )


def _check_range(name: str, value: np.ndarray) -> None:
    """Refuses whole numbers that JAX would cut to 32 bits, and to others, in silence."""
    kept = jax.dtypes.canonicalize_dtype(value.dtype)
    if kept == value.dtype or value.dtype.kind not in "iu" or not value.size:
        return
    low, high = value.min(), value.max()
    if low < np.iinfo(kept).min or high > np.iinfo(kept).max:
        raise refuse(
            f"{name} in the batch has {high if high > np.iinfo(kept).max else low}",
            rule=f"whole numbers fit into {kept}, in which a step computes",
            fix=f"leave {name!r} out, or number what it names from 0",
        )


def check_lists(batch: Mapping[str, Any]) -> None:
    """Refuses a list of arrays of all examples in the place of an array.

    A list of rows passes: as many of them as the other arrays have examples.

    Raises:
      JaxparError: With its name, and a batch without it.
    """
    counts = {tuple(value.shape)[:1] for value in batch.values() if hasattr(value, "shape")}
    for name, value in batch.items():
        if isinstance(value, list | tuple) and value and _is_of_all(value, counts):
            number = f"{name}_{{i}}"
            shapes = ", ".join(str(list(each.shape)) for each in value[:4])
            raise refuse(
                f"{name} in the batch is a {type(value).__name__} of {len(value)} arrays, {shapes}",
                rule="a batch is a dict of arrays, the first dim of each the examples, and no list is inside of it",
                fix=f'{{f"{number}": x for i, x in enumerate(batch["{name}"])}} beside the other arrays, and in the '
                f'loss [batch[f"{number}"] for i in range({len(value)})]; np.stack(batch["{name}"]) of examples',
            )


def _is_of_all(value: list | tuple, counts: set[tuple[int, ...]]) -> bool:
    """Returns whether the members of a list have all examples each; `counts` are those of the other arrays."""
    if not all(hasattr(each, "shape") and tuple(each.shape) for each in value):
        return False
    shapes = {tuple(each.shape) for each in value}
    first = {shape[:1] for shape in shapes}
    if len(first) > 1 or counts == {(len(value),)}:
        return False
    if counts:
        return first <= counts
    return len(shapes) > 1 or (len(value) <= min(FEW, *next(iter(first))) and len(next(iter(shapes))) > 1)
