"""The data of a job, and the protocol of a source of batches."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxpar.data.tokenizers.files import positions
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import JaxparError, Keywords, Problem, check_ranges, nearest, refuse

Batch = dict[str, np.ndarray]
ROWS = ("jsonl", "parquet")
TEXT = ("stdlib", "text", *ROWS)  # the sources whose examples are tokens
OF_SETS = ("source", "path", "pattern", "column", "messages", "learn")  # what an evaluation set has of its own
SET_NAME = "[a-z][a-z0-9]*"  # as metrics have it: eval_wiki_loss
SEQ = 128  # tokens of an example of text, where nobody says how many
OURS = ("bytes", "bpe")  # the tokenizers that are no path


@dataclass(frozen=True, kw_only=True)
class Data(Keywords):
    """The data to train on.

    Attributes:
      source: stdlib, text, jsonl, parquet, digits, arrays, or "package.module:name" of a Python iterable, of a function
        that returns one, or of an object with batch(step, size) and, to be evaluated, evaluation(index, size); its
        `examples`, if it has them, is how many there are.
      evaluation: "package.module:name" of examples to evaluate it on, if the source has no `evaluation` itself: a
        dataset by number or an iterable of batches, or what makes one.
      sets: Evaluation sets by name, each a table of source, path, pattern, column, messages and learn; what it
        leaves out, but path, is as in training: { wiki = { path = "wiki.jsonl" } } has the metrics eval_wiki_loss etc.
      path: File, folder or glob of text, rows or arrays; a list of them for text and rows.
      weights: Shares of the examples that come from each entry of `path`, if they are not to be as many as there are.
      pattern: Which files of a folder of text; hidden ones are left out unless it begins with a dot.
      column: Column of JSONL or Parquet that holds text.
      messages: Column that holds conversations, lists of {role, content}, instead: the chat template of the tokenizer's
        folder renders them.
      learn: answers, or all of a conversation.
      tokenizer: bytes, bpe trained on the text, or a tokenizer of Hugging Face's: tokenizer.json, or a folder with one.
      end: The token that ends a document; "" means the eos_token of the tokenizer's folder.
      vocab: Tokens of a bpe.
      documents: mixed cuts rows of `seq` tokens out of all documents, one after the other; alone gives each document
        its own row, filled up; apart packs several into a row, which the model is told by `segments` and `positions`.
        auto is alone for conversations, and mixed for all else.
      seq: Tokens per example. 0 is 128; for conversations what the model takes in whose folder the tokenizer is, 2,048
        at most.
      held_out: Share of the examples kept for evaluation.
      ahead: Batches that a thread reads ahead, where reading is uneven; with 0 the next one is read while devices
        compute. Rows of metrics have input_wait_seconds, what a step waited for its batch at most.
      shuffle: Whether examples come in a new order every epoch.
    """

    source: str = "stdlib"
    evaluation: str = ""
    sets: dict[str, dict[str, str | list[str]]] = field(default_factory=dict)
    path: str | list[str] = field(default_factory=str)
    weights: tuple[float, ...] = ()
    pattern: str = "*"
    column: str = "text"
    messages: str = ""
    learn: Literal["answers", "all"] = "answers"
    tokenizer: str = "bytes"
    end: str = ""
    vocab: int = 1024
    documents: Literal["auto", "mixed", "alone", "apart"] = "auto"
    seq: int = 0
    held_out: float = 0.02
    shuffle: bool = True
    ahead: int = 0

    @property
    def is_text(self) -> bool:
        """Whether the examples are tokens."""
        return self.source in TEXT

    @property
    def has_rows(self) -> bool:
        """Whether documents are rows of files, and not files."""
        return self.source in ROWS

    @property
    def is_marked(self) -> bool:
        """Whether packed tokens say themselves where documents begin and what is learned; text of old runs does not."""
        return self.has_rows or self.tokenizer not in OURS

    @property
    def has_mask(self) -> bool:
        """Whether batches of text say which targets count."""
        return self.documents != "mixed" or bool(self.messages and self.learn == "answers")

    @property
    def tokens(self) -> int:
        """The number of different tokens of the text.

        Raises:
          JaxparError: If a tokenizer is to be read and is not there.
        """
        if self.tokenizer in OURS:
            return 256 if self.tokenizer == "bytes" else self.vocab
        return saved(self.tokenizer).size

    def set_of(self, name: str) -> "Data":
        """Returns the settings of an evaluation set, whose examples are all read, in their order.

        Raises:
          JaxparError: If they do not go together.
        """
        table = self.sets[name]
        own: dict[str, Any] = {"path": "", "messages": "" if "column" in table else self.messages, **table}
        return replace(self, sets={}, weights=(), evaluation="", held_out=0.0, shuffle=False, **own)

    def __post_init__(self):
        if self.documents == "auto":
            object.__setattr__(self, "documents", "alone" if self.messages else "mixed")
        if self.seq == 0 and self.seq is not False:
            object.__setattr__(self, "seq", positions(self.tokenizer) if self.messages else SEQ)
        problems: list[Problem] = []
        try:
            check_ranges(
                self, "data", {"seq": (1, 2**24), "vocab": (257, 2**24), "held_out": (0.0, 0.5), "ahead": (0, 1024)}
            )
        except JaxparError as error:
            problems += error.problems
        known = (*TEXT, "digits", "arrays")
        if self.source not in known and not (isinstance(self.source, str) and ":" in self.source):
            rule = f'a source is {", ".join(known)}, or "package.module:name"'
            problems.append(Problem(f"data.source = {self.source!r}", rule, _meant(self.source, known)))
        elif self.source in ("text", "arrays", *ROWS) and not self.path:
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
        problems += _of_text(self) or [problem for name in self.sets for problem in _of_set(self, name)]
        if problems:
            raise JaxparError(*problems)


def _of_text(spec: Data) -> list[Problem]:
    """Returns what is wrong with the keys that go together."""
    found = []
    if spec.messages and (not spec.has_rows or spec.tokenizer in OURS):
        got = f"data.messages with data.source = {spec.source!r}, data.tokenizer = {spec.tokenizer!r}"
        rule = "messages are a column of JSONL or Parquet, rendered by the chat template of a tokenizer's folder"
        found.append(Problem(got, rule, 'source = "jsonl", and tokenizer = the folder of the model'))
    if spec.end and spec.tokenizer in OURS:
        rule = "bytes and our own bpe end a document by token 0"
        found.append(Problem(f"data.end = {spec.end!r} with {spec.tokenizer}", rule, "leave it out"))
    if spec.evaluation and ":" not in spec.source:
        rule = "data.evaluation is for data of one's own; of files a share is held out"
        found.append(Problem(f"data.evaluation = {spec.evaluation!r}", rule, "data.held_out = 0.02"))
    if not spec.column:
        found.append(Problem("data.column = ''", "data.column names a column", 'column = "text"'))
    entries = len(spec.path) if isinstance(spec.path, list) else 1
    good = all(isinstance(each, int | float) and 0 < each < float("inf") for each in spec.weights)
    if spec.weights and (len(spec.weights) != entries or not good or not spec.is_text or entries < 2):
        got = f"data.weights = {list(spec.weights)} for {entries} of data.path"
        rule = (
            "a mixture of text or rows has a positive weight for every entry of data.path, of which there are several"
        )
        found.append(Problem(got, rule, 'path = ["a.jsonl", "b.jsonl"], weights = [0.7, 0.3]'))
    return found


def check_path(spec: Data) -> None:
    """Refuses a path that no source reads.

    Raises:
      JaxparError: If there is one.
    """
    if spec.path and spec.source not in ("text", "arrays", *ROWS):
        raise refuse(
            f"data.path = {spec.path!r} with data.source = {spec.source!r}, which reads no path",
            rule="a path is read by text, jsonl, parquet and arrays",
            fix='source = "text"',
        )


def _of_set(spec: Data, name: str) -> list[Problem]:
    """Returns what is wrong with an evaluation set."""
    key, table = f"data.sets.{name}", spec.sets[name]
    if unknown := [each for each in table if each not in OF_SETS]:
        return [
            Problem(f"{key}.{unknown[0]}", f"a set has the keys {', '.join(OF_SETS)}", nearest(unknown[0], OF_SETS))
        ]
    if not re.fullmatch(SET_NAME, name):
        return [Problem(key, "a set's name is of small letters and digits, as metrics have it", "data.sets.wiki")]
    if not table.keys() & {"source", "path"}:
        return [Problem(key, "a set has other examples than those that are trained on", 'path = "wiki.jsonl"')]
    try:
        made = spec.set_of(name)
    except JaxparError as error:
        return [Problem(each.got.replace("data.", f"{key}.", 1), each.rule, each.fix) for each in error.problems]
    if ":" in made.source and "source" not in table:
        return [Problem(f"{key} without a source", "data of one's own says nothing of files", 'source = "jsonl"')]
    try:
        check_path(made)
    except JaxparError as error:
        return [Problem(each.got.replace("data.", f"{key}.", 1), each.rule, each.fix) for each in error.problems]
    if made.is_text and made.tokenizer == "bpe":
        rule = "a bpe is trained on the text of a job: that of a set would be another one"
        return [Problem(f"{key} with data.tokenizer = 'bpe'", rule, 'tokenizer = "bytes", or a tokenizer.json')]
    return []


def _meant(source: object, known: Sequence[str]) -> str:
    """Returns the source that was meant, where a file is named in its place too."""
    ends = Path(source).suffix if isinstance(source, str) else ""
    kind = {".npz": "arrays", ".npy": "arrays", ".bin": "arrays", ".jsonl": "jsonl", ".parquet": "parquet"}.get(
        ends, "text"
    )
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
      examples: Of a batch that is filled up with copies how many examples there are, which are its first rows; else 0.
    """

    weight: float
    batch: dict[str, Any]
    examples: int = 0


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

        The last ones may be fewer: then their batches are filled up, and the weights make up for it, unless a loss
        does not add up over examples: then the copies are left out.
        """
        ...
