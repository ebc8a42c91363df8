"""Explains repeated work at lines of the model whose activations no axis splits.

`Parallel.activations` names the dims of the activations of a line; `specs="found"`, `jp.find_specs` and `jaxpar specs`
write these names. They leave an activation unsharded where a split would cost more than the repeated work.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.source_lines import parse_line

AXES = ("context", "tensor")  # the axes for which `jp.find_specs` chooses dims


@dataclass(frozen=True)
class UnsplitLines:
    """Lines of the model with an array that none of the axes splits, as its names in `Parallel.activations` say.

    Attributes:
      sizes: Maps each of `AXES` of a size above 1 to its size, and `data` to its size.
      lines: File name and number of each line, `net.py:12`.
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
