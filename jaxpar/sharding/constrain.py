"""Maps the names that a model gives to dims of activations to mesh axes, while a step is traced.

A model calls Flax's own `nn.with_logical_constraint(x, ("batch", "seq", "embed"))`, or `jaxpar.constrain(x, "batch",
"seq", "embed")`, and knows no mesh; outside of a step both do nothing. If a name has no rule, XLA chooses the sharding
of its dim from the operands of the activation.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flax.core import spmd
from jax.sharding import PartitionSpec

from jaxpar.models.dim_names import step_rules
from jaxpar.sharding.rules import Axes


class _NameRecorder:
    """Replaces the name in the first rule: it equals nothing, and records each name that it is compared with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            self.names.append(str(other))
        return False

    __hash__ = object.__hash__


class RecordingRules(tuple):
    """Flax rules, as (name, axes), followed by an UNCONSTRAINED rule for every other name of the current activation.

    Flax replicates a dim whose name has no rule: a constraint on ("activation_batch", ...) would gather the batch. Flax
    has no hook to change this, but it compares the name of each rule, in order, with the names of the activation. So
    the name of the first rule is an object that records the activation's names during these comparisons, and the last
    rules leave the dims without a rule to XLA.

    Attributes:
      recorded_names: The names of all activations so far.
    """

    recorded_names: set[str]

    def __iter__(self) -> Iterator:
        recorder = _NameRecorder()
        yield recorder, None
        ruled = set()
        for name, axes in super().__iter__():
            ruled.add(name)
            yield name, axes
        self.recorded_names.update(recorder.names)
        yield from ((name, PartitionSpec.UNCONSTRAINED) for name in dict.fromkeys(recorder.names) if name not in ruled)


@contextmanager
def activation_names(names: Mapping[str, Axes], sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """Context in which these rules map names of activation dims to mesh axes; earlier rules take precedence.

    If another dim of the activation already uses one of several axes of a name, the name gets only its first axis.

    Yields:
      The set of names that the model used, also in nested contexts; it is complete when the context ends.
    """

    def active_axes(axes: Axes) -> Axes:
        active = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if sizes.get(axis, 1) > 1)
        return None if not active else active[0] if len(active) == 1 else active

    rules = []
    for name, axes in names.items():
        active = active_axes(axes)
        rules.append((name, active))
        if isinstance(active, tuple):
            # Flax skips a rule if one of its axes is taken. So each rule is repeated with only its first axis:
            # under sequence parallelism `seq` is (context, tensor) on the stream, and context where heads have tensor
            rules.append((name, active[0]))
    # a pipeline nests this context inside of the step's, with other sizes: names used there also count for the step
    outer_rules = step_rules.get()
    resolved = RecordingRules(rules)
    resolved.recorded_names = outer_rules.recorded_names if isinstance(outer_rules, RecordingRules) else set()
    token = step_rules.set(resolved)
    try:
        with spmd.logical_axis_rules(resolved):
            yield resolved.recorded_names
    finally:
        step_rules.reset(token)
