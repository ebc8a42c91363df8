"""Examples that lie in arrays, one row each: from files, or scikit-learn's handwritten digits."""

import hashlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.examples import Examples
from jaxpar.data.spec import Batch, Data
from jaxpar.errors import JaxparError, refuse
from jaxpar.files import check_plain

BLOCK = 2**22  # bytes that are read at once
RULE = "arrays come as .npz, .npy or a folder of .npy, and hold numbers"
FIX = "np.savez(path, inputs=..., labels=...)"
# what numpy, zipfile and Python's tokenizer raise of damaged files
DAMAGED = (
    OSError, ValueError, AttributeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, TypeError,
    SyntaxError, tokenize.TokenError, OverflowError, zlib.error,
)  # fmt: skip


class Arrays(Examples):
    """Examples that lie in arrays, one row each."""

    def __init__(self, arrays: Mapping[str, np.ndarray], spec: Data, seed: int):
        for name, value in arrays.items():
            if not value.ndim or not len(value) or value.dtype.kind not in "biufc":
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
        self.arrays, self._fingerprint = arrays, ""
        super().__init__(next(iter(lengths.values())), spec, seed)

    @property
    def fingerprint(self) -> str:
        """A hash of these arrays; all of them are read for it.

        Raises:
          JaxparError: If a whole number does not fit into 32 bits.
        """
        self._fingerprint = self._fingerprint or self._hashed()
        return self._fingerprint

    def _hashed(self) -> str:
        digest = hashlib.sha256()
        for name, value in sorted(self.arrays.items()):
            digest.update(f"{name}{value.shape}{in_32_bits(value[:0], name).dtype}".encode())
            for block in blocks(value):
                digest.update(in_32_bits(block, name).data)  # numpy types an array as a buffer from 3.12 on
        return digest.hexdigest()[:16]

    def _rows(self, chosen: np.ndarray) -> Batch:
        return {name: in_32_bits(np.ascontiguousarray(value[chosen]), name) for name, value in self.arrays.items()}


def blocks(value: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the numbers of an array in their order, block by block; read from its file where it lies in one."""
    if isinstance(value, np.memmap) and value.flags.c_contiguous and value.filename is not None:
        with open(value.filename, "rb", buffering=0) as stream:  # pages of the map would count as memory
            stream.seek(value.offset)
            for begin in range(0, value.size, many := max(1, BLOCK // value.itemsize)):
                yield np.fromfile(stream, value.dtype, min(many, value.size - begin))
        return
    rows = max(1, BLOCK // max(1, value[:1].nbytes))
    for begin in range(0, len(value), rows):
        yield np.ascontiguousarray(value[begin : begin + rows])


def in_32_bits(value: np.ndarray, name: str) -> np.ndarray:
    """Returns 64-bit numbers in 32 bits, which is what a step computes in.

    Raises:
      JaxparError: If a whole number does not fit.
    """
    if value.dtype.kind in "iu" and value.dtype.itemsize == 8:
        if value.size and (value.max() >= 2**31 or value.min() < -(2**31)):
            raise refuse(f"{name} has {value.max()}", rule="whole numbers fit into 32 bits", fix="smaller ids")
        return value.astype(np.int32)
    narrow = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}.get(value.dtype)
    return value if narrow is None else value.astype(narrow)


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


def load_arrays(path: Path, *, whole: bool = False) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz, of a folder of .npy, or one .npy as `inputs`. Nothing is unpickled.

    What comes from .npy is mapped, not read, and stays in its dtype until a batch is made of it.

    Args:
      path: Where they lie.
      whole: Whether every number is looked at: it must fit into 32 bits.

    Raises:
      JaxparError: If it is not there, is no such file, holds Python objects, or whole numbers beyond 32 bits.
    """
    try:
        path = path.expanduser()
        for file in sorted(path.glob("*.npy")) if path.is_dir() else [path]:
            check_plain(file, rule=RULE, fix=FIX)
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
                if foreign := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
                    raise ValueError(f"its member {foreign[0]!r:.60} is no .npy")
    except JaxparError:
        raise
    except DAMAGED as error:
        text = getattr(error, "strerror", None) or str(error)
        if "allow_pickle" in text:  # what numpy says of any file that it does not know
            text = "it is no .npz or .npy, or holds Python objects"
        raise refuse(
            f"data.path = '{path}': {text}",
            rule=RULE,
            fix=FIX,
        ) from error
    if not arrays:
        raise refuse(
            f"data.path = '{path}' holds no arrays",
            rule="arrays come as .npz or .npy",
            fix="np.savez(path, inputs=...)",
        )
    named = {name: f"{path}: {name}" for name in arrays}
    held = {name: value for name, value in arrays.items() if not isinstance(value, np.memmap)}
    if whole:
        for name in arrays.keys() - held.keys():
            if arrays[name].dtype in (np.int64, np.uint64):
                for block in blocks(arrays[name]):
                    in_32_bits(block, named[name])
    return arrays | {name: in_32_bits(value, named[name]) for name, value in held.items()}
