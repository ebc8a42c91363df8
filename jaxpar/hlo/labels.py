"""What the label of an instruction says: the pass that it belongs to, and the operation."""

import re

from jaxpar.sharding.names import AGAIN, GRADIENT

_WRAPPERS = ("jit(", "while", "body", "eval_jaxpr", "checkpoint", "rematted", "closed_call", "pipeline:")


def is_backward(label: str) -> bool:
    """Whether an operation belongs to the backward pass or adds up gradients; false for recomputation."""
    return ("transpose(" in label or GRADIENT in label) and AGAIN not in label


def is_recomputed(label: str) -> bool:
    """Whether an operation is a recomputation of the forward pass in the backward pass."""
    return AGAIN in label


def shorten_label(label: str) -> str:
    """Returns the end of a label, without the names of JAX's transformations and loops.

    >>> shorten_label("jit(f)/while/body/transpose(jvp(Block))/bsd,df->bsf/dot_general")
    'bsd,df->bsf/dot_general'
    """
    words = [word for word in re.split(r"/(?![^(]*\))", label) if not word.startswith(_WRAPPERS)]
    words = [re.sub(r"^(?:transpose|jvp|vmap|\()+|\)+$", "", word) for word in words]
    end = "/".join([word for word in words if word][-2:]) or label
    parts = end.split(":")  # XLA labels combined instructions a:b:c
    return parts[0] if len(parts) == 1 else f"{parts[0]} and {len(parts) - 1} more"
