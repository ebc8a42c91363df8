"""The techniques of a plan by their axis, in the order in which a search assigns devices.

The last axis takes all remaining devices. The order decides ties, and the layouts of a random draw.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.errors import refuse
from jaxpar.plan.techniques.base import PlanTechnique
from jaxpar.plan.techniques.context import CONTEXT
from jaxpar.plan.techniques.data import DATA
from jaxpar.plan.techniques.expert import EXPERT
from jaxpar.plan.techniques.pipe import PIPE
from jaxpar.plan.techniques.sharding import SHARDING
from jaxpar.plan.techniques.tensor import TENSOR
from jaxpar.tables import insert_row, replace_rows

TECHNIQUES: dict[str, PlanTechnique] = {
    technique.axis: technique for technique in (PIPE, TENSOR, CONTEXT, EXPERT, SHARDING, DATA)
}


@contextmanager
def added(technique: PlanTechnique, *, before: str = "fsdp") -> Iterator[None]:
    """Context manager that adds a technique, in the order before the axis `before`.

    Raises:
      JaxparError: If its axis already has a technique, or `before` has none.
    """
    if technique.axis in TECHNIQUES or before not in TECHNIQUES:
        raise refuse(
            f"a technique of the axis {technique.axis!r} before {before!r}",
            rule=f"a plan has one technique for an axis, and has them for {', '.join(TECHNIQUES)}",
            fix="another axis, or before='fsdp'",
        )
    with replace_rows(TECHNIQUES, insert_row(TECHNIQUES, technique.axis, technique, at=[*TECHNIQUES].index(before))):
        yield
