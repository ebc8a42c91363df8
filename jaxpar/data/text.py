"""Batches of examples in memory and of windows of packed tokens, and the files that `data.path` names."""

import os
import sysconfig
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxpar.buckets import fetch
from jaxpar.data.packed import Packed, ignored_by_loss, token_ids
from jaxpar.data.spec import Batch, Data, Rows, WeightedBatch
from jaxpar.errors import refuse

# Examples in memory, and the split that holds some out.
#
#     step, batch ─► positions step * batch ... ─► epoch, place ─► permutation(seed, epoch)[place]
#
# Every k-th example is held out, spread over the whole set.

# Batches held-out examples at a fixed size, and counts each example once under any additive loss function.
#
#     80 examples, batches of 48      1     x loss sums of [0 .. 47]
#                                     1     x loss sums of [48 .. 79, 48 x 16]     32 examples, padded with 16 copies
#                                   - 16/48 x loss sums of [48 x 48]               subtracts the copies
#
# A smaller last batch would be another program to compile, and the mesh may not divide it. A mask would have to be read
# by the loss function. Sums and counts, as nearly every loss function returns them, add up over examples: so a batch of
# copies of one example measures its sums, which are subtracted. The evaluation loop checks that sums add up
# (`jaxpar.train.incomplete_batches`).


def weighted_batches(count: int, size: int, rows: Rows, read: Callable[[np.ndarray], Batch]) -> list[WeightedBatch]:
    """Returns batches of `size` rows whose weighted loss sums count each of `count` examples once.

    If the examples fit several times, all are repeated equally often, so fewer than half of the rows are padding. The
    subtracted sum is then smaller than the other, so that the difference of float32 sums is accurate.

    Args:
      count: Number of examples, at most `size`; 0 gives no batch.
      size: Rows of a batch.
      rows: The rows of the batches to return, in order; None means all.
      read: Maps indices of examples, below `count`, to their arrays.
    """
    if not count:
        return []
    copies, padding = divmod(size, count)
    indices = np.concatenate([np.tile(np.arange(count), copies), np.zeros((padding,), np.int64)])
    selection = slice(None) if rows is None else rows
    batches = [WeightedBatch(1 / copies, read(indices[selection]), count if count < size else 0)]
    if padding:
        batches.append(WeightedBatch(-padding / (size * copies), read(np.zeros_like(indices)[selection])))
    return batches


class Examples(ABC):
    """Indexed examples, a share of them held out.

    Args:
      count: Number of examples, held-out ones included.
      spec: The `[data]` table.
      seed: Seed of the shuffle.
    """

    def __init__(self, count: int, spec: Data, seed: int):
        self.spec, self.seed = spec, seed
        self.train_indices: TrainIndices | np.ndarray
        self.train_indices, self.held_out_indices = split_held_out(count, spec.held_out)

    @property
    def examples(self) -> int:
        """Number of training examples."""
        return len(self.train_indices)

    @property
    def held_out_count(self) -> int:
        """Number of held-out examples."""
        return len(self.held_out_indices)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        return self.take_positions(np.arange(step * size, (step + 1) * size)[slice(None) if rows is None else rows])

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"example {self._batch_indices(step, size)[row]} of {self.spec.path or self.spec.source}"

    def take_positions(self, positions: np.ndarray) -> Batch:
        """Returns the examples at positions of the endless sequence of epochs, as a mixture draws them."""
        return self._rows(
            self.train_indices[
                _shuffled_indices(positions, len(self.train_indices), seed=self.seed, shuffle=self.spec.shuffle)
            ]
        )

    def take_indices(self, indices: np.ndarray) -> Batch:
        """Returns examples by index among all, such as some of `train_indices` or `held_out_indices`."""
        return self._rows(indices)

    def _batch_indices(self, step: int, size: int) -> np.ndarray:
        return self.train_indices[order(step, size, len(self.train_indices), seed=self.seed, shuffle=self.spec.shuffle)]

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` held-out examples; none after the last."""
        chosen = self.held_out_indices[index * size : (index + 1) * size]
        return weighted_batches(len(chosen), size, rows, lambda indices: self._rows(chosen[indices]))

    @abstractmethod
    def _rows(self, chosen: np.ndarray) -> Batch:
        """Returns the examples with these indices, stacked."""


@lru_cache(maxsize=2)  # a batch may span two epochs
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of one epoch. Shape [examples], uint32 if it suffices: text has many windows."""
    places = np.arange(examples, dtype=np.uint32 if examples <= 2**32 else np.int64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(places)  # the order does not depend on the dtype
    return places


def order(step: int, batch: int, examples: int, *, seed: int, shuffle: bool = True) -> np.ndarray:
    """Returns the indices of a step's batch among the training examples. Shape [batch], int64.

    Every example comes once per epoch; a batch may span two epochs.
    """
    return _shuffled_indices(np.arange(step * batch, (step + 1) * batch), examples, seed=seed, shuffle=shuffle)


def _shuffled_indices(positions: np.ndarray, examples: int, *, seed: int, shuffle: bool) -> np.ndarray:
    epochs, places = positions // examples, positions % examples
    if shuffle:
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            places[in_epoch] = permutation(examples, seed, int(epoch))[places[in_epoch]]
    return places.astype(np.int64)


@dataclass(frozen=True)
class TrainIndices:
    """Indices of the training examples, computed on demand, because those of a text's windows would fill memory.

    Attributes:
      examples: Number of all examples.
      stride: Examples `stride - 1`, `2 stride - 1`, ... are held out; 0 holds out none.
    """

    examples: int
    stride: int

    def __len__(self) -> int:
        return self.examples - (self.examples // self.stride if self.stride else 0)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Converts indices of training examples to indices among all examples, held-out ones included."""
        return places + places // (self.stride - 1) if self.stride else places


def split_held_out(examples: int, fraction: float) -> tuple[TrainIndices, np.ndarray]:
    """Splits indices into (training, held-out): every k-th is held out, spread over the whole set."""
    if fraction * examples < 0.5:
        return TrainIndices(examples, 0), np.arange(0)
    every = max(2, round(1 / fraction))
    return TrainIndices(examples, every), np.arange(every - 1, examples, every)


COMPRESSED_PATTERNS = {"jsonl": ("*.jsonl.gz", "*.jsonl.zst")}  # source to the compressed files that it also reads


class TokenWindows(Examples):
    """Windows of `spec.seq` tokens of the file `file`."""

    file: Path

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"from token {self._batch_indices(step, size)[row] * self.spec.seq} of {self.file}"


class Tokens(TokenWindows):
    """Windows of packed tokens: `inputs`, `targets` and (if not all tokens are learned) `mask` [batch, seq], int32.

    Args:
      file: The packed tokens.
      packed: Their hash manifest.
      spec: The `[data]` table.
      seed: Seed of the shuffle of windows.
    """

    notes: tuple[str, ...] = ()  # messages to the user about how documents became rows

    def __init__(self, file: Path, packed: Packed, spec: Data, seed: int):
        if not file.stat().st_size:
            raise refuse(f"{file} is empty", rule="packed tokens are as jaxpar wrote them", fix=f"rm {file}")
        self.spec, self.file, self.fingerprint, self.marked = spec, file, packed.text, packed.marked
        self.tokens = np.memmap(file, dtype=packed.dtype, mode="r")
        self._handle = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        super().__init__(self._count(), spec, seed)

    def _count(self) -> int:
        check_length(len(self.tokens), self.spec)
        return (len(self.tokens) - 1) // self.spec.seq

    def _rows(self, chosen: np.ndarray) -> Batch:
        window = np.empty((len(chosen), self.spec.seq + 1), self.tokens.dtype)
        for row, index in enumerate(chosen):
            window[row] = self._read(int(index) * self.spec.seq, self.spec.seq + 1)
        ids = token_ids(window) if self.marked else window.astype(np.int32)
        batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
        return batch | ({"mask": (~ignored_by_loss(window[:, 1:])).astype(np.int32)} if self.spec.has_mask else {})

    def _read(self, begin: int, count: int) -> np.ndarray:
        """Reads tokens with pread: a memory map would add up to 2 MiB per row to the memory that the process uses."""
        itemsize = self.tokens.dtype.itemsize
        content = os.pread(self._handle, count * itemsize, begin * itemsize)
        if len(content) < count * itemsize:
            raise refuse(
                f"{self.file} became shorter",
                rule="packed tokens stay while a run reads them",
                fix="the same command again, which goes on from the last checkpoint",
            )
        return np.frombuffer(content, self.tokens.dtype)


def check_length(tokens: int, spec: Data) -> None:
    """Checks that a text holds at least two sequences.

    Raises:
      JaxparError: If it is shorter.
    """
    if (tokens - 1) // spec.seq < 2:
        raise refuse(
            f"{tokens} tokens of text, data.seq = {spec.seq}",
            rule="the text holds at least two sequences",
            fix=f"more text, or data.seq = {(tokens - 1) // 2}"
            if tokens > 2
            else "another data.path: there is no text in it",
        )


def stdlib_files() -> list[Path]:
    """The source files of this machine's Python, without tests and installed packages."""
    home = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "turtledemo"}
    return sorted(file for file in home.rglob("*.py") if not skip.intersection(file.relative_to(home).parts))


def text_files(spec: Data, say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Returns the files that `data.path` names, sorted, without hidden files and the contents of hidden folders.

    Args:
      spec: The `[data]` table.
      say: Takes a message if hidden files were skipped.

    Raises:
      JaxparError: If a path names no file.
    """
    hidden: list[Path] = []
    entries: dict[Path, tuple[str, Path]] = {}  # absolute path to (entry of data.path, path as named by it)
    for text in [spec.path] if isinstance(spec.path, str) else spec.path:
        local_path = fetch(text)
        try:
            path = Path(local_path).expanduser()
            anchor = Path(path.anchor or ".")
            if path.is_dir():
                names = [f"*.{spec.source}", *COMPRESSED_PATTERNS.get(spec.source, ())]
                patterns = names if spec.has_rows and spec.pattern == "*" else [spec.pattern]
                matches = {file: file.relative_to(path) for glob in patterns for file in path.rglob(glob)}
                visible = [file for file, inner in matches.items() if not _is_hidden(inner, spec.pattern)]
                hidden += [file for file in matches.keys() - set(visible) if file.is_file()]
                visible = [file for file in visible if file.is_file()]
            elif path.is_file():
                visible = [path]
            else:
                matches = [file for file in anchor.glob(str(path.relative_to(path.anchor))) if file.is_file()]
                visible = [file for file in matches if not _is_hidden(file, str(path))]
                hidden += [file for file in matches if file not in set(visible)]
        except (OSError, ValueError, RuntimeError) as error:
            raise refuse(
                f"data.path = {text!r}, data.pattern = {spec.pattern!r}: {error}",
                rule="a path is a file, a folder or a glob",
                fix='path = "corpus", pattern = "*.txt"',
            ) from error
        if not visible:
            details = f", data.pattern = {spec.pattern!r}" * path.is_dir()
            details += f", without {len(hidden)} hidden ones," * bool(hidden)
            raise refuse(
                f"data.path = {text!r}{details} names no file",
                rule="a path is a file, a folder or a glob",
                fix="check it from where you start jaxpar",
            )
        for file in visible:
            if earlier := entries.get(file.absolute()):
                raise refuse(
                    f"data.path names {file.name} twice: by {earlier[0]!r} and by {text!r}",
                    rule="each file is read once: to be named twice gives it no more weight",
                    fix=f"{earlier[0]!r} once, and data.weights, which has a share of the examples for each entry",
                )
        entries |= {file.absolute(): (text, file) for file in visible}
    if hidden:
        subject = f"{len(hidden)} hidden files of data.path are" if len(hidden) > 1 else "1 hidden file of data.path is"
        say(f"{subject} not read (the first: {min(hidden)})")
    return sorted(file for _, file in entries.values())


def _is_hidden(path: Path, pattern: str) -> bool:
    """Whether the name of a file or a folder above it begins with a dot that is not in the user's pattern."""
    pattern_parts = Path(pattern).parts
    if any(part.startswith(".") and set(part) & set("*?[") for part in pattern_parts):
        return False
    return any(part.startswith(".") and part not in ("..", *pattern_parts) for part in path.parts)
