"""Resolves the names that a model gives the dims of activations, while its step is traced.

A model calls Flax's own `nn.with_logical_constraint(x, ("batch", "seq", "embed"))`, or `jaxpar.constrain(x, "batch",
"seq", "embed")`, and knows no mesh; outside of a step both do nothing. XLA chooses the sharding of a dim whose name has
no rule, from the operands of the activation.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flax.core import spmd
from jax.sharding import PartitionSpec

from jaxpar.models.dim_names import step_rules
from jaxpar.sharding.rules import Axes


class _NameRecorder:
    """Takes the place of the first rule's name: equals nothing, and records the names that it is compared with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            self.names.append(str(other))
        return False

    __hash__ = object.__hash__


class RecordingRules(tuple):
    """Flax rules, (name, axes) each, that end with one for every other name of the current activation.

    Flax treats a name without a rule as a dim that is whole on every device: a constraint on ("activation_batch", ...)
    would gather the batch. Its only hook is that it reads all rules, in order, and checks for each whether its name is
    among the activation's. So the name of the first rule records the activation's names from these comparisons, and the
    last rules leave to XLA the dims without a rule.

    Attributes:
      seen: The names of all activations so far.
    """

    seen: set[str]

    def __iter__(self) -> Iterator:
        recorder = _NameRecorder()
        yield recorder, None
        ruled = set()
        for name, axes in super().__iter__():
            ruled.add(name)
            yield name, axes
        self.seen.update(recorder.names)
        yield from ((name, PartitionSpec.UNCONSTRAINED) for name in dict.fromkeys(recorder.names) if name not in ruled)


@contextmanager
def activation_names(names: Mapping[str, Axes], sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """Resolves names of activation dims by these rules, earlier rules first, until the context ends.

    If an earlier name took one of several axes of a name, the name gets its first axis alone.

    Yields:
      The names that the model used, complete when the context ends; also those of contexts inside of it.
    """

    def present(axes: Axes) -> Axes:
        active = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if sizes.get(axis, 1) > 1)
        return None if not active else active[0] if len(active) == 1 else active

    rules = []
    for name, axes in names.items():
        active = present(axes)
        rules.append((name, active))
        if isinstance(active, tuple):
            # A rule is skipped as soon as one of its axes is taken. So it is repeated with its first axis alone:
            # under sequence parallelism `seq` is (context, tensor) on the stream, and context where heads have tensor
            rules.append((name, active[0]))
    # a pipeline opens this context again inside of a step's, with other sizes: names used there count for the step
    outer_rules = step_rules.get()
    resolved = RecordingRules(rules)
    resolved.seen = outer_rules.seen if isinstance(outer_rules, RecordingRules) else set()
    token = step_rules.set(resolved)
    try:
        with spmd.logical_axis_rules(resolved):
            yield resolved.seen
    finally:
        step_rules.reset(token)
