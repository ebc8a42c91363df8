"""Named evaluation sets: all of their examples are evaluated, and none is trained on.

    [data.sets]
    wiki = {path = "wiki.jsonl"}                   inherits the other keys of [data]
    code = {source = "text", path = "code/*.py"}
    mine = {source = "mine:held"}                  a map-style dataset, an iterable of batches, or a function of one

Their metrics are eval_wiki_loss, eval_code_perplexity and so on, in addition to those of the held-out share.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.iterables import UserSource
from jaxpar.data.sources import open_data
from jaxpar.data.spec import SET_NAME, Data, Rows, Source, WeightedBatch
from jaxpar.data.streams.user_data import open_held_out
from jaxpar.data.text import Examples, weighted_batches
from jaxpar.errors import refuse


class EvaluationSet(Protocol):
    """Examples to evaluate on."""

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` examples; none after the last. See `spec.Source`."""
        ...


class AllExamples:
    """All examples of an indexed source, in order."""

    def __init__(self, source: Examples):
        self.source = source

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` examples; none after the last."""
        chosen = np.arange(index * size, min((index + 1) * size, self.source.examples))
        chosen = self.source.train_indices[chosen]
        return weighted_batches(len(chosen), size, rows, lambda indices: self.source.take_indices(chosen[indices]))


def open_set(spec: Data, name: str, folder: Path, size: int, *, named: object = None) -> EvaluationSet:
    """Opens an evaluation set.

    Args:
      spec: The `[data]` table with the set.
      name: Name of the set.
      folder: Folder of packed tokens.
      size: Examples of a batch.
      named: The user's object, for a source `package.module:name`.

    Raises:
      JaxparError: If there is nothing to read, or it cannot be read.
    """
    return open_all(spec.evaluation_set(name), f"data.sets.{name}", folder, size, named=named)


def open_all(settings: Data, key: str, folder: Path, size: int, *, named: object = None) -> EvaluationSet:
    """Opens all examples of the data, which hold none out, as an evaluation set.

    Args:
      settings: The data, such as `Data.evaluation_set` returns them.
      key: The key of the data, for messages.
      folder: Folder of packed tokens.
      size: Examples of a batch.
      named: The user's object, for a source `package.module:name`.

    Raises:
      JaxparError: If there is nothing to read, or it cannot be read.
    """
    examples = _open_all_examples(settings, folder) if named is None else _open_object(named, settings.source)
    return _check_not_empty(examples, key, size)


def open_sets(sets: Mapping[str, object], folder: Path, size: int) -> dict[str, EvaluationSet]:
    """Opens evaluation sets given as Python objects.

    Args:
      sets: Name to a `Data`, all of whose examples are evaluated; to a source from `open_data`, whose held-out examples
        are; or to an object with `evaluation(index, size)`, a map-style dataset, an iterable of batches, or a function
        that returns one.
      folder: Folder of packed tokens.
      size: Examples of a batch.

    Raises:
      JaxparError: If a value is none of these, a name is invalid in metrics, or a set has no example.
    """
    return {name: _open_set(value, f"sets[{name!r:.60}]", name, folder, size) for name, value in sets.items()}


def _open_set(given: object, said: str, name: object, folder: Path, size: int) -> EvaluationSet:
    if not isinstance(name, str) or not re.fullmatch(SET_NAME, name):
        raise refuse(said, rule="a set's name is of small letters and digits, as in metrics", fix="sets['wiki']")
    if isinstance(given, Data):
        if given.is_text and given.tokenizer == "bpe":
            rule = 'evaluation sets cannot use "bpe", whose vocabulary is learned from each text: the ids would differ'
            raise refuse(f"{said} with tokenizer='bpe'", rule=rule, fix='tokenizer="bytes", or a tokenizer.json')
        settings = replace(given, sets={}, weights=(), evaluation="", held_out=0.0, shuffle=False)
        return _check_not_empty(_open_all_examples(settings, folder), said, size)
    is_ours = type(given).__module__.startswith("jaxpar.data.")
    return _check_not_empty(given if is_ours else _open_object(given, said), said, size)


def _open_all_examples(asked: Data, folder: Path) -> Any:
    source: Source = open_data(asked, folder)
    return AllExamples(source) if isinstance(source, Examples) else source


def _open_object(named: object, name: str) -> Any:
    return UserSource(named, name) if callable(getattr(named, "evaluation", None)) else open_held_out(named, name)


def _check_not_empty(made: Any, said: str, size: int) -> Any:
    if not made.evaluation(0, size):
        raise refuse(f"{said} holds no example", rule="an evaluation set has at least one", fix="leave it out")
    return made
