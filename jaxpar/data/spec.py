"""The data of a job, and the protocol of a source of batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxpar.errors import JaxparError, Keywords, Problem, check_ranges, nearest

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Data(Keywords):
    """The data to train on.

    Attributes:
      source: stdlib, text, digits, arrays, or "package.module:name" of a Python iterable, of a function that returns
        one, or of an object with batch(step, size) and, to be evaluated, evaluation(index, size); its `examples`, if it
        has them, is how many there are.
      path: File, folder or glob of text or arrays; a list of them for text.
      pattern: Which files of a folder of text.
      tokenizer: bytes, or bpe trained on the text.
      vocab: Tokens of a bpe.
      seq: Tokens per example.
      held_out: Share of the examples kept for evaluation.
      shuffle: Whether examples come in a new order every epoch.
    """

    source: str = "stdlib"
    path: str | list[str] = field(default_factory=str)
    pattern: str = "*"
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    vocab: int = 1024
    seq: int = 128
    held_out: float = 0.02
    shuffle: bool = True

    @property
    def is_text(self) -> bool:
        """Whether the examples are tokens."""
        return self.source in ("stdlib", "text")

    @property
    def tokens(self) -> int:
        """The number of different tokens of the text."""
        return 256 if self.tokenizer == "bytes" else self.vocab

    def __post_init__(self):
        problems: list[Problem] = []
        try:
            check_ranges(self, "data", {"seq": (1, 2**24), "vocab": (257, 2**24), "held_out": (0.0, 0.5)})
        except JaxparError as error:
            problems += error.problems
        known = ("stdlib", "text", "digits", "arrays")
        if self.source not in known and not (isinstance(self.source, str) and ":" in self.source):
            rule = f'a source is {", ".join(known)}, or "package.module:name"'
            problems.append(Problem(f"data.source = {self.source!r}", rule, _meant(self.source, known)))
        elif self.source in ("text", "arrays") and not self.path:
            problems.append(
                Problem(
                    f"data.source = {self.source!r} without a path",
                    "this source reads the files of data.path",
                    'path = "corpus/*.txt"',
                )
            )
        elif self.source == "arrays" and not isinstance(self.path, str):
            problems.append(
                Problem(
                    f"data.path = {self.path!r} for arrays",
                    "arrays come as one .npz, one .npy or a folder of .npy",
                    'path = "data.npz"',
                )
            )
        if problems:
            raise JaxparError(*problems)


def _meant(source: object, known: Sequence[str]) -> str:
    """Returns the source that was meant, where a file is named in its place too."""
    ends = Path(source).suffix if isinstance(source, str) else ""
    kind = "arrays" if ends in (".npz", ".npy") else "text"
    return f'source = "{kind}", path = "{source}"' if ends else nearest(str(source), known)


Rows = np.ndarray | None  # which rows of a global batch are wanted, in order; None means all


def some(batch: Batch, rows: Rows) -> Batch:
    """Returns those rows of a batch."""
    return batch if rows is None else {name: value[rows] for name, value in batch.items()}


@dataclass(frozen=True, slots=True)
class Weighted:
    """A batch of held-out examples.

    Attributes:
      weight: What its sums and counts are multiplied by, before they are added to those of the others.
      batch: Name to array of as many rows as every batch has.
    """

    weight: float
    batch: dict[str, Any]


class Source(Protocol):
    """A source of batches."""

    @property
    def fingerprint(self) -> str:
        """Tells the examples from others: a run goes on with those that it began with."""
        ...

    @property
    def examples(self) -> int | None:
        """How many there are to train on; None where nobody knows."""
        ...

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, or some of its rows: the same for the same step, always."""
        ...

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` held-out examples, in one or two batches of `size` rows; none after the last.

        The last ones may be fewer: then their batches are filled up, and the weights make up for it.
        """
        ...
