"""Measures the share of its peak that this device reaches in bfloat16 matmuls, by their size.

Each product of square matrices is the left factor of the next. The numbers are random, because a chip multiplies zeros
faster. `plan/machine/fit.py` has the formula that is fitted. Not yet run on a GPU, only compiled for H100s; its parts
are tested on simulated devices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.measure.base import Destination, measured_devices, once, today
from jaxpar.measure.record import where
from jaxpar.mesh.devices import describe
from jaxpar.plan.machine.fit import fit_gemm
from jaxpar.units import show_seconds

SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)  # 0.27 GFLOP to 3.7 TFLOP


def program(weights: jax.Array, repeats: int) -> Callable[[Any], Any]:
    """Returns a program of `repeats` matmuls in sequence with the same weights. All shapes are [side, side]."""

    def body(x, weights):
        for _ in range(repeats):
            x = jax.lax.dot(x, weights, preferred_element_type=_accurate(x.dtype)).astype(x.dtype)
        return x

    compiled = jax.jit(body, donate_argnums=0)
    return lambda x: compiled(x, weights)


def _accurate(dtype: np.dtype) -> Any:
    """Multiplies two matrices; 8-bit ones are quantized from 16 bits first, as in a training step."""
    return jnp.bfloat16 if dtype.itemsize == 1 else dtype


def time_product(
    side: int,
    device: object,
    *,
    rounds: int = 20,
    dtype: DTypeLike = jnp.bfloat16,
    once: Callable[..., float] = once,
) -> float:
    """Times a matmul of two [side, side] matrices, in seconds.

    Args:
      side: Number of rows and of columns.
      device: The device that computes it.
      rounds: As in `once`.
      dtype: Dtype of both matrices; JAX multiplies float32 at its default precision, which is TF32 on GPUs.
      once: `base.once`, or a substitute in tests.
    """
    with jax.default_device(device):
        x, weights = jax.random.normal(jax.random.key(0), (2, side, side))
        weights = (weights / math.sqrt(side)).astype(dtype)  # so that products neither grow nor vanish
        x = x.astype(dtype)
        return once(lambda repeats: program(weights, repeats), x, rounds=rounds)


def gemm(*, write: str = "", rounds: int = 20, sides: Sequence[int] = SIDES) -> dict[str, Any]:
    """Times matmuls on one device, prints the share of the peak by size, and returns it.

    Args:
      write: The chip's TOML file, which gets the table [gemm], or "". The peak FLOP/s is that of its [chip], or of
        jaxpar's table of chips if there is no file.
      rounds: As in `once`.
      sides: Sides of the square matrices.

    Raises:
      JaxparError: If the devices are simulated, the chip's peak is not known, or no curve fits the times.
    """
    devices = measured_devices("gemm", one=True)
    destination = Destination.for_devices(write, devices)
    chip, device = destination.known_chip(), jax.local_devices()[0]
    print(
        f"one {device.device_kind}, jax {jax.__version__}, {chip.bf16_flops / 1e12:.4g} TFLOP/s on its sheet; measured"
    )
    flop, seconds = [2.0 * side**3 for side in sides], []
    for side, size in zip(sides, flop, strict=True):
        seconds.append(time_product(side, device, rounds=rounds))
        reached = f"{size / seconds[-1] / 1e12:>8.4g} TFLOP/s" if seconds[-1] > 0 else "no time"
        print(f"{side:>6} x {side:<6}{show_seconds(seconds[-1]):>10}  {reached}", flush=True)
    source = f"jaxpar measure gemm on one {describe([device])[4:]}, {today()}, jax {jax.__version__}"
    fit = fit_gemm(flop, seconds, peak=chip.bf16_flops, source=source)
    print(
        f"{fit.gemm.top:.1%} of the peak x f / (f + {fit.gemm.half / 1e9:.3g} GFLOP); "
        f"off by {fit.error:.0%} in the median, {fit.worst:.0%} at most"
    )
    table = {"top": fit.gemm.top, "half": fit.gemm.half, "source": source}
    destination.write("gemm", table)
    return {"sides": list(sides), "seconds": seconds, "gemm": table, "error": fit.error, "worst": fit.worst,
            "holds": True, "where": where()}  # fmt: skip
