"""Stacks lists of equal layers at the start of a step, and unstacks their gradients at its end.

params     blocks/0/w, blocks/1/w, ... ──► blocks/*/w ──► the table ──► gradients of blocks/*/w ──► of blocks/0/w, ...
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.layout import Layout
from jaxpar.parallel.specs import update_specs
from jaxpar.sharding.names import Tree, by_path, nest, pick


def stack_layers(layout: Layout, params: Tree) -> Tree:
    """Replaces lists of layers in the parameters by stacks."""
    if not layout.lists:
        return params
    flat = by_path(params)
    stacks = {stack: [flat.pop(path) for path in members] for stack, members in layout.lists.items()}
    flat |= {stack: _on(layout, stack, jnp.stack(layers), "stored") for stack, layers in stacks.items()}
    return _nested(flat)


def unstack_layers(layout: Layout, gradients: Tree) -> Tree:
    """Replaces stacks in the gradients by lists of layers."""
    if not layout.lists:
        return gradients
    flat = by_path(gradients)
    for stack, members in layout.lists.items():
        stacked_gradient = _on(layout, stack, flat.pop(stack), "updated")
        flat |= {path: stacked_gradient[i] for i, path in enumerate(members)}
    return _nested(flat)


def _on(layout: Layout, stack: str, value: jax.Array, which: str) -> jax.Array:
    """Shards a stack like its layers between steps, without splitting the dim of layers."""
    member = layout.lists[stack][0]
    spec = (
        pick(update_specs(layout), tuple(member.split("/"))) if which == "updated" else layout.placements[member].stored
    )
    return jax.lax.with_sharding_constraint(value, layout.sharding(PartitionSpec(None, *spec)))


def _nested(flat: Mapping[str, Any]) -> Tree:
    return nest({tuple(path.split("/")): value for path, value in flat.items()})
