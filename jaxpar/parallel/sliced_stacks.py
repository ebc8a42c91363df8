"""The error of a stack whose sharded dim the model slices, by a scan or a vmap."""

from collections.abc import Sequence

from jaxpar.errors import JaxparError, refuse
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.rules import SMALL


def sliced_stack_error(layout: Layout, path: str, sliced: Sequence[int]) -> JaxparError:
    """Makes the error; it has a rule for each large parameter of the module with this problem.

    Args:
      layout: The layout.
      path: Path of a parameter.
      sliced: The dims that the model slices.
    """
    places = {**layout.other_state, **layout.placements}
    count = [places[path].leaf.shape[dim] for dim in sliced]
    stack = path.split("/")[0] + "/"  # one scan or vmap slices the parameters of one module: refuse all at once
    matches = [
        param
        for param, place in places.items()
        if param == path or (param.startswith(stack) and place.leaf.bytes >= SMALL and place.is_split(sliced)
                            and [place.leaf.shape[dim] for dim in sliced] == count)
    ]  # fmt: skip
    rules = {
        param: tuple("layers" if dim in sliced else name for dim, name in enumerate(places[param].names))
        for param in matches
    }
    return refuse(
        f"{path} {layout.describe(path)}: the model takes dim {sliced[0]} apart, by a scan or a vmap, and "
        f"{places[path].stored[sliced[0]]} splits it",
        rule="a dim of stacked layers stays whole, so that each layer is gathered when it runs",
        fix=f"paths={rules} in Parallel, or names in the model",
    )
