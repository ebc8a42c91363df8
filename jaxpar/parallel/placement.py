"""The placement of one array of a model: its specs between steps and when the model reads it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from jax.sharding import PartitionSpec

from jaxpar.sharding.names import LARGE, Leaf, shard_bytes, short_dtype
from jaxpar.units import show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The placement of one parameter, or of another array of a model's state.

    Attributes:
      leaf: Its shape, dtype and the names of its dims.
      names: Names of the dims, as annotated or inferred.
      stored: Spec of the array between steps.
      used: Spec of the array when the model reads it.
      whole: The stored spec without the `fsdp` axis; differs from `used` if `tensor` splits another dim of it in
        storage.
      sharded: Spec with the `fsdp` axis, for gradients and optimizer state in the ZeRO stages that shard them.
      why: The rule that chose the specs.
    """

    leaf: Leaf
    names: tuple[str | None, ...]
    stored: PartitionSpec
    used: PartitionSpec
    whole: PartitionSpec
    sharded: PartitionSpec
    why: str

    def per_device(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of the array's shard on a device between steps."""
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
        """Returns the specs (stored, whole, used) of the value that the model reads: the array, or a layer of a stack.

        Args:
          shape: Shape of the value that the model reads.
        """
        dims, sliced = range(len(self.leaf.shape)), self.sliced_dims(shape)
        remaining = [dim for dim in dims if dim not in sliced]
        padded = ((*spec, *(None,) * (len(dims) - len(spec))) for spec in (self.stored, self.whole, self.used))
        return tuple(PartitionSpec(*(spec[dim] for dim in remaining)) for spec in padded)

    def sliced_dims(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the dims that a value of this shape lacks because a scan or a `vmap` removed them.

        If several choices fit, it returns the first dims, and prefers dims named `layers`.
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
        """Whether an axis splits one of these dims between steps."""
        return any(dim < len(self.stored) and self.stored[dim] is not None for dim in dims)


# Large parameters that no axis splits, though others are split: a summary names them with the reason.
#
#     wte/embedding [50257, 756], 145 MiB, 92 % of the model (vocab=50257 not divisible by tensor=8)
#
# Vectors are too small to matter. If no axis is meant to split parameters (`data` alone), all of them are whole by
# intent, as are those outside of a pipeline's layers.

SHARE = 0.01  # least share of the model's bytes for a parameter to be named
_NAMED = 3  # most parameters that a summary names


def largest_unsplit(placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Returns the parameters of at least 1 % of the model that no axis splits, the largest first.

    Empty if `fsdp` and `tensor` split nothing at all.

    Args:
      placements: Placement of every parameter, by its path.
    """
    if not _axes_that_split(placements):
        return {}
    least = max(LARGE, SHARE * _bytes(placements))
    unsplit = {path: place for path, place in placements.items() if place.leaf.bytes >= least and not any(place.stored)}
    return dict(sorted(unsplit.items(), key=lambda item: -item[1].leaf.bytes))


def unsplit_note(placements: Mapping[str, Placement]) -> str:
    """Describes the unsplit parameters, each with size, share of the model and reason; "" if there are none."""
    unsplit = largest_unsplit(placements)
    if not unsplit:
        return ""
    axes, total = " and ".join(_axes_that_split(placements)), _bytes(placements)

    def describe_parameter(path: str, place: Placement) -> str:
        leaf = place.leaf
        share = f"{100 * leaf.bytes / total:.0f} % of the model"
        return f"{path} {list(leaf.shape)}, {show_bytes(leaf.bytes)}, {share} ({_reason(place, axes)})"

    entries = [describe_parameter(*item) for item in [*unsplit.items()][:_NAMED]]
    remainder = [f"{len(unsplit) - _NAMED} more"] * (len(unsplit) > _NAMED)
    return "; whole on every device: " + "; ".join([*entries, *remainder])


def _reason(place: Placement, axes: str) -> str:
    parts = [part for part in place.why.split("; ") if "divi" in part]
    return "; ".join(parts) or f"no dim for {axes}: {place.why}"


def _axes_that_split(placements: Mapping[str, Placement]) -> list[str]:
    """Returns the axes that split at least one parameter, except `pipe`."""
    entries = [entry for place in placements.values() for entry in place.stored if entry is not None]
    axes = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
    return sorted(axes - {"pipe"})


def _bytes(placements: Mapping[str, Placement]) -> int:
    return sum(place.leaf.bytes for place in placements.values())
