"""Large parameters that no axis splits, though others are split: a summary names them with the reason.

    wte/embedding [50257, 756], 145 MiB, 92 % of the model (vocab=50257 not divisible by tensor=8)

Vectors are too small to matter. If no axis is meant to split parameters (`data` alone), all of them are whole by
intent, as are those outside of a pipeline's layers.
"""

from collections.abc import Mapping

from jaxpar.parallel.placement import Placement
from jaxpar.sharding.names import LARGE
from jaxpar.units import show_bytes

SHARE = 0.01  # least share of the model's bytes for a parameter to be named
_NAMED = 3  # most parameters that a summary names


def largest_unsplit(placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Returns the parameters of at least 1 % of the model that no axis splits, the largest first.

    Empty if `fsdp` and `tensor` split nothing at all.

    Args:
      placements: Placement of every parameter, by its path.
    """
    if not _splitting(placements):
        return {}
    least = max(LARGE, SHARE * _bytes(placements))
    unsplit = {path: place for path, place in placements.items() if place.leaf.bytes >= least and not any(place.stored)}
    return dict(sorted(unsplit.items(), key=lambda item: -item[1].leaf.bytes))


def unsplit_note(placements: Mapping[str, Placement]) -> str:
    """Describes the unsplit parameters, each with size, share of the model and reason; "" if there are none."""
    unsplit = largest_unsplit(placements)
    if not unsplit:
        return ""
    axes, total = " and ".join(_splitting(placements)), _bytes(placements)

    def one(path: str, place: Placement) -> str:
        leaf = place.leaf
        share = f"{100 * leaf.bytes / total:.0f} % of the model"
        return f"{path} {list(leaf.shape)}, {show_bytes(leaf.bytes)}, {share} ({_reason(place, axes)})"

    entries = [one(*item) for item in [*unsplit.items()][:_NAMED]]
    remainder = [f"{len(unsplit) - _NAMED} more"] * (len(unsplit) > _NAMED)
    return "; whole on every device: " + "; ".join([*entries, *remainder])


def _reason(place: Placement, axes: str) -> str:
    parts = [part for part in place.why.split("; ") if "divi" in part]
    return "; ".join(parts) or f"no dim for {axes}: {place.why}"


def _splitting(placements: Mapping[str, Placement]) -> list[str]:
    """Returns the axes that split some parameter, other than the stages of a pipeline."""
    entries = [entry for place in placements.values() for entry in place.stored if entry is not None]
    axes = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
    return sorted(axes - {"pipe"})


def _bytes(placements: Mapping[str, Placement]) -> int:
    return sum(place.leaf.bytes for place in placements.values())
