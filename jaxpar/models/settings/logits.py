"""The logits of a loss: how large they are on a device, and whether they are made whole or in chunks of tokens.

    whole     one matmul, one softmax, the logits kept for the backward pass: fewest programs, most memory
    chunks    the same matmuls chunk by chunk; of all logits no more than a chunk is ever there

The size alone decides, and whoever opens `noted` is told which it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from jaxpar.units import show_bytes

LARGEST = 4 * 2**30  # bytes of logits in float32 that a device makes whole
CHUNK = 2**30  # bytes of them in a chunk, at most: of 128,256 entries 2,093 tokens, a matmul that keeps a GPU busy


@dataclass(frozen=True)
class Logits:
    """The logits of one microbatch on one device.

    Attributes:
      tokens: Tokens of the device.
      vocab: Entries of the vocabulary of the device.
      largest: Bytes in float32 up to which they are made whole.
    """

    tokens: int
    vocab: int
    largest: int = LARGEST

    @property
    def bytes(self) -> int:
        """Bytes of all of them in float32, which a loss computes in."""
        return 4 * self.tokens * self.vocab

    @property
    def in_chunks(self) -> bool:
        """Whether they are made in chunks."""
        return self.bytes > self.largest

    @property
    def chunks(self) -> int:
        """Into how many chunks the tokens of a device fall; 1 where its logits are made whole."""
        if not self.in_chunks:
            return 1
        least = min(self.tokens, -(-self.bytes // min(CHUNK, max(self.largest, 1))))
        # equal chunks where up to twice as many are: else tokens that weigh nothing fill up the last one
        return next((count for count in range(least, 2 * least + 1) if self.tokens % count == 0), least)

    def of_part(self, parts: int) -> "Logits":
        """Returns those of one of so many equal parts of the tokens."""
        return replace(self, tokens=max(1, self.tokens // parts))

    def __str__(self) -> str:
        """Returns which form runs, and why."""
        size = f"a device's {self.tokens:,} x {self.vocab:,} in float32 would be {show_bytes(self.bytes)}"
        if not self.in_chunks:
            return f"logits: whole; {size}, not more than {show_bytes(self.largest)}"
        each = -(-self.tokens // self.chunks)
        return f"logits: {self.chunks} chunks of {each:,} tokens; {size}, more than {show_bytes(self.largest)}"


_noting: ContextVar[list[Logits] | None] = ContextVar("noting", default=None)


@contextmanager
def noted() -> Iterator[list[Logits]]:
    """Notes the logits of each loss that is traced while the context lasts, once each.

    Yields:
      A list, complete when the context ends. Empty where a loss takes logits from the model as it makes them.
    """
    found: list[Logits] = []
    token = _noting.set(found)
    try:
        yield found
    finally:
        _noting.reset(token)


def note(logits: Logits) -> None:
    """Adds the logits of a loss to what is noted."""
    found = _noting.get()
    if found is not None and logits not in found:
        found.append(logits)
