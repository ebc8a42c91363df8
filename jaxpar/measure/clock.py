"""Times one operation inside a program, and checks that the devices are real ones."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.mesh.devices import describe, is_simulated, visible_devices

REPEATS = (2, 12)  # the operation is repeated 2 times in the shorter program, 12 times in the longer one


def once(build: Callable[[int], Callable[[Any], Any]], x: Any, *, rounds: int) -> float:
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
