"""Measures the planner's constants of a machine: the share of the peak that matmuls reach, and the speed of links.

Matmuls: bfloat16, by their size. Each product of square matrices is the left factor of the next. The numbers are
random, because a chip multiplies zeros faster.

Links: the latency and bandwidth that collectives reach.

    inside      groups of 2, 4, ... and all devices of a machine; neighbours are neighbours
    between     groups of 2, 4, ... and all machines, one device of each machine; all devices take part at once

All groups of a size run at the same time, as on a mesh axis. A repeat is a collective and a kernel that passes one
element to the next collective, so the time to start a kernel is part of `launch`.

`plan/machine/fit_hardware.py` has the formulas that are fitted. Not yet run on GPUs, only compiled for H100s; the parts
are tested on simulated devices.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpar.errors import refuse
from jaxpar.measure.record import Destination, measured_devices, once, today, where
from jaxpar.mesh.collective import wire_bytes
from jaxpar.mesh.devices import describe
from jaxpar.plan.machine.fit_hardware import KINDS, LinkFit, Timing, fit_gemm, fit_link
from jaxpar.units import show_bytes, show_seconds

SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)  # 0.27 GFLOP to 3.7 TFLOP
SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24, 26, 28))  # bytes of the whole array
_BYTES = 4  # float32, which every backend sends as it is


def matmul_program(weights: jax.Array, repeats: int) -> Callable[[Any], Any]:
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
        return once(lambda repeats: matmul_program(weights, repeats), x, rounds=rounds)


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


@dataclass(frozen=True, slots=True)
class Tier:
    """Groups of one size over one kind of link.

    Attributes:
      name: `inside` a machine or `between` machines.
      devices: The devices of each group, in the order of the links. Shape [groups, group size].
    """

    name: str
    devices: np.ndarray


def tiers(devices: Sequence[Any], per_node: int) -> list[Tier]:
    """Returns the groups to measure, from the smallest to the largest of each tier.

    Args:
      devices: All devices, ordered by machine.
      per_node: Number of devices per machine.

    Raises:
      JaxparError: If `per_node` does not divide the number of devices, or there is only one device.
    """
    if per_node < 1 or len(devices) % per_node:
        raise refuse(
            f"--per-node {per_node} of {len(devices)} devices",
            rule="all machines have the same number of devices",
            fix="--per-node 8",
        )
    if len(devices) < 2:
        raise refuse(
            f"links of {describe(devices)}",
            rule="measuring a link needs at least two devices",
            fix="two devices or more",
        )
    grid = np.array(devices, dtype=object).reshape(-1, per_node)
    return [
        Tier(name, whole.reshape(-1, group))
        for name, whole in (("inside", grid), ("between", grid.T))
        for group in groups(whole.shape[1])
    ]


def groups(count: int) -> list[int]:
    """Returns the group sizes to measure: the powers of two that divide a number of devices, and that number.

    >>> groups(8), groups(6), groups(1)
    ([2, 4, 8], [2, 6], [])
    """
    return sorted({1 << power for power in range(1, 32) if count % (1 << power) == 0} | ({count} - {1}))


def collective_program(kind: str, devices: np.ndarray, repeats: int) -> Callable[[Any], Any]:
    """Returns a program of `repeats` collectives, each of which waits for the one before.

    Args:
      kind: One of `KINDS`; a collective-permute sends to the next device in the ring.
      devices: As in `Tier`.
      repeats: Number of collectives.

    Returns:
      A function that updates a flat array in place; the array is sharded over the devices. Between two all-reduces the
      devices' values are made unequal, because XLA replaces a sum of equal values by a multiplication.
    """
    mesh = Mesh(devices, ("rest", "ring"), axis_types=(AxisType.Auto,) * 2)
    ring = [(i, (i + 1) % devices.shape[1]) for i in range(devices.shape[1])]

    def body(x):
        for _ in range(repeats):
            if kind == "all-reduce":
                x = jax.lax.psum(x, "ring").at[0].set(jax.lax.axis_index("ring").astype(x.dtype))
            elif kind == "all-gather":
                x = x.at[0].set(jax.lax.all_gather(x, "ring", tiled=True)[0])
            elif kind == "reduce-scatter":
                x = x.at[0].set(jax.lax.psum_scatter(x, "ring", tiled=True)[0])
            else:
                x = jax.lax.ppermute(x, "ring", ring)
        return x

    spec = P(("rest", "ring"))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec), donate_argnums=0)


def entries(kind: str, group: int, size: int) -> int:
    """Returns the number of entries that a device holds before a collective of this many bytes; at least 1."""
    return max(1, size // _BYTES // group) * (1 if kind == "all-gather" else group)


def time_collective(kind: str, devices: np.ndarray, size: int, *, rounds: int = 20) -> Timing:
    """Times one collective of about `size` bytes, as `Timing` counts bytes; returns seconds.

    Args:
      kind: One of `KINDS`.
      devices: As in `Tier`.
      size: Bytes; rounded down to a number that the group divides.
      rounds: As in `once`.
    """
    group = devices.shape[1]
    count = entries(kind, group, size)
    sharding = NamedSharding(Mesh(devices, ("rest", "ring"), axis_types=(AxisType.Auto,) * 2), P(("rest", "ring")))
    x = jax.jit(lambda: jnp.zeros(count * devices.size, jnp.float32), out_shardings=sharding)()
    seconds = once(lambda repeats: collective_program(kind, devices, repeats), x, rounds=rounds)
    whole = count * (group if kind == "all-gather" else 1) * _BYTES
    return Timing(kind=kind, group=group, size=whole, seconds=seconds)


def links(*, write: str = "", per_node: int = 0, rounds: int = 20, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Times every collective, prints the fitted latency and bandwidth, and returns both.

    Args:
      write: The TOML file of the chip that gets the table [links], or "".
      per_node: Number of devices per machine; 0 counts each process as a machine.
      rounds: As in `once`.
      sizes: Sizes of the collectives, in bytes.

    Raises:
      JaxparError: If the devices are simulated, there is only one, or no link model fits the times.
    """
    devices = measured_devices("links")
    size = per_node or jax.local_device_count()
    found = tiers(devices, size)
    destination = Destination.for_devices(write, devices)
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    say(f"{describe(devices)}, {len(devices) // size} machines of {size}, jax {jax.__version__}; measured")
    timings: dict[str, list[Timing]] = {}
    for tier in found:
        for kind in KINDS:
            some = [time_collective(kind, tier.devices, each, rounds=rounds) for each in sizes]
            timings.setdefault(tier.name, []).extend(some)
            say(line(tier.name, some), flush=True)
    if jax.process_index():  # the clock of the first process is the one that counts
        return {"holds": True, "where": where()}
    fits = fit(timings)
    for name, one in fits.items():
        print(describe_fit(name, one))
    source = f"jaxpar measure links on {describe(devices)}, {today()}, jax {jax.__version__}"
    table = links_table(fits, size, source)
    destination.write("links", table)
    return {
        "timings": {name: [asdict(each) for each in some] for name, some in timings.items()},
        "fits": {name: asdict(one) for name, one in fits.items()},
        "links": table, "holds": True, "where": where(),
    }  # fmt: skip


def fit(timings: dict[str, list[Timing]]) -> dict[str, LinkFit]:
    """Fits the link of each tier; `between` takes over the launch time that was fitted for `inside`, if any."""
    fits: dict[str, LinkFit] = {}
    for name in sorted(timings, reverse=True):  # inside first
        fits[name] = fit_link(timings[name], launch=fits["inside"].launch if "inside" in fits else None)
    return fits


def links_table(fits: dict[str, LinkFit], per_node: int, source: str) -> dict[str, Any]:
    """Returns the table [links] of a chip file; if machines have one device, `between` also fills `inside`."""
    first = fits.get("inside") or fits["between"]
    link = {name: {"latency": one.link.latency, "bandwidth": one.link.bandwidth} for name, one in fits.items()}
    if not first.separable:
        source += "; groups of two do not tell launch and latency apart: launch has both"
    inside = {"inside": link.get("inside") or link["between"]}
    return {"per_node": per_node, "launch": first.launch} | inside | link | {"source": source}


def line(name: str, timings: Sequence[Timing]) -> str:
    """Formats the times of one collective: the smallest size, the largest, and the bandwidth at the largest."""
    small, large = timings[0], timings[-1]
    seconds = statistics.median(timing.seconds / timing.size for timing in timings[-3:]) * large.size
    rate = wire_bytes(large.kind, large.size, large.group) / seconds if seconds > 0 else float("nan")
    return (
        f"{name:<9}{large.group:>4} x {large.kind:<20}{show_bytes(small.size):>10} {show_seconds(small.seconds):>9}"
        f"{show_bytes(large.size):>10} {show_seconds(large.seconds):>9}{rate / 1e9:>9.4g} GB/s on the wire"
    )


def describe_fit(name: str, fit: LinkFit) -> str:
    """Formats a fit as one line."""
    return (
        f"{name}: {fit.link.bandwidth / 1e9:.4g} GB/s, {fit.link.latency * 1e6:.3g} us a hop, "
        f"{fit.launch * 1e6:.3g} us to launch; off by {fit.error:.0%} in the median, {fit.worst:.0%} at most"
    )
