"""Evaluation sets by name: all of their examples count, and none of them is trained on.

    [data.sets]
    wiki = {path = "wiki.jsonl"}                   the other keys of [data] hold for it too
    code = {source = "text", path = "code/*.py"}
    mine = {source = "mine:held"}                  a dataset by number, an iterable of batches, or what makes one

Their metrics are eval_wiki_loss, eval_code_perplexity and so on, beside those of the examples that are held out.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.examples import Examples
from jaxpar.data.held_out import weighted
from jaxpar.data.iterables import Own
from jaxpar.data.sources import open_data
from jaxpar.data.spec import SET_NAME, Data, Rows, Source, Weighted
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
    made = _all_of(asked, folder) if named is None else _own(named, asked.source)
    return _checked(made, f"data.sets.{name}", size)


def as_sets(sets: Mapping[str, Any], folder: Path, size: int) -> dict[str, EvaluationSet]:
    """Returns evaluation sets of Python's objects, by name.

    Args:
      sets: Name to a `Data`, all of whose examples count; what `open_data` returns, of which those that it holds out
        do; an object with `evaluation(index, size)`, a dataset by number, an iterable of batches, or what makes one.
      folder: Where packed tokens are kept.
      size: Examples of a batch.

    Raises:
      JaxparError: If one is none of these, has a name that metrics cannot have, or holds no example.
    """
    return {name: _opened(given, f"sets[{name!r:.60}]", name, folder, size) for name, given in sets.items()}


def _opened(given: Any, said: str, name: Any, folder: Path, size: int) -> EvaluationSet:
    if not isinstance(name, str) or not re.fullmatch(SET_NAME, name):
        raise refuse(said, rule="a set's name is of small letters and digits, as metrics have it", fix="sets['wiki']")
    if isinstance(given, Data):
        if given.is_text and given.tokenizer == "bpe":
            rule = "a bpe is trained on the text that is trained on: that of a set would be another one"
            raise refuse(f"{said} with tokenizer='bpe'", rule=rule, fix='tokenizer="bytes", or a tokenizer.json')
        every = replace(given, sets={}, weights=(), evaluation="", held_out=0.0, shuffle=False)
        return _checked(_all_of(every, folder), said, size)
    is_ours = type(given).__module__.startswith("jaxpar.data.")
    return _checked(given if is_ours else _own(given, said), said, size)


def _all_of(asked: Data, folder: Path) -> Any:
    """Returns all examples of data of ours."""
    source: Source = open_data(asked, folder)
    return All(source) if isinstance(source, Examples) else source


def _own(named: Any, name: str) -> Any:
    """Returns examples of the user's own object."""
    return Own(named, name) if callable(getattr(named, "evaluation", None)) else held_out(named, name)


def _checked(made: Any, said: str, size: int) -> Any:
    """Returns an evaluation set that holds an example."""
    if not made.evaluation(0, size):
        raise refuse(f"{said} holds no example", rule="an evaluation set has at least one", fix="leave it out")
    return made
