"""Tensor parallelism: two all-reduces of [tokens, dim] each way in a block, or as many gathers and scatters.

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES, Technique


def block(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the exposed seconds of a block's collectives over the tensor axis, forward and backward.

    Forward nothing hides its two all-reduces, each a scatter and a gather. Backward an all-reduce runs beside the
    product that makes a weight's gradient. Sharded by sequence, two gathers have to come first; two scatters, and the
    two gathers that may be needed once more, run beside products (Korthikanti et al., section 4.2.2). Full remat makes
    the forward's again.
    """
    once = 2 * hardware.gather(BYTES * tokens(shape, candidate) * shape.dim, candidate.tensor, 1)
    beside, forward = 1 - software.tensor_overlap, 2 * once
    backward = once * np.where(candidate.sequence, 1 + (1 + software.regather) * beside, 2 * beside)
    return forward, backward + candidate.recomputed[4] * forward


TENSOR = Technique(letter="T", colour=208, block=block)
