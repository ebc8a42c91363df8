"""How a model computes: dtypes of its matmuls, policies for the residuals of its backward pass, and logits in chunks.

`step/numerics.py` implements the dtypes, `models/remat.py` the policies. The size of the logits on a device decides
whether a loss computes all of them at once or in chunks of tokens; `record_logits` records the decision:

    whole     one matmul, one softmax, the logits saved for the backward pass: fewest programs, most memory
    chunks    the same matmuls chunk by chunk; at most one chunk of logits exists at a time
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from jaxpar.errors import refuse, suggest
from jaxpar.units import show_bytes

PRECISIONS = ("fp32", "bf16")
POLICIES = {
    "none": "keeps all that the backward pass reads",
    "dots": "keeps the results of matmuls with a weight (no batch dims), recomputes the rest",
    "all_dots": "keeps the results of all matmuls, attention scores too",
    "full": "keeps the input of each layer, recomputes everything inside it",
    "offload": "as full, with the inputs of layers in host memory; for layers in a scan",
}
LARGEST = 4 * 2**30  # maximum bytes of float32 logits that a device computes at once
CHUNK = 2**30  # maximum bytes per chunk: with 128,256 entries 2,093 tokens, a matmul that keeps a GPU busy


def model_policy(remat: str) -> str:
    """Returns the policy that a model applies itself: none for `offload`, which the step applies to any model."""
    return "none" if remat == "offload" else remat


@dataclass(frozen=True)
class Precision:
    """The dtype of matmuls, and exceptions from it. `"bf16"` is short for `{compute = "bf16"}`.

    Attributes:
      compute: fp32, or bf16: matmuls in bfloat16, parameters and optimizer in float32.
      allow: Matmuls that may stay in float32 under bf16: "Router.__call__", "moe.py:41" or patterns such as "Router.*",
        by the names under which an error and `jaxpar inspect` list them.
    """

    SHORT: ClassVar[str] = "compute"  # the key that a plain text in place of the table sets

    compute: Literal["fp32", "bf16"] = "fp32"
    allow: tuple[str, ...] = ()

    def __post_init__(self):
        if not isinstance(self.compute, str) or self.compute not in PRECISIONS:
            raise refuse(
                f"precision={self.compute!r}",
                rule=f"precision is one of {', '.join(PRECISIONS)}",
                fix=suggest(str(self.compute), PRECISIONS),
            )
        if isinstance(self.allow, str) or not all(isinstance(pattern, str) for pattern in self.allow):
            raise refuse(f"allow={self.allow!r:.60}", rule="allow is a list of patterns", fix='allow=("Router.*",)')
        if self.allow and self.compute == "fp32":
            raise refuse(
                f"precision fp32 with allow={list(self.allow)}",
                rule="allow names matmuls that stay in float32 under bf16",
                fix='compute="bf16", or allow left out',
            )


# Which attention cuDNN's fused kernel supports, from sizes and masks: for traced calls and for plans.

HOPPER = 9.0  # compute capability: from here on heads may be 256 wide, before it 128, as in JAX's own check
DTYPES = ("bfloat16", "float16")


def head_fits(head_dim: int, capability: float = HOPPER) -> bool:
    """Whether cuDNN's fused kernel supports heads of this width on GPUs of a compute capability."""
    return head_dim % 8 == 0 and head_dim <= (256 if capability >= HOPPER else 128)


def why_no_part(
    *,
    dtype: str,
    head_dim: int,
    causal: bool,
    window: int | None,
    segments: bool,
    softcap: bool = False,
    ring: int,
    capability: float = HOPPER,
) -> str | None:
    """Explains why the kernel cannot run attention over a part of the keys, as in a ring; None if it can.

    Args:
      dtype: Dtype of the queries.
      head_dim: Width of a head.
      causal: Whether the mask is causal.
      window: Tokens of the window; None if unbounded.
      segments: Whether documents share a row and do not attend to each other.
      softcap: Whether scores are capped.
      ring: Number of groups in the ring, between which keys rotate.
      capability: Compute capability of the GPUs.
    """
    if dtype not in DTYPES:
        return f"it computes in 16 bits, not in {dtype}"
    if segments:
        return "it is given no segments of packed documents"
    if softcap:
        return "it caps no scores"
    if window is not None and not (causal and ring == 1):
        return "a window is causal and within the tokens of one device for it"
    return None if head_fits(head_dim, capability) else f"it has no heads of {head_dim}"


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
