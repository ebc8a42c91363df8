"""Matmuls by size and format, and the start of a small kernel: what the planner and the timeline assume.

The curve of bfloat16 goes into the chip's file, for `jaxpar plan JOB --chip h100.toml`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.inspector.timeline import KERNEL
from jaxpar.measure.machine import SIDES, time_product
from jaxpar.measure.record import today
from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.machine.fit_hardware import fit_gemm
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.hardware_file import write_table

from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work

FORMATS = {"bf16": jnp.bfloat16, "tf32": jnp.float32, "fp8": jnp.float8_e4m3fn}
SMALL = "start of a small kernel"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      sides: Of the matrices, by format.
      rounds: As in `clock.once`.
    """

    sides: dict[str, tuple[int, ...]]
    rounds: int

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, side) for name, sides in self.sides.items() for side in sides)


def run(work: Work) -> None:
    """Measures, and fits the curve of bfloat16."""
    device = visible_devices()[0]
    expected = dict(predict(work.sizes, work.hardware))
    bf16: dict[int, float] = {}
    for name, side in work.sizes:
        take = partial(_product, work, device, name, side, expected)
        line = work.measure(named(name, side), take)
        if name == "bf16" and "seconds" in line:
            bf16[side] = line["seconds"]
    work.measure(SMALL, lambda: {"seconds": _small(work)})
    work.measure("curve of bf16", lambda: _curve(work, bf16))


def named(name: str, side: int) -> str:
    """Returns what a measurement is called."""
    return f"{name} {side}"


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields what the planner's curve says, scaled by the peak of each format; fp8 has twice that of bf16."""
    peaks = {"bf16": 1.0, "tf32": hardware.chip.f32_flops / hardware.chip.bf16_flops, "fp8": 2.0}
    for name, side in sizes:
        yield named(name, side), {"planner_seconds": float(hardware.matmuls(2.0 * side**3)) / peaks[name]}
    yield SMALL, {"timeline_seconds": KERNEL}


def _product(work: Work, device: Any, name: str, side: int, expected: dict[str, Numbers]) -> dict[str, Any]:
    pretended = expected[named(name, side)]["planner_seconds"]

    def once(build, x, *, rounds):
        return work.once(build, x, rounds=rounds, pretended=pretended)

    try:
        seconds = time_product(side, device, rounds=work.sizes.rounds, dtype=FORMATS[name], once=once)
    except jax.errors.JaxRuntimeError as error:  # a format that this GPU, or this version of XLA, does not multiply
        return {"absent": str(error).splitlines()[0][:300]}
    return {"seconds": seconds, "flop_per_second": 2.0 * side**3 / seconds if seconds > 0 else None}


def _small(work: Work) -> float:
    def build(repeats: int):
        def body(x):
            for _ in range(4 * repeats):
                x = jax.lax.optimization_barrier(x + 1)
            return x

        return jax.jit(body, donate_argnums=0)

    return work.once(build, jnp.zeros((256,)), rounds=work.sizes.rounds, pretended=4 * KERNEL) / 4


def _curve(work: Work, seconds: dict[int, float]) -> dict[str, Any]:
    """Fits the curve, and writes it into the chip's file."""
    chip = work.hardware.chip
    source = f"bench gpu, {'rehearsed' if work.rehearsal else work.lines.identity.device}, {today()}"
    fit = fit_gemm([2.0 * side**3 for side in seconds], list(seconds.values()), peak=chip.bf16_flops, source=source)
    table = {"top": fit.gemm.top, "half": fit.gemm.half, "source": source}
    write_table(work.folder / f"{chip.key}.toml", "gemm", table, chip=chip)
    return table | {"error": fit.error, "worst": fit.worst}


_TINY = (8, 16, 24, 32)
STAGE = Stage(
    name="gemm", seconds=60, limit=150,
    measures="matmuls in bf16, tf32 and fp8 by size, the start of a small kernel; the curve, as CHIP.toml",
    beside="the constants that planner and timeline assume",
    real=Sizes({"bf16": SIDES, "tf32": (1024, 2048, 4096, 8192), "fp8": (1024, 2048, 4096, 8192)}, rounds=10),
    tiny=Sizes({"bf16": _TINY, "tf32": _TINY[:1], "fp8": _TINY[:1]}, rounds=1),
    run=run, predict=predict,
)  # fmt: skip
