"""Activations: the names a model gives them are resolved while its step is traced.

A model calls Flax's own `nn.with_logical_constraint(x, ("batch", "seq", "embed"))`, or
`jaxpar.constrain(x, "batch", "seq", "embed")`, and knows no mesh; outside of a step both
do nothing.
"""

from collections.abc import Mapping
from contextlib import contextmanager

from flax.core import spmd

from jaxpar.sharding.rules import Axes


@contextmanager
def activation_names(names: Mapping[str, Axes], sizes: Mapping[str, int]):
    """Resolves names of activation dims by these rules, earlier rules first, while the context lasts."""

    def present(axes: Axes) -> Axes:
        kept = tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if sizes.get(a, 1) > 1)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    with spmd.logical_axis_rules(tuple((name, present(axes)) for name, axes in names.items())):
        yield
