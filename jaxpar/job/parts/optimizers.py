"""The optimizer of a job, and by what its evaluations are compared."""

import optax

from jaxpar.job.file.schema import Job
from jaxpar.optim import chain
from jaxpar.optim.freeze import freeze
from jaxpar.train.best import Best


def resolve_optimizer(job: Job) -> optax.GradientTransformation:
    """Returns the optax chain of a job, at its global batch; what its sweep is over is in the chain's state."""
    swept = job.sweep.values if job.sweep.over else ()
    made = chain.build(job.optimizer.at(job.train.global_batch), job.train.steps, swept)
    frozen, but = job.train.frozen
    return freeze(made, frozen, but=but) if frozen else made


def best_of(job: Job) -> Best:
    """Returns how the evaluations of a job are compared, and how long it waits for a better one."""
    spec = job.checkpoint
    return Best(metric=spec.best, lowest=spec.best_is == "lowest", patience=job.train.patience)
