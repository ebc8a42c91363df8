"""Finds the devices of the machine, or creates simulated devices on its CPU, and builds a mesh of them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.errors import refuse
from jaxpar.mesh.axes import AXES, infer_sizes
from jaxpar.mesh.memory_pool import pool_variables
from jaxpar.mesh.xla import hush_plugin

THREADS = 8  # threads per simulated device, see `_make_devices`
SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"
LATER = (0, 13)  # XLA ends the process at a flag that it does not know: the first release that was not tried


@dataclass(frozen=True)
class Simulated:
    """A number of simulated devices that need not exist, to describe a run on them."""

    count: int


def visible_devices() -> list[Any]:
    """Returns the devices of all processes that JAX finds.

    If this call initializes JAX's GPUs, it preallocates the share of memory that `jaxpar.mesh.memory_pool` sets, unless
    the user's environment variables set another one.
    """
    hush_plugin()
    with _environment(pool_variables(os.environ)):
        return jax.devices()


def allocated_bytes(device: Any) -> int | None:
    """Returns the bytes that this process allocated of a device's memory; None if simulated, absent or not local."""
    if device not in jax.local_devices():
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables while JAX creates its devices, and restores them for other programs."""
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def use_cpu_only() -> None:
    """Restricts this process to the CPU: describing or planning needs no memory of accelerators."""
    hush_plugin()
    jax.config.update("jax_platforms", "cpu")


def simulate(count: int, *, processes: int = 1) -> None:
    """Makes this process see `count` simulated devices on the CPU, and no others.

    Must come before the first use of a device: JAX creates its devices once.

    Args:
      count: Number of devices, of all processes together.
      processes: Number of connected processes; each gets the same number of devices.

    Raises:
      JaxparError: If `count` is not positive or no multiple of `processes`, or if JAX already has other devices.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise refuse(f"simulate({count!r})", rule="a positive whole number of devices", fix="simulate(8)")
    if count % processes:
        raise refuse(
            f"{count} simulated devices on {processes} processes",
            rule="all processes have the same number of devices",
            fix=f"mesh.simulate = {-(-count // processes) * processes}, or another number of processes",
        )
    try:
        use_cpu_only()
        jax.config.update("jax_num_cpu_devices", count // processes)
    except RuntimeError:
        pass  # the devices exist already; whether they are the ones asked for is checked next
    _make_devices(count // processes)
    if jax.default_backend() != "cpu" or jax.device_count() != count:
        raise refuse(
            f"simulate({count}) after JAX made {describe(jax.devices())}",
            rule="devices are simulated before the first one is used, once per process",
            fix="call it first thing in the program or notebook, or restart the kernel",
        )


def _make_devices(count: int) -> None:
    """Creates the devices, with enough threads that collectives cannot block each other.

    XLA gives all simulated devices one pool of as many threads as there are devices. A device may have several
    collectives open at once, each of which blocks a thread until its peers arrive; eight threads on eight devices
    have been observed to wait for each other (all-gathers over one axis, all-reduces over another), until XLA aborts
    the process after 40 seconds. XLA reads the size of the pool from the variable NPROC when it creates the pool.

    Programs from JAX's persistent cache can deadlock in spite of the threads: XLA starts their collectives at the same
    time, in a different order on each device. Without the scheduler for concurrency the order is the same on all.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER not in flags and _release(version("jaxlib")) < LATER:
        os.environ["XLA_FLAGS"] = f"{flags} --{SCHEDULER}=false".strip()
    nproc = os.environ.get("NPROC")
    with _environment({"NPROC": str(max(THREADS * count, int(nproc) if nproc and nproc.isdecimal() else 0))}):
        jax.devices()


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def is_simulated(devices) -> bool:
    """Whether some device is a CPU: timings on it say nothing about accelerators."""
    return any(device.platform == "cpu" for device in devices)


def describe(devices) -> str:
    """Returns `8 x NVIDIA H200` or `8 x cpu (simulated)`."""
    kind = devices[0].device_kind
    return f"{len(devices)} x {kind}{' (simulated)' if is_simulated(devices) and len(devices) > 1 else ''}"


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | Mesh | None = None) -> Mesh:
    """Returns a mesh with these axes, outermost first as in `AXES`.

    Every axis is an Auto axis: XLA places the collectives, and unmodified Flax models work.

    Args:
      sizes: Axis name to size; at most one is -1.
      devices: The devices to use, all visible ones by default; or a mesh, whose axis types are ignored.

    Raises:
      JaxparError: If the sizes do not multiply to the number of devices.
    """
    if isinstance(devices, Mesh):
        devices = _in_order(devices, sizes)
    chosen = visible_devices() if devices is None else list(devices) if isinstance(devices, Iterable) else [devices]
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen) or len(set(chosen)) < len(chosen):
        raise refuse(
            f"devices={devices!r:.80}",
            rule="a mesh has devices, each once, or a number of devices that need not be there",
            fix="devices=jax.devices()[:8], or leave it out for all visible ones",
        )
    sizes = infer_sizes(sizes, len(chosen), platform=chosen[0].platform)
    names = tuple(axis for axis in AXES if axis in sizes)
    shape = tuple(sizes[axis] for axis in names)
    auto = (AxisType.Auto,) * len(names)
    if chosen[0].platform == "cpu":  # simulated devices have no topology to respect
        return Mesh(np.array(chosen).reshape(shape), names, axis_types=auto)
    return jax.make_mesh(shape, names, axis_types=auto, devices=chosen)


def _in_order(mesh: Mesh, sizes: Mapping[str, int]) -> list[Any]:
    """Returns the devices of a mesh, transposed to the order of `AXES` if all of its axes are known.

    Raises:
      JaxparError: If an axis has another size in `sizes`.
    """
    for axis, size in mesh.shape.items():
        if sizes.get(axis, size) not in (size, -1):
            raise refuse(
                f"{axis}={sizes[axis]} on a mesh with {axis}={size}",
                rule="an axis of a mesh has one size",
                fix=f"{axis}={size}, or devices=list(mesh.devices.flat)",
            )
    if not set(mesh.axis_names) <= set(AXES):
        return list(mesh.devices.flat)
    order = sorted(range(len(mesh.axis_names)), key=lambda dim: list(AXES).index(mesh.axis_names[dim]))
    return list(mesh.devices.transpose(order).flat)
