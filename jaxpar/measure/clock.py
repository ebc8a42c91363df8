"""Seconds of one operation inside a program, and the machine that it may be measured on."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.mesh.devices import describe, is_simulated, visible_devices

REPEATS = (2, 12)  # of the operation, in the shorter and in the longer program


def once(build: Callable[[int], Callable[[Any], Any]], x: Any, *, rounds: int) -> float:
    """Returns the seconds that one more repeat takes: the difference of two programs, in which calling them cancels.

    Args:
      build: Number of repeats to a program that runs so many, each of which depends on the one before.
      x: Input of the program, which returns the same shape; it is donated.
      rounds: Pairs of programs; the median counts. At least one.

    Returns:
      Seconds; not above 0 where the clock sees no difference.
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


def measured_devices(what: str) -> list[Any]:
    """Returns the devices of all processes, connected if a launcher says that there are several.

    Raises:
      JaxparError: If they are the processor's or simulated: their speed says nothing about hardware.
    """
    from jaxpar.cluster.connect import connect
    from jaxpar.cluster.environment import detect

    cluster = detect(os.environ)
    if cluster and not jax.distributed.is_initialized():
        connect(cluster)
    devices = visible_devices()
    if is_simulated(devices):
        raise refuse(
            f"measure {what} on {describe(devices)}",
            rule="speed is measured on GPUs; devices simulated on a CPU have no speed of their own",
            fix="run it where the GPUs are, with the extra cuda: jaxpar doctor says which devices are seen",
        )
    return devices
