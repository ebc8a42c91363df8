"""The price of a technique: the protocol that a plan asks of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape

BYTES = 2  # of a bfloat16: activations travel in it
Block = Callable[[Shape, Candidate, Hardware, SoftwareModel], tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique that shares the work of a block between devices.

    Attributes:
      letter: Its cause in bars of a terminal.
      colour: The same as one of 256 colours of a terminal; waiting for the network is warm.
      block: Returns the exposed seconds of its collectives in one block of one microbatch, forward and backward, those
        that are repeated too. Numbers, or arrays where the candidate's fields are.
    """

    letter: str
    colour: int
    block: Block
