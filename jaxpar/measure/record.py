"""Measures one operation on a machine: times it inside a program, on real devices, and writes it to a chip file.

The chip file is checked before anything is measured. `where` records the devices, package versions and commit that a
measured number belongs to.
"""

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jaxpar
from jaxpar.errors import refuse
from jaxpar.mesh.chip_file import load_chip
from jaxpar.mesh.chips import Chip, find_chip
from jaxpar.mesh.devices import describe, is_simulated, visible_devices
from jaxpar.plan.machine.hardware_file import write_table

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
COMMIT = "JAXPAR_COMMIT"  # the commit of a copy that has no history, such as one sent to another machine
REPEATS = (2, 12)  # the operation is repeated 2 times in the shorter program, 12 times in the longer one


def versions() -> dict[str, str]:
    """Returns the versions of Python, jaxpar and the packages that compute; does not initialize any device.

    The version of jaxpar comes from its code, since it may be on the path without being installed. The version of a
    package that is not installed is "missing".
    """
    found = {"jaxpar": jaxpar.__version__} | {name: installed(name) for name in PACKAGES}
    return found | {"python": platform.python_version()}


def installed(name: str) -> str:
    """Returns the version of an installed package, or "missing"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str:
    """Returns the commit of the working directory, `+` for uncommitted changes, or "" outside of git.

    The environment variable JAXPAR_COMMIT overrides it.
    """
    if given := os.environ.get(COMMIT):
        return given
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if head.returncode else head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


# Records where a number was measured: devices, machine, versions and commit.


def where() -> dict[str, Any]:
    """Returns the devices, the machine, the versions and the commit of this process."""
    return {
        "devices": describe(visible_devices()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions(),
        "commit": commit(),
    }


def once(build: Callable[[int], Callable[[Any], Any]], x: object, *, rounds: int) -> float:
    """Times one repeat of an operation: the difference of two programs, so that the time of a call cancels.

    Args:
      build: Maps a number of repeats to a program that runs the operation so often; each repeat needs the last one's
        result.
      x: Input of the program, which returns an array of the same shape; it is donated.
      rounds: How often the pair of programs is timed, at least once; the result is the median.

    Returns:
      Seconds; 0 or less if the operation is too short for the clock.
    """
    programs = [build(repeats) for repeats in REPEATS]
    for program in programs:
        x = jax.block_until_ready(program(x))
    found = []
    for _ in range(rounds):
        at = [time.perf_counter()]
        for program in programs:
            x = jax.block_until_ready(program(x))
            at.append(time.perf_counter())
        found.append((at[2] - 2 * at[1] + at[0]) / (REPEATS[1] - REPEATS[0]))
    return statistics.median(found)


def measured_devices(what: str, *, one: bool = False) -> list[Any]:
    """Returns the devices of all processes; connects the processes first if a launcher started several.

    Args:
      what: What is measured.
      one: Whether only one device is measured, for which no other process is needed.

    Raises:
      JaxparError: If the devices are a CPU or simulated: their speed says nothing about GPUs; or if the processes
        cannot be connected.
    """
    from jaxpar.cluster.connect import connect
    from jaxpar.cluster.environment import detect
    from jaxpar.cluster.launchers import unsupported_launcher

    if not jax.distributed.is_initialized():
        environment = dict(os.environ)
        if one and unsupported_launcher(environment):
            environment.setdefault("JAXPAR_PROCESSES", "1")  # each process by itself
        if cluster := detect(environment):
            connect(cluster)
    devices = visible_devices()
    if is_simulated(devices):
        raise refuse(
            f"measure {what} on {describe(devices)}",
            rule="speed is measured on GPUs; devices simulated on a CPU have no speed of their own",
            fix="run it where the GPUs are, with the extra cuda: jaxpar doctor says which devices are seen",
        )
    return devices


@dataclass(frozen=True, slots=True)
class Destination:
    """The file that a measurement is written to.

    Attributes:
      path: The chip's file; None where nothing is written.
      chip: The chip of that file, or of the devices; None where neither is known, and nothing is written.
      kind: JAX's name of the devices, `device_kind`.
    """

    path: Path | None
    chip: Chip | None
    kind: str

    @classmethod
    def for_devices(cls, write: str, devices: Sequence[Any]) -> "Destination":
        """Returns the destination for these devices.

        Raises:
          JaxparError: If the file describes another chip or its path cannot be written, or if there is no file and
            jaxpar's table has no such chip.
        """
        kind = devices[0].device_kind
        chip = find_chip(kind)
        if not write:
            return cls(None, chip, kind)
        path = Path(write)
        if path.exists():
            own = load_chip(path)
            named = find_chip(own.name)
            if chip and named and named is not chip:
                raise refuse(
                    f"{path} of an {own.name}, on {kind}",
                    rule="a file describes one chip, the one that is measured",
                    fix="--write mine.toml",
                )
            return cls(path, own, kind)
        if path.suffix != ".toml" or not path.absolute().parent.is_dir():
            raise refuse(f"--write {write}", rule="a .toml file, in a folder that exists", fix="--write mine.toml")
        found = cls(path, chip, kind)
        found.known_chip()
        return found

    def known_chip(self) -> Chip:
        """Returns the chip.

        Raises:
          JaxparError: If it is not known.
        """
        if self.chip is None:
            raise refuse(
                f"{self.kind}, which is not in jaxpar's table of chips",
                rule="a chip that is not in jaxpar's table needs a file with its peak FLOP/s and its memory",
                fix="--write mine.toml, with the table [chip] of jaxpar/mesh/chip_file.py in it",
            )
        return self.chip

    def write(self, name: str, table: Mapping[str, object]) -> None:
        """Writes a table into the file, if there is a path; of several processes, only the first writes."""
        if self.path is not None and jax.process_index() == 0:
            write_table(self.path, name, table, chip=self.known_chip())
            print(f"[{name}]: {self.path}")


def today() -> str:
    """Returns today's date in the format of `source`."""
    return datetime.date.today().isoformat()
