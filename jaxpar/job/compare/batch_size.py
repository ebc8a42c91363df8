"""The global batch of a comparison, which every method must be able to divide."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxpar.errors import Problem
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.base import Exchange
from jaxpar.job.check import device_count
from jaxpar.job.compare.methods import Method
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import batch_factors
from jaxpar.mesh.axes import infer_sizes


def divisor(job: Job, method: Method) -> int:
    """Returns the number that divides the global batch if a method trains the job.

    Raises:
      JaxparError: If the mesh does not fit the devices, or a simulated method the number of replicas.
    """
    sizes, algorithm = infer_sizes(job.parallel.sizes, device_count(job)), method.algorithm
    if isinstance(algorithm, Exchange):
        return math.prod(batch_factors(job, sizes, replace(job.parallel, exchange=algorithm)).values())
    # a share of the batch is trained on by one replica, which splits it over its own devices
    inside = batch_factors(job, sizes, replace(job.parallel, exchange=AllReduce()))
    return algorithm.shares(sizes["data"]) * math.prod(size for name, size in inside.items() if name != "data")


def fit_batch(job: Job, methods: Sequence[Method]) -> tuple[Job, list[Problem]]:
    """Returns the job with the next global batch that all methods divide, and a problem if its own is another.

    Raises:
      JaxparError: If the mesh does not fit the devices, or a simulated method the number of replicas.
    """
    divisors = {method.name: divisor(job, method) for method in methods}
    common, size = math.lcm(*divisors.values()), job.train.global_batch
    batch = -(-size // common) * common
    if batch == size:
        return job, []
    indivisible = [f"{name} ({number})" for name, number in divisors.items() if size % number]
    rule = f"the batch is divided by the number of each method, so by {common} for all that are compared"
    problem = Problem(
        f"train.global_batch = {size} with {', '.join(indivisible)}", rule, f"train.global_batch = {batch}"
    )
    return replace(job, train=replace(job.train, global_batch=batch)), [problem]
