"""The techniques that a job may declare, by their axis."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.parallel.techniques.base import Technique
from jaxpar.parallel.techniques.context import CONTEXT
from jaxpar.parallel.techniques.data import DATA
from jaxpar.parallel.techniques.pipe import PIPE
from jaxpar.parallel.techniques.sharding import SHARDING
from jaxpar.parallel.techniques.tensor import TENSOR
from jaxpar.tables import changed

TECHNIQUES: dict[str, Technique] = {each.axis: each for each in (PIPE, DATA, SHARDING, CONTEXT, TENSOR)}


@contextmanager
def added(technique: Technique) -> Iterator[None]:
    """Adds a technique, or takes it for the one of its axis, until the context ends.

    A way of jaxpar's own technique to run a model's islands is added so:
    `added(replace(CONTEXT, how={**CONTEXT.how, "mine": {"attention": mine}}))`.
    """
    with changed(TECHNIQUES, {**TECHNIQUES, technique.axis: technique}):
        yield
