"""Placement of one array of a model, between steps and where the model reads it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from jax.sharding import PartitionSpec

from jaxpar.sharding.names import Leaf
from jaxpar.sharding.shard_bytes import shard_bytes, short_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The placement of one parameter, or of another array of a model's state.

    Attributes:
      leaf: Its shape, dtype and the names of its dims.
      names: Names of the dims, as annotated or inferred.
      stored: Spec of the array between steps.
      used: Spec where the model reads it.
      whole: Spec as stored, without the `fsdp` axis; other than `used` where `tensor` stores it along another dim.
      sharded: Spec with the `fsdp` axis, which gradients and optimizer state take by stage.
      why: The rule that placed it.
    """

    leaf: Leaf
    names: tuple[str | None, ...]
    stored: PartitionSpec
    used: PartitionSpec
    whole: PartitionSpec
    sharded: PartitionSpec
    why: str

    def per_device(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of its shard on each device between steps."""
        return shard_bytes(self.leaf, self.stored, sizes)

    def describe(self, sizes: Mapping[str, int]) -> str:
        """Returns `f32[embed/fsdp, mlp/tensor]`."""
        dims = []
        for dim, (size, name) in enumerate(zip(self.leaf.shape, self.names, strict=True)):
            axes = self.stored[dim] if dim < len(self.stored) else None
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            dims.append("/".join([str(name or size), *(axis for axis in axes if sizes[axis] > 1)]))
        return f"{short_dtype(self.leaf.dtype)}[{', '.join(dims)}]"

    def slice_specs(self, shape: tuple[int, ...]) -> tuple[PartitionSpec, ...]:
        """Returns the specs (stored, whole, used) of the value that the model reads: all dims, or one layer of a stack.

        Args:
          shape: Of the value that the model reads.
        """
        dims, sliced = range(len(self.leaf.shape)), self.sliced_dims(shape)
        remaining = [dim for dim in dims if dim not in sliced]
        padded = ((*spec, *(None,) * (len(dims) - len(spec))) for spec in (self.stored, self.whole, self.used))
        return tuple(PartitionSpec(*(spec[dim] for dim in remaining)) for spec in padded)

    def sliced_dims(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the dims that a value of this shape lacks: a scan or a `vmap` removed them.

        If several would fit, the first ones; dims named `layers` before others.
        """
        dims = range(len(self.leaf.shape))
        missing = len(dims) - len(shape)
        layers = [dim for dim in dims if self.names[dim] == "layers"]
        if not missing or len(layers) >= missing:
            return tuple(layers[:missing])
        fitting = (
            candidate
            for candidate in combinations(dims, missing)
            if tuple(size for dim, size in enumerate(self.leaf.shape) if dim not in candidate) == shape
        )
        return next(fitting, tuple(dims[:missing]))

    def is_split(self, dims: Iterable[int]) -> bool:
        """Returns whether an axis splits one of these dims between steps."""
        return any(dim < len(self.stored) and self.stored[dim] is not None for dim in dims)
