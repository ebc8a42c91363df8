"""Devices: those of the machine, or simulated ones on its processor."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.mesh.memory_pool import wanted
from jaxpar.mesh.plugin import hush_plugin

THREADS = 8  # threads per simulated device, see `_make_devices`


@dataclass(frozen=True)
class Simulated:
    """So many simulated devices that need not be there: enough to say what would run on them."""

    count: int


def visible() -> list[Any]:
    """Returns the devices that this process sees; of several processes, all of theirs.

    Of GPUs that JAX makes here it takes as much memory as `jaxpar.mesh.memory_pool` promises, where the user's own
    variables do not say otherwise.
    """
    hush_plugin()
    with _told(wanted(os.environ)):
        return jax.devices()


def took(device: Any) -> int | None:
    """Returns the bytes of a device's memory that this process took; None of simulated, absent and others' devices."""
    if device not in jax.local_devices():
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


@contextmanager
def _told(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are read when devices are made, and takes them back: other programs have their own."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def leave_alone() -> None:
    """Keeps this process off accelerators: describing or planning needs no memory of theirs."""
    hush_plugin()
    jax.config.update("jax_platforms", "cpu")


def simulate(count: int, *, processes: int = 1) -> None:
    """Makes this process see `count` simulated devices on the processor, and nothing else.

    Must come before the first use of a device: JAX creates its devices once.

    Args:
      count: Devices, of all processes together.
      processes: How many there are, already connected; each gets as many devices.

    Raises:
      JaxparError: If `count` is not positive, does not divide, or the devices exist already and are others.
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
        leave_alone()
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
    """Creates the devices, with threads enough that no collective keeps another from being reached.

    XLA gives all simulated devices one pool of as many threads as there are devices. A device may have several
    collectives open at once, each of which blocks a thread until its peers arrive; eight threads on eight devices
    were seen to end up waiting for each other (all-gathers over one axis, all-reduces over another), until XLA
    aborts the process after 40 seconds. The size of the pool is read from NPROC when it is made.
    """
    before = os.environ.get("NPROC")
    with _told({"NPROC": str(max(THREADS * count, int(before) if before and before.isdecimal() else 0))}):
        jax.devices()


def is_simulated(devices) -> bool:
    """Returns whether speed on these devices says nothing about hardware (several CPU devices)."""
    return any(device.platform == "cpu" for device in devices)


def describe(devices) -> str:
    """Returns `8 x NVIDIA H200` or `8 x cpu (simulated)`."""
    kind = devices[0].device_kind
    return f"{len(devices)} x {kind}{' (simulated)' if is_simulated(devices) and len(devices) > 1 else ''}"
