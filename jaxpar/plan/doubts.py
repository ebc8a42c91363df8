"""Assumptions of a plan, each made as wrong as it may well be, to both sides.

    bandwidths, speed of matmuls       off by `DOUBT`
    latencies                          twice, or half: of hops, and of what starts a kernel or a collective
    exposed collectives                twice, or half, of what overlap is assumed to leave
    fixed cost of a matmul             twice, or half: what a small microbatch's matmuls lose

So no doubt makes a cause of a step's time more than twice, or less than half, as long.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel

DOUBT = 0.3  # how wrong an assumed bandwidth or speed may be
MOST = 2.0  # the factor by which a doubt changes a part of the time at most

_OVERLAPS = tuple(each.name for each in fields(SoftwareModel) if each.name.endswith("overlap"))


def doubts(hardware: Hardware, software: SoftwareModel) -> Iterator[tuple[str, Hardware, SoftwareModel]]:
    """Yields each doubt in words, with the hardware and the software as they would then be."""
    for sign, word in ((1 + DOUBT, "more"), (1 - DOUBT, "less")):
        for what, part, rate in (
            ("bandwidth inside a node", "inside", "bandwidth"),
            ("bandwidth between nodes", "between", "bandwidth"),
            ("speed of matmuls", "chip", "bf16_flops"),
        ):
            one = getattr(hardware, part)
            changed = replace(one, **{rate: getattr(one, rate) * sign})
            yield f"{DOUBT:.0%} {word} {what}", replace(hardware, **{part: changed}), software
    for factor, word in ((MOST, "twice"), (1 / MOST, "half")):
        yield f"{word} the latencies", _later(hardware, factor), software
        yield f"{word} the traffic that nothing hides", hardware, _exposed(software, factor)
        gemm = replace(hardware.gemm, half=hardware.gemm.half * factor)
        yield f"{word} the fixed cost of a matmul", replace(hardware, gemm=gemm), software


def _later(hardware: Hardware, factor: float) -> Hardware:
    links = {key: getattr(hardware, key) for key in ("inside", "between")}
    slower = {key: replace(link, latency=link.latency * factor) for key, link in links.items()}
    return replace(hardware, launch=min(1.0, hardware.launch * factor), **slower)


def _exposed(software: SoftwareModel, factor: float) -> SoftwareModel:
    """Returns the software with so many times the share of collectives that computation does not hide."""
    left = {key: min(1.0, factor * (1 - getattr(software, key))) for key in _OVERLAPS}
    pieces = _exposed(software.pieces, factor) if software.pieces else None
    return replace(software, pieces=pieces, **{key: 1 - share for key, share in left.items()})
