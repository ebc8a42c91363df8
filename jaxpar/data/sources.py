"""Opens the source of a job's batches, and checks the beginning of its text first.

stdlib    the source code of this machine's Python: real text, no download
text      any file, folder or glob: each file is a document
jsonl     lines of JSON, each one a document: a column of text or of messages
parquet   rows of Parquet, likewise
digits    scikit-learn's handwritten digits; photographs: tiles of its two photographs, a class for each pixel
images    pictures: a folder for each class, tar files of webdataset, or Parquet
arrays    .npz, .npy or a folder of .npy; a flat .npy of integers and a .bin are token ids
pkg:name  an object with `batch(step, size)`, a map-style dataset, an iterable of batches, or a function returning one
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

from jaxpar.data.arrays import Arrays, load_arrays, load_digits, load_photographs
from jaxpar.data.corpus import blocks
from jaxpar.data.document_rows import DocumentRows, PreferencePairs, length_note
from jaxpar.data.documents.plain_text import TextFile, WrongBytes
from jaxpar.data.packing import pack, print_to_stderr
from jaxpar.data.spec import OURS, Batch, Data, Rows, Source, WeightedBatch, check_path, select_rows
from jaxpar.data.streams.user_data import open_user_data
from jaxpar.data.text import Examples, Tokens, check_length, stdlib_files, text_files, weighted_batches
from jaxpar.data.token_stream import TokenStream, is_token_stream
from jaxpar.data.tokenizers.encoders import HuggingFaceEncoder, end_token, open_corpus
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import refuse

# Mixes the examples of several sets by weight: the position of an example alone decides its set.
#
#     weights 0.7, 0.3     a a b a a b a a a b | a a b ...        7,000 of 10,000 positions are a's, evenly spread
#
# An exhausted set begins a new epoch, in a new order, while the others go on.

ROUND = 10_000  # examples after which the order in which sets are drawn repeats


class Mixture:
    """Several sets as one source.

    Args:
      sets: The sets, each with its own order and held-out examples.
      weights: Relative frequency of each set.

    Raises:
      JaxparError: If a weight is so small that its set would never be drawn.
    """

    def __init__(self, sets: Sequence[Examples], weights: Sequence[float]):
        self.sets, shares = sets, np.array(weights) / sum(weights)
        self.counts = np.floor(shares * ROUND).astype(int)
        largest_remainders = np.argsort(self.counts - shares * ROUND, kind="stable")[: ROUND - self.counts.sum()]
        self.counts[largest_remainders] += 1
        if not self.counts.all():
            raise refuse(
                f"data.weights = {list(weights)}",
                rule=f"every set is drawn at least once in {ROUND} examples",
                fix="larger weights, or without that entry of data.path",
            )
        # example k of a set that is drawn n times in a round is placed at the fraction (k + 1/2) / n of the round
        fractions = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        order = np.argsort(fractions, kind="stable")
        self.pattern = np.repeat(np.arange(len(sets)), self.counts)[order]
        self.ranks = np.concatenate([np.arange(count) for count in self.counts])[order]

    @property
    def fingerprint(self) -> str:
        """The fingerprints of all sets, joined by +."""
        return "+".join(str(getattr(source, "fingerprint", "")) for source in self.sets)

    @property
    def examples(self) -> int:
        """Number of training examples in all sets."""
        return sum(source.examples for source in self.sets)

    @property
    def held_out_count(self) -> int:
        """Number of held-out examples in all sets."""
        return sum(source.held_out_count for source in self.sets)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        positions = np.arange(step * size, (step + 1) * size)[slice(None) if rows is None else rows]
        owners, inner = self._locate(positions)
        parts = {owner: self.sets[owner].take_positions(inner[owners == owner]) for owner in np.unique(owners).tolist()}
        batch: Batch = {}
        for owner, part in parts.items():
            for name, value in part.items():
                array = batch.setdefault(name, np.empty((len(positions), *value.shape[1:]), value.dtype))
                array[owners == owner] = value
        return batch

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        owners, inner = self._locate(np.array([step * size + row]))
        return self.sets[owners[0]].where(int(inner[0]), 1, 0)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` held-out examples, one set after the other; none after the last."""
        ends = np.cumsum([len(owner.held_out_indices) for owner in self.sets])
        chosen = np.arange(index * size, min((index + 1) * size, int(ends[-1])))
        if not len(chosen):
            return []
        owners = np.searchsorted(ends, chosen, side="right")
        begins = np.concatenate([[0], ends[:-1]])
        parts = [
            source.take_indices(source.held_out_indices[chosen[owners == owner] - begins[owner]])
            for owner, source in enumerate(self.sets)
            if owner in owners
        ]
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return weighted_batches(len(chosen), size, rows, lambda indices: select_rows(batch, indices))

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index of each position's set, and the position within that set."""
        rounds, places = positions // ROUND, positions % ROUND
        owners = self.pattern[places]
        return owners, rounds * self.counts[owners] + self.ranks[places]


def open_data(
    spec: Data, folder: str | Path = "runs/data", *, seed: int = 0, named: object = None, held_out: object = None
) -> Source:
    """Opens the source of a job.

    Args:
      spec: The `[data]` table.
      folder: Folder of packed tokens and the tokenizer.
      seed: Seed of the shuffle.
      named: The user's object, for `package.module:name`.
      held_out: The user's object of held-out examples, if it is another object.

    Raises:
      JaxparError: If there is nothing to read, or it cannot be read.
    """
    folder = Path(folder)
    check_path(spec)
    if spec.is_text:
        return _open_text(spec, folder, seed)
    if spec.source == "digits":
        return Arrays(load_digits(), spec, seed)
    if spec.source == "photographs":
        return Arrays(load_photographs(), spec, seed)
    if spec.source == "images":
        from jaxpar.data.images.source import open_images

        return open_images(spec, folder, seed)
    if spec.source == "arrays" and is_token_stream(Path(str(spec.path))):
        return TokenStream(Path(str(spec.path)), spec, seed)
    if spec.source == "arrays":
        return Arrays(load_arrays(Path(str(spec.path))), spec, seed)
    if named is None:
        raise refuse(
            f"data.source = {spec.source!r} without its object",
            rule="a job imports the object that it names; in Python the caller passes it",
            fix="jp.open_data(data, named=my_batches)",
        )
    return open_user_data(spec, named, folder, seed=seed, held=held_out)


def _open_text(spec: Data, folder: Path, seed: int) -> Source:
    if spec.weights:
        entries = [replace(spec, path=entry, weights=()) for entry in spec.path]
        return Mixture([_open_packed(entry, folder, seed) for entry in entries], spec.weights)
    return _open_packed(spec, folder, seed)


def _open_packed(spec: Data, folder: Path, seed: int) -> Tokens:
    files = stdlib_files() if spec.source == "stdlib" else text_files(spec, print_to_stderr)
    file, packed = pack(open_corpus(spec, files), spec, folder)
    if spec.preferences:
        return PreferencePairs(file, packed, spec, seed)
    return (Tokens if spec.documents == "mixed" else DocumentRows)(file, packed, spec, seed)


# Checks the beginning of a job's text before any of it is packed.

ROWS = 1000  # rows of the first file whose lengths are measured, and files whose beginning is checked
BEGINNING = 2**16  # bytes checked of each text file


def report_lengths(spec: Data) -> str:
    """Reports whether the first conversations fit a row; "" if they do, or if there are none to read.

    Raises:
      JaxparError: If a row is no conversation, or a package that reads it is missing.
    """
    if not spec.messages or spec.documents == "mixed" or find_spec("tokenizers") is None:
        return ""
    corpus = open_corpus(spec, text_files(spec)[:1])
    pieces = list(islice(corpus.pieces(), ROWS))
    counts = [len(ids) for ids in HuggingFaceEncoder(read_tokenizer(spec.tokenizer), spec.end).encode(pieces)]
    return length_note(np.array(counts, np.int64), "conversations at the beginning", spec)


def check_text(spec: Data) -> None:
    """Checks that there is text, that its first row is valid, and that the tokenizer has an end-of-document token.

    Raises:
      JaxparError: If a check fails.
    """
    if spec.tokenizer not in OURS:
        end_token(read_tokenizer(spec.tokenizer), spec.end)
    if spec.source == "stdlib":
        return
    files = text_files(spec)
    if spec.has_rows and next(open_corpus(spec, files[:1]).pieces(), None) is None:
        raise refuse(f"{files[0]} has no row", rule="a file of rows has at least one", fix="another data.path")
    for file in files[:ROWS] if spec.source == "text" else ():
        TextFile(file, WrongBytes()).check(next(blocks(file), b"")[:BEGINNING])
    if spec.source == "text" and spec.tokenizer == "bytes" and spec.documents == "mixed":
        check_length(sum(file.stat().st_size + 1 for file in files), spec)
