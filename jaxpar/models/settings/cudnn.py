"""Which attention cuDNN's fused kernel supports, from sizes and masks: for traced calls and for plans."""

HOPPER = 9.0  # compute capability: from here on heads may be 256 wide, before it 128, as in JAX's own check
DTYPES = ("bfloat16", "float16")


def head_fits(head_dim: int, capability: float = HOPPER) -> bool:
    """Whether the kernel supports heads of this width on GPUs of a compute capability."""
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
    """Says why the kernel cannot run attention over a part of the keys, as a ring does; None if it can.

    Args:
      dtype: Dtype of the queries.
      head_dim: Width of a head.
      causal: Whether the mask is causal.
      window: Tokens of the window; None if unbounded.
      segments: Whether documents share a row and do not see each other.
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
