"""Tensors in files: a header of JSON, then their bytes, one after the other. No code, no pickle.

    8 bytes: n   n bytes: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}   data

Read from a memory map as much as is asked for, written tensor by tensor, so that a model passes through a host
that could not hold it.

Format: github.com/huggingface/safetensors. Large models come as several files and an index, which says what is where.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.files import check_plain, partial_path

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E5M2": jnp.float8_e5m2, "F8_E4M3": jnp.float8_e4m3fn,
    "I16": np.int16, "U16": np.uint16, "F16": np.float16, "BF16": jnp.bfloat16, "I32": np.int32, "U32": np.uint32,
    "F32": np.float32, "F64": np.float64, "I64": np.int64, "U64": np.uint64,
}  # fmt: skip
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
FLOATS = tuple(np.dtype(DTYPES[name]) for name in ("F32", "BF16", "F16"))  # what weights come in
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DIMS = 64  # of an array, at most
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
RULE = "a .safetensors file is a header and the bytes it describes, whole"
FIX = "fetch or export it again"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
      file: Where it lies.
      dtype: Of its elements.
      shape: Its dims.
      start: Its first byte, from the beginning of the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def view(self) -> np.ndarray:
        """Returns the tensor as a memory map: bytes are read when they are used."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, mode="r", offset=self.start, shape=self.shape)


@dataclass(frozen=True, slots=True)
class Made:
    """One tensor to be written.

    Attributes:
      name: Its name.
      dtype: Of its elements.
      shape: Its dims.
      make: Returns it; called once, when its turn has come.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def entries(file: Path) -> dict[str, Entry]:
    """Returns the tensors of a file by name; of their bytes none is read.

    Raises:
      JaxparError: If it cannot be read, or is not as the format says.
    """
    check_plain(file, rule=RULE, fix=FIX)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise ValueError(f"{size} bytes, which cannot have a header of {length}")
            header = json.loads(stream.read(length), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("the header is no table")
        header.pop("__metadata__", None)
        found = {name: _entry(file, name, told, 8 + length) for name, told in header.items()}
        _check_gapless(found, 8 + length, size)
    except OSError as error:
        raise refuse(f"{file}: {error.strerror}", rule=RULE, fix=FIX) from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"{file}: {str(error)[:200]}", rule=RULE, fix=FIX) from error
    return found


def folder_entries(folder: Path) -> dict[str, Entry]:
    """Returns the tensors of a model's folder, of one file or of those that its index names.

    Raises:
      JaxparError: If there are none, a file is damaged, or the index is not as the format says.
    """
    index = folder / INDEX
    if not index.exists():
        if (folder / ONE).exists():
            return entries(folder / ONE)
        pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        raise refuse(
            f"{folder} has no {ONE}" + (f"; {pickled[0]} is a pickle, which can run any code" if pickled else ""),
            rule="weights are read from safetensors, which hold numbers and nothing else",
            fix="save_pretrained(folder) of transformers writes them" if pickled else "another folder",
        )
    said = _index(index)
    found = {name: entry for file in sorted(set(said.values())) for name, entry in entries(folder / file).items()}
    for name, entry in found.items():
        if said.get(name) != entry.file.name:
            where = f"in {said[name]}" if name in said else "nowhere"
            raise refuse(f"{index}: {name} is in {entry.file.name}, the index says {where}", rule=RULE, fix=FIX)
    if lost := said.keys() - found:
        raise refuse(f"{index}: {min(lost)} is not in {said[min(lost)]}", rule=RULE, fix=FIX)
    return found


def write(folder: Path, tensors: Sequence[Made], *, most: int) -> list[Path]:
    """Writes tensors to a folder, in several files where one would be too large.

    Args:
      folder: Where; it exists.
      tensors: In the order in which they are written.
      most: Bytes of data in a file; a tensor alone may be larger.

    Returns:
      What was written.
    """
    files: list[list[Made]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(one.bytes for one in files[-1]) + tensor.bytes > most:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return [_write(folder / ONE, files[0])]
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    written = [_write(folder / name, each) for name, each in zip(names, files, strict=True)]
    where = {tensor.name: name for name, each in zip(names, files, strict=True) for tensor in each}
    total = sum(tensor.bytes for tensor in tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    (folder / INDEX).write_text(text + "\n")
    return [*written, folder / INDEX]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _entry(file: Path, name: str, told: Any, data: int) -> Entry:
    """Returns the entry of a tensor in a header; `data` is the offset of the bytes."""
    shape, offsets = _numbers(told, "shape"), _numbers(told, "data_offsets")
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!r:.100} is described as {told!r:.100}")
    if not isinstance(told.get("dtype"), str) or told["dtype"] not in DTYPES:
        raise ValueError(f"{name!r:.100} has the dtype {told.get('dtype')!r:.40}, known are {', '.join(DTYPES)}")
    dtype = np.dtype(DTYPES[told["dtype"]])
    if len(shape) > DIMS or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"{name!r:.100} has the shape {shape!r:.60}, which no array has")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r:.100} of {told['dtype']} {shape!r:.60} has {offsets[1] - offsets[0]} bytes")
    return Entry(file, dtype, tuple(shape), data + offsets[0])


def _numbers(told: Any, key: str) -> list[int] | None:
    found = told.get(key) if isinstance(told, dict) else None
    whole = isinstance(found, list) and all(type(number) is int and number >= 0 for number in found)
    return found if whole else None


def _check_gapless(found: Mapping[str, Entry], data: int, size: int) -> None:
    at = data
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, math.prod(item[1].shape))):
        if entry.start != at:
            raise ValueError(f"{name!r:.100} begins at byte {entry.start - data} of the data, not at {at - data}")
        at += math.prod(entry.shape) * entry.dtype.itemsize
    if at != size:
        raise ValueError(f"{at} bytes are described, the file has {size}")


def _index(file: Path) -> dict[str, str]:
    """Returns tensor to file name; a name that leads out of the folder is refused."""
    check_plain(file, rule="an index maps each tensor to the file that holds it", fix=FIX)
    try:
        said = json.loads(file.read_bytes(), object_pairs_hook=_once)
        said = said["weight_map"]
        if not isinstance(said, dict) or not all(isinstance(name, str) for name in said.values()) or not said:
            raise ValueError("weight_map is no table of file names")
    except OSError as error:
        raise refuse(
            f"{file}: {error.strerror}", rule="an index maps each tensor to the file that holds it", fix=FIX
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refuse(
            f"{file}: {str(error)[:200]}", rule="an index maps each tensor to the file that holds it", fix=FIX
        ) from error
    for name in sorted(set(said.values())):
        if not name.endswith(".safetensors") or set(name) & {"/", "\\", ":", "\0"}:
            raise refuse(f"{file} names the file {name!r:.100}", rule="a model's files lie in its own folder", fix=FIX)
    return said


def _write(file: Path, tensors: Sequence[Made]) -> Path:
    """Writes one file; a reader sees all of it, or nothing."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file that does not say so
    for tensor, start in zip(tensors, _starts(tensors), strict=True):
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    part = partial_path(file)
    try:
        with part.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                value = np.ascontiguousarray(tensor.make(), tensor.dtype)
                out.write(value.reshape(-1).view(np.uint8).data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def _starts(tensors: Sequence[Made]) -> Iterator[int]:
    at = 0
    for tensor in tensors:
        yield at
        at += tensor.bytes
