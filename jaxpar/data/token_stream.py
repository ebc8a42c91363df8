"""Windows of token ids from files that other programs wrote; the files are mapped, not copied or unpickled.

flat .npy        integers [n]
raw .bin         uint16, little-endian (nanoGPT's train.bin)
llm.c .bin       256 int32 of header: 20240520 and uint16 tokens (GPT-2), or 20240801 and uint32 (Llama 3)
Megatron .bin    beside an .idx that names the dtype and the lengths of sequences
"""

import hashlib
import os
import struct
from pathlib import Path

import numpy as np

from jaxpar.data.arrays import READ_ERRORS
from jaxpar.data.spec import Batch, Data
from jaxpar.data.text import TokenWindows
from jaxpar.errors import refuse
from jaxpar.files import check_plain

LLM_C = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}  # llm.c, dev/data/data_common.py
HEADER = 1024  # bytes of llm.c's header
MEGATRON = b"MMIDIDX\0\0"  # Megatron-LM, megatron/core/datasets/indexed_dataset.py
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # its DType; 6 and 7 are floats
BLOCK = 2**22  # tokens per read of the fingerprint
RULE = "tokens come as a flat .npy of integers, as a .bin of uint16, as llm.c's .bin, or as Megatron's .bin and .idx"
FIX = "np.array(ids, np.uint16).tofile('train.bin')"


class TokenStream(TokenWindows):
    """Windows of a file of token ids: `inputs` and `targets` [batch, seq], int32.

    Args:
      path: The file.
      spec: The `[data]` table.
      seed: Seed of the shuffle of windows.
    """

    def __init__(self, path: Path, spec: Data, seed: int):
        self.file, self.tokens, self._fingerprint = path, load_tokens(path), ""
        if (len(self.tokens) - 1) // spec.seq < 2:
            raise refuse(
                f"{path}: {len(self.tokens)} tokens, data.seq = {spec.seq}",
                rule="the tokens are at least two sequences",
                fix="more tokens, or a shorter data.seq",
            )
        super().__init__((len(self.tokens) - 1) // spec.seq, spec, seed)

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens, which reads all of them."""
        if not self._fingerprint:
            digest = hashlib.sha256(self.tokens.dtype.str.encode())
            for begin in range(0, len(self.tokens), BLOCK):
                digest.update(np.ascontiguousarray(self.tokens[begin : begin + BLOCK]).data)
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def _rows(self, chosen: np.ndarray) -> Batch:
        seq = self.spec.seq
        window = np.stack([self.tokens[int(index) * seq : (int(index) + 1) * seq + 1] for index in chosen])
        if window.size and (int(window.max()) >= 2**31 or int(window.min()) < 0):
            worst = window.min() if int(window.min()) < 0 else window.max()
            raise refuse(f"{self.file}: token {worst}", rule="ids are from 0 to 2^31 - 1", fix=FIX)
        window = window.astype(np.int32)
        return {"inputs": window[:, :-1], "targets": window[:, 1:]}


def is_token_stream(path: Path) -> bool:
    """Whether a path holds token ids: a .bin, or a one-dimensional .npy of integers.

    Raises:
      JaxparError: If an .npy is a pipe or otherwise no regular file.
    """
    path = path.expanduser()
    if path.suffix == ".bin":
        return True
    check_plain(path, rule=RULE, fix=FIX)
    if path.suffix != ".npy" or not path.is_file():
        return False
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except READ_ERRORS:  # loading it reports what is wrong
        return False
    return array.ndim == 1 and array.dtype.kind in "iu"


def load_tokens(path: Path) -> np.ndarray:
    """Maps the token ids of a file. Shape [n].

    Raises:
      JaxparError: If it is none of the formats, or truncated.
    """
    path = path.expanduser()
    check_plain(path, rule=RULE, fix=FIX)
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        size = os.path.getsize(path)
        with path.open("rb") as stream:
            head = stream.read(HEADER)
        index = path.with_suffix(".idx")
        if index.exists():
            return _megatron(path, index, size)
        if len(head) == HEADER and (number := int.from_bytes(head[:4], "little")) in LLM_C:
            version, count = struct.unpack("<ii", head[4:12])
            kind = LLM_C[number]
            if size != HEADER + count * kind.itemsize:
                raise ValueError(f"llm.c's header (version {version}) says {count} tokens, {size} bytes are there")
            return np.memmap(path, kind, mode="r", offset=HEADER, shape=(count,))
        if not size or size % 2:
            raise ValueError(f"{size} bytes are not a whole number of uint16")
        return np.memmap(path, "<u2", mode="r")
    except (*READ_ERRORS, struct.error) as error:
        raise refuse(f"{path}: {getattr(error, 'strerror', None) or error}", rule=RULE, fix=FIX) from error


def _megatron(path: Path, index: Path, size: int) -> np.ndarray:
    """Maps the tokens of Megatron's files: sequences are contiguous, so their lengths only check the size."""
    check_plain(index, rule=RULE, fix=FIX)
    with index.open("rb") as stream:
        head = stream.read(34)
        if len(head) < 34 or head[:9] != MEGATRON:
            raise ValueError(f"{index.name} is no index of Megatron's")
        version, code, sequences, _ = struct.unpack("<QBQQ", head[9:])
        if version != 1 or code not in CODES:
            raise ValueError(f"{index.name} has version {version} and dtype {code}")
        if index.stat().st_size < 34 + 4 * sequences:
            raise ValueError(f"{index.name} is cut off")
        count = int(np.fromfile(stream, "<i4", sequences).sum(dtype=np.int64))
    kind = np.dtype(CODES[code])
    if size != count * kind.itemsize:
        raise ValueError(f"{index.name} says {count} tokens of {kind.name}, {size} bytes are there")
    return np.memmap(path, kind, mode="r", shape=(count,))
