"""What `context_by="auto"` leaves open, as a question of one call of attention, and the answer to it.

    parallel  asks        Call ──► choose ──► Choice
    plan      answers     `jaxpar.plan.techniques.chosen.choose`
    step, job hand it in  `asked.traced(layout, used, choose)`

A plan reads layouts, so it lies above this room, which knows of it only what is here.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of attention, over all devices.

    Attributes:
      rows: Rows of a replica.
      seq: Tokens of a row.
      heads: Heads of queries.
      kv_heads: Those of keys.
      head_dim: Width of one.
      causal: Whether the mask is causal.
      window: As in `jaxpar.attention`.
      segments: Whether documents share a row and do not see each other.
      softcap: Whether scores are capped, which cuDNN's kernel does not do.
      dtype: Of queries.
      context: Devices that share a row.
      tensor: Devices that share the heads.
      held: Bytes of a device's training state.
      layers: Layers whose shares the backward pass keeps: all without recomputation, 1 where they are made again.
      chip: For which chip, a key of `jaxpar.plan.machine.hardware.HARDWARE`; "" where none is known.
      kernel: `context_kernel` of `jaxpar.Parallel`.
    """

    rows: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    segments: bool = False
    softcap: bool = False
    dtype: str = "bfloat16"
    context: int
    tensor: int = 1
    held: int = 0
    layers: int = 1
    chip: str = ""
    kernel: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A form: `by` and `ulysses` as `jaxpar.Parallel` has them, and why, in a sentence."""

    by: str
    ulysses: int
    why: str


Choose = Callable[[Call], Choice]
