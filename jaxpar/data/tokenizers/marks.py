"""Tokens on the disk with two marks each, in their highest bits: a document begins here; this is not learned.

    uint16   learned? first? 14 bits of id          a tokenizer of up to 16,384 tokens
    uint32   learned? first? 30 bits of id          a larger one

So one file says it all, and one list of hashes covers it.
"""

import numpy as np


def dtype_of(tokens: int) -> np.dtype:
    """Returns the dtype of marked tokens of a tokenizer of so many."""
    return np.dtype(np.uint16 if tokens <= 2**14 else np.uint32)


def _bits(dtype: np.dtype) -> tuple[int, int]:
    bits = 8 * dtype.itemsize
    return 1 << (bits - 1), 1 << (bits - 2)


def mark(ids: np.ndarray, dtype: np.dtype, *, first: bool, learned: np.ndarray | None = None) -> np.ndarray:
    """Returns ids with their marks.

    Args:
      ids: Tokens of a piece. Shape [n].
      dtype: What `dtype_of` says.
      first: Whether a document begins with them.
      learned: Which are; None means all. Shape [n], bool.
    """
    apart, begins = _bits(dtype)
    made = ids.astype(dtype)
    if learned is not None:
        made[~learned] |= apart
    if first and len(made):
        made[0] |= begins
    return made


def begins(tokens: np.ndarray) -> np.ndarray:
    """Returns whether a document begins at each token. Shape [...], bool."""
    return (tokens & _bits(tokens.dtype)[1]) != 0


def unlearned(tokens: np.ndarray) -> np.ndarray:
    """Returns whether each token is not learned. Shape [...], bool."""
    return (tokens & _bits(tokens.dtype)[0]) != 0


def ids(tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens without their marks. Shape [...], int32."""
    return (tokens & (_bits(tokens.dtype)[1] - 1)).astype(np.int32)
