"""Examples that are rows of arrays: from files, or scikit-learn's handwritten digits and photographs."""

import hashlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.images.pixels import augment
from jaxpar.data.spec import Batch, Data, Rows
from jaxpar.data.text import Examples
from jaxpar.errors import JaxparError, refuse
from jaxpar.files import check_plain

TILE = 64  # rows and columns of a tile of a photograph
BLOCK = 2**22  # bytes per read
RULE = "arrays come as .npz, .npy or a folder of .npy, and hold numbers"
FIX = "np.savez(path, inputs=..., labels=...)"
# exceptions of numpy, zipfile and Python's tokenizer on damaged files
READ_ERRORS = (
    OSError, ValueError, AttributeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, TypeError,
    SyntaxError, tokenize.TokenError, OverflowError, zlib.error,
)  # fmt: skip


class Arrays(Examples):
    """Examples that are rows of arrays: row i of every array belongs to example i."""

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

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, its images changed as `data.augment` says."""
        batch = super().batch(step, size, rows)
        if not self.spec.augment:
            return batch
        positions = np.arange(step * size, (step + 1) * size)
        return augment(batch, positions if rows is None else positions[rows], self.spec.augment, self.seed)

    @property
    def fingerprint(self) -> str:
        """Hashes all arrays.

        Raises:
          JaxparError: If an integer does not fit into 32 bits.
        """
        self._fingerprint = self._fingerprint or self._compute_hash()
        return self._fingerprint

    def _compute_hash(self) -> str:
        digest = hashlib.sha256()
        for name, value in sorted(self.arrays.items()):
            digest.update(f"{name}{value.shape}{to_32_bits(value[:0], name).dtype}".encode())
            for block in blocks(value):
                digest.update(to_32_bits(block, name).data)  # numpy types an array as a buffer from 3.12 on
        return digest.hexdigest()[:16]

    def _rows(self, chosen: np.ndarray) -> Batch:
        return {name: to_32_bits(np.ascontiguousarray(value[chosen]), name) for name, value in self.arrays.items()}


def blocks(value: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the blocks of an array in C order; reads a mapped array from its file."""
    if isinstance(value, np.memmap) and value.flags.c_contiguous and value.filename is not None:
        with open(value.filename, "rb", buffering=0) as stream:  # pages of the memory map would count as memory
            stream.seek(value.offset)
            for begin in range(0, value.size, count := max(1, BLOCK // value.itemsize)):
                yield np.fromfile(stream, value.dtype, min(count, value.size - begin))
        return
    rows = max(1, BLOCK // max(1, value[:1].nbytes))
    for begin in range(0, len(value), rows):
        yield np.ascontiguousarray(value[begin : begin + rows])


def to_32_bits(value: np.ndarray, name: str) -> np.ndarray:
    """Converts 64-bit numbers to 32 bits, in which a step computes, and big-endian ones to this machine's byte order.

    Raises:
      JaxparError: If an integer does not fit.
    """
    if not value.dtype.isnative:  # as of IDX, FITS and HDF5 files
        value = value.astype(value.dtype.newbyteorder("="))
    if value.dtype.kind in "iu" and value.dtype.itemsize == 8:
        if value.size and (value.max() >= 2**31 or value.min() < -(2**31)):
            largest = value.max() if value.max() >= 2**31 else value.min()
            raise refuse(f"{name} has {largest}", rule="whole numbers fit into 32 bits", fix="smaller ids")
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


def load_photographs() -> dict[str, np.ndarray]:
    """Returns tiles of scikit-learn's two photographs, for predicting the dominant colour of each pixel.

    Returns:
      `inputs` [120, 64, 64], brightness within 0..1, and `labels` [120, 64, 64]: index of each pixel's largest channel
      (0 red, 1 green, 2 blue).
    """
    try:
        from sklearn.datasets import load_sample_images

        photographs: Any = load_sample_images()
    except ImportError as error:  # without Pillow scikit-learn raises it too
        raise refuse(
            "data.source = 'photographs' without scikit-learn and Pillow",
            rule="the photographs come with scikit-learn, which reads them by Pillow",
            fix="pip install 'jaxpar[digits]'",
        ) from error
    images = np.stack(photographs["images"])[:, : 6 * TILE, : 10 * TILE]
    tiles = images.reshape(-1, 6, TILE, 10, TILE, 3).swapaxes(2, 3).reshape(-1, TILE, TILE, 3)
    return {"inputs": (tiles.mean(axis=-1) / 255).astype(np.float32), "labels": tiles.argmax(axis=-1).astype(np.int32)}


def load_arrays(path: Path, *, check_all: bool = False) -> dict[str, np.ndarray]:
    """Loads the arrays of an .npz, of a folder of .npy, or one .npy as `inputs`. Nothing is unpickled.

    Arrays of .npy files are mapped, and keep their dtype until they become a batch.

    Args:
      path: The file or folder.
      check_all: Whether to check that every integer fits into 32 bits, in mapped arrays too.

    Raises:
      JaxparError: If it is missing, has another format, or contains Python objects or integers beyond 32 bits.
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
            ):  # opened here, since numpy does not close a damaged file
                arrays = {name: file[name] for name in file.files}
                if other_members := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
                    raise ValueError(f"its member {other_members[0]!r:.60} is no .npy")
    except JaxparError:
        raise
    except READ_ERRORS as error:
        text = getattr(error, "strerror", None) or str(error)
        if "allow_pickle" in text:  # numpy's message for any unknown file
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
    labels = {name: f"{path}: {name}" for name in arrays}
    in_memory = {name: value for name, value in arrays.items() if not isinstance(value, np.memmap)}
    if check_all:
        for name in arrays.keys() - in_memory.keys():
            if arrays[name].dtype in (np.int64, np.uint64):
                for block in blocks(arrays[name]):
                    to_32_bits(block, labels[name])
    return arrays | {name: to_32_bits(value, labels[name]) for name, value in in_memory.items()}
