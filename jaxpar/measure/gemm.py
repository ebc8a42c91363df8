"""Measures the share of its peak that this device reaches in bfloat16 matmuls, by their size.

Square products of random numbers, each the next one's left side: a chip that multiplies zeros runs faster. What is
fitted is in `plan/machine/fit.py`. Not run on a GPU yet: compiled for H100s, and its parts tested on simulated devices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.measure.chip import Destination, today
from jaxpar.measure.clock import measured_devices, once
from jaxpar.measure.record import where
from jaxpar.mesh.devices import describe
from jaxpar.plan.machine.fit import fit_gemm
from jaxpar.units import show_seconds

SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)  # 0.27 GFLOP to 3.7 TFLOP


def program(weights: Any, repeats: int) -> Callable[[Any], Any]:
    """Returns the program of so many matmuls with the same weights, one after another. Shapes [side, side]."""

    def body(x, weights):
        for _ in range(repeats):
            x = jax.lax.dot(x, weights, preferred_element_type=_accurate(x.dtype)).astype(x.dtype)
        return x

    compiled = jax.jit(body, donate_argnums=0)
    return lambda x: compiled(x, weights)


def _accurate(dtype: Any) -> Any:
    """Multiplies two matrices; 8-bit ones are quantized from 16 bits first, as in a training step."""
    return jnp.bfloat16 if dtype.itemsize == 1 else dtype


def time_product(
    side: int, device: Any, *, rounds: int = 20, dtype: Any = jnp.bfloat16, once: Callable[..., float] = once
) -> float:
    """Returns the seconds of a matmul of two [side, side] matrices.

    Args:
      side: Of both.
      device: Where.
      rounds: As in `clock.once`.
      dtype: Of both; float32 as JAX multiplies it by default, on GPUs in TF32.
      once: The clock.
    """
    with jax.default_device(device):
        x, weights = jax.random.normal(jax.random.key(0), (2, side, side))
        weights = (weights / math.sqrt(side)).astype(dtype)  # so that products neither grow nor vanish
        x = x.astype(dtype)
        return once(lambda repeats: program(weights, repeats), x, rounds=rounds)


def gemm(*, write: str = "", rounds: int = 20, sides: Sequence[int] = SIDES) -> dict[str, Any]:
    """Times matmuls on one device, prints the share of the peak by size, and returns it.

    Args:
      write: The TOML file of the chip that gets the table [gemm], or "". Its [chip] says what the peak is; without a
        file, the table of chips does.
      rounds: As in `clock.once`.
      sides: Of the matrices.

    Raises:
      JaxparError: If the devices are simulated, the chip's peak is not known, or no curve fits the times.
    """
    devices = measured_devices("gemm")
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
