"""Says of repeated work that the names of its lines leave it whole, as found specs do where a split costs more.

The names are those of `Parallel.activations`, which `specs="found"`, `jp.find_specs` and `jaxpar specs` write.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.source_lines import parse_line

AXES = ("context", "tensor")  # for which specs are found


@dataclass(frozen=True)
class UnsplitLines:
    """Lines of the model of which some array is split over none of the axes, by its names.

    Attributes:
      sizes: Axis for which specs are found to its size, if that is more than 1; and `data` to its size.
      lines: Their file names and numbers, `net.py:12`.
    """

    sizes: Mapping[str, int]
    lines: tuple[str, ...]

    @property
    def _axes(self) -> list[str]:
        return [axis for axis in AXES if axis in self.sizes]

    @property
    def cause(self) -> str:
        """Why the lines repeat work, as text."""
        axes = " x ".join(f"{axis}={self.sizes[axis]}" for axis in self._axes)
        return (
            f"the names of {', '.join(self.lines)} in `activations` leave arrays whole over {axes}, as found specs do "
            "where no dim can be split, or where collectives would take longer than the repeated work, as modelled for "
            "the chip and the batch of jp.find_specs"
        )

    @property
    def fix(self) -> str:
        """The ways out, as text."""
        replicas = self.sizes["data"]
        for axis in self._axes:
            replicas *= self.sizes[axis]
        ones = ", ".join(f"{axis}=1" for axis in self._axes)
        return (
            f"{ones} and data={replicas}, or fsdp={replicas}, where no device repeats work; or your own names for "
            "these lines in `activations` and for their parameters in `paths`, which win over those found; or larger "
            "batches or widths, of which found specs split more"
        )


def unsplit_lines(layout: Layout, lines: Iterable[str]) -> UnsplitLines | None:
    """Finds those of some lines that have an array whose names no axis splits; None without such lines or axes.

    Args:
      layout: The layout.
      lines: Lines of repeated work, `net.py:12 in __call__`.
    """
    sizes = {axis: size for axis in AXES if (size := layout.sizes.get(axis, 1)) > 1}
    unsplit = {
        f"{line.file.rsplit('/', 1)[-1]}:{line.line}"
        for key, dims in layout.parallel.activations.items()
        if (line := parse_line(key)) and not any({*spec_axes(layout.names.get(dim or ""))} & {*sizes} for dim in dims)
    }
    places = dict.fromkeys(line.partition(" in ")[0] for line in lines)
    found = tuple(place for place in places if place in unsplit)
    return UnsplitLines({**sizes, "data": layout.sizes["data"]}, found) if sizes and found else None
