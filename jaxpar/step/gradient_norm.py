"""The global gradient norm: each device sums over its own shards.

    shards ─► sum of squares ─► / number of copies of a shard ─► one sum over all sharding axes ─► root
              in float32 or wider

One scalar is all-reduced, for the metric and for an optimizer that clips by the norm. Optax's code sums the squares of
each gradient over the axes that shard it: XLA merges these all-reduces only if they are adjacent, and never merges the
norm of the metric with that of `optax.clip_by_global_norm`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    Literal,
    jaxpr_as_fun,
)
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar.jaxprs.dataflow import Traced, needed_equations
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import abstract_params, update_specs
from jaxpar.sharding.names import Tree, is_float, shard_counts
from jaxpar.step.overwritten_state import accumulator_dtype

Axes = tuple[str, ...]


def unsharded_norm(gradients: Tree, *, squared: bool = False) -> jax.Array:
    """Returns the norm of gradients, or its square, partitioned by XLA; 8-bit matrices have no gradient."""
    return optax.tree.norm([_widen(leaf) for leaf in jax.tree.leaves(gradients) if is_float(leaf)], squared=squared)


def optax_norm(gradients: Tree) -> jax.Array:
    """Returns the norm of gradients by the equations of `optax.tree.norm`: squares in the dtype of each gradient."""
    return optax.tree.norm([leaf for leaf in jax.tree.leaves(gradients) if is_float(leaf)])


def norm(layout: Layout, gradients: Tree) -> jax.Array:
    """Returns the root of the sum of all squares, like `optax.tree.norm` but summed in another order.

    Args:
      layout: The layout; its `updated` has the spec of each gradient.
      gradients: The gradients of all parameters.
    """
    specs = jax.tree.leaves(update_specs(layout), is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    leaves = [_widen(leaf) for leaf in jax.tree.leaves(gradients) if is_float(leaf)]
    specs = [spec for spec, leaf in zip(specs, jax.tree.leaves(gradients), strict=True) if is_float(leaf)]
    axes = tuple(axis for axis, size in layout.sizes.items() if size > 1 and any(axis in _axes(spec) for spec in specs))
    if not axes or not _has_equal_shards(layout, gradients):
        return unsharded_norm(gradients)

    def sum_squares(shards: list[jax.Array]) -> jax.Array:
        shards_by_axes: defaultdict[Axes, list[jax.Array]] = defaultdict(list)
        for shard, spec in zip(shards, specs, strict=True):
            shards_by_axes[tuple(axis for axis in axes if axis not in _axes(spec))].append(shard)
        # a shard with several copies counts once
        partial_sums = [
            optax.tree.norm(group, squared=True) / math.prod(layout.sizes[axis] for axis in copy_axes)
            for copy_axes, group in shards_by_axes.items()
        ]
        return jax.lax.psum(sum(partial_sums[1:], partial_sums[0]), axes)

    total = jax.shard_map(
        sum_squares, mesh=layout.device_mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )(leaves)  # fmt: skip
    return jnp.sqrt(total)


def _widen(leaf: jax.Array) -> jax.Array:
    return leaf.astype(accumulator_dtype(leaf.dtype))  # in float16 the square of 256 is infinite


def _axes(spec: PartitionSpec) -> Axes:
    return tuple(axis for entry in spec for axis in spec_axes(entry))


def _has_equal_shards(layout: Layout, gradients: Tree) -> bool:
    """Whether XLA partitions the program, and the specs in `layout.updated` split every gradient into equal shards."""
    mesh: Mesh = jax.sharding.get_abstract_mesh()  # pyright: ignore[reportAssignmentType]
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return False
    if jax.tree.structure(gradients) != jax.tree.structure(abstract_params(layout)):
        return False

    def is_even(gradient: jax.Array, param: jax.Array, spec: PartitionSpec) -> bool:
        ways = shard_counts(spec, gradient.ndim, layout.sizes)
        return gradient.shape == param.shape and not any(n % way for n, way in zip(gradient.shape, ways, strict=True))

    return all(jax.tree.leaves(jax.tree.map(is_even, gradients, abstract_params(layout), update_specs(layout))))


# Reuses the computed gradient norm in an optimizer that computes it too.
#
# The optimizer's update is traced, and every value that equals `optax.tree.norm` of the gradients, by its equations, is
# replaced by the known norm. All else is unchanged, and so is an update without a norm.


def with_norm(update: Callable[[Tree], Any], gradients: Tree, norm: jax.Array) -> Any:
    """Returns `update(gradients)`, but replaces its computation of the norm of all gradients by `norm`.

    Args:
      update: Returns a tree of arrays.
      gradients: The gradients of all parameters.
      norm: `optax.tree.norm(gradients)`, up to rounding. Shape [].
    """
    traced, norm_jaxpr = Traced(update, gradients), Traced(optax_norm, gradients).closed.jaxpr
    values = Values({})
    norm_number = values.number_vars(norm_jaxpr)[norm_jaxpr.outvars[0]]
    jaxpr = traced.closed.jaxpr
    norm_vars = [
        var for var, value in Values(values.numbers, grows=False).number_vars(jaxpr).items() if value == norm_number
    ]
    if not norm_vars:
        return traced(gradients)
    eqns = [eqn for eqn in jaxpr.eqns if not {*norm_vars}.intersection(eqn.outvars)]
    effect_vars = [var for eqn in eqns if eqn.effects for var in eqn.invars]  # of jax.debug.print etc.
    live = set(map(id, needed_equations(eqns, [*jaxpr.outvars, *effect_vars])[0]))
    eqns = [eqn for eqn in eqns if id(eqn) in live or eqn.effects]
    rewritten = ClosedJaxpr(jaxpr.replace(invars=[*jaxpr.invars, *norm_vars], eqns=eqns), traced.closed.consts)
    out = jaxpr_as_fun(rewritten)(*jax.tree.leaves(gradients), *(norm.astype(var.aval.dtype) for var in norm_vars))
    return jax.tree.unflatten(traced.outputs, out)


class Values:
    """Value numbering for several jaxprs of the same arguments: the results of equal equations get equal numbers.

    Attributes:
      numbers: The number of each argument, each literal, and each equation, identified by the numbers of its inputs.
      grows: Whether a new equation gets a new number, or none.
    """

    def __init__(self, numbers: dict[Hashable, int], *, grows: bool = True):
        self.numbers, self.grows = numbers, grows

    def number_vars(self, jaxpr: Jaxpr) -> dict[Any, int]:
        """Returns the number of each variable that has one."""
        numbers: dict[Any, int] = {}
        for i, var in enumerate(jaxpr.invars):
            self._note(numbers, var, ("argument", i))
        for eqn in jaxpr.eqns:
            inputs = [self._literal(var) if isinstance(var, Literal) else numbers.get(var) for var in eqn.invars]
            if None in inputs or eqn.effects:
                continue
            signature = (eqn.primitive.name, tuple(sorted((key, str(value)) for key, value in eqn.params.items())))
            for i, var in enumerate(eqn.outvars):
                self._note(numbers, var, (*signature, *inputs, i))
        return numbers

    def _literal(self, literal: Literal) -> int | None:
        return self._number(("literal", str(literal.aval), str(literal.val)))

    def _note(self, found: dict[Any, int], var: object, key: Hashable) -> None:
        if (number := self._number(key)) is not None:
            found[var] = number

    def _number(self, key: Hashable) -> int | None:
        return self.numbers.setdefault(key, len(self.numbers)) if self.grows else self.numbers.get(key)
