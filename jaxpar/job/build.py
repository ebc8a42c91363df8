"""A job walks through the rooms: devices, mesh, layout, state, step, source."""

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
from jaxpar.job.check import check, meant
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import check_evaluated, open_data, open_sets
from jaxpar.job.parts.measures import resolve_measures
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.names import vocabulary
from jaxpar.job.parts.optimizers import own_functions, resolve_optimizer
from jaxpar.mesh.devices import simulate, visible
from jaxpar.optim import chain
from jaxpar.optim.extra import follows_steps
from jaxpar.parallel.compose import compose
from jaxpar.parallel.layout import Layout
from jaxpar.step.step import Step, train_step

BLOCK = 4096  # steps whose learning rates are computed at once


@dataclass(frozen=True, kw_only=True)
class Built:
    """A job on its devices, ready to train.

    Attributes:
      job: The job.
      layout: Where arrays live.
      step: The step, compiled at its first call.
      optimizer: The optax chain.
      learning_rate: Step to learning rate; None where that of each member of a sweep is its own, or follows the loss.
      source: Where batches come from.
      sets: Evaluation sets by name.
      larger: The steps of later phases of a batch that grows, by the times that their batches are of the first.
    """

    job: Job
    layout: Layout
    step: Step
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], float] | None
    source: Source
    sets: dict[str, EvaluationSet] = field(default_factory=dict)
    larger: dict[int, Step] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        """The steps of all phases."""
        return [self.step, *self.larger.values()]


def build(job: Job, *, processes: int = 1) -> Built:
    """Returns the job on real or simulated devices.

    Args:
      job: The job.
      processes: Among how many, all connected, simulated devices are divided.

    Raises:
      JaxparError: With what is wrong, before anything is compiled.
    """
    if job.mesh.simulate:
        simulate(job.mesh.simulate, processes=processes)
    devices = visible()
    if job.mesh.devices > len(devices):
        raise refuse(
            f"mesh.devices = {job.mesh.devices}, {len(devices)} visible ({devices[0].platform})",
            rule="a job trains on devices that are there",
            fix=f"mesh.devices = {len(devices)}, or mesh.simulate = {job.mesh.devices}",
        )
    if unused := vocabulary(job):
        raise JaxparError(*unused)
    step = assemble(job, devices[: job.mesh.devices or None])
    source = open_data(job)
    check_evaluated(job, source)
    sets = open_sets(job)
    spec = job.optimizer.at(job.train.global_batch)
    return Built(
        job=job,
        layout=step.layout,
        step=step,
        optimizer=step.optimizer,
        source=source,
        sets=sets,
        learning_rate=rates(spec, job.train.steps, own=own_functions(job)) if _is_told(job, step) else None,
        larger={times: _step(job, step.layout, step.optimizer, times) for times in job.train.growth.factors[1:]},
    )


def _is_told(job: Job, step: Step) -> bool:
    """Returns whether the rate of each step is known before it is made."""
    return not job.sweep.over and (job.optimizer.is_plain or follows_steps(step.abstract().optimizer))


def rates(spec: chain.Optimizer, steps: int, *, own: chain.Own = chain.NONE) -> Callable[[int], float]:
    """Returns the learning rate of a step, from 0: computed for some thousands of steps at once, and then kept."""
    schedule = jax.vmap(chain.schedule(spec, steps, own=own))

    @lru_cache(maxsize=2)
    def block(number: int) -> np.ndarray:
        found = np.asarray(schedule(number * BLOCK + jnp.arange(BLOCK)))
        return np.broadcast_to(found, (BLOCK,))

    return lambda index: float(block(index // BLOCK)[index % BLOCK])


def rate_jump(built: Built, row: dict[str, Any], at: int) -> str:
    """Returns a line about a learning rate that jumps where a run goes on, "" where it goes on as it was.

    Args:
      built: The job as it is now: a finished run that gets more steps has another schedule than before.
      row: The row of metrics of the last step that was made.
      at: The number of that step.
    """
    was, steps = row.get("learning_rate"), built.job.train.steps
    if was is None or built.learning_rate is None or row["step"] != at or not 0 < at < steps:
        return ""
    if math.isclose(was, built.learning_rate(at - 1), rel_tol=1e-5, abs_tol=1e-12):
        return ""
    return (
        f"the learning rate jumps from {was:.3g} at step {at} to {built.learning_rate(at):.3g} at step {at + 1}: its "
        f"schedule is now that of {steps} steps with this [optimizer], and was another"
    )


def assemble(job: Job, devices: Sequence[Any]) -> Step:
    """Returns the step of a job on these devices, which may be absent ones.

    Raises:
      JaxparError: With everything that is wrong with the job.
    """
    if problems := check(job):
        raise JaxparError(*problems)
    layout = compose(resolve_model(job, resolve_loss(job)), job.declared, devices)
    return _step(job, meant(job, layout), resolve_optimizer(job, layout.blueprint))


def _step(job: Job, layout: Layout, optimizer: optax.GradientTransformation, times: int = 1) -> Step:
    """Returns the step for batches so many times that of the first phase: of as many times the microbatches."""
    train = job.train
    return train_step(
        layout, resolve_loss(job), optimizer, guard=job.faults.on_bad_step == "skip", seed=train.seed,
        accumulate=train.accumulate * times, precision=train.precision, remat=train.remat, offload=train.offload,
        collectives=train.collectives, measures=resolve_measures(job),
    )  # fmt: skip
