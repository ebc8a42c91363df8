"""Builds a job: devices, mesh, layout, step, data source."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.data.spec import Source
from jaxpar.data.streams.sets import EvaluationSet
from jaxpar.errors import JaxparError, refuse
from jaxpar.job.check import ResolvedJob, resolve
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import check_evaluated, open_data, open_sets
from jaxpar.job.parts.measures import resolve_measures
from jaxpar.job.parts.names import vocabulary
from jaxpar.job.parts.optimizers import custom_functions
from jaxpar.mesh.devices import simulate, visible_devices
from jaxpar.optim import optax_chain
from jaxpar.optim.step_inputs import rate_follows_steps
from jaxpar.parallel.layout import Layout
from jaxpar.step.step import Step
from jaxpar.train.api.train_step import train_step

BLOCK = 4096  # learning rates computed at once


@dataclass(frozen=True, kw_only=True)
class BuiltJob:
    """A job on its devices, ready to train.

    Attributes:
      job: The job.
      layout: The placement of all arrays.
      step: The step, compiled at its first call.
      optimizer: The optax chain.
      learning_rate: Maps a step to its learning rate; None if it differs per member of a sweep, or depends on the loss.
      source: The source of batches.
      sets: Evaluation sets by name.
      later_steps: For a growing batch, the steps of later phases, by the ratio of their batch to the first phase's.
    """

    job: Job
    layout: Layout
    step: Step
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], float] | None
    source: Source
    sets: dict[str, EvaluationSet] = field(default_factory=dict)
    later_steps: dict[int, Step] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        """The steps of all phases."""
        return [self.step, *self.later_steps.values()]


def build(job: Job, *, processes: int = 1) -> BuiltJob:
    """Builds a job on real or simulated devices.

    Args:
      job: The job.
      processes: Number of connected processes among which simulated devices are divided.

    Raises:
      JaxparError: With the problems of the job, before anything is compiled.
    """
    if job.mesh.simulate:
        simulate(job.mesh.simulate, processes=processes)
    devices = visible_devices()
    if job.mesh.devices > len(devices):
        raise refuse(
            f"mesh.devices = {job.mesh.devices}, {len(devices)} visible ({devices[0].platform})",
            rule="a job trains on devices that are there",
            fix=f"mesh.devices = {len(devices)}, or mesh.simulate = {job.mesh.devices}",
        )
    if unused := vocabulary(job):
        raise JaxparError(*unused)
    resolved = _resolve_or_raise(job, devices[: job.mesh.devices or None])
    step = _step(resolved)
    source = open_data(job)
    check_evaluated(job, source)
    sets = open_sets(job)
    spec = job.optimizer.for_batch(job.train.global_batch)
    return BuiltJob(
        job=job,
        layout=step.layout,
        step=step,
        optimizer=step.optimizer,
        source=source,
        sets=sets,
        learning_rate=rates(spec, job.train.steps, own=custom_functions(job)) if _has_known_rates(job, step) else None,
        later_steps={times: _step(resolved, times) for times in job.train.growth.factors[1:]},
    )


def _has_known_rates(job: Job, step: Step) -> bool:
    """Whether the learning rate of each step is known in advance."""
    return not job.sweep.over and (job.optimizer.is_plain or rate_follows_steps(step.abstract().optimizer))


def rates(
    spec: optax_chain.Optimizer, steps: int, *, own: optax_chain.UserFunctions = optax_chain.NONE
) -> Callable[[int], float]:
    """Returns a function that maps a step (from 0) to its learning rate, computed in cached blocks of `BLOCK` steps."""
    schedule = jax.vmap(optax_chain.schedule(spec, steps, user_functions=own))

    @lru_cache(maxsize=2)
    def block(number: int) -> np.ndarray:
        block_rates = np.asarray(schedule(number * BLOCK + jnp.arange(BLOCK)))
        return np.broadcast_to(block_rates, (BLOCK,))

    return lambda index: float(block(index // BLOCK)[index % BLOCK])


def rate_jump(built: BuiltJob, row: dict[str, Any], at: int) -> str:
    """Reports a jump of the learning rate at a resume, "" if there is none.

    Args:
      built: The current job; e.g. a finished run that gets more steps has a new schedule.
      row: The metrics of the last step before the resume.
      at: The number of that step.
    """
    prior, steps = row.get("learning_rate"), built.job.train.steps
    if prior is None or built.learning_rate is None or row["step"] != at or not 0 < at < steps:
        return ""
    if math.isclose(prior, built.learning_rate(at - 1), rel_tol=1e-5, abs_tol=1e-12):
        return ""
    return (
        f"the learning rate jumps from {prior:.3g} at step {at} to {built.learning_rate(at):.3g} at step {at + 1}: its "
        f"schedule is now that of {steps} steps with this [optimizer], and was another"
    )


def assemble(job: Job, devices: Sequence[Any]) -> Step:
    """Returns the step of a job on the given devices, which may be absent ones.

    Raises:
      JaxparError: With all problems of the job.
    """
    return _step(_resolve_or_raise(job, devices))


def _resolve_or_raise(job: Job, devices: Sequence[Any]) -> ResolvedJob:
    resolved = resolve(job, devices)
    if resolved.problems:
        raise JaxparError(*resolved.problems)
    return resolved


def _step(resolved: ResolvedJob, times: int = 1) -> Step:
    """Builds the step for batches `times` as large as in the first phase, with `times` as many microbatches."""
    job, layout, loss, optimizer = resolved.job, resolved.layout, resolved.loss, resolved.optimizer
    if layout is None or loss is None or optimizer is None:
        raise TypeError(f"a job with problems has no step: {resolved.problems}")
    train = job.train
    return train_step(
        layout, loss, optimizer, guard=job.faults.on_bad_step == "skip", seed=train.seed,
        accumulate=train.accumulate * times, precision=train.precision, remat=train.remat, offload=train.offload,
        collectives=train.collectives, measures=resolve_measures(job),
    )  # fmt: skip
