"""Batches of windows of packed tokens, and the files that `data.path` names."""

import os
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpar.buckets import fetch
from jaxpar.data.examples import Examples
from jaxpar.data.packed import Packed
from jaxpar.data.spec import Batch, Data
from jaxpar.data.tokenizers import flag_bits
from jaxpar.errors import refuse

COMPRESSED = {"jsonl": ("*.jsonl.gz", "*.jsonl.zst")}  # source to the compressed files that it also reads


class Tokens(Examples):
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
        ids = flag_bits.ids(window) if self.marked else window.astype(np.int32)
        batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
        return batch | ({"mask": (~flag_bits.unlearned(window[:, 1:])).astype(np.int32)} if self.spec.has_mask else {})

    def _read(self, begin: int, count: int) -> np.ndarray:
        """Reads tokens with pread: pages of a memory map, of up to 2 MiB per row, would count as memory."""
        itemsize = self.tokens.dtype.itemsize
        content = os.pread(self._handle, count * itemsize, begin * itemsize)
        if len(content) < count * itemsize:
            raise refuse(
                f"{self.file} became shorter",
                rule="packed tokens stay while a run reads them",
                fix="the same command again, which goes on from the last checkpoint",
            )
        return np.frombuffer(content, self.tokens.dtype)

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"from token {self._chosen(step, size)[row] * self.spec.seq} of {self.file}"


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
                names = [f"*.{spec.source}", *COMPRESSED.get(spec.source, ())]
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
    """Whether a file or a folder above it begins with a dot that the pattern does not write itself."""
    pattern_parts = Path(pattern).parts
    if any(part.startswith(".") and set(part) & set("*?[") for part in pattern_parts):
        return False
    return any(part.startswith(".") and part not in ("..", *pattern_parts) for part in path.parts)
