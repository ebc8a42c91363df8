"""Decides from the size of logits on a device whether a loss computes all logits at once or in chunks of tokens.

    whole     one matmul, one softmax, the logits saved for the backward pass: fewest programs, most memory
    chunks    the same matmuls chunk by chunk; at most one chunk of logits exists at a time

`record_logits` records the decision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from jaxpar.units import show_bytes

LARGEST = 4 * 2**30  # maximum bytes of float32 logits that a device computes at once
CHUNK = 2**30  # maximum bytes per chunk: with 128,256 entries 2,093 tokens, a matmul that keeps a GPU busy


@dataclass(frozen=True)
class Logits:
    """The logits of one microbatch on one device.

    Attributes:
      tokens: Tokens on the device.
      vocab: Vocabulary entries on the device.
      largest: Maximum bytes of logits in float32 that are computed at once.
    """

    tokens: int
    vocab: int
    largest: int = LARGEST

    @property
    def bytes(self) -> int:
        """Bytes of all logits in float32, the dtype of a loss."""
        return 4 * self.tokens * self.vocab

    @property
    def is_chunked(self) -> bool:
        """Whether the loss computes the logits in chunks of tokens."""
        return self.bytes > self.largest

    @property
    def is_large(self) -> bool:
        """Whether a user may want to change the decision: the loss has chunks, or whole logits of over 1 GiB."""
        return self.is_chunked or self.bytes > CHUNK

    @property
    def chunks(self) -> int:
        """Number of chunks of a device's tokens; 1 if all logits are computed at once."""
        if not self.is_chunked:
            return 1
        minimum = min(self.tokens, -(-self.bytes // min(CHUNK, max(self.largest, 1))))
        # equal chunks if at most twice as many divide the tokens: else tokens of weight zero pad the last one
        return next((count for count in range(minimum, 2 * minimum + 1) if self.tokens % count == 0), minimum)

    def part(self, parts: int) -> "Logits":
        """The logits of one of `parts` equal parts of the tokens."""
        return replace(self, tokens=max(1, self.tokens // parts))

    def __str__(self) -> str:
        """Describes whether the logits are computed at once or in chunks, and why."""
        size = f"a device's {self.tokens:,} x {self.vocab:,} in float32 would be {show_bytes(self.bytes)}"
        if not self.is_chunked:
            return f"logits: whole; {size}, not more than {show_bytes(self.largest)}"
        chunk_tokens = -(-self.tokens // self.chunks)
        return f"logits: {self.chunks} chunks of {chunk_tokens:,} tokens; {size}, more than {show_bytes(self.largest)}"


_records: ContextVar[list[Logits] | None] = ContextVar("records", default=None)


@contextmanager
def record_logits() -> Iterator[list[Logits]]:
    """Context that records the logits of each traced loss, without duplicates.

    Yields:
      A list, complete when the context ends; empty if the loss takes logits from the model's `__call__`.
    """
    records: list[Logits] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def add_logits(logits: Logits) -> None:
    """Adds the logits of a loss to the record, if there is one."""
    records = _records.get()
    if records is not None and logits not in records:
        records.append(logits)
