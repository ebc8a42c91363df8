"""Sensitivity analysis: changes each assumption of a plan by its plausible error, up and down.

    bandwidths, speed of matmuls       times 1 + `DOUBT`, and 1 - `DOUBT`
    latencies                          twice, and half: of hops, and of launches of kernels and collectives
    exposed collectives                twice, and half
    fixed cost of a matmul             twice, and half: of each matmul, and of each wave of tiles

No change makes a step more than twice, or less than half, as long. Each names the causes of step time that it does not
change, so that a search can skip layouts that cannot become first under it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.time import StepTime

DOUBT = 0.3  # plausible relative error of an assumed bandwidth or speed
MOST = 2.0  # upper limit of the factor by which a changed assumption scales a part of the step time
COMPUTING = ("matmuls", "attention", "elementwise", "recompute", "optimizer")  # causes without a collective

_OVERLAPS = tuple(field.name for field in fields(SoftwareModel) if field.name.endswith("overlap"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChange:
    """One assumption, changed by its plausible error in one direction.

    Attributes:
      description: Description of the change.
      hardware: The changed hardware.
      software: The changed software.
      least_share: Lower bound of the changed step time over the original; 1 if steps only grow longer.
      unchanged_causes: Causes of step time that the change leaves as they are.
    """

    description: str
    hardware: Hardware
    software: SoftwareModel
    least_share: float
    unchanged_causes: tuple[str, ...]

    def lower_bound(self, time: StepTime) -> Any:
        """Returns a lower bound of the seconds of a step under the change, from its original `time`.

        It does not shorten each changed cause by a factor: computation hides as many seconds of a collective as before,
        so the exposed remainder may shrink to nothing.
        """
        return np.maximum(self.least_share * time.total, sum(time[cause] for cause in self.unchanged_causes))


def changes(hardware: Hardware, software: SoftwareModel) -> Iterator[ModelChange]:
    """Yields each changed assumption, with the changed hardware and software."""
    for sign, word in ((1 + DOUBT, "more"), (1 - DOUBT, "less")):
        for change, part, rate, untouched in (
            ("bandwidth inside a node", "inside", "bandwidth", COMPUTING),
            ("bandwidth between nodes", "between", "bandwidth", COMPUTING),
            ("speed of matmuls", "chip", "bf16_flops", ()),
        ):
            component = getattr(hardware, part)
            faster = replace(hardware, **{part: replace(component, **{rate: getattr(component, rate) * sign})})
            yield ModelChange(
                description=f"{DOUBT:.0%} {word} {change}", hardware=faster, software=software,
                least_share=min(1.0, 1 / sign), unchanged_causes=untouched,
            )  # fmt: skip
    for factor, word in ((MOST, "twice"), (1 / MOST, "half")):
        curve = hardware.gemm
        gemm = replace(hardware, gemm=replace(curve, half=curve.half * factor, wave=curve.wave * factor))
        for change, machines, programs, untouched in (
            ("the latencies", _later(hardware, factor), software, COMPUTING),
            ("the traffic that nothing hides", hardware, _exposed(software, factor), COMPUTING),
            ("the fixed cost of a matmul", gemm, software, ()),
        ):
            yield ModelChange(
                description=f"{word} {change}",
                hardware=machines,
                software=programs,
                least_share=min(1.0, factor),
                unchanged_causes=untouched,
            )


def _later(hardware: Hardware, factor: float) -> Hardware:
    links = {key: getattr(hardware, key) for key in ("inside", "between")}
    slower = {key: replace(link, latency=link.latency * factor) for key, link in links.items()}
    return replace(hardware, launch=min(1.0, hardware.launch * factor), **slower)


def _exposed(software: SoftwareModel, factor: float) -> SoftwareModel:
    """Multiplies the exposed share of collectives by a factor."""
    exposed = {key: min(1.0, factor * (1 - getattr(software, key))) for key in _OVERLAPS}
    split_sequences = _exposed(software.split_sequences, factor) if software.split_sequences else None
    return replace(software, split_sequences=split_sequences, **{key: 1 - share for key, share in exposed.items()})


# The Pareto front of time and memory: layouts that no other layout beats in both (Pareto 1906).


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """All compared layouts that fit, as arrays [layouts]; all numbers are modelled.

    Attributes:
      layouts: The layouts.
      seconds: Seconds of a step.
      bytes: Bytes of the fullest device.
    """

    layouts: Candidate
    seconds: np.ndarray
    bytes: np.ndarray

    @property
    def pareto(self) -> np.ndarray:
        """Indices of the Pareto front, fastest first."""
        return pareto(self.seconds, self.bytes)

    def fastest_below(self, limits: np.ndarray) -> np.ndarray:
        """Returns the indices of the fastest layout below each limit of bytes, without duplicates."""
        front = self.pareto
        count = np.searchsorted(-self.bytes[front], -np.asarray(limits), side="left")
        return front[np.unique(count[count < len(front)])]


def pareto(seconds: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Returns the indices of the Pareto front, fastest first; of equal points, the first.

    >>> pareto(np.array([1.0, 2.0, 3.0, 2.5]), np.array([9, 4, 4, 5])).tolist()
    [0, 1]
    """
    order = np.lexsort((needed, seconds))
    lowest = np.minimum.accumulate(needed[order])
    return order[np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(order)]]
