"""What names of dims mean by rules of Flax's that a model's author, or its user, put in force around it.

    with nnx.logical_axis_rules([("embed", "model"), ("batch", "data")]):     or nn.logical_axis_rules
        layout = jp.compose(model, jp.Parallel(data=2, tensor=4))

The axes are those of the author's mesh, and mean on the layout's what they mean in a spec of the model's. The user's
own `Parallel(rules=...)` come before them, and jaxpar's names after.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flax.core import spmd

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.sharding.author.explicit import author_rules
from jaxpar.sharding.names import Blueprint, Leaf
from jaxpar.sharding.rules import Axes, axes_of_name

Rule = tuple[str, Any]


def with_rules_in_force(blueprint: Blueprint) -> Blueprint:
    """Returns a model whose names mean what the rules in force here say, if it was made where they were not."""
    rules = author_rules()
    if not rules or rules == blueprint.rules:
        return blueprint

    def ruled(leaf: Leaf) -> Leaf:
        if leaf.names is None or leaf.axes is not None:
            return leaf
        return replace(leaf, axes=tuple(spmd.from_sharding_rules(leaf.names, rules)))

    leaves, others = (
        {path: ruled(leaf) for path, leaf in each.items()} for each in (blueprint.leaves, blueprint.others)
    )
    return replace(blueprint, leaves=leaves, others=others, rules=rules)


def with_author_rules(
    names: Mapping[str, Axes], rules: Sequence[Rule], user: Mapping[str, Axes], sizes: Mapping[str, int]
) -> tuple[dict[str, Axes], list[str]]:
    """Returns names of dims to axes with the author's rules among them, and axes of the author's that are not there.

    Args:
      names: By the user's rules and jaxpar's own names.
      rules: The author's, the first of a name wins.
      user: The user's own rules.
      sizes: Mesh axis to size.
    """
    written = {axis for _, axes in rules for axis in _tuple(axes)}
    ruled: dict[str, Axes] = {}
    unknown: list[str] = []
    for name, axes in rules:
        if name in user or name in ruled or name == "layers":  # a dim of layers is a pipeline's
            continue
        there = [axis for axis in _tuple(axes) if axis in names or axis in sizes]
        unknown += [axis for axis in _tuple(axes) if axis not in there]
        if there or not axes:
            ruled[name] = (
                tuple(dict.fromkeys(on for axis in there for on in _meant(axis, names, sizes, written))) or None
            )
    first = {name: axes for name, axes in names.items() if name in user}
    return {**first, **ruled, **{name: axes for name, axes in names.items() if name not in ruled}}, unknown


def check_rules_in_force(blueprint: Blueprint) -> None:
    """Refuses rules around a step that were not in force where its layout was composed.

    Raises:
      JaxparError: If there are such rules.
    """
    rules = author_rules()
    if rules and rules != blueprint.rules:
        raise refuse(
            f"rules for {', '.join(dict.fromkeys(str(name) for name, _ in rules))} are in force around the step, and "
            f"{'others' if blueprint.rules else 'none'} were where {blueprint.name} was composed",
            rule="a name of a dim means one thing for parameters and for activations",
            fix="jp.compose inside of the same context of logical_axis_rules, or rules={...} in Parallel",
        )


def _meant(axis: str, names: Mapping[str, Axes], sizes: Mapping[str, int], written: set[str]) -> tuple[str, ...]:
    examples = batch_axes(sizes)
    if axis in examples and axis not in names:  # the author's only axis of examples may be several of a layout
        return tuple(each for each in examples if each == axis or each not in written)
    return axes_of_name(axis, names)


def _tuple(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
