"""Lists of arrays in a batch: rows, which are one array, or views and crops of all examples, which are several."""

from collections.abc import Mapping
from typing import Any

from jaxpar.errors import refuse

FEW = 8  # arrays of more than one dim: so many are views rather than examples


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
