"""Trains a job by Hogwild! on this machine's CPU, once for each number of threads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxpar.errors import JaxparError, Problem
from jaxpar.exchange.base import AllReduce
from jaxpar.job.build import assemble
from jaxpar.job.compare.training import evaluate
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data
from jaxpar.job.parts.optimizers import custom_functions
from jaxpar.optim.optax_chain import schedule
from jaxpar.parallel.declaration import Parallel
from jaxpar.train.hogwild import race

LAST = 0.1  # share of the last updates whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class RaceRow:
    """The result for one number of threads.

    Attributes:
      workers: Number of threads.
      loss: Mean loss of the last tenth of the updates.
      eval_loss: Loss on the held-out examples; nan if there are none.
      seconds: Measured time of all updates.
      staleness: Mean number of other threads' updates between a read and its write.
      write_share: Mean share of the parameters' elements that an update wrote.
    """

    workers: int
    loss: float
    eval_loss: float
    seconds: float
    staleness: float
    write_share: float


def train(job: Job, workers: Sequence[int]) -> Iterator[RaceRow]:
    """Yields a row for each number of threads; each starts anew and makes `train.steps` updates.

    Args:
      job: The job; its mesh and parallelism are ignored. An update uses `train.global_batch` examples.
      workers: Numbers of threads.

    Raises:
      JaxparError: If the job's optimizer is not plain SGD, or the job cannot be trained on one device.
    """
    _check(job)
    local_job = replace(
        job,
        mesh=replace(job.mesh, target="", simulate=0, devices=1),
        parallel=replace(Parallel(), exchange=AllReduce()),
    )
    step, source = assemble(local_job, jax.devices("cpu")[:1]), open_data(job)
    rate = schedule(
        job.optimizer.for_batch(job.train.global_batch), job.train.steps, user_functions=custom_functions(job)
    )
    rates = np.asarray(jax.vmap(rate)(np.arange(job.train.steps)))
    for count in workers:
        result = race(
            step, lambda number: source.batch(number, job.train.global_batch), workers=count, updates=job.train.steps,
            rate=lambda number: float(rates[number]), seed=job.train.seed,
        )  # fmt: skip
        tail = max(1, int(LAST * len(result.loss)))
        yield RaceRow(
            workers=count,
            loss=float(np.mean(result.loss[-tail:])),
            eval_loss=evaluate(local_job, step, source, result.state),
            seconds=result.seconds,
            staleness=float(np.mean(result.staleness)),
            write_share=float(np.mean(result.write_share)),
        )


def _check(job: Job) -> None:
    """Refuses optimizers other than plain SGD: all threads would also write their state."""
    spec, problems = job.optimizer, []
    settings: dict[str, Any] = {"name": "sgd", "beta1": 0.0, "clip": 0.0}
    for key, value in settings.items():
        if getattr(spec, key) != value:
            problems.append(
                Problem(
                    f"optimizer.{key} = {getattr(spec, key)!r} with Hogwild!",
                    "threads subtract rate times gradient from each element: SGD without momentum or clipping",
                    f"optimizer.{key}={value} as an override",
                )
            )
    if spec.arguments:
        problems.append(
            Problem("optimizer.arguments with Hogwild!", "it is SGD without further arguments", "leave them out")
        )
    if job.sweep.over or job.train.grow:
        key = "sweep.over" if job.sweep.over else "train.grow"
        problems.append(Problem(f"{key} with Hogwild!", "it trains one model at one batch size", f"leave {key} out"))
    if problems:
        raise JaxparError(*problems)
