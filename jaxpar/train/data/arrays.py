"""Examples that lie in arrays, one row each: from files, or scikit-learn's handwritten digits."""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.train.data import order
from jaxpar.train.data.held_out import Weighted, weighted
from jaxpar.train.data.spec import Batch, Data, Rows


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
        self.train, self.out = order.held_out(next(iter(lengths.values())), spec.held_out)
        self.fingerprint = fingerprint or _hash(arrays)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        return self._rows(self._chosen(step, size)[slice(None) if rows is None else rows])

    def where(self, step: int, size: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        return f"example {self._chosen(step, size)[row]} of {self.spec.path or self.spec.source}"

    def _chosen(self, step: int, size: int) -> np.ndarray:
        return self.train[order.rows(step, size, len(self.train), seed=self.seed, shuffle=self.spec.shuffle)]

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` held-out examples; none after the last."""
        chosen = self.out[index * size : (index + 1) * size]
        return weighted(len(chosen), size, rows, lambda at: self._rows(chosen[at]))

    def _rows(self, chosen: np.ndarray) -> Batch:
        return {name: np.ascontiguousarray(value[chosen]) for name, value in self.arrays.items()}


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
