"""The techniques that a job may declare, by axis."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.parallel.techniques.base import Technique
from jaxpar.parallel.techniques.context import CONTEXT
from jaxpar.parallel.techniques.data import DATA
from jaxpar.parallel.techniques.expert import EXPERT
from jaxpar.parallel.techniques.image import HEIGHT, WIDTH
from jaxpar.parallel.techniques.pipe import PIPE
from jaxpar.parallel.techniques.sharding import SHARDING
from jaxpar.parallel.techniques.tensor import TENSOR
from jaxpar.tables import replace_rows

TECHNIQUES: dict[str, Technique] = {
    technique.axis: technique for technique in (PIPE, DATA, SHARDING, EXPERT, HEIGHT, WIDTH, CONTEXT, TENSOR)
}


@contextmanager
def with_technique(technique: Technique) -> Iterator[None]:
    """Adds a technique, or replaces the one of its axis, until the context ends.

    This also adds an implementation of a model's islands to one of jaxpar's techniques:
    `with_technique(replace(CONTEXT, how={**CONTEXT.how, "mine": {"attention": mine}}))`.
    """
    with replace_rows(TECHNIQUES, {**TECHNIQUES, technique.axis: technique}):
        yield
