"""The optimizer of a job."""

import optax

from jaxpar.job.file.schema import Job
from jaxpar.optim import chain


def resolve_optimizer(job: Job) -> optax.GradientTransformation:
    """Returns the optax chain of a job, at its global batch; what its sweep is over is in the chain's state."""
    swept = job.sweep.values if job.sweep.over else ()
    return chain.build(job.optimizer.at(job.train.global_batch), job.train.steps, swept)
