"""Fits the constants of `Hardware` to measured times, with the same formulas.

    gather, reduce-scatter    launch +   (P-1) latency +   n (P-1)/P / bandwidth
    all-reduce              2 launch + 2 (P-1) latency + 2 n (P-1)/P / bandwidth
    send                      launch +         latency +   n         / bandwidth
    matmul of f FLOP         (f + half) / (peak x top)

All are linear in the unknowns, so the fit is one non-negative least-squares problem. Residuals are relative to their
times, so that 4 KiB counts as much as 256 MiB. Residuals above 1.345 standard deviations count linearly (Huber 1964,
with that constant), so that a few disturbed measurements matter little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.chips import Link
from jaxpar.mesh.collective import wire_bytes
from jaxpar.plan.machine.hardware import Gemm

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
LEAST = 3  # fewest sizes for a fit of a line
_HUBER, _ROUNDS = 1.345, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The measured seconds of one collective.

    Attributes:
      kind: One of `KINDS`.
      group: Devices of the group, at least two.
      size: Bytes of the whole array that is reduced, gathered or scattered; in a permute, bytes that each device sends.
      seconds: Measured seconds.
    """

    kind: str
    group: int
    size: int
    seconds: float

    def __post_init__(self):
        if self.kind not in KINDS or self.group < 2 or self.size < 1:
            raise refuse(
                f"{self.kind} of {self.size} bytes on {self.group} devices",
                rule=f"a timing is of {', '.join(KINDS)}, of at least a byte, on two devices or more",
                fix='Timing(kind="all-gather", group=8, size=2**20, seconds=1e-3)',
            )


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link, fitted to times of collectives.

    Attributes:
      link: Latency of a hop, and bandwidth.
      launch: Seconds before the first hop.
      separable: Whether the fit separates launch and latency; with groups of two alone, launch includes the latency.
      error: Median error of the fit, relative to the times.
      worst: Largest error, relative to the times.
    """

    link: Link
    launch: float
    separable: bool
    error: float
    worst: float


@dataclass(frozen=True, slots=True)
class GemmFit:
    """The fitted curve of a chip's matmuls, with errors as in `LinkFit`."""

    gemm: Gemm
    error: float
    worst: float


def fit_link(timings: Sequence[Timing], *, launch: float | None = None) -> LinkFit:
    """Fits latency, bandwidth and launch of a link.

    Args:
      timings: Times of one tier, of any kinds and groups.
      launch: Known seconds, from another tier of the same machine; None fits them.

    Raises:
      JaxparError: If there are too few sizes, a time is not positive and finite, or times do not grow with the size.
    """
    sizes = sorted({timing.size for timing in timings})
    _enough(len(sizes), "bytes")
    for sample in timings:
        _positive(sample.seconds, f"{sample.kind} of {sample.size} bytes on {sample.group} devices")
    times = np.array([timing.seconds for timing in timings])
    launches = np.array([1.0 + (timing.kind == "all-reduce") for timing in timings])
    hops = np.array([1 if timing.kind == "collective-permute" else timing.group - 1 for timing in timings])
    wire = np.array([wire_bytes(timing.kind, timing.size, timing.group) for timing in timings])
    separable = launch is not None or len(set(hops.tolist())) > 1
    columns = [wire] + [launches] * (launch is None) + [launches * hops] * separable
    solution, errors = _solve(np.stack(columns, 1), times - launches * (launch or 0.0), times)
    if not solution[0] > 0:
        raise refuse(
            f"times that do not grow from {sizes[0]} to {sizes[-1]} bytes",
            rule="the bandwidth is fitted to the growth of the times with the bytes",
            fix="larger sizes, on a machine that does nothing else",
        )
    return LinkFit(
        link=Link(latency=float(solution[-1]) if separable else 0.0, bandwidth=float(1 / solution[0])),
        launch=float(solution[1]) if launch is None else launch,
        separable=separable, error=float(np.median(errors)), worst=float(errors.max()),
    )  # fmt: skip


def fit_gemm(flop: Sequence[float], seconds: Sequence[float], *, peak: float, source: str) -> GemmFit:
    """Fits the share of the peak by the size of a matmul.

    Args:
      flop: FLOP of each matmul.
      seconds: Measured seconds of each matmul.
      peak: FLOP per second on the chip's data sheet.
      source: Origin of the times, as text.

    Raises:
      JaxparError: If there are too few sizes, a time is not positive and finite, or the times do not grow or beat the
        peak.
    """
    _enough(len(set(flop)), "FLOP")
    for size, time in zip(flop, seconds, strict=True):
        _positive(time, f"a matmul of {size:g} FLOP")
    times, sizes = np.array(seconds, float), np.array(flop, float)
    (slope, fixed), errors = _solve(np.stack([sizes, np.ones_like(sizes)], 1), times, times)
    if not slope > 0 or 1 / slope > peak:
        finding = f"{1 / slope / 1e12:.4g} TFLOP/s" if slope > 0 else "times that do not grow"
        raise refuse(
            f"{finding} in matmuls, {peak / 1e12:.4g} TFLOP/s on the chip's sheet",
            rule="larger matmuls take longer, and none is faster than the peak",
            fix="set bf16_flops in [chip] to the peak of this chip, or measure larger matmuls",
        )
    gemm = Gemm(top=float(1 / (slope * peak)), half=float(fixed / slope), source=source)
    return GemmFit(gemm, float(np.median(errors)), float(errors.max()))


def _solve(columns: np.ndarray, target: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the x >= 0 that minimizes (columns @ x - wanted) / times robustly, and the absolute relative errors."""
    rows, goal = columns / times[:, None], target / times
    scale = np.linalg.norm(rows, axis=0)
    rows, weight = rows / scale, np.ones_like(times)
    solution = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        solution = _nonnegative(rows * weight[:, None], goal * weight)
        errors = np.abs(rows @ solution - goal)
        spread = 1.4826 * np.median(errors)  # the standard deviation, where errors are normal
        if spread < 1e-12:
            break
        weight = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(errors, 1e-300)))
    return solution / scale, np.abs(rows @ solution - goal)


def _nonnegative(rows: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Solves non-negative least squares by trying every set of nonzero entries; there are at most three entries."""
    best, best_error = np.zeros(rows.shape[1]), float(goal @ goal)
    for count in range(1, rows.shape[1] + 1):
        for support in map(list, combinations(range(rows.shape[1]), count)):
            partial = np.linalg.lstsq(rows[:, support], goal, rcond=None)[0]
            residual = float(((rows[:, support] @ partial - goal) ** 2).sum())
            if (partial >= 0).all() and residual < best_error:
                best, best_error = np.zeros(rows.shape[1]), residual
                best[support] = partial
    return best


def _enough(count: int, unit: str) -> None:
    if count < LEAST:
        raise refuse(
            f"times of {count} sizes", rule=f"{LEAST} sizes or more, in {unit}", fix="time larger and smaller ones"
        )


def _positive(seconds: float, name: str) -> None:
    if not 0 < seconds < float("inf"):
        raise refuse(
            f"{name} in {seconds!r} s",
            rule="a time is above 0 and finite; otherwise the clock is too coarse, or the machine is not quiet",
            fix="measure again on a quiet machine, with more rounds",
        )
