"""Names of dtypes for a model's matmuls, and of policies for the residuals of its backward pass.

`step/numerics.py` implements the dtypes, `models/remat.py` the policies.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxpar.errors import refuse, suggest

PRECISIONS = ("fp32", "bf16")
POLICIES = {
    "none": "keeps all that the backward pass reads",
    "dots": "keeps the results of matmuls with a weight (no batch dims), recomputes the rest",
    "all_dots": "keeps the results of all matmuls, attention scores too",
    "full": "keeps the input of each layer, recomputes everything inside it",
    "offload": "as full, with the inputs of layers in host memory; for layers in a scan",
}


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
