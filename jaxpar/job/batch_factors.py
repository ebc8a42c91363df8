"""The numbers whose product divides the global batch of a job."""

from collections.abc import Mapping

from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.parallel.declaration import Parallel


def batch_factors(job: Job, sizes: Mapping[str, int], parallel: Parallel) -> dict[str, int]:
    """Returns the factors of the global batch by name: the axes that split it, and accumulated batches or microbatches.

    Args:
      job: The job.
      sizes: Mesh axis to size.
      parallel: The declaration whose exchange decides whether `data` splits examples.
    """
    name, count = "accumulate", job.train.accumulate
    if sizes["pipe"] > 1:
        name = "microbatches"
        try:
            count = job.parallel.pipeline.table(sizes["pipe"]).microbatches * job.parallel.pipeline.group
        except JaxparError:  # `compose` reports it
            count = 1
    return {axis: sizes[axis] for axis in parallel.sized(sizes).batch_axes} | {name: count}
