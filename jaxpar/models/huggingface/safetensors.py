"""Reads and writes safetensors files: a JSON header, then the tensors' bytes in sequence. No code, no pickle.

    8 bytes: n   n bytes: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}   data

jaxpar reads parts of tensors through a memory map and writes files tensor by tensor, so a host needs far less memory
than the size of the model.

Format: github.com/huggingface/safetensors. Large models are several files and an index of tensor to file.
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
FLOATS = tuple(np.dtype(DTYPES[name]) for name in ("F32", "BF16", "F16"))  # dtypes of weights
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DIMS = 64  # maximum dims of an array
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
RULE = "a .safetensors file is a header and the bytes it describes, whole"
FIX = "fetch or export it again"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
      file: The file.
      dtype: Dtype of its elements.
      shape: Its dims.
      start: Offset of its first byte from the beginning of the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def view(self) -> np.ndarray:
        """Returns the tensor as a memory map, which reads bytes on use."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, mode="r", offset=self.start, shape=self.shape)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to write.

    Attributes:
      name: Its name.
      dtype: Dtype of its elements.
      shape: Its dims.
      make: Computes the tensor; called once, right before it is written.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def entries(file: Path) -> dict[str, Entry]:
    """Reads the header of a file: its tensors by name, without their data.

    Raises:
      JaxparError: If it cannot be read, or violates the format.
    """
    check_plain(file, rule=RULE, fix=FIX)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise ValueError(f"{size} bytes, which cannot have a header of {length}")
            header = json.loads(stream.read(length), object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("the header is no table")
        header.pop("__metadata__", None)
        result = {name: _entry(file, name, fields, 8 + length) for name, fields in header.items()}
        _check_gapless(result, 8 + length, size)
    except OSError as error:
        raise refuse(f"{file}: {error.strerror}", rule=RULE, fix=FIX) from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"{file}: {str(error)[:200]}", rule=RULE, fix=FIX) from error
    return result


def folder_entries(folder: Path) -> dict[str, Entry]:
    """The tensors of a model's folder, from one file or from those that its index names.

    Raises:
      JaxparError: If there are none, a file is damaged, or the index violates the format.
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
    files = _index(index)
    table = {name: entry for file in sorted(set(files.values())) for name, entry in entries(folder / file).items()}
    for name, entry in table.items():
        if files.get(name) != entry.file.name:
            where = f"in {files[name]}" if name in files else "nowhere"
            raise refuse(f"{index}: {name} is in {entry.file.name}, the index says {where}", rule=RULE, fix=FIX)
    if missing := files.keys() - table:
        raise refuse(f"{index}: {min(missing)} is not in {files[min(missing)]}", rule=RULE, fix=FIX)
    return table


def write(folder: Path, tensors: Sequence[TensorSource], *, max_file_bytes: int) -> list[Path]:
    """Writes tensors to a folder, in several files if one would be too large.

    Args:
      folder: Output folder; must exist.
      tensors: The tensors, in the order of writing.
      max_file_bytes: Maximum bytes of data per file; a single tensor may be larger.

    Returns:
      The written files.
    """
    files: list[list[TensorSource]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(tensor_in_file.bytes for tensor_in_file in files[-1]) + tensor.bytes > max_file_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return [_write(folder / ONE, files[0])]
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    written = [_write(folder / name, group) for name, group in zip(names, files, strict=True)]
    weight_map = {tensor.name: name for name, group in zip(names, files, strict=True) for tensor in group}
    total = sum(tensor.bytes for tensor in tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / INDEX).write_text(text + "\n")
    return [*written, folder / INDEX]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _entry(file: Path, name: str, fields: Any, data: int) -> Entry:
    """Parses the entry of a tensor in a header; `data` is the offset of the data."""
    shape, offsets = _numbers(fields, "shape"), _numbers(fields, "data_offsets")
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!r:.100} is described as {fields!r:.100}")
    if not isinstance(fields.get("dtype"), str) or fields["dtype"] not in DTYPES:
        raise ValueError(f"{name!r:.100} has the dtype {fields.get('dtype')!r:.40}, known are {', '.join(DTYPES)}")
    dtype = np.dtype(DTYPES[fields["dtype"]])
    if len(shape) > DIMS or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"{name!r:.100} has the shape {shape!r:.60}, which no array has")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r:.100} of {fields['dtype']} {shape!r:.60} has {offsets[1] - offsets[0]} bytes")
    return Entry(file, dtype, tuple(shape), data + offsets[0])


def _numbers(fields: object, key: str) -> list[int] | None:
    numbers = fields.get(key) if isinstance(fields, dict) else None
    is_valid = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
    return numbers if is_valid else None


def _check_gapless(entries: Mapping[str, Entry], data: int, size: int) -> None:
    offset = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, math.prod(item[1].shape))):
        if entry.start != offset:
            raise ValueError(f"{name!r:.100} begins at byte {entry.start - data} of the data, not at {offset - data}")
        offset += math.prod(entry.shape) * entry.dtype.itemsize
    if offset != size:
        raise ValueError(f"{offset} bytes are described, the file has {size}")


def _index(file: Path) -> dict[str, str]:
    """Parses an index, which maps tensors to file names; refuses a file name outside of the folder."""
    check_plain(file, rule="an index maps each tensor to the file that holds it", fix=FIX)
    try:
        names = json.loads(file.read_bytes(), object_pairs_hook=_unique_keys)
        names = names["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
            raise ValueError("weight_map is no table of file names")
    except OSError as error:
        raise refuse(
            f"{file}: {error.strerror}", rule="an index maps each tensor to the file that holds it", fix=FIX
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refuse(
            f"{file}: {str(error)[:200]}", rule="an index maps each tensor to the file that holds it", fix=FIX
        ) from error
    for name in sorted(set(names.values())):
        if not name.endswith(".safetensors") or set(name) & {"/", "\\", ":", "\0"}:
            raise refuse(f"{file} names the file {name!r:.100}", rule="a model's files lie in its own folder", fix=FIX)
    return names


def _write(file: Path, tensors: Sequence[TensorSource]) -> Path:
    """Writes one file atomically."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    for tensor, start in zip(tensors, _starts(tensors), strict=True):
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
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


def _starts(tensors: Sequence[TensorSource]) -> Iterator[int]:
    offset = 0
    for tensor in tensors:
        yield offset
        offset += tensor.bytes
