"""The optimizer of a job, and by what its evaluations are compared."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
from jaxpar.optim.patterns import meant
from jaxpar.optim.probe import SMALL, check_chain, check_rate, needs_loss
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Blueprint
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


def resolve_optimizer(job: Job, blueprint: Blueprint | None = None) -> optax.GradientTransformation:
    """Returns the optax chain of a job, at its global batch; what its sweep is over is in the chain's state.

    Args:
      job: The job.
      blueprint: Its model, if that is known: else it is traced where an optimizer asks for the names of its dims.

    Raises:
      JaxparError: If its optimizer or schedule is not there, or has other arguments.
    """
    made = _whole(job, cache(lambda: _names(blueprint or as_blueprint(resolve_model(job, resolve_loss(job))))))
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
    if _asks_names(job):
        spec = replace(spec, arguments={**spec.arguments, muon.DIMS: muon.matrices(names)})
    return chain.build(spec, job.sweep.steps(job.train.steps), swept, own=own_functions(job), names=names)


def _asks_names(job: Job) -> bool:
    return job.optimizer.name == "muon" and muon.DIMS not in job.optimizer.arguments


def _names(blueprint: Blueprint) -> muon.Names:
    """Returns the names of the dims of each parameter of a model."""
    return {path: leaf.names for path, leaf in name_stacks(blueprint.leaves).items()}


def note_optimizer(job: Job, layout: Layout) -> Layout:
    """Returns the layout, whose notes say what an optimizer makes of which parameters, where they differ.

    Raises:
      JaxparError: If that is nothing.
    """
    if not _asks_names(job):
        return layout
    leaves, (frozen, but) = layout.blueprint.leaves, job.train.frozen
    held = set(meant(leaves, frozen)) - set(meant(leaves, but))
    shapes = {path: leaf.shape for path, leaf in leaves.items() if path not in held}
    return layout.noted(str(muon.share(shapes, _names(layout.blueprint)))) if shapes else layout


def best_of(job: Job) -> Best:
    """Returns how the evaluations of a job are compared, and how long it waits for a better one."""
    spec = job.checkpoint
    return Best(metric=spec.best, lowest=spec.best_is == "lowest", patience=job.train.patience)
