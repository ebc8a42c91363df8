"""Finds parameters whose gradients the optimizer never reads; a step does not compute, reduce, store or count these.

    optax.multi_transform({"train": adamw, "freeze": optax.set_to_zero()}, labels)
    optax.masked(optax.set_to_zero(), frozen), optax.freeze: likewise

The jaxpr of the update decides, not labels. If a chain clips by the global norm of all parameters before it freezes
some of them, it reads their gradients, and gets them, as in plain optax; if it clips inside `multi_transform`, it does
not. Parameters in 8 bits and references must be frozen.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Literal, Var
from jax.typing import DTypeLike

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import CALLS, Scan, Traced, needed_equations, unwrap_jaxpr, variables
from jaxpar.optim.step_inputs import update
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.read_parameter import reshard_padded
from jaxpar.parallel.state_specs import abstract_params
from jaxpar.sharding.adapters import is_scales
from jaxpar.sharding.names import SCOPE, Tree, format_path


def frozen_paths(layout: Layout, optimizer: optax.GradientTransformation) -> frozenset[str]:
    """Returns the paths of parameters whose gradients the optimizer's update does not read."""
    state = jax.eval_shape(optimizer.init, abstract_params(layout))  # of one replica, if replicas step separately
    # only masked optimizers leave gradients unread: others need no trace
    if not any(map(_is_masked, jax.tree.leaves(state, is_leaf=_is_masked))):
        return frozenset()
    # float32 stands in for 8-bit matrices, whose dtype a chain might refuse in this trace
    params = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else _float(x.shape), abstract_params(layout)
    )
    closed = jax.make_jaxpr(partial(update, optimizer))(params, state, params, _float(()))
    read_indices = _reads(closed.jaxpr, set(range(len(closed.jaxpr.outvars))))
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(layout))  # gradients come first
    return frozenset(format_path(keys) for index, (keys, _) in enumerate(leaves) if index not in read_indices)


def drop_paths(paths: Set[str], tree: Tree) -> Tree:
    """Returns a tree of parameters, gradients or specs with None at these paths."""
    if not paths:
        return tree
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: None if format_path(keys) in paths else leaf, tree)


def fill_missing(tree: Tree, source: Tree) -> Tree:
    """Fills the None leaves of a tree from another tree."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, source, is_leaf=lambda leaf: leaf is None)


def zero_frozen(paths: Set[str], layout: Layout, gradients: Tree) -> Tree:
    """Returns gradients with zeros at these paths."""
    if not paths:
        return gradients
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(layout))
    return fill_missing(drop_paths(paths, gradients), zeros)


def _float(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedState)


def _reads(jaxpr: Jaxpr, outs: Set[int]) -> set[int]:
    """Returns the indices of inputs that these outputs may depend on; a loop or branch counts as reading all inputs."""
    live: set[Var] = variables(jaxpr.outvars[index] for index in outs)
    for eqn in reversed(jaxpr.eqns):
        out_indices = {index for index, var in enumerate(eqn.outvars) if var in live}
        if not out_indices:
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in CALLS else None
        ins = eqn.invars if inner is None else [eqn.invars[index] for index in _reads(unwrap_jaxpr(inner), out_indices)]
        live |= variables(ins)
    return {index for index, var in enumerate(jaxpr.invars) if var in live}


# Gathers parameters over fsdp once per step, in ZeRO stages 1 and 2, which store shards between steps.
#
#     stored ─► cast ─► gathered over fsdp ─► read by every microbatch
#               └───── once per step ─────┘
#
# A parameter is sent in the matmul dtype if the model only casts it to that dtype, and as stored if the model also
# reads it otherwise, e.g. in a weight penalty. If the model casts it in several places, or in every turn of a loop, it
# becomes float32 again after the gather, so that its gradient is summed in float32. Stage 3 gathers where a layer runs
# (`Layout.use`), and pipelines gather before their table (`Shardings`).


@dataclass(frozen=True)
class Reads:
    """Counts of a parameter's uses in a program.

    Attributes:
      casts: Number of casts to the matmul dtype; a cast inside a loop counts 2.
      other_reads: Number of other reads.
    """

    casts: int = 0
    other_reads: int = 0


def gather_params(layout: Layout, params: Tree, forward: Callable, *inputs: Any, dtype: DTypeLike | None) -> Tree:
    """Gathers the parameters over `fsdp`, for ZeRO stages 1 and 2.

    Args:
      layout: The layout, with the stored and the used sharding of each parameter.
      params: The stored parameters.
      forward: A function of (params, *known) that reads the parameters as the step does.
      *known: The other arguments of `forward`.
      dtype: The matmul dtype, or None for the stored dtype.
    """
    uses = {} if dtype is None else count_reads(forward, params, *inputs, dtype=dtype)

    def gather_leaf(keys, value: jax.Array) -> jax.Array:
        path = format_path(keys)
        place, use = layout.placements[path], uses.get(path, Reads(other_reads=1))
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            floats = jnp.issubdtype(value.dtype, jnp.floating)  # 8-bit integers are sent as stored
            wire_value = value.astype(dtype) if use.casts and not use.other_reads and floats else value
            # otherwise XLA may gather float32 and cast afterwards
            wire_value = jax.lax.with_sharding_constraint(wire_value, layout.sharding(place.stored))
            read_as = reshard_padded(wire_value, layout.sharding(place.used), layout.sharding(place.whole))
            return read_as if use.casts < 2 else read_as.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(gather_leaf, params)


def count_reads(forward: Callable, params: Tree, *inputs: Any, dtype: DTypeLike) -> dict[str, Reads]:
    """Counts the uses of each parameter in a function of (params, *known)."""
    traced = Traced(forward, params, *inputs)
    jaxpr = traced.flat.jaxpr
    counts = _count(jaxpr, jaxpr.outvars, jnp.dtype(dtype))
    keys, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(traced.inputs, jaxpr.invars)[0])
    return {format_path(key): Reads(counts[var, True], counts[var, False]) for key, var in keys}


def _count(jaxpr: Jaxpr, outs: Iterable, dtype: DTypeLike) -> Counter[tuple[Var, bool]]:
    """Counts reads of (variable, whether it is a cast to `dtype`) in the equations that these outputs depend on."""
    counts: Counter = Counter((var, False) for var in variables(outs))
    eqns, live = needed_equations(jaxpr.eqns, outs)
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "scan":
            scan = Scan(eqn)
            live_outs = [var for i, var in enumerate(eqn.outvars) if i < scan.carry or var in live]
            inner = [scan.body.outvars[eqn.outvars.index(var)] for var in live_outs]
            inner_counts = _count(scan.body, inner, dtype)
            for i, (outer_var, inner_var) in enumerate(zip(eqn.invars, scan.body.invars, strict=True)):
                if isinstance(outer_var, Literal):
                    continue
                carried = scan.consts <= i < scan.consts + scan.carry
                counts[outer_var, True] += inner_counts[inner_var, True] * (2 if i < scan.consts else 1) * (not carried)
                counts[outer_var, False] += inner_counts[inner_var, False] + carried
        else:
            cast = name == "convert_element_type" and eqn.params["new_dtype"] == dtype
            counts.update((var, cast) for var in variables(eqn.invars))
    return counts


def check_eight_bits(layout: Layout) -> None:
    """Refuses an optimizer that reads the gradients of 8-bit matrices.

    Raises:
      JaxparError: If it reads one.
    """
    eight_bit = {path for path, adapter in layout.blueprint.adapters.items() if adapter.float_dtype}
    eight_bit |= {path for path in layout.placements if is_scales(layout.blueprint, path)}
    if trained := sorted(eight_bit - layout.frozen):
        raise refuse(
            f"{trained[0]} is {layout.placements[trained[0]].leaf.dtype}, and the optimizer reads its gradient",
            rule="a base in 8 bits is frozen: it has no gradient",
            fix='jp.freeze(chain, ["*"], but=["adapters"]); or jp.add_lora(...) without base="int8", to train it too',
        )


def check_reference(layout: Layout) -> None:
    """Refuses an optimizer that trains the reference of a model.

    Raises:
      JaxparError: If it reads a gradient of the reference.
    """
    blueprint = layout.blueprint
    if copies := sorted(blueprint.copies.keys() - layout.frozen):
        raise refuse(
            f"the optimizer trains {copies[0]}, a copy of the reference",
            rule="a reference stays as it was: it has no gradient and no optimizer state",
            fix='jp.freeze(optimizer, ["reference"])',
        )
    if shared := sorted(blueprint.shared - layout.frozen):
        raise refuse(
            f"the optimizer trains {shared[0]}, which the model shares with its reference",
            rule="what a model shares with its reference is frozen",
            fix='jp.freeze(optimizer, ["*"], but=["adapters"]) for adapters; or jp.add_reference(model, trained=[...]) '
            "with all that the optimizer trains",
        )
