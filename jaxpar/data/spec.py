"""The `[data]` table of a job, and the protocol of a source of batches."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxpar.data.images.image_config import ImageConfig
from jaxpar.data.tokenizers.tokenizer_facts import context_length, read_tokenizer
from jaxpar.errors import JaxparError, Keywords, Problem, check_ranges, refuse, suggest

Batch = dict[str, np.ndarray]
ROWS = ("jsonl", "parquet")
TEXT = ("stdlib", "text", *ROWS)  # the sources whose examples are tokens
PATHS = ("text", "arrays", "images", *ROWS)  # the sources that read `path`
PICTURES = ("digits", "photographs", "arrays", "images")  # the sources that may be augmented
SET_KEYS = ("source", "path", "pattern", "column", "messages", "learn")  # the keys of an evaluation set
SET_NAME = "[a-z][a-z0-9]*"  # a part of metric names: eval_wiki_loss
SEQ = 128  # default tokens of an example of text
AUGMENTATIONS = ("flip", "crop")
OURS = ("bytes", "bpe")  # the built-in tokenizers; any other value is a path


@dataclass(frozen=True, kw_only=True, repr=False)
class Data(Keywords):
    """The data to train on.

    Attributes:
      source: stdlib, text, jsonl, parquet, digits, photographs, images, arrays, or "package.module:name" of a Python
        iterable, of a function that returns one, or of an object with batch(step, size) and, to be evaluated,
        evaluation(index, size); its `examples`, if any, is the number of training examples.
      evaluation: "package.module:name" of held-out examples, if the source has no `evaluation` itself: a map-style
        dataset, an iterable of batches, or a function that returns one.
      sets: Evaluation sets by name, each a table of source, path, pattern, column, messages and learn; the other keys,
        and those left out except path, are as in training: { wiki = { path = "wiki.jsonl" } } adds eval_wiki_loss etc.
      path: File, folder or glob of text, rows, arrays or pictures; a list of them for text and rows.
      weights: Share of the examples that comes from each entry of `path`; default: in proportion to their sizes.
      pattern: Glob of the files in a folder of text; hidden files are skipped unless it begins with a dot.
      column: Column of JSONL or Parquet that holds text.
      messages: Column of conversations, lists of {role, content}, used instead of `column`: the chat template of the
        tokenizer's folder renders them.
      learn: answers, or all of a conversation.
      preferences: Whether rows are preferences, for loss = "dpo": columns prompt, chosen and rejected, of text or of
        messages (then the prompt may be the beginning that both answers share).
      tokenizer: bytes, bpe (trained on the text), or a Hugging Face tokenizer: a tokenizer.json, or a folder with one.
      end: The token that ends a document; "" means the eos_token of the tokenizer's folder.
      vocab: Vocabulary size of a bpe.
      documents: mixed concatenates all documents and cuts rows of `seq` tokens; alone gives each document its own,
        padded row; apart packs several documents into a row, whose arrays `segments` and `positions` separate them.
        auto is alone for conversations, and mixed otherwise.
      seq: Tokens per example. 0 is 128; for conversations the context length of the model in the tokenizer's folder,
        at most 2,048.
      augment: Random changes of training images, if source is images, arrays, digits or photographs: flip mirrors half,
        crop shifts them by up to an eighth. They depend on the seed and the step alone.
      images: How pictures of the source images become arrays.
      held_out: Share of the examples that is held out for evaluation; unused if pictures come with a folder val, or a
        source with an evaluation.
      ahead: Batches that a thread prefetches, for uneven read times; with 0 the next batch is read while devices
        compute. The metric input_wait_seconds is an upper bound of the time a step waits for its batch.
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
    preferences: bool = False
    tokenizer: str = "bytes"
    end: str = ""
    vocab: int = 1024
    documents: Literal["auto", "mixed", "alone", "apart"] = "auto"
    seq: int = 0
    augment: tuple[Literal["flip", "crop"], ...] = ()
    images: ImageConfig = field(default_factory=ImageConfig)
    held_out: float = 0.02
    shuffle: bool = True
    ahead: int = 0

    @property
    def is_text(self) -> bool:
        """Whether the examples are tokens."""
        return self.source in TEXT

    @property
    def has_rows(self) -> bool:
        """Whether a document is a row of a file (JSONL, Parquet) rather than a file."""
        return self.source in ROWS

    @property
    def is_marked(self) -> bool:
        """Whether packed tokens have flag bits (`tokenizers.marks`); bytes and bpe of plain text have none."""
        return self.has_rows or self.tokenizer not in OURS

    @property
    def has_mask(self) -> bool:
        """Whether batches of text have a `mask` of the targets that count."""
        return self.documents != "mixed" or bool(self.messages and self.learn == "answers")

    @property
    def tokens(self) -> int:
        """Vocabulary size of the tokenizer.

        Raises:
          JaxparError: If the tokenizer is a path and cannot be read.
        """
        if self.tokenizer in OURS:
            return 256 if self.tokenizer == "bytes" else self.vocab
        return read_tokenizer(self.tokenizer).size

    @property
    def _default_seq(self) -> int:
        has_context = self.messages or (self.preferences and self.tokenizer not in OURS)
        return context_length(self.tokenizer) if has_context else SEQ

    def evaluation_set(self, name: str) -> "Data":
        """Returns the settings of an evaluation set: all of its examples, in order.

        Raises:
          JaxparError: If its keys contradict each other.
        """
        table = self.sets[name]
        changes: dict[str, Any] = {"path": "", "messages": "" if "column" in table else self.messages, **table}
        return replace(self, sets={}, weights=(), evaluation="", held_out=0.0, shuffle=False, augment=(), **changes)

    def __post_init__(self):
        if self.documents == "auto":
            object.__setattr__(self, "documents", "alone" if self.messages or self.preferences else "mixed")
        if self.seq == 0 and self.seq is not False:
            object.__setattr__(self, "seq", self._default_seq)
        problems: list[Problem] = []
        try:
            check_ranges(
                self, "data", {"seq": (1, 2**24), "vocab": (257, 2**24), "held_out": (0.0, 0.5), "ahead": (0, 1024)}
            )
        except JaxparError as error:
            problems += error.problems
        known_sources = (*TEXT, "digits", "photographs", "images", "arrays")
        if self.source not in known_sources and not (
            isinstance(self.source, str) and ":" in self.source and "://" not in self.source
        ):
            rule = f'a source is {", ".join(known_sources)}, or "package.module:name"'
            problems.append(
                Problem(f"data.source = {self.source!r}", rule, _suggest_source(self.source, known_sources))
            )
        elif self.source in PATHS and not self.path:
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
        problems += _text_problems(self) or [problem for name in self.sets for problem in _set_problems(self, name)]
        if problems:
            raise JaxparError(*problems)


def _text_problems(spec: Data) -> list[Problem]:
    """Problems of keys that depend on each other."""
    problems = []
    if spec.messages and (not spec.has_rows or spec.tokenizer in OURS):
        got = f"data.messages with data.source = {spec.source!r}, data.tokenizer = {spec.tokenizer!r}"
        rule = "messages are a column of JSONL or Parquet, rendered by the chat template of a tokenizer's folder"
        problems.append(Problem(got, rule, 'source = "jsonl", and tokenizer = the folder of the model'))
    if spec.preferences and (not spec.has_rows or spec.messages or spec.documents != "alone"):
        got = (
            f"data.preferences with source = {spec.source!r}, messages = {spec.messages!r}, "
            f"documents = {spec.documents!r}"
        )
        rule = "preferences are rows of JSONL or Parquet with a prompt, a chosen and a rejected answer, a row for each"
        problems.append(Problem(got, rule, 'source = "jsonl", without messages and documents'))
    if spec.end and spec.tokenizer in OURS:
        rule = "bytes and our own bpe end a document by token 0"
        problems.append(Problem(f"data.end = {spec.end!r} with {spec.tokenizer}", rule, "leave it out"))
    if spec.evaluation and ":" not in spec.source:
        rule = "data.evaluation needs a source of your own, package.module:name; from files a share is held out"
        problems.append(Problem(f"data.evaluation = {spec.evaluation!r}", rule, "data.held_out = 0.02"))
    if unknown := [kind for kind in spec.augment if kind not in AUGMENTATIONS]:
        rule = f"images are changed by {' and '.join(AUGMENTATIONS)}"
        problems.append(Problem(f"data.augment = {unknown}", rule, suggest(str(unknown[0]), AUGMENTATIONS)))
    if spec.augment and spec.source not in PICTURES:
        rule = "only images can be augmented: the sources images, arrays, digits and photographs"
        problems.append(Problem(f"data.augment with data.source = {spec.source!r}", rule, "leave it out"))
    if not spec.column:
        problems.append(Problem("data.column = ''", "data.column names a column", 'column = "text"'))
    entries = len(spec.path) if isinstance(spec.path, list) else 1
    positive = all(isinstance(weight, int | float) and 0 < weight < float("inf") for weight in spec.weights)
    if spec.weights and (len(spec.weights) != entries or not positive or not spec.is_text or entries < 2):
        got = f"data.weights = {list(spec.weights)} for {entries} of data.path"
        rule = (
            "a mixture of text or rows has a positive weight for every entry of data.path, of which there are several"
        )
        problems.append(Problem(got, rule, 'path = ["a.jsonl", "b.jsonl"], weights = [0.7, 0.3]'))
    return problems


def check_path(spec: Data) -> None:
    """Checks that `path` is unset for a source that reads no path.

    Raises:
      JaxparError: If it is set.
    """
    if spec.path and spec.source not in PATHS:
        raise refuse(
            f"data.path = {spec.path!r} with data.source = {spec.source!r}, which reads no path",
            rule="a path is read by text, jsonl, parquet, images and arrays",
            fix='source = "text"',
        )


def _set_problems(spec: Data, name: str) -> list[Problem]:
    key, table = f"data.sets.{name}", spec.sets[name]
    if unknown := [item for item in table if item not in SET_KEYS]:
        return [
            Problem(f"{key}.{unknown[0]}", f"a set has the keys {', '.join(SET_KEYS)}", suggest(unknown[0], SET_KEYS))
        ]
    if not re.fullmatch(SET_NAME, name):
        return [Problem(key, "a set's name is of small letters and digits, as in metrics", "data.sets.wiki")]
    if not table.keys() & {"source", "path"}:
        return [Problem(key, "a set has other examples than training: a source or path", 'path = "wiki.jsonl"')]
    try:
        settings = spec.evaluation_set(name)
    except JaxparError as error:
        return [Problem(item.got.replace("data.", f"{key}.", 1), item.rule, item.fix) for item in error.problems]
    if settings.source == "images" and not settings.images.classes:
        rule = "the labels of a set are those of training: the classes are named, as a set's folders may lack some"
        return [Problem(f"{key} without data.images.classes", rule, 'data.images.classes = ["cat", "dog"]')]
    if ":" in settings.source and "source" not in table:
        return [
            Problem(f"{key} without a source", "a Python source does not define how a set is read", 'source = "jsonl"')
        ]
    try:
        check_path(settings)
    except JaxparError as error:
        return [Problem(item.got.replace("data.", f"{key}.", 1), item.rule, item.fix) for item in error.problems]
    if settings.is_text and settings.tokenizer == "bpe":
        rule = 'evaluation sets cannot use "bpe", whose vocabulary is learned from each text: the ids would differ'
        return [Problem(f"{key} with data.tokenizer = 'bpe'", rule, 'tokenizer = "bytes", or a tokenizer.json')]
    return []


def _suggest_source(source: object, known: Sequence[str]) -> str:
    """Suggests a source; for a file name, the source that reads its suffix."""
    path = Path(source) if isinstance(source, str) else Path()
    kinds = {
        ".npz": "arrays", ".npy": "arrays", ".bin": "arrays", ".jsonl": "jsonl", ".parquet": "parquet",
        ".tar": "images", ".txt": "text", ".md": "text", ".py": "text",
    }  # fmt: skip
    if kind := kinds.get(path.suffix, "jsonl" if path.suffixes[:1] == [".jsonl"] else ""):
        return f'source = "{kind}", path = "{source}"'
    others = {".arrow": "to_parquet of datasets", ".csv": "to_json(orient='records', lines=True) of pandas"}
    if writer := others.get(path.suffix) or others.get(f".{source}"):
        return f"write it as JSONL or Parquet, as by {writer}"
    from jaxpar.models.huggingface.folder import is_local_name  # only this error needs it

    hub = re.fullmatch(r"(?:hf://datasets/)?([\w-][\w.-]*/[\w.-]+)", str(source))
    if hub and (hub[1] != source or not is_local_name(hub[1])):
        folder = hub[1].rpartition("/")[2]
        download = f"hf download --repo-type dataset {hub[1]} --local-dir {folder}"
        return f'{download}, and source = "parquet", path = "{folder}", or the source of its files'
    if "/" in str(source) and os.path.isdir(path):
        return f'path = "{source}", and the source of its files, such as "text"'
    return suggest(str(source), known)


Rows = np.ndarray | None  # the rows of a global batch to return, in order; None means all


def select_rows(batch: Batch, rows: Rows) -> Batch:
    """Selects rows of a batch."""
    return batch if rows is None else {name: value[rows] for name, value in batch.items()}


@dataclass(frozen=True, slots=True)
class WeightedBatch:
    """A batch of held-out examples.

    Attributes:
      weight: Multiplies the batch's loss sums and counts before they are added to the totals of all batches.
      batch: Arrays by name; every batch has the same number of rows.
      examples: If the batch is padded with copies, the number of examples, which are its first rows; else 0.
    """

    weight: float
    batch: dict[str, Any]
    examples: int = 0


class Source(Protocol):
    """A source of batches."""

    @property
    def fingerprint(self) -> str:
        """Identifies the examples: a run resumes only with the same ones."""
        ...

    @property
    def examples(self) -> int | None:
        """Number of training examples; None if unknown."""
        ...

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, or some of its rows; it depends on the step alone."""
        ...

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` held-out examples in one or two batches of `size` rows; [] at the end.

        The last group may be smaller: its batches are padded with copies, which the weights subtract. If a loss does
        not add up over examples, the copies are left out instead.
        """
        ...
