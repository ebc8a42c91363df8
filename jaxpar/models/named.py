"""Names of dims of activations, which a training step gives a meaning: what an axis of its mesh splits."""

from collections.abc import Sequence
from contextvars import ContextVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse

# the rules of the step that is traced, also where the model opens a context of rules of its own; none outside of a step
step_rules: ContextVar[Sequence] = ContextVar("step_rules", default=())


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` split as the names of its dims say, where a training step gives them a meaning.

    Names that come first among the rules win where two dims ask for one mesh axis. A dim whose name
    has no rule is left to XLA; one that is None is whole. Outside of a step this does nothing.

    Args:
      x: An activation.
      *names: One name, or None, for every dim.
    """
    if len(names) != x.ndim or not all(name is None or isinstance(name, str) for name in names):
        raise refuse(
            f"constrain(x of shape {list(x.shape)}, {', '.join(map(repr, names))})",
            rule="every dim has one name, or None",
            fix=f"constrain(x, {', '.join(map(repr, (*names, *(None,) * x.ndim)[: x.ndim]))})",
        )
    spec = _spec(names, step_rules.get())
    return x if spec is None else constrain_to(x, spec)


def spec_of(names: tuple[str | None, ...]) -> PartitionSpec | None:
    """Returns how an activation with these names of dims is cut; None outside of a step.

    To ask is not to name: a step notes the names that `constrain` compares with its rules, as those that its model
    used, and refuses an axis that cuts none of them. A copy of the rules notes nothing.
    """
    return _spec(names, tuple(step_rules.get()))


def constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns `x` constrained to a spec on the axes of the step's own mesh.

    A bare spec would be read as one of the model's author: see `sharding/author/explicit.py`.
    """
    return jax.lax.with_sharding_constraint(x, NamedSharding(get_abstract_mesh(), spec))


def axes_of(entry: object) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec: those that cut a dim, none where nothing is said of it."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)  # pyright: ignore[reportArgumentType]


def _spec(names: tuple[str | None, ...], rules: Sequence) -> PartitionSpec | None:
    if not rules:
        return None
    dims: list = [None] * len(names)
    taken: set[str] = set()
    for name, axes in rules:
        if axes is PartitionSpec.UNCONSTRAINED:
            dims = [axes if each == name else dim for each, dim in zip(names, dims, strict=True)]
        elif name in names and axes is not None and dims[names.index(name)] is None:
            wanted = (axes,) if isinstance(axes, str) else tuple(axes)
            if not taken.intersection(wanted):
                dims[names.index(name)] = axes
                taken.update(wanted)
    return PartitionSpec(*dims)
