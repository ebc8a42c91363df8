"""`head="auto"` of `jaxpar.Pipeline` for a decoder: the head on the last stage, or spread over all stages."""

from typing import Any

import numpy as np

from jaxpar.parallel.pipeline_options import HELD, LEAST
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.model.shape import Shape


def auto_head(shape: Shape, candidate: Candidate) -> Any:
    """Returns `last` or `spread` for every candidate, with the rule of `jaxpar.parallel.head_placement`."""
    table = shape.vocab * shape.dim / candidate.tensor
    freed = HELD * table * (2 - shape.tied) * (1 - 1 / np.asarray(candidate.pipe))
    divides = np.equal(shape.vocab % (candidate.pipe * candidate.tensor), 0)
    looks_up = np.greater(candidate.context, 1) & np.equal(candidate.tensor, 1)
    spread = ~looks_up & candidate.phased & divides & np.not_equal(candidate.zero, 2) & (freed >= LEAST)
    return np.where(spread, "spread", "last")
