"""Lists of equal layers, stacked at the beginning of a step and taken apart at its end.

params     blocks/0/w, blocks/1/w, ... ──► blocks/*/w ──► the table ──► gradients of blocks/*/w ──► of blocks/0/w, ...
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, by_path, nest, pick


def stacked(layout: Layout, params: Tree) -> Tree:
    """Returns the parameters with stacks in place of lists of layers."""
    if not layout.lists:
        return params
    flat = by_path(params)
    stacks = {stack: [flat.pop(path) for path in members] for stack, members in layout.lists.items()}
    flat |= {stack: _on(layout, stack, jnp.stack(each), "stored") for stack, each in stacks.items()}
    return _nested(flat)


def taken_apart(layout: Layout, gradients: Tree) -> Tree:
    """Returns gradients of lists of layers from those of their stacks."""
    if not layout.lists:
        return gradients
    flat = by_path(gradients)
    for stack, members in layout.lists.items():
        whole = _on(layout, stack, flat.pop(stack), "updated")
        flat |= {path: whole[i] for i, path in enumerate(members)}
    return _nested(flat)


def _on(layout: Layout, stack: str, value: jax.Array, which: str) -> jax.Array:
    """Returns a stack with all layers on each device, cut as each of them is between steps."""
    member = layout.lists[stack][0]
    each = pick(layout.updated, tuple(member.split("/"))) if which == "updated" else layout.placements[member].stored
    return jax.lax.with_sharding_constraint(value, layout.sharding(PartitionSpec(None, *each)))


def _nested(flat: Mapping[str, Any]) -> Tree:
    return nest({tuple(path.split("/")): value for path, value in flat.items()})
