"""A job trained by Hogwild! on this machine's processor, with one number of threads after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxpar.errors import JaxparError, Problem
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.job.build import assemble
from jaxpar.job.compare.trained import evaluate
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data
from jaxpar.job.parts.optimizers import own_functions
from jaxpar.optim.chain import schedule
from jaxpar.parallel.declare import Parallel
from jaxpar.train.hogwild import race

LAST = 0.1  # share of the updates whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class Row:
    """What so many threads have made of a job.

    Attributes:
      workers: Threads.
      loss: Mean of the last tenth of the updates.
      eval_loss: Of the held-out examples; nan if there are none.
      seconds: Of all updates, measured.
      staleness: Updates of other threads between reading and writing, in the mean.
      write_share: Share of the parameters' elements that an update wrote, in the mean.
    """

    workers: int
    loss: float
    eval_loss: float
    seconds: float
    staleness: float
    write_share: float


def train(job: Job, workers: Sequence[int]) -> Iterator[Row]:
    """Yields a row for each number of threads; each begins anew and makes as many updates as the job has steps.

    Args:
      job: Its mesh and parallelism are not looked at; an update is of `train.global_batch` examples.
      workers: Numbers of threads.

    Raises:
      JaxparError: If the job's optimizer keeps a state, or it cannot be trained on one device.
    """
    _check(job)
    alone = replace(
        job,
        mesh=replace(job.mesh, target="", simulate=0, devices=1),
        parallel=replace(Parallel(), exchange=AllReduce()),
    )
    step, source = assemble(alone, jax.devices("cpu")[:1]), open_data(job)
    rate = schedule(job.optimizer.at(job.train.global_batch), job.train.steps, own=own_functions(job))
    rates = np.asarray(jax.vmap(rate)(np.arange(job.train.steps)))
    for count in workers:
        result = race(
            step, lambda number: source.batch(number, job.train.global_batch), workers=count, updates=job.train.steps,
            rate=lambda number: float(rates[number]), seed=job.train.seed,
        )  # fmt: skip
        last = max(1, int(LAST * len(result.loss)))
        yield Row(
            workers=count,
            loss=float(np.mean(result.loss[-last:])),
            eval_loss=evaluate(alone, step, source, result.state),
            seconds=result.seconds,
            staleness=float(np.mean(result.staleness)),
            write_share=float(np.mean(result.write_share)),
        )


def _check(job: Job) -> None:
    """Refuses optimizers that are more than SGD: their state would be written by all threads too."""
    spec, problems = job.optimizer, []
    wanted: dict[str, Any] = {"name": "sgd", "beta1": 0.0, "clip": 0.0}
    for key, value in wanted.items():
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
