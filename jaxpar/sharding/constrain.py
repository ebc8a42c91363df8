"""Activations: the names a model gives them are resolved while its step is traced.

A model calls Flax's own `nn.with_logical_constraint(x, ("batch", "seq", "embed"))`, or
`jaxpar.constrain(x, "batch", "seq", "embed")`, and knows no mesh; outside of a step both
do nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flax.core import spmd

from jaxpar.sharding.rules import Axes


class _Noted(str):
    """A name that remembers being found among the names of an activation.

    Rules are looked up by `name in names`, in Flax's own constraints as in `jp.constrain`: equality is the one place
    that sees both, without a hook in Flax.
    """

    seen: set[str]

    def __eq__(self, other: object) -> bool:
        same = str.__eq__(self, other)
        if same is True:
            self.seen.add(str(self))
        return same

    __hash__ = str.__hash__


@contextmanager
def activation_names(names: Mapping[str, Axes], sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """Resolves names of activation dims by these rules, earlier rules first, while the context lasts.

    Where a name before it took one of several axes of a name, it has the first one alone.

    Yields:
      The names that the model used, complete when the context ends; also those of contexts inside of it.
    """

    def present(axes: Axes) -> Axes:
        kept = tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if sizes.get(a, 1) > 1)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    # a pipeline opens this context again inside of a step's, with other sizes: what is named there is named in the step
    around = (name.seen for name, _ in spmd.get_logical_axis_rules() if isinstance(name, _Noted))
    seen: set[str] = next(around, set())
    rules = []
    for name, axes in names.items():
        noted = _Noted(name)
        noted.seen = seen
        kept = present(axes)
        rules.append((noted, kept))
        if isinstance(kept, tuple):
            # A rule is skipped as soon as one of its axes is taken. So the name comes again with its first axis alone:
            # under sequence parallelism `seq` is (context, tensor) on the stream, and context where heads have tensor
            rules.append((noted, kept[0]))
    with spmd.logical_axis_rules(tuple(rules)):
        yield seen
