"""Evaluation sets by name: all of their examples count, and none of them is trained on.

    [data.sets]
    wiki = {path = "wiki.jsonl"}                   the other keys of [data] hold for it too
    code = {source = "text", path = "code/*.py"}
    mine = {source = "mine:held"}                  a dataset by number, an iterable of batches, or what makes one

Their metrics are eval_wiki_loss, eval_code_perplexity and so on, beside those of the examples that are held out.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.examples import Examples
from jaxpar.data.held_out import weighted
from jaxpar.data.iterables import Own
from jaxpar.data.sources import open_data
from jaxpar.data.spec import Data, Rows, Source, Weighted
from jaxpar.data.streams.evaluated import held_out
from jaxpar.errors import refuse


class EvaluationSet(Protocol):
    """Examples that are evaluated."""

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` examples; none after the last. See `spec.Source`."""
        ...


class All:
    """All examples of a source that is read by number, in their order."""

    def __init__(self, source: Examples):
        self.source = source

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` examples; none after the last."""
        chosen = np.arange(index * size, min((index + 1) * size, self.source.examples))
        return weighted(len(chosen), size, rows, lambda at: self.source.numbered(chosen[at]))


def open_set(spec: Data, name: str, folder: Path, size: int, *, named: Any = None) -> EvaluationSet:
    """Returns an evaluation set.

    Args:
      spec: The `[data]` table that it is in.
      name: Of the set.
      folder: Where packed tokens are kept.
      size: Examples of a batch.
      named: The user's object, for a source `package.module:name`.

    Raises:
      JaxparError: If there is nothing to read, or it cannot be read.
    """
    asked = spec.set_of(name)
    if named is not None:
        is_source = callable(getattr(named, "evaluation", None))
        made: Any = Own(named, asked.source) if is_source else held_out(named, asked.source)
    else:
        source: Source = open_data(asked, folder)
        made = All(source) if isinstance(source, Examples) else source
    if not made.evaluation(0, size):
        raise refuse(
            f"data.sets.{name} holds no example", rule="an evaluation set has at least one", fix="leave it out"
        )
    return made
