"""Handles `axis_name` of a normalization layer, which its author meant for a `pmap` or a `vmap` of the model.

axis_name="batch", under the model's own vmap(..., axis_name="batch")   the layer's mean is over that axis
axis_name="batch", without an axis of that name                         dropped: a step has all examples
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxpar.errors import refuse


def names_axes(module: object) -> bool:
    """Whether a module is a normalization layer that averages its statistics over a named axis."""
    fields = vars(module)  # not getattr, which a module may override
    return fields.get("axis_name") is not None and "axis_index_groups" in fields


@contextmanager
def without_unbound_axes(module: Any, manual: Collection[str] = ()) -> Iterator[None]:
    """Drops from a layer's `axis_name`, until the context ends, the axes that no `vmap` or `shard_map` binds.

    A step computes statistics over all examples of the batch, so the layer does not need the axis of a `pmap`. A module
    that is no such layer is unchanged.

    Args:
      module: The module that is being called.
      manual: Mesh axes that are manual because of jaxpar's own `shard_map` around the model.

    Raises:
      JaxparError: If the layer averages over groups of devices.
    """
    if not names_axes(module):
        yield
        return
    axes = module.axis_name
    # bypasses __setattr__, as Linen's modules are frozen
    object.__setattr__(module, "axis_name", without_axes(module, lambda name: name in manual or not is_bound(name)))
    try:
        yield
    finally:
        object.__setattr__(module, "axis_name", axes)


def without_axes(module: Any, is_removed: Callable[[Any], bool]) -> Any:
    """Returns the `axis_name` of a normalization layer without some of the axes.

    Raises:
      JaxparError: If the layer averages over groups of their devices.
    """
    names = module.axis_name if isinstance(module.axis_name, tuple | list) else (module.axis_name,)
    remaining = tuple(name for name in names if not is_removed(name))
    if len(remaining) == len(names):
        return module.axis_name
    if module.axis_index_groups is not None:
        raise refuse(
            f"{type(module).__name__}(axis_name={module.axis_name!r}, axis_index_groups={module.axis_index_groups})",
            rule="statistics of a normalization are over the whole batch, which no group of devices has apart",
            fix="axis_index_groups=None",
        )
    return remaining or None


def is_bound(name: Hashable) -> bool:
    """Whether a `vmap` or a `shard_map` around the caller has an axis of this name."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True
