"""The optimizer of a job."""

import optax

from jaxpar.job.file.schema import Job
from jaxpar.optim import chain
from jaxpar.optim.freeze import freeze


def resolve_optimizer(job: Job) -> optax.GradientTransformation:
    """Returns the optax chain of a job, at its global batch; what its sweep is over is in the chain's state."""
    swept = job.sweep.values if job.sweep.over else ()
    made = chain.build(job.optimizer.at(job.train.global_batch), job.train.steps, swept)
    frozen, but = job.train.frozen
    return freeze(made, frozen, but=but) if frozen else made
