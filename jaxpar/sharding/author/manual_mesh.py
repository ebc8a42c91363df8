"""Translates a `jax.shard_map` on the author's mesh to the mesh of the step.

author   shard_map(f, mesh=Mesh(8, ("data",)), in_specs=P("data"))
step     data=8                ──► on the mesh of the step, manual over `data`
data=2, fsdp=2, ...   ──► also, if the author's `data` is 2; XLA splits the rest over the other axes
data=4                ──► refused: f uses sizes and names of axes in its collectives
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse


def manual_mesh(mesh: Mesh | AbstractMesh | None, axis_names: Collection[str], specs: object) -> tuple[Any, Any]:
    """Returns the mesh for a model's `shard_map`, and its manual axes: the step's mesh if that has the author's axes.

    Raises:
      JaxparError: If the step's mesh lacks the author's axes.
    """
    step = get_abstract_mesh()
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    named = dict.fromkeys(name for spec in leaves if spec is not None for entry in spec for name in entry_axes(entry))
    if step.empty and mesh is None and named:
        sizes, kinds = (1,) * len(named), (AxisType.Auto,) * len(named)
        return AbstractMesh(sizes, tuple(named), axis_types=kinds), axis_names
    if step.empty or mesh is None or mesh.abstract_mesh == step:
        return mesh, axis_names
    author = {axis: size for axis, size in mesh.shape.items() if size > 1}
    present = {axis: size for axis, size in step.shape.items() if size > 1}
    manual = frozenset(axis_names or author or named)
    if (
        author.items() <= present.items()
        and {*manual, *named} <= {*step.shape}
        and not manual.intersection(step.manual_axes)
    ):
        return step, manual
    texts = [", ".join(f"{axis}={size}" for axis, size in axes.items()) or "one device" for axes in (author, present)]
    raise refuse(
        f"the model runs shard_map on a mesh of its own with {texts[0]}, and the mesh of the step has {texts[1]}",
        rule="inside of a step shard_map runs on the mesh of the step: an axis of a mesh of the model's own is one of "
        "the step's, of the same name and size, and not manual already, as in a pipeline",
        fix="jax.shard_map without mesh=, with axes of the step's mesh in its axis_names, specs and collectives; or "
        "the author's names and sizes in Parallel, if they are axes of jaxpar's",
    )


def entry_axes(entry: object) -> tuple[str, ...]:
    """Returns the axes of one dim in a spec."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
