"""The question and the answer of `context_by="auto"`: which implementation runs a call of attention.

    parallel  asks        AttentionCall ──► choose ──► AttentionChoice
    plan      answers     `jaxpar.plan.techniques.auto_context.choose_form`
    train, job hand it in `jaxpar.train_step`, and `all_techniques.tracing(layout, use, choose)`

A plan reads layouts, so `plan` imports this package, and this package knows only these types of a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.errors import refuse

KERNELS = ("auto", "cudnn", "plain")  # values of `context_kernel`


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of attention, over all devices.

    Attributes:
      sequences: Sequences of a replica.
      seq: Tokens of a sequence.
      heads: Heads of queries.
      kv_heads: Heads of keys.
      head_dim: Width of a head.
      causal: Whether the mask is causal.
      window: As in `jaxpar.attention`.
      segments: Whether several documents share a sequence and do not attend to each other.
      softcap: Whether scores are capped, which cuDNN's kernel does not do.
      dtype: Dtype of the queries.
      context: Devices that share a sequence.
      tensor: Devices that share the heads.
      state_bytes: Bytes of a device's training state.
      layers: Layers whose attention weights are saved for the backward pass: all layers, or 1 with recomputation.
      chip: The chip, a key of `jaxpar.plan.machine.hardware.HARDWARE`; "" if none is known.
      kernel: `context_kernel` of `jaxpar.Parallel`.
    """

    sequences: int
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
    state_bytes: int = 0
    layers: int = 1
    chip: str = ""
    kernel: str = "auto"


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """An implementation of context parallelism (`context_by` and `ulysses` of `jaxpar.Parallel`), and the reason."""

    context_by: str
    ulysses: int
    why: str


Choose = Callable[[AttentionCall], AttentionChoice]


def refuse_choice(call: AttentionCall) -> AttentionChoice:
    """Refuses to choose in a program without a planner.

    Raises:
      JaxparError: Always.
    """
    raise refuse(
        f"context_by='auto' over context={call.context}, in a program without a planner",
        rule="a planner chooses the form of attention; jp.train_step and jobs bring jaxpar's",
        fix='jp.Parallel(context_by="ring"), or another form by name',
    )
