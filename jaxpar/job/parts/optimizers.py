"""The optimizer of a job, and by what its evaluations are compared."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import optax

from jaxpar.errors import refuse
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.optim import chain, muon
from jaxpar.optim.extra import PLATEAU
from jaxpar.optim.freeze import freeze
from jaxpar.optim.named import Own
from jaxpar.optim.optimizer import SETTINGS
from jaxpar.optim.pace import counts_steps
from jaxpar.optim.probe import SMALL, check_chain, check_rate, needs_loss
from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding.rules import name_stacks
from jaxpar.step.checks.eval_params import check_eval_params
from jaxpar.train.best import Best


def own_functions(job: Job) -> Own:
    """Returns the user's own optimizer and schedule that a job names by import path.

    Raises:
      JaxparError: If there is no such object.
    """
    names = {"optimizer.name": job.optimizer.name, "optimizer.schedule.name": job.optimizer.schedule.name}
    found = [import_object(name, key, allowed=job.allow_import) if ":" in name else None for key, name in names.items()]
    return Own(optimizer=found[0], schedule=found[1])


def resolve_optimizer(job: Job) -> optax.GradientTransformation:
    """Returns the optax chain of a job, at its global batch; what its sweep is over is in the chain's state.

    Raises:
      JaxparError: If its optimizer or schedule is not there, or has other arguments.
    """
    made = _whole(job, cache(partial(_names, job)))
    frozen, but = job.train.frozen
    return freeze(made, frozen, but=but) if frozen else made


def check_optimizer(job: Job, params: Any = None) -> None:
    """Refuses an optimizer that a job cannot have; it is tried on shapes, unless it and its schedule are jaxpar's own.

    Args:
      job: The job.
      params: The parameters of its model, as shapes, if they are known: a user's own optimizer, which may tell them
        apart by their paths, is tried on no others.

    Raises:
      JaxparError: If it is not there, has other arguments, or cannot be used in a step.
    """
    made, spec = _whole(job), job.optimizer
    if spec.is_plain:
        return
    if spec.schedule.name:
        rate = chain.schedule(spec.at(job.train.global_batch), job.train.steps, own=own_functions(job))
        check_rate(rate, name=spec.schedule.name)
    by_loss = spec.schedule.name == PLATEAU
    if job.metrics.noise_every and (spec.name not in SETTINGS or by_loss):
        raise refuse(
            f"metrics.noise_every = {job.metrics.noise_every} with {PLATEAU if by_loss else spec.name}",
            rule=f"the temperature of updates is known of {', '.join(SETTINGS)}, whose rate follows the step",
            fix="noise_every = 0",
        )
    if ":" in spec.name and params is None:
        return
    state = check_chain(made, spec, SMALL) if params is None else check_chain(resolve_optimizer(job), spec, params)
    check_eval_params(job.parallel.exchange, state)
    if job.parallel.pipeline.weights != "flush" and needs_loss(made):
        raise refuse(
            f"parallel.pipeline.weights = {job.parallel.pipeline.weights!r} with {PLATEAU if by_loss else spec.name}",
            rule="a step without a flush makes many updates, before the loss of its batch is known",
            fix='weights = "flush", or an optimizer that reads no loss',
        )
    if job.parallel.pipeline.weights != "flush" and not spec.is_constant and not counts_steps(state):
        raise refuse(
            f"parallel.pipeline.weights = {job.parallel.pipeline.weights!r} with {spec.name}",
            rule="a step without a flush makes many updates, which an optimizer that counts its own takes for steps",
            fix='weights = "flush", or decay = "constant", warmup = 0',
        )


def _whole(job: Job, names: Callable[[], muon.Names] = dict) -> optax.GradientTransformation:
    """Returns the optax chain of a job, of all parameters; with the names of their dims, for what asks for them."""
    swept = job.sweep.values if job.sweep.over else ()
    spec = job.optimizer.at(job.train.global_batch)
    if spec.name == "muon" and muon.DIMS not in spec.arguments:
        spec = replace(spec, arguments={**spec.arguments, muon.DIMS: muon.matrices(names)})
    return chain.build(spec, job.train.steps, swept, own=own_functions(job))


def _names(job: Job) -> muon.Names:
    """Returns the names of the dims of each parameter of a job's model."""
    leaves = as_blueprint(resolve_model(job, resolve_loss(job))).leaves
    return {path: leaf.names for path, leaf in name_stacks(leaves).items()}


def best_of(job: Job) -> Best:
    """Returns how the evaluations of a job are compared, and how long it waits for a better one."""
    spec = job.checkpoint
    return Best(metric=spec.best, lowest=spec.best_is == "lowest", patience=job.train.patience)
