"""Two flags in the highest bits of each token on disk: the loss ignores this token; a document begins here.

    uint16   unlearned? first? 14 bits of id        a tokenizer of up to 16,384 tokens
    uint32   unlearned? first? 30 bits of id        a larger one

So one file holds ids, mask and document boundaries, and one hash manifest covers it.
"""

import numpy as np


def dtype_of(tokens: int) -> np.dtype:
    """The dtype that holds the ids of a vocabulary of this size and both flags."""
    return np.dtype(np.uint16 if tokens <= 2**14 else np.uint32)


def _bits(dtype: np.dtype) -> tuple[int, int]:
    bits = 8 * dtype.itemsize
    return 1 << (bits - 1), 1 << (bits - 2)


def set_flags(ids: np.ndarray, dtype: np.dtype, *, first: bool, learned: np.ndarray | None = None) -> np.ndarray:
    """Sets the flags of token ids.

    Args:
      ids: Tokens of a piece. Shape [n].
      dtype: The result's dtype, from `dtype_of`.
      first: Whether a document begins with the first of them.
      learned: Whether the loss counts each token; None means all. Shape [n], bool.
    """
    unlearned_bit, begin_bit = _bits(dtype)
    tokens = ids.astype(dtype)
    if learned is not None:
        tokens[~learned] |= unlearned_bit
    if first and len(tokens):
        tokens[0] |= begin_bit
    return tokens


def document_starts(tokens: np.ndarray) -> np.ndarray:
    """Whether a document begins at each token. Shape [...], bool."""
    return (tokens & _bits(tokens.dtype)[1]) != 0


def ignored_by_loss(tokens: np.ndarray) -> np.ndarray:
    """Whether the loss ignores each token. Shape [...], bool."""
    return (tokens & _bits(tokens.dtype)[0]) != 0


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """Token ids without the flags. Shape [...], int32."""
    return (tokens & (_bits(tokens.dtype)[1] - 1)).astype(np.int32)
