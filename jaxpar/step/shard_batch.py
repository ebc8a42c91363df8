"""Places a global batch on the devices of a layout.

    numbers of any kind ─► check that rows divide ─► arrays over data x fsdp; each process provides its local shards

The batch size must be a multiple of replicas x microbatches.
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
from jaxpar.parallel.state_specs import batch_sharding

FEW = 8  # a list of up to this many arrays with more than one dim holds views of all examples, not examples


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlacement:
    """The placement of a step's batches.

    Attributes:
      layout: The layout whose devices get the batch.
      accumulate: Number of microbatches per step, which run in sequence.
    """

    layout: Layout
    accumulate: int = 1

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Places the batch on its devices; does not move arrays that are already on the layout's mesh.

        Raises:
          JaxparError: If an entry is not an array of numbers, or its first dim does not divide.
        """
        check_dict(batch)
        check_lists(batch)
        return self._check_first_dims({name: self._put(name, value) for name, value in batch.items()})

    def shapes(self, batch: Mapping[str, object]) -> dict[str, Any]:
        """Returns the shapes and the future shardings of the arrays of a batch.

        Raises:
          JaxparError: If a first dim does not divide, or a step takes slices of arrays with several.
        """
        return self._check_first_dims({name: self.shape_struct(name, value) for name, value in batch.items()})

    def _check_first_dims(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if len({array.shape[:1] for array in arrays.values()}) > 1:
            from jaxpar.step.checks.batch_examples import check_slices  # most batches have one number of examples

            check_slices(arrays, self.layout, self.accumulate)
        return arrays

    def shape_struct(self, name: str, value: Any) -> Any:
        """Returns the shape and the future sharding of one array of a batch.

        Raises:
          JaxparError: If its first dim does not divide.
        """
        if self._is_placed(value):
            self._check_placed(name, value)
            return value
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            value = _array(name, value)
        self._check_rows(name, value)
        sharding = batch_sharding(self.layout, value.shape)
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), sharding=sharding)

    def _put(self, name: str, value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and self._is_placed(value):
            self._check_placed(name, value)
            return value
        if on_devices := isinstance(value, jax.Array) and self._is_here(value):  # perhaps on a mesh with Explicit axes
            _check_numbers(name, value)
        else:
            value = _array(name, value)
        self._check_rows(name, value)
        sharding = batch_sharding(self.layout, value.shape)
        if on_devices:
            return jax.device_put(value, sharding)
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])  # local shards only

    def _is_placed(self, value: object) -> bool:
        sharding = getattr(value, "sharding", None)
        return isinstance(sharding, NamedSharding) and sharding.mesh == self.layout.device_mesh

    def _is_here(self, value: jax.Array) -> bool:
        """Whether an array is on exactly the devices of the layout."""
        devices = value.sharding.device_set
        return len(devices) == self.layout.devices and devices == set(self.layout.device_mesh.devices.flat)

    def _check_placed(self, name: str, value: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> None:
        """Refuses a placed array that does not divide into microbatches; accepts any sharding."""
        if self.accumulate * self.layout.microbatches > 1:
            self._check_rows(name, value)

    def _check_rows(self, name: str, value: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> None:
        ways = self.layout.replicas * self.accumulate * self.layout.microbatches
        if not value.shape or not value.shape[0] or value.shape[0] % ways:
            from jaxpar.step.checks.batch_examples import examples_error  # not loaded where nothing is wrong

            raise examples_error(name, value, self.layout, self.accumulate)


def check_dict(batch: object) -> None:
    """Refuses a batch that is not a non-empty dict.

    Raises:
      JaxparError: If it is another collection of arrays, or empty.
    """
    if not isinstance(batch, Mapping) or not batch:
        fields = "batch._asdict(): " if hasattr(batch, "_asdict") else "vars(batch): " if is_dataclass(batch) else ""
        raise refuse(
            f"a batch that is {'{}' if isinstance(batch, Mapping) else f'a {type(batch).__name__}'}",
            rule="a batch is a dict of arrays",
            fix=f'{fields}{{"inputs": ..., "targets": ...}}',
        )


def _array(name: str, value: object) -> np.ndarray:
    """Converts an entry of a batch to a numpy array of a dtype that JAX supports."""
    if isinstance(value, Mapping):
        raise refuse(
            f"{name} in the batch is a dict of {', '.join(map(str, value))}",
            rule="a batch is a dict of arrays, without nested dicts",
            fix='flax.traverse_util.flatten_dict(batch, sep="/"), and in the loss unflatten_dict(batch, sep="/")',
        )
    if isinstance(value, jax.Array):
        _check_numbers(name, value)
    try:
        value = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a PyTorch tensor with requires_grad
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
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise refuse(
            f"{name} in the batch has random keys",
            rule="a batch holds numbers; a loss of (model, batch, key) is given a key in every step",
            fix=f"that key, or jax.random.key_data({name}), and in the loss jax.random.wrap_key_data",
        )


def _check_range(name: str, value: np.ndarray) -> None:
    """Refuses integers that JAX would silently truncate to 32 bits."""
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if dtype == value.dtype or value.dtype.kind not in "iu" or not value.size:
        return
    low, high = value.min(), value.max()
    if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
        raise refuse(
            f"{name} in the batch has {high if high > np.iinfo(dtype).max else low}",
            rule=f"whole numbers fit into {dtype}, in which a step computes",
            fix=f"leave {name!r} out, or number what it names from 0",
        )


def check_lists(batch: Mapping[str, Any]) -> None:
    """Refuses a list of arrays that each hold all examples. A list with one row per example passes.

    Raises:
      JaxparError: Names the list, and suggests a batch without it.
    """
    counts = {tuple(value.shape)[:1] for value in batch.values() if hasattr(value, "shape")}
    for name, value in batch.items():
        if isinstance(value, list | tuple) and value and _holds_all_examples(value, counts):
            number = f"{name}_{{i}}"
            shapes = ", ".join(str(list(array.shape)) for array in value[:4])
            raise refuse(
                f"{name} in the batch is a {type(value).__name__} of {len(value)} arrays, {shapes}",
                rule="a batch is a dict of arrays whose first dim is the examples, without lists",
                fix=f'{{f"{number}": x for i, x in enumerate(batch["{name}"])}} beside the other arrays, and in the '
                f'loss [batch[f"{number}"] for i in range({len(value)})]; np.stack(batch["{name}"]) of examples',
            )


def _holds_all_examples(value: list | tuple, counts: set[tuple[int, ...]]) -> bool:
    """Whether each array in a list holds all examples; `counts` are the sizes of dim 0 of the other arrays."""
    if not all(hasattr(array, "shape") and tuple(array.shape) for array in value):
        return False
    shapes = {tuple(array.shape) for array in value}
    first_dims = {shape[:1] for shape in shapes}
    if len(first_dims) > 1 or counts == {(len(value),)}:
        return False
    if counts:
        return first_dims <= counts
    return len(shapes) > 1 or (len(value) <= min(FEW, *next(iter(first_dims))) and len(next(iter(shapes))) > 1)
