"""Assumptions of a plan, each made as wrong as it may well be, to both sides.

    bandwidths, speed of matmuls       off by `DOUBT`
    latencies                          twice, or half: of hops, and of what starts a kernel or a collective
    exposed collectives                twice, or half, of what overlap is assumed to leave
    fixed cost of a matmul             twice, or half: what a small microbatch's matmuls lose, and each wave of tiles

So no doubt makes a step more than twice, or less than half, as long; and each says which causes of its time it leaves
as they are, so that what cannot become first under it need not be weighed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.time import StepTime

DOUBT = 0.3  # how wrong an assumed bandwidth or speed may be
MOST = 2.0  # the factor by which a doubt changes a part of the time at most
COMPUTING = ("matmuls", "attention", "elementwise", "recompute", "optimizer")  # causes without a collective

_OVERLAPS = tuple(each.name for each in fields(SoftwareModel) if each.name.endswith("overlap"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """One assumption, made as wrong as it may well be to one side.

    Attributes:
      what: In words.
      hardware: As it would then be.
      software: As it would then be.
      left: Share of a step's time that is left at least; 1 where steps only grow longer.
      untouched: Causes of a step's time that it does not touch.
    """

    what: str
    hardware: Hardware
    software: SoftwareModel
    left: float
    untouched: tuple[str, ...]

    def at_least(self, time: StepTime) -> Any:
        """Returns the seconds that a step would still take, or more, by what it takes without the doubt.

        Not the causes that it touches, each shortened: what computation hides of a collective stays as long, so that
        what is left of it may shrink to nothing.
        """
        return np.maximum(self.left * time.total, sum(time[cause] for cause in self.untouched))


def doubts(hardware: Hardware, software: SoftwareModel) -> Iterator[Doubt]:
    """Yields each doubt, with the hardware and the software as they would then be."""
    for sign, word in ((1 + DOUBT, "more"), (1 - DOUBT, "less")):
        for what, part, rate, untouched in (
            ("bandwidth inside a node", "inside", "bandwidth", COMPUTING),
            ("bandwidth between nodes", "between", "bandwidth", COMPUTING),
            ("speed of matmuls", "chip", "bf16_flops", ()),
        ):
            one = getattr(hardware, part)
            faster = replace(hardware, **{part: replace(one, **{rate: getattr(one, rate) * sign})})
            yield Doubt(
                what=f"{DOUBT:.0%} {word} {what}", hardware=faster, software=software,
                left=min(1.0, 1 / sign), untouched=untouched,
            )  # fmt: skip
    for factor, word in ((MOST, "twice"), (1 / MOST, "half")):
        curve = hardware.gemm
        gemm = replace(hardware, gemm=replace(curve, half=curve.half * factor, wave=curve.wave * factor))
        for what, changed, exposed, untouched in (
            ("the latencies", _later(hardware, factor), software, COMPUTING),
            ("the traffic that nothing hides", hardware, _exposed(software, factor), COMPUTING),
            ("the fixed cost of a matmul", gemm, software, ()),
        ):
            yield Doubt(
                what=f"{word} {what}", hardware=changed, software=exposed, left=min(1.0, factor), untouched=untouched
            )


def _later(hardware: Hardware, factor: float) -> Hardware:
    links = {key: getattr(hardware, key) for key in ("inside", "between")}
    slower = {key: replace(link, latency=link.latency * factor) for key, link in links.items()}
    return replace(hardware, launch=min(1.0, hardware.launch * factor), **slower)


def _exposed(software: SoftwareModel, factor: float) -> SoftwareModel:
    """Returns the software with so many times the share of collectives that computation does not hide."""
    left = {key: min(1.0, factor * (1 - getattr(software, key))) for key in _OVERLAPS}
    pieces = _exposed(software.pieces, factor) if software.pieces else None
    return replace(software, pieces=pieces, **{key: 1 - share for key, share in left.items()})
