"""Activations: the names a model gives them are resolved while its step is traced.

A model calls Flax's own `nn.with_logical_constraint(x, ("batch", "seq", "embed"))`, or
`jaxpar.constrain(x, "batch", "seq", "embed")`, and knows no mesh; outside of a step both
do nothing. A name without a rule says nothing of its dim: XLA splits that as it splits what
the activation was made of.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flax.core import spmd
from jax.sharding import PartitionSpec

from jaxpar.models.named import step_rules
from jaxpar.sharding.rules import Axes


class _Asked:
    """Stands where the first rule has its name, equals nothing, and keeps the names that it is compared with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            self.names.append(str(other))
        return False

    __hash__ = object.__hash__


class Rules(tuple):
    """Rules of Flax's, (name, axes) each, that end with one for every other name of the activation at hand.

    Flax takes a name without a rule for a dim that is whole on every device: a constraint on ("activation_batch", ...)
    would gather the batch. Its only hook is that it reads all rules, in order, and asks of each whether its name is
    among the activation's. So the first one is a name that learns in this way what the others are, and the last ones
    leave the dims to XLA that no rule was found for.

    Attributes:
      seen: The names of all activations so far.
    """

    seen: set[str]

    def __iter__(self) -> Iterator:
        asked = _Asked()
        yield asked, None
        known = set()
        for name, axes in super().__iter__():
            known.add(name)
            yield name, axes
        self.seen.update(asked.names)
        yield from ((name, PartitionSpec.UNCONSTRAINED) for name in dict.fromkeys(asked.names) if name not in known)


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

    rules = []
    for name, axes in names.items():
        kept = present(axes)
        rules.append((name, kept))
        if isinstance(kept, tuple):
            # A rule is skipped as soon as one of its axes is taken. So the name comes again with its first axis alone:
            # under sequence parallelism `seq` is (context, tensor) on the stream, and context where heads have tensor
            rules.append((name, kept[0]))
    # a pipeline opens this context again inside of a step's, with other sizes: what is named there is named in the step
    around = step_rules.get()
    resolved = Rules(rules)
    resolved.seen = around.seen if isinstance(around, Rules) else set()
    token = step_rules.set(resolved)
    try:
        with spmd.logical_axis_rules(resolved):
            yield resolved.seen
    finally:
        step_rules.reset(token)
