"""Dim names of activations; a training step maps them to axes of its mesh."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse

IMAGES = "images"  # name of the examples of convolutions, where a rule splits them otherwise than those of other layers
SPATIAL = ("height", "width")  # names of the first spatial dims of an image or a volume, which axes split

# sharding rules of the step being traced, even if the model opens its own context of rules; empty outside of a step
step_rules: ContextVar[Sequence] = ContextVar("step_rules", default=())


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Shards `x` as the traced step maps the names of its dims to mesh axes; the identity outside of a step.

    If rules map two dims to one mesh axis, the name that comes first among the rules gets it. A dim whose name has no
    rule is left to XLA; a dim named None is not sharded.

    Args:
      x: An activation.
      *names: One name, or None, per dim.
    """
    if len(names) != x.ndim or not all(name is None or isinstance(name, str) for name in names):
        raise refuse(
            f"constrain(x of shape {list(x.shape)}, {', '.join(map(repr, names))})",
            rule="every dim has one name, or None",
            fix=f"constrain(x, {', '.join(map(repr, (*names, *(None,) * x.ndim)[: x.ndim]))})",
        )
    spec = _spec(names, step_rules.get())
    return x if spec is None else constrain_to(x, spec)


def get_spec(names: tuple[str | None, ...]) -> PartitionSpec | None:
    """The spec of an activation with these dim names; None outside of a step.

    Unlike `constrain`, this does not count as a use of the names: a step records the names that `constrain` looks up in
    its rules, and refuses an axis that shards none of them. This function looks them up in a copy of the rules.
    """
    return _spec(names, tuple(step_rules.get()))


def record_use(name: str) -> None:
    """Records that the model uses a name, as `constrain` does for its arguments."""
    names: set[str] | None = getattr(step_rules.get(), "recorded_names", None)  # None outside of a step
    if names is not None:
        names.add(name)


def constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrains `x` to a spec in axes of the step's mesh.

    It passes a NamedSharding, because jaxpar translates a spec without a mesh: see `sharding/author/explicit.py`.
    """
    return jax.lax.with_sharding_constraint(x, NamedSharding(get_abstract_mesh(), spec))


def spec_axes(entry: object) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec; none if the dim is unsharded or unconstrained."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)  # pyright: ignore[reportArgumentType]


def _spec(names: tuple[str | None, ...], rules: Sequence) -> PartitionSpec | None:
    if not rules:
        return None
    dims: list = [None] * len(names)
    used_axes: set[str] = set()
    for name, axes in rules:
        if axes is PartitionSpec.UNCONSTRAINED:
            dims = [axes if dim_name == name else dim for dim_name, dim in zip(names, dims, strict=True)]
        elif name in names and axes is not None and dims[names.index(name)] is None:
            rule_axes = (axes,) if isinstance(axes, str) else tuple(axes)
            if not used_axes.intersection(rule_axes):
                dims[names.index(name)] = axes
                used_axes.update(rule_axes)
    return PartitionSpec(*dims)


def partial_spec(rank: int, entries: Mapping[int, tuple[str, ...] | None]) -> PartitionSpec:
    """Returns a spec with these entries by dim; all other dims are as XLA chooses."""
    return PartitionSpec(*(entries.get(dim, PartitionSpec.UNCONSTRAINED) for dim in range(rank)))
