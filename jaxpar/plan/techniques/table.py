"""The techniques that a plan weighs, by their axis, in the order in which a search tries sizes.

The last takes all devices that the others leave. The order decides ties, and which layouts a random draw names.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.errors import refuse
from jaxpar.plan.techniques.base import Technique
from jaxpar.plan.techniques.context import CONTEXT
from jaxpar.plan.techniques.data import DATA
from jaxpar.plan.techniques.pipe import PIPE
from jaxpar.plan.techniques.sharding import SHARDING
from jaxpar.plan.techniques.tensor import TENSOR
from jaxpar.tables import changed, inserted

TECHNIQUES: dict[str, Technique] = {each.axis: each for each in (PIPE, TENSOR, CONTEXT, SHARDING, DATA)}


@contextmanager
def added(technique: Technique, *, before: str = "fsdp") -> Iterator[None]:
    """Adds a technique, tried before that of another axis, until the context ends.

    Raises:
      JaxparError: If there is one for its axis, or none for `before`.
    """
    if technique.axis in TECHNIQUES or before not in TECHNIQUES:
        raise refuse(
            f"a technique of the axis {technique.axis!r} before {before!r}",
            rule=f"a plan has one technique for an axis, and has them for {', '.join(TECHNIQUES)}",
            fix="another axis, or before='fsdp'",
        )
    with changed(TECHNIQUES, inserted(TECHNIQUES, technique.axis, technique, at=[*TECHNIQUES].index(before))):
        yield
