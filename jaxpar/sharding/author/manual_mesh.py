"""`jax.shard_map` on a mesh of the author's own, inside of a step.

author   shard_map(f, mesh=Mesh(8, ("data",)), in_specs=P("data"))
step     data=8                ──► on the mesh of the step, manual over `data`
data=2, fsdp=2, ...   ──► also, where the author's `data` is 2; XLA splits what is left over the other axes
data=4                ──► refused: f knows sizes and names of axes, in its collectives
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse


def manual_mesh(mesh: Any, axis_names: Any, specs: Any) -> tuple[Any, Any]:
    """Returns the mesh that `shard_map` runs on and its manual axes: the step's, if that has the author's axes.

    Raises:
      JaxparError: If it has not.
    """
    on = get_abstract_mesh()
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    named = dict.fromkeys(
        name for spec in leaves if spec is not None for entry in spec for name in axis_names_of(entry)
    )
    if on.empty and mesh is None and named:
        sizes, kinds = (1,) * len(named), (AxisType.Auto,) * len(named)
        return AbstractMesh(sizes, tuple(named), axis_types=kinds), axis_names
    if on.empty or mesh is None or mesh.abstract_mesh == on:
        return mesh, axis_names
    own = {axis: size for axis, size in mesh.shape.items() if size > 1}
    there = {axis: size for axis, size in on.shape.items() if size > 1}
    manual = frozenset(axis_names or own or named)
    if own.items() <= there.items() and {*manual, *named} <= {*on.shape} and not manual.intersection(on.manual_axes):
        return on, manual
    shown = [", ".join(f"{axis}={size}" for axis, size in each.items()) or "one device" for each in (own, there)]
    raise refuse(
        f"the model runs shard_map on a mesh of its own with {shown[0]}, and the mesh of the step has {shown[1]}",
        rule="inside of a step shard_map runs on the mesh of the step: an axis of a mesh of the model's own is one of "
        "the step's, of the same name and size, and not manual already, as in a pipeline",
        fix="jax.shard_map without mesh=, with axes of the step's mesh in its axis_names, specs and collectives; or "
        "the author's names and sizes in Parallel, if they are axes of jaxpar's",
    )


def axis_names_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of one dim in a spec."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
