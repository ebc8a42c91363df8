"""A look at parameters before they are saved."""

from typing import Any

import jax

from jaxpar.errors import Problem
from jaxpar.step.guard import are_finite
from jaxpar.train.faults import LOWER_RATE, BadStep

_are_finite = jax.jit(are_finite)


def check_before_save(step: int, params: Any) -> None:
    """Looks at parameters before they are saved: an update can spoil them while its loss and gradients are fine.

    Raises:
      BadStep: If a number is nan or inf.
    """
    if not _are_finite(params):
        got = f"the parameters of step {step} are not finite, though its loss and gradients are"
        raise BadStep(step, Problem(got, "a checkpoint is saved only while all parameters are finite", LOWER_RATE))
