"""The optimizer of a job, and the metric that compares its evaluations."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import optax

from jaxpar.errors import refuse
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.optim import muon, optax_chain
from jaxpar.optim.optax_lookup import SMALL, UserFunctions, check_chain, check_rate, needs_loss
from jaxpar.optim.optimizer import SETTINGS
from jaxpar.optim.patterns import matching
from jaxpar.optim.step_inputs import PLATEAU
from jaxpar.optim.wrappers import freeze, has_schedules
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.layout import Layout, with_note
from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.rules import name_stacks
from jaxpar.step.checks.input_state import check_eval_params
from jaxpar.train.run import Best


def custom_functions(job: Job) -> UserFunctions:
    """Imports the user's own optimizer and schedule that a job names.

    Raises:
      JaxparError: If an object does not exist.
    """
    names = {"optimizer.name": job.optimizer.name, "optimizer.schedule.name": job.optimizer.schedule.name}
    pair = [import_object(name, key, allowed=job.allow_import) if ":" in name else None for key, name in names.items()]
    return UserFunctions(optimizer=pair[0], schedule=pair[1])


def resolve_optimizer(job: Job, blueprint: Blueprint | None = None) -> optax.GradientTransformation:
    """Builds the optax chain of a job for its global batch; swept settings are part of the chain's state.

    Args:
      job: The job.
      blueprint: The model, if available; otherwise it is traced if the optimizer needs the names of its dims.

    Raises:
      JaxparError: If the optimizer or schedule does not exist, or takes other arguments.
    """
    optimizer = _full_chain(
        job, cache(lambda: _dim_names(blueprint or as_blueprint(resolve_model(job, resolve_loss(job)))))
    )
    frozen, exceptions = job.train.frozen
    return freeze(optimizer, frozen, but=exceptions) if frozen else optimizer


def check_optimizer(job: Job, params: object = None) -> None:
    """Refuses an optimizer that does not work in the job; a custom optimizer or schedule is tried on shapes.

    Args:
      job: The job.
      params: Shapes of the model's parameters, if available. A user's own optimizer may select parameters by path, so
        it is checked only if they are given.

    Raises:
      JaxparError: If it does not exist, takes other arguments, or cannot be used in a step.
    """
    optimizer, spec = _full_chain(job), job.optimizer
    if spec.is_plain:
        return
    if spec.schedule.name:
        rate = optax_chain.schedule(
            spec.for_batch(job.train.global_batch), job.train.steps, user_functions=custom_functions(job)
        )
        check_rate(rate, name=spec.schedule.name)
    by_loss = spec.schedule.name == PLATEAU
    if job.metrics.noise_every and (spec.name not in SETTINGS or by_loss):
        raise refuse(
            f"metrics.noise_every = {job.metrics.noise_every} with {PLATEAU if by_loss else spec.name}",
            rule=f"the noise temperature is known for {', '.join(SETTINGS)}, whose rate follows the step",
            fix="noise_every = 0",
        )
    if ":" in spec.name and params is None:
        return
    state = check_chain(optimizer, spec, SMALL) if params is None else check_chain(resolve_optimizer(job), spec, params)
    check_eval_params(job.parallel.exchange, state)
    if job.parallel.pipeline.weights != "flush" and needs_loss(optimizer):
        raise refuse(
            f"parallel.pipeline.weights = {job.parallel.pipeline.weights!r} with {PLATEAU if by_loss else spec.name}",
            rule="a step without a flush makes many updates, before the loss of its batch is known",
            fix='weights = "flush", or an optimizer that reads no loss',
        )
    if job.parallel.pipeline.weights != "flush" and not spec.is_constant and not has_schedules(state):
        raise refuse(
            f"parallel.pipeline.weights = {job.parallel.pipeline.weights!r} with {spec.name}",
            rule="without a flush a step makes several updates, and this optimizer counts them as steps",
            fix='weights = "flush", or decay = "constant", warmup = 0',
        )


def _full_chain(job: Job, names: Callable[[], muon.Names] = dict) -> optax.GradientTransformation:
    """Builds the optax chain of a job for all parameters, even frozen ones; `names` returns their dim names by path."""
    sweep_values = job.sweep.values if job.sweep.over else ()
    spec = job.optimizer.for_batch(job.train.global_batch)
    if _needs_dim_names(job):
        spec = replace(spec, arguments={**spec.arguments, muon.DIMS: muon.matrix_dims(names)})
    return optax_chain.build(
        spec, job.sweep.steps(job.train.steps), sweep_values, user_functions=custom_functions(job), names=names
    )


def _needs_dim_names(job: Job) -> bool:
    return job.optimizer.name == "muon" and muon.DIMS not in job.optimizer.arguments


def _dim_names(blueprint: Blueprint) -> muon.Names:
    """Maps each parameter of a model to the names of its dims."""
    return {path: leaf.names for path, leaf in name_stacks(blueprint.leaves).items()}


def note_optimizer(job: Job, layout: Layout) -> Layout:
    """Adds a note to the layout that says which parameters muon orthogonalizes, and which others not.

    Raises:
      JaxparError: If muon has nothing to orthogonalize.
    """
    if not _needs_dim_names(job):
        return layout
    leaves, (frozen, exceptions) = layout.blueprint.leaves, job.train.frozen
    frozen_paths = set(matching(leaves, frozen)) - set(matching(leaves, exceptions))
    shapes = {path: leaf.shape for path, leaf in leaves.items() if path not in frozen_paths}
    return with_note(layout, str(muon.muon_coverage(shapes, _dim_names(layout.blueprint)))) if shapes else layout


def best_evaluation(job: Job) -> Best:
    """Returns the metric that compares the evaluations of a job, and its patience."""
    spec = job.checkpoint
    return Best(metric=spec.best, lowest=spec.best_is == "lowest", patience=job.train.patience)
