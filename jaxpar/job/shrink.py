"""Continues a job on fewer processes than it began with: which sizes stay, and which shrink.

pipe, expert, context, tensor   stay: they cut the model
fsdp, then data                 shrink: they copy it; data only where its replicas are equal
the global batch                stays: it is what the loss curve belongs to
"""

import math

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.check import check
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job
from jaxpar.mesh.axes import infer_sizes

SHRUNK = ("data", "fsdp")  # axes that copy the model or its state


def fewer(job: Job, *, processes: int, most: int) -> tuple[int, list[str]]:
    """Returns the largest number of processes, at most `most`, that a job can go on with, and its overrides.

    Args:
      job: As it ran on `processes` processes, each with as many devices.
      processes: How many.
      most: How many are left.

    Raises:
      JaxparError: If none will do: why not, for each number.
    """
    key = "simulate" if job.mesh.simulate else "devices"
    devices = getattr(job.mesh, key)
    if not devices:
        raise refuse(
            f"{processes} processes, of which {most} are left, and no mesh.devices in the job",
            rule="to go on with fewer processes, jaxpar must know how many devices each had",
            fix=f"mesh.devices = so many on all {processes} processes together",
        )
    problems: list[Problem] = []
    for count in range(most, 0, -1):
        left = devices // processes * count
        try:
            words = [f"mesh.{key}={left}", *_shrunk(job, devices, left)]
            found = check(loads(dumps(job), words, allow_import=job.allow_import))
        except JaxparError as error:
            found = list(error.problems)
        if not found:
            return count, words
        problems.append(Problem(f"{count} processes with {left} devices: {found[0].got}", found[0].rule, found[0].fix))
    raise JaxparError(*problems)


def _shrunk(job: Job, devices: int, left: int) -> list[str]:
    """Returns the sizes of `data` and `fsdp` on the devices that are left, as overrides."""
    declared = job.parallel.sizes
    if -1 in declared.values():  # inferred, whatever is left
        return []
    sizes = infer_sizes(declared, devices)
    gives = ("fsdp",) if job.declared.exchange.differ else SHRUNK
    kept = math.prod(size for axis, size in sizes.items() if axis not in gives)
    if left % kept:
        names = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if axis not in gives and size > 1)
        raise refuse(
            f"{names} on {left} devices",
            rule="the axes that cut the model keep their size, and so does data where its replicas differ",
            fix=f"a number of processes with a multiple of {kept} devices",
        )
    ways = left // kept
    if "data" not in gives:
        return [f"parallel.fsdp={ways}", f"parallel.data={sizes['data']}"]
    fsdp = next(size for size in range(min(sizes["fsdp"], ways), 0, -1) if ways % size == 0)
    return [f"parallel.fsdp={fsdp}", f"parallel.data={ways // fsdp}"]
