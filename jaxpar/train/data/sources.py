"""What a job may train on.

stdlib    the source code of this machine's Python: real text, no download
text      any file, folder or glob
digits    scikit-learn's handwritten digits
arrays    .npz, .npy or a folder of .npy
pkg:name  any Python iterable of batches, or an object with `batch(step, size)`
"""

import hashlib
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxpar.errors import JaxparError, Problem, nearest, refuse, users_code, within
from jaxpar.train.data.order import held_out, rows
from jaxpar.train.data.tokens import pack, train_bpe

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What to train on.

    Attributes:
      source: stdlib, text, digits, arrays, or "package.module:name" of a Python iterable.
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
        """How many different tokens the text has."""
        return 256 if self.tokenizer == "bytes" else self.vocab

    def __post_init__(self):
        problems: list[Problem] = []
        try:
            within(self, "data", {"seq": (1, 2**24), "vocab": (257, 2**24), "held_out": (0.0, 0.5)})
        except JaxparError as error:
            problems += error.problems
        known = ("stdlib", "text", "digits", "arrays")
        if self.source not in known and ":" not in self.source:
            rule = f'a source is {", ".join(known)}, or "package.module:name"'
            problems.append(Problem(f"data.source = {self.source!r}", rule, nearest(self.source, known)))
        elif self.source in ("text", "arrays") and not self.path:
            problems.append(
                Problem(f"data.source = {self.source!r} without a path", "it reads files", 'path = "corpus/*.txt"')
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


class Source(Protocol):
    """Where batches come from."""

    fingerprint: str

    def batch(self, step: int, size: int) -> Batch:
        """Returns the training batch of a step: the same for the same step, always."""
        ...

    def evaluation(self, index: int, size: int) -> Batch | None:
        """Returns the index-th batch of the held-out examples, or None after the last whole one."""
        ...


class Arrays:
    """Examples that lie in arrays, one row each."""

    def __init__(self, arrays: Mapping[str, np.ndarray], spec: Data, seed: int, fingerprint: str = ""):
        for name, value in arrays.items():
            if not value.ndim or not len(value) or value.dtype.kind not in "biuf":
                raise refuse(
                    f"{name} is {value.dtype} of shape {list(value.shape)}",
                    rule="an array has a row of numbers for every example",
                    fix=f"leave {name} out, or encode it as numbers [examples, ...]",
                )
        lengths = {name: len(value) for name, value in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise refuse(
                f"arrays of {', '.join(f'{n} {k}' for k, n in lengths.items())} rows",
                rule="row i of every array belongs to example i",
                fix="give every array as many rows",
            )
        self.arrays, self.spec, self.seed = arrays, spec, seed
        self.train, self.out = held_out(next(iter(lengths.values())), spec.held_out)
        self.fingerprint = fingerprint or _hash(arrays)

    def batch(self, step: int, size: int) -> Batch:
        """Returns the training batch of a step."""
        return self._rows(self.train[rows(step, size, len(self.train), seed=self.seed, shuffle=self.spec.shuffle)])

    def evaluation(self, index: int, size: int) -> Batch | None:
        """Returns the index-th held-out batch; the last is filled up with rows that count nothing (`mask` 0)."""
        chosen = self.out[index * size : (index + 1) * size]
        if not len(chosen):
            return None
        batch = self._rows(np.resize(chosen, size))
        mask = (np.arange(size) < len(chosen)).astype(np.float32)
        given = batch.get("mask", np.ones((size,), np.float32))
        batch["mask"] = given * mask.reshape(-1, *(1,) * (given.ndim - 1))
        return batch

    def _rows(self, chosen: np.ndarray) -> Batch:
        return {name: np.ascontiguousarray(value[chosen]) for name, value in self.arrays.items()}


class Tokens(Arrays):
    """Windows of a memmapped token file: `inputs` and `targets` [batch, seq], int32."""

    def __init__(self, file: Path, dtype, spec: Data, seed: int, fingerprint: str):
        if not file.stat().st_size:
            raise refuse(f"{file} is empty", rule="packed tokens are as jaxpar wrote them", fix=f"rm {file}")
        tokens = np.memmap(file, dtype=dtype, mode="r")
        check_length(len(tokens), spec)
        count = (len(tokens) - 1) // spec.seq
        self.tokens = tokens
        super().__init__({"window": np.arange(count)}, spec, seed, fingerprint)

    def _rows(self, chosen: np.ndarray) -> Batch:
        at = chosen[:, None] * self.spec.seq + np.arange(self.spec.seq + 1)
        window = self.tokens[at].astype(np.int32)
        return {"inputs": window[:, :-1], "targets": window[:, 1:]}

    def evaluation(self, index: int, size: int) -> Batch | None:
        """Returns the index-th held-out batch, its mask spread over the tokens."""
        batch = super().evaluation(index, size)
        if batch is not None:
            batch["mask"] = np.broadcast_to(batch["mask"][:, None], batch["targets"].shape).copy()
        return batch


def check_length(tokens: int, spec: Data) -> None:
    """Checks that a text is long enough.

    Raises:
      JaxparError: If it holds less than two sequences.
    """
    if (tokens - 1) // spec.seq < 2:
        raise refuse(
            f"{tokens} tokens of text, data.seq = {spec.seq}",
            rule="the text holds at least two sequences",
            fix=f"more text, or data.seq = {(tokens - 1) // 2}"
            if tokens > 2
            else "another data.path: there is no text in it",
        )


class Stream:
    """Batches of the user's own iterable. To reach a step, the batches before it are drawn and dropped."""

    def __init__(self, iterable: Iterable, name: str):
        self.iterable, self.fingerprint = iterable, name
        self._iterator, self._next = None, 0

    def batch(self, step: int, size: int) -> Batch:
        """Returns the training batch of a step."""
        if self._iterator is None or step < self._next:
            self._iterator, self._next = iter(self.iterable), 0
        batch: Any = None
        while self._next <= step:
            with users_code(
                f"{self.fingerprint}, batch {self._next}",
                rule="an iterable has a batch for every step",
                fix="the line that it names",
            ):
                batch = next(self._iterator, None)
            if batch is None:
                raise refuse(
                    f"{self.fingerprint} ended after {self._next} batches, step {step} needs one more",
                    rule="an iterable has a batch for every step, or starts over by itself",
                    fix=f"train.steps = {self._next}, or loop inside it"
                    if self._next
                    else "yield {'inputs': ..., 'targets': ...} for every step",
                )
            self._next += 1
        return as_batch(batch, size, self.fingerprint)

    def evaluation(self, index: int, size: int) -> Batch | None:
        """Returns None: nothing is held out of an iterable."""
        return None


class Own:
    """The user's own object with `batch(step, size)`, each batch checked."""

    def __init__(self, source: Any, name: str):
        self.source, self.name = source, name
        self.fingerprint = str(getattr(source, "fingerprint", name))

    def batch(self, step: int, size: int) -> Batch:
        """Returns the training batch of a step."""
        with users_code(
            f"{self.name}.batch({step}, {size})", rule="a source has batch(step, size)", fix="the line that it names"
        ):
            batch = self.source.batch(step, size)
        return as_batch(batch, size, self.name)

    def evaluation(self, index: int, size: int) -> Batch | None:
        """Returns a held-out batch, or None; also where the source holds nothing out."""
        if not hasattr(self.source, "evaluation"):
            return None
        with users_code(
            f"{self.name}.evaluation({index}, {size})",
            rule="a source has evaluation(index, size)",
            fix="the line that it names",
        ):
            batch = self.source.evaluation(index, size)
        return None if batch is None else as_batch(batch, size, self.name)


def as_batch(batch: Any, size: int, name: str) -> Batch:
    """Returns a user's batch as arrays of numbers in 32 bits.

    Raises:
      JaxparError: If it is no dict of arrays with `size` rows each.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise refuse(
            f"{name} yields {f'{batch!r:.60}' if not hasattr(batch, 'shape') else type(batch).__name__}",
            rule="a batch is a dict of arrays",
            fix="yield {'inputs': ..., 'targets': ...}",
        )
    made = {}
    for key, value in batch.items():
        try:
            array = in_32_bits(np.asarray(value), f"{name}: {key}")
        except (TypeError, ValueError) as error:
            if isinstance(error, JaxparError):
                raise
            raise refuse(
                f"{name} yields {key}: {error}",
                rule="a batch is a dict of arrays",
                fix=f"np.stack rows of one shape, or leave {key!r} out",
            ) from error
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            raise refuse(
                f"{name} yields {key} of dtype {array.dtype}",
                rule="a batch holds numbers",
                fix=f"leave {key!r} out, or encode it",
            )
        if array.shape[:1] != (size,):
            raise refuse(
                f"{name} yields {key} of shape {list(array.shape)}, train.global_batch = {size}",
                rule="the first dim of every array is the global batch",
                fix=f"{size} rows in every array" if array.shape else f"leave {key!r} out",
            )
        made[key] = array
    return made


def in_32_bits(value: np.ndarray, name: str) -> np.ndarray:
    """Returns 64-bit numbers in 32 bits, which is what a step computes in.

    Raises:
      JaxparError: If a whole number does not fit.
    """
    if value.dtype.kind in "iu" and value.dtype.itemsize == 8:
        if value.size and (value.max() >= 2**31 or value.min() < -(2**31)):
            raise refuse(f"{name} has {value.max()}", rule="whole numbers fit into 32 bits", fix="smaller ids")
        return value.astype(np.int32)
    return value.astype(np.float32) if value.dtype == np.float64 else value


def open_source(spec: Data, folder: str | Path = "runs/data", *, seed: int = 0, named: Any = None) -> Source:
    """Returns the source of a job.

    Args:
      spec: The `[data]` table.
      folder: Where packed tokens and the tokenizer are kept.
      seed: Of the order of examples.
      named: The user's object, for `package.module:name`.

    Raises:
      JaxparError: If there is nothing to read, or it cannot be read.
    """
    folder = Path(folder)
    if spec.is_text:
        files = stdlib_files() if spec.source == "stdlib" else text_files(spec)
        texts, digest = read(files)
        tokenizer = train_bpe(texts, spec.vocab, folder, digest) if spec.tokenizer == "bpe" else None
        file, dtype = pack(texts, tokenizer, folder, f"{spec.tokenizer}-{spec.tokens}-{digest}")
        return Tokens(file, dtype, spec, seed, digest)
    if spec.source == "digits":
        return Arrays(load_digits(), spec, seed)
    if spec.source == "arrays":
        return Arrays(load_arrays(Path(str(spec.path))), spec, seed)
    if isinstance(named, Iterator):
        raise refuse(
            f"data.source = {spec.source!r} is a {type(named).__name__}, which can be read once",
            rule="a source is read from its start again: to check it, and to resume",
            fix="name the function that makes it",
        )
    if callable(getattr(named, "batch", None)) and not isinstance(named, type):
        return Own(named, spec.source)
    if callable(named):
        with users_code(
            f"data.source = {spec.source!r}",
            rule="a function of no arguments returns an iterable of batches",
            fix="give its arguments defaults",
        ):
            named = named()
        if callable(getattr(named, "batch", None)):
            return Own(named, spec.source)
    if not isinstance(named, Iterable):
        raise refuse(
            f"data.source = {spec.source!r} is a {type(named).__name__}",
            rule="a source is an iterable of batches, a function that returns one, or has batch(step, size)",
            fix="yield {'inputs': ..., 'targets': ...} from a generator function",
        )
    return Stream(named, spec.source)


def stdlib_files() -> list[Path]:
    """Returns the source files of this machine's Python, without tests and installed packages."""
    home = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "turtledemo"}
    return sorted(file for file in home.rglob("*.py") if not skip.intersection(file.relative_to(home).parts))


def text_files(spec: Data) -> list[Path]:
    """Returns the files that `data.path` names, sorted.

    Raises:
      JaxparError: If a path names no file.
    """
    found: list[Path] = []
    for text in [spec.path] if isinstance(spec.path, str) else spec.path:
        try:
            path = Path(text).expanduser()
            anchor = Path(path.anchor or ".")
            if path.is_dir():
                some = [file for file in path.rglob(spec.pattern) if file.is_file()]
            elif path.is_file():
                some = [path]
            else:
                some = [file for file in anchor.glob(str(path.relative_to(path.anchor))) if file.is_file()]
        except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
            raise refuse(
                f"data.path = {text!r}, data.pattern = {spec.pattern!r}: {error}",
                rule="a path is a file, a folder or a glob",
                fix='path = "corpus", pattern = "*.txt"',
            ) from error
        if not some:
            of = f", data.pattern = {spec.pattern!r}" * path.is_dir()
            raise refuse(
                f"data.path = {text!r}{of} names no file",
                rule="a path is a file, a folder or a glob",
                fix="check it from where you start jaxpar",
            )
        found += some
    return sorted(set(found))


def read(files: list[Path]) -> tuple[list[bytes], str]:
    """Returns the files' contents and a hash of all of them."""
    texts, digest = [], hashlib.sha256()
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise JaxparError(
                *refuse(
                    f"{file}: {error.strerror}", rule="text files are readable", fix="check its permissions"
                ).problems
            ) from error
        texts.append(data)
        digest.update(len(data).to_bytes(8, "big") + data)
    if not any(texts):
        raise refuse(
            f"{len(files)} files without a single byte", rule="there is text to train on", fix="another data.path"
        )
    return texts, digest.hexdigest()[:16]


def load_digits() -> dict[str, np.ndarray]:
    """Returns scikit-learn's 1,797 handwritten digits: `inputs` [n, 8, 8] within 0..1, `labels` [n]."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise refuse(
            "data.source = 'digits' without scikit-learn",
            rule="the digits come with scikit-learn",
            fix="pip install 'jaxpar[digits]'",
        ) from error
    digits: Any = load_digits()
    return {"inputs": (digits["images"] / 16).astype(np.float32), "labels": digits["target"].astype(np.int32)}


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz, of a folder of .npy, or one .npy as `inputs`. Nothing is unpickled.

    Raises:
      JaxparError: If it is not there, is no such file, or holds Python objects.
    """
    try:
        path = path.expanduser()
        if path.is_dir():
            arrays = {
                file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(path.glob("*.npy"))
            }
        elif path.suffix == ".npy":
            arrays = {"inputs": np.load(path, mmap_mode="r", allow_pickle=False)}
        else:
            with (
                path.open("rb") as stream,
                np.load(stream, allow_pickle=False) as file,
            ):  # numpy leaves a broken one open
                arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        text = getattr(error, "strerror", None) or str(error)
        if "allow_pickle" in text:  # what numpy says of any file that it does not know
            text = "it holds Python objects, or is no such file"
        raise refuse(
            f"data.path = '{path}': {text}",
            rule="arrays come as .npz, .npy or a folder of .npy, and hold numbers",
            fix="np.savez(path, inputs=..., labels=...)",
        ) from error
    if not arrays:
        raise refuse(
            f"data.path = '{path}' holds no arrays",
            rule="arrays come as .npz or .npy",
            fix="np.savez(path, inputs=...)",
        )
    return {name: in_32_bits(value, f"{path}: {name}") for name, value in arrays.items()}


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        digest.update(f"{name}{value.shape}{value.dtype}".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()[:16]
