"""Applies the Flax rules for names of dims that a model's author or its user sets in a context around the model.

    with nnx.logical_axis_rules([("embed", "model"), ("batch", "data")]):     or nn.logical_axis_rules
        layout = jp.compose(model, jp.Parallel(data=2, tensor=4))

The axes are those of the author's mesh, and are translated to the layout's mesh like those of a spec in the model. The
user's `Parallel(rules=...)` take precedence over these rules, and these over jaxpar's own names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flax.core import spmd

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.sharding.author.explicit import author_rules, axes_tuple
from jaxpar.sharding.names import Blueprint, Leaf
from jaxpar.sharding.rules import Axes, resolve_axes

Rule = tuple[str, Any]


def with_rules_in_force(blueprint: Blueprint) -> Blueprint:
    """Applies the current Flax rules to the names of a model's dims, unless its blueprint already has them."""
    rules = author_rules()
    if not rules or rules == blueprint.rules:
        return blueprint

    def apply_rules(leaf: Leaf) -> Leaf:
        if leaf.names is None or leaf.axes is not None:
            return leaf
        return replace(leaf, axes=tuple(spmd.from_sharding_rules(leaf.names, rules)))

    leaves, others = (
        {path: apply_rules(leaf) for path, leaf in arrays.items()}
        for arrays in (blueprint.leaves, blueprint.other_leaves)
    )
    return replace(blueprint, leaves=leaves, other_leaves=others, rules=rules)


def with_author_rules(
    names: Mapping[str, Axes], rules: Sequence[Rule], user: Mapping[str, Axes], sizes: Mapping[str, int]
) -> tuple[dict[str, Axes], list[str]]:
    """Merges the author's rules into the rules for names of dims; also returns the author's axes that nothing maps.

    Args:
      names: Name of a dim to mesh axes, by the user's rules and jaxpar's own.
      rules: The author's rules; the first rule for a name counts.
      user: The user's rules.
      sizes: Mesh axis to size.
    """
    written = {axis for _, axes in rules for axis in axes_tuple(axes)}
    ruled: dict[str, Axes] = {}
    unknown: list[str] = []
    for name, axes in rules:
        if name in user or name in ruled or name == "layers":  # `layers` belongs to a pipeline
            continue
        present = [axis for axis in axes_tuple(axes) if axis in names or axis in sizes]
        unknown += [axis for axis in axes_tuple(axes) if axis not in present]
        if present or not axes:
            ruled[name] = (
                tuple(dict.fromkeys(on for axis in present for on in _mesh_axes(axis, names, sizes, written))) or None
            )
    first = {name: axes for name, axes in names.items() if name in user}
    return {**first, **ruled, **{name: axes for name, axes in names.items() if name not in ruled}}, unknown


def check_rules_in_force(blueprint: Blueprint) -> None:
    """Refuses Flax rules around a step that differ from those around the `compose` of its layout.

    Raises:
      JaxparError: If the rules differ.
    """
    rules = author_rules()
    if rules and rules != blueprint.rules:
        raise refuse(
            f"rules for {', '.join(dict.fromkeys(str(name) for name, _ in rules))} are in force around the step, but "
            f"{'others' if blueprint.rules else 'none'} were in force when {blueprint.name} was composed",
            rule="a name of a dim means one thing for parameters and for activations",
            fix="jp.compose inside of the same context of logical_axis_rules, or rules={...} in Parallel",
        )


def _mesh_axes(axis: str, names: Mapping[str, Axes], sizes: Mapping[str, int], written: set[str]) -> tuple[str, ...]:
    examples = batch_axes(sizes)
    if axis in examples and axis not in names:  # the author's only axis of examples may be several of a layout
        return tuple(example_axis for example_axis in examples if example_axis == axis or example_axis not in written)
    return resolve_axes(axis, names)
