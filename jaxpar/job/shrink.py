"""Fits a job to fewer processes: shrinks some axis sizes and keeps the others.

pipe, expert, context, tensor   stay: they shard the model
data, then fsdp                 shrink: they replicate the model or shard its state; data only if replicas are equal
the global batch                stays: the loss curve depends on it
"""

import math

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.check import check
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job
from jaxpar.mesh.axes import infer_sizes

BATCH_AXES = ("data", "fsdp")  # axes that replicate the model or shard its state


def fit_processes(job: Job, *, processes: int, most: int) -> tuple[int, list[str]]:
    """Finds the largest number of processes, at most `most`, on which a job can continue; also returns the overrides.

    Args:
      job: The job that ran on `processes` processes, with the same number of devices each.
      processes: Number of processes so far.
      most: Number of processes left.

    Raises:
      JaxparError: If no number works; the message has the reason for each.
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
        size = devices // processes * count
        try:
            words = [f"mesh.{key}={size}", *_shrunk_sizes(job, devices, size)]
            errors = check(loads(dumps(job), words, allow_import=job.allow_import))
        except JaxparError as error:
            errors = list(error.problems)
        if not errors:
            return count, words
        problems.append(
            Problem(f"{count} processes with {size} devices: {errors[0].got}", errors[0].rule, errors[0].fix)
        )
    raise JaxparError(*problems)


def _shrunk_sizes(job: Job, devices: int, device_count: int) -> list[str]:
    """Returns the sizes of `data` and `fsdp` on `device_count` devices, as overrides."""
    declared = job.parallel.sizes
    if -1 in declared.values():  # inferred from the number of devices
        return []
    sizes = infer_sizes(declared, devices)
    shrinkable = ("fsdp",) if job.effective_parallel.exchange.replicas_differ else BATCH_AXES
    fixed_product = math.prod(size for axis, size in sizes.items() if axis not in shrinkable)
    if device_count % fixed_product:
        names = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if axis not in shrinkable and size > 1)
        raise refuse(
            f"{names} on {device_count} devices",
            rule="the axes that cut the model keep their size, and so does data where its replicas differ",
            fix=f"a number of processes with a multiple of {fixed_product} devices",
        )
    count = device_count // fixed_product
    if "data" not in shrinkable:
        return [f"parallel.fsdp={count}", f"parallel.data={sizes['data']}"]
    fsdp = next(size for size in range(min(sizes["fsdp"], count), 0, -1) if count % size == 0)
    return [f"parallel.fsdp={fsdp}", f"parallel.data={count // fsdp}"]
