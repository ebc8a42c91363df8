"""Large parameters that no axis splits, though others are: a summary says which, and why.

    wte/embedding [50257, 756], 145 MiB, 92 % of the model (vocab=50257 not divisible by tensor=8)

A vector costs nothing, and where nothing is asked to split parameters (`data` alone) all of them are whole by intent.
So are those outside of a pipeline's layers.
"""

from collections.abc import Mapping

from jaxpar.parallel.placement import Placement
from jaxpar.sharding.names import LARGE
from jaxpar.units import show_bytes

SHARE = 0.01  # of the model's bytes, from which on one parameter is worth a word
_NAMED = 3  # parameters that a summary names, at most


def whole(placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Returns the parameters of at least 1 % of the model that no axis splits, the largest first.

    None where `fsdp` and `tensor` split nothing at all.

    Args:
      placements: Of every parameter, by its path.
    """
    if not _splitting(placements):
        return {}
    least = max(LARGE, SHARE * _bytes(placements))
    found = {path: each for path, each in placements.items() if each.leaf.bytes >= least and not any(each.stored)}
    return dict(sorted(found.items(), key=lambda item: -item[1].leaf.bytes))


def told(placements: Mapping[str, Placement]) -> str:
    """Returns what stays whole, with its size, its share of the model and the reason; nothing where nothing does."""
    found = whole(placements)
    if not found:
        return ""
    axes, total = " and ".join(_splitting(placements)), _bytes(placements)

    def one(path: str, place: Placement) -> str:
        leaf = place.leaf
        share = f"{100 * leaf.bytes / total:.0f} % of the model"
        return f"{path} {list(leaf.shape)}, {show_bytes(leaf.bytes)}, {share} ({_reason(place, axes)})"

    words = [one(*item) for item in [*found.items()][:_NAMED]]
    more = [f"{len(found) - _NAMED} more"] * (len(found) > _NAMED)
    return "; whole on every device: " + "; ".join([*words, *more])


def _reason(place: Placement, axes: str) -> str:
    """Returns why no axis splits a parameter: what does not divide, or that its dims are no axis's."""
    parts = [part for part in place.why.split("; ") if "divi" in part]
    return "; ".join(parts) or f"no dim for {axes}: {place.why}"


def _splitting(placements: Mapping[str, Placement]) -> list[str]:
    """Returns the axes that split some parameter, other than the stages of a pipeline."""
    entries = [entry for place in placements.values() for entry in place.stored if entry is not None]
    axes = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
    return sorted(axes - {"pipe"})


def _bytes(placements: Mapping[str, Placement]) -> int:
    return sum(place.leaf.bytes for place in placements.values())
