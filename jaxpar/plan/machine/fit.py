"""Times become constants: what a machine took is fitted in the very form in which `Hardware` prices it.

    gather, reduce-scatter    launch +   (P-1) latency +   n (P-1)/P / bandwidth
    all-reduce              2 launch + 2 (P-1) latency + 2 n (P-1)/P / bandwidth
    send                      launch +         latency +   n         / bandwidth
    matmul of f FLOP         (f + half) / (peak x top)

All are linear in what is sought, so it is one least-squares problem without negative solutions. Every residual is taken
relative to its time: a size of 4 KiB counts as much as one of 256 MiB. Residuals past 1.345 standard deviations count
linearly (Huber 1964, with that constant), so that a few times taken while the machine did something else matter little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.collective import wire_bytes
from jaxpar.mesh.links import Link
from jaxpar.plan.machine.hardware import Gemm

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
LEAST = 3  # sizes, without which a line through the times says nothing
_HUBER, _ROUNDS = 1.345, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The measured seconds of one collective.

    Attributes:
      kind: One of `KINDS`.
      group: Devices that took part together, at least two.
      size: Bytes: of the whole array that is reduced, gathered or scattered, of what each device sends in a permute.
      seconds: Measured.
    """

    kind: str
    group: int
    size: int
    seconds: float

    def __post_init__(self):
        if self.kind not in KINDS or self.group < 2 or self.size < 1:
            raise refuse(
                f"{self.kind} of {self.size} bytes on {self.group} devices",
                rule=f"one of {', '.join(KINDS)}, of at least a byte, on two devices or more",
                fix='Timing(kind="all-gather", group=8, size=2**20, seconds=1e-3)',
            )


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link as its collectives reach it.

    Attributes:
      link: Latency of a hop, and bandwidth.
      launch: Seconds before the first hop.
      apart: Whether the times tell launch and latency apart; groups of two alone do not, and launch has both.
      error: Median of the errors of the fit, relative to the times.
      worst: The largest.
    """

    link: Link
    launch: float
    apart: bool
    error: float
    worst: float


@dataclass(frozen=True, slots=True)
class GemmFit:
    """The curve of a chip's matmuls, and how far from it the times are, as in `LinkFit`."""

    gemm: Gemm
    error: float
    worst: float


def fit_link(timings: Sequence[Timing], *, launch: float | None = None) -> LinkFit:
    """Returns the latency, the bandwidth and the launch that explain the times best.

    Args:
      timings: Of one tier, of any kinds and groups.
      launch: Seconds that are known already, from another tier of the same machine; None fits them.

    Raises:
      JaxparError: If there are too few sizes, a time is none, or the times do not grow with the size.
    """
    sizes = sorted({timing.size for timing in timings})
    _enough(len(sizes), "bytes")
    for each in timings:
        _positive(each.seconds, f"{each.kind} of {each.size} bytes on {each.group} devices")
    times = np.array([timing.seconds for timing in timings])
    once = np.array([1.0 + (timing.kind == "all-reduce") for timing in timings])
    hops = np.array([1 if timing.kind == "collective-permute" else timing.group - 1 for timing in timings])
    wire = np.array([wire_bytes(timing.kind, timing.size, timing.group) for timing in timings])
    apart = launch is not None or len(set(hops.tolist())) > 1
    columns = [wire] + [once] * (launch is None) + [once * hops] * apart
    found, errors = _solve(np.stack(columns, 1), times - once * (launch or 0.0), times)
    if not found[0] > 0:
        raise refuse(
            f"times that do not grow from {sizes[0]} to {sizes[-1]} bytes",
            rule="more bytes take longer: the bandwidth is fitted to how much longer",
            fix="larger sizes, on a machine that does nothing else",
        )
    return LinkFit(
        link=Link(latency=float(found[-1]) if apart else 0.0, bandwidth=float(1 / found[0])),
        launch=float(found[1]) if launch is None else launch,
        apart=apart, error=float(np.median(errors)), worst=float(errors.max()),
    )  # fmt: skip


def fit_gemm(flop: Sequence[float], seconds: Sequence[float], *, peak: float, source: str) -> GemmFit:
    """Returns the share of the peak by the size of a matmul.

    Args:
      flop: Of each matmul.
      seconds: What it took.
      peak: FLOP per second on the chip's sheet.
      source: Where the times were taken.

    Raises:
      JaxparError: If there are too few sizes, a time is none, the times do not grow, or they beat the peak.
    """
    _enough(len(set(flop)), "FLOP")
    for size, time in zip(flop, seconds, strict=True):
        _positive(time, f"a matmul of {size:g} FLOP")
    times, sizes = np.array(seconds, float), np.array(flop, float)
    (slope, fixed), errors = _solve(np.stack([sizes, np.ones_like(sizes)], 1), times, times)
    if not slope > 0 or 1 / slope > peak:
        reached = f"{1 / slope / 1e12:.4g} TFLOP/s" if slope > 0 else "times that do not grow"
        raise refuse(
            f"{reached} in matmuls, {peak / 1e12:.4g} TFLOP/s on the chip's sheet",
            rule="larger matmuls take longer, and none is faster than the peak",
            fix="bf16_flops in [chip] is that of this very chip; larger matmuls",
        )
    gemm = Gemm(top=float(1 / (slope * peak)), half=float(fixed / slope), source=source)
    return GemmFit(gemm, float(np.median(errors)), float(errors.max()))


def _solve(columns: np.ndarray, wanted: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns x >= 0 with columns @ x close to what is wanted, and the errors, both relative to the times."""
    rows, goal = columns / times[:, None], wanted / times
    scale = np.linalg.norm(rows, axis=0)
    rows, weight = rows / scale, np.ones_like(times)
    found = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        found = _nonnegative(rows * weight[:, None], goal * weight)
        errors = np.abs(rows @ found - goal)
        spread = 1.4826 * np.median(errors)  # the standard deviation, where errors are normal
        if spread < 1e-12:
            break
        weight = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(errors, 1e-300)))
    return found / scale, np.abs(rows @ found - goal)


def _nonnegative(rows: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Returns the x >= 0 of least squares, by trying every set of entries that are not 0; there are three at most."""
    best, least = np.zeros(rows.shape[1]), float(goal @ goal)
    for count in range(1, rows.shape[1] + 1):
        for kept in map(list, combinations(range(rows.shape[1]), count)):
            part = np.linalg.lstsq(rows[:, kept], goal, rcond=None)[0]
            rest = float(((rows[:, kept] @ part - goal) ** 2).sum())
            if (part >= 0).all() and rest < least:
                best, least = np.zeros(rows.shape[1]), rest
                best[kept] = part
    return best


def _enough(count: int, unit: str) -> None:
    if count < LEAST:
        raise refuse(
            f"times of {count} sizes", rule=f"{LEAST} sizes or more, in {unit}", fix="time larger and smaller ones"
        )


def _positive(seconds: float, what: str) -> None:
    if not 0 < seconds < float("inf"):
        raise refuse(
            f"{what} in {seconds!r} s",
            rule="a time is above 0 and finite: a clock that sees none is too coarse, or the machine is not quiet",
            fix="measure again on a quiet machine, with more rounds",
        )
