"""Context parallelism: keys and values gathered forward, and their gradients scattered back.

Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2.
"""

from typing import Any

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES, Technique


def block(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the exposed seconds of a block's collectives over the context axis, forward and backward.

    Every device has queries of its own tokens and keys and values of all, whose gradients are sums over the devices.
    They are gathered once more where attention is computed again.
    """
    size = 2 * BYTES * candidate.microbatch * shape.seq * shape.kv_dim / candidate.tensor
    once = (1 - software.context_overlap) * hardware.gather(size, candidate.context, candidate.tensor)
    return once, (1 + candidate.recomputed[1]) * once


CONTEXT = Technique(letter="C", colour=173, block=block)
