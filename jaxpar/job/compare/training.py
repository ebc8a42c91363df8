"""Trains a job by a method, and records its loss against samples, bytes and virtual seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data.spec import Source, select_rows
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.exchange.clock import base
from jaxpar.exchange.clock.base import SimulatedRun, WorkerTimes, mean_staleness
from jaxpar.exchange.clock.parameter_servers import AsynchronousEasgd
from jaxpar.job.build import assemble
from jaxpar.job.check import check, device_count
from jaxpar.job.compare.parse_methods import Method, fit_batch
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data
from jaxpar.job.parts.models import resolve_loss
from jaxpar.mesh.axes import infer_sizes
from jaxpar.mesh.chips import Link
from jaxpar.parallel.layout import Layout, replica_messages, trained_shards
from jaxpar.step.init_state import init_state
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.step.stochastic_loss import key_parameter
from jaxpar.train import loop, virtual_clock
from jaxpar.train.feed import Feed


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The training curve of a method. Arrays have one entry per update.

    Attributes:
      method: The method.
      samples: Examples used so far.
      bytes: Bytes that a device has sent so far, to other replicas or to a server and back.
      seconds: Time on the virtual clock; modelled.
      loss: Loss on the examples of the update.
      eval_loss: Final loss on the held-out examples; nan if there are none.
      staleness: Mean staleness of the gradients.
    """

    method: Method
    samples: np.ndarray
    bytes: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    eval_loss: float
    staleness: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the curve as JSON values."""
        arrays = {name: getattr(self, name).tolist() for name in ("samples", "bytes", "seconds", "loss")}
        return {
            "method": self.method.name, "simulated": not self.method.runs, "eval_loss": self.eval_loss,
            "staleness": self.staleness, **arrays,
        }  # fmt: skip


def train(job: Job, method: Method, times: WorkerTimes, link: Link) -> Curve:
    """Trains a job by a method, on as many examples as the job has.

    Args:
      job: The job; its own exchange is ignored.
      method: The method; for a simulated one, each replica over `data` is a worker.
      times: Distribution of the replicas' gradient times; `travel` is set from the link.
      link: The link between replicas, and between a worker and its server.

    Raises:
      JaxparError: With the problems of the job under this method.
    """
    algorithm = method.algorithm
    if isinstance(algorithm, Exchange):
        return _train_exchange(job, method, algorithm, times, link)
    if isinstance(algorithm, AsynchronousEasgd):
        return _elastic(job, method, algorithm, times, link)
    return _simulate(job, method, algorithm, times, link)


def check_all(job: Job, methods: Sequence[Method]) -> None:
    """Refuses methods that cannot train the job, before any training starts.

    Raises:
      JaxparError: With the problems of all methods.
    """
    if job.sweep.over:
        raise refuse("a job with [sweep]", rule="methods are compared on one model", fix="a job without [sweep]")
    problems: list[Problem] = []
    if job.train.grow:
        fix = "train.grow=[] as an override"
        problems.append(Problem("train.grow in a comparison", "methods are compared at one batch size", fix))
    try:
        fitting, batch_problems = fit_batch(job, methods)
        problems += batch_problems
    except JaxparError:  # an invalid mesh or method: the checks below report it together with other problems
        fitting = job
    for method in methods:
        try:
            method_problems = (
                check(_with_exchange(fitting, method.algorithm)) if isinstance(method.algorithm, Exchange) else []
            )
            if not isinstance(method.algorithm, Exchange):
                _examples(fitting, method.algorithm, method.name)
        except JaxparError as error:
            method_problems = list(error.problems)
        problems += [problem for problem in method_problems if problem not in problems]
    if problems:
        raise JaxparError(*problems)


def _with_exchange(job: Job, exchange: Exchange) -> Job:
    return replace(job, parallel=replace(job.parallel, exchange=exchange))


def _examples(job: Job, algorithm: SimulatedRun | AsynchronousEasgd, name: str) -> int:
    """Returns the number of examples per gradient of a simulated method.

    Raises:
      JaxparError: If the global batch is not divisible among the workers, or the loss takes a random key.
    """
    shares = algorithm.shares(replicas(job))
    size = job.train.global_batch // shares
    if size * shares != job.train.global_batch:
        raise refuse(
            f"train.global_batch = {job.train.global_batch} with {name}",
            rule=f"the global batch is divided evenly among the {shares} counted workers",
            fix=f"train.global_batch = {-(-job.train.global_batch // shares) * shares}",
        )
    if key_parameter(resolve_loss(job)) is not None:
        raise refuse(
            f"{name} with a loss of (model, batch, key)",
            rule="on the virtual clock a loss draws no random numbers of its own",
            fix="a loss of (model, batch)",
        )
    return size


def replicas(job: Job) -> int:
    """Returns the number of replicas of a job over `data`."""
    return infer_sizes(job.parallel.sizes, device_count(job))["data"]


def _train_exchange(job: Job, method: Method, exchange: Exchange, times: WorkerTimes, link: Link) -> Curve:
    job = _with_exchange(job, exchange)
    step, source = assemble(job, jax.devices()[: device_count(job)]), open_data(job)
    state, losses = init_state(step.layout, step.optimizer, seed=job.train.seed), []
    feed = Feed(source, step.layout, job.train.global_batch)
    for index in range(job.train.steps):
        state, metrics = step(state, feed.batch(index))
        losses.append(metrics["loss"])
    number, traffic = np.arange(1, job.train.steps + 1), replica_messages(step.layout)
    return Curve(
        method=method,
        samples=number * job.train.global_batch,
        bytes=number * base.sent_bytes(traffic),
        seconds=base.seconds(traffic, step.layout.sizes["data"], len(number), times, link),
        loss=np.array(jax.device_get(losses), np.float64),
        eval_loss=evaluate(job, step, source, state),
    )


def _simulate(job: Job, method: Method, algorithm: SimulatedRun, times: WorkerTimes, link: Link) -> Curve:
    workers = replicas(job)
    size, source = _examples(job, algorithm, method.name), open_data(job)
    device_bytes = _parameter_bytes(
        assemble(_worker_job(job, workers, job.train.steps, size), _devices(job, workers)).layout
    )
    updates = algorithm.updates(workers, job.train.steps, replace(times, travel=link.time(device_bytes)))
    worker_job = _worker_job(job, workers, sum(update.shard == 0 for update in updates), size)
    step = assemble(worker_job, _devices(job, workers))
    rows: list[tuple[float, float, float, float]] = []
    gradients = 0

    def record_update(update, loss: float) -> None:
        nonlocal gradients
        if update.shard == 0:
            gradients += len(update.pushes)
            rows.append((gradients * size, 2 * device_bytes * gradients / workers, update.seconds, loss))

    examples = _shares(source, job.train.global_batch, size)
    state = virtual_clock.run(step, updates, examples, record_update, seed=job.train.seed)
    samples, traffic, seconds, losses = np.array(rows).T
    return Curve(
        method=method, samples=samples, bytes=traffic, seconds=seconds, loss=losses,
        eval_loss=evaluate(job, step, source, state), staleness=mean_staleness(updates),
    )  # fmt: skip


def _elastic(job: Job, method: Method, algorithm: AsynchronousEasgd, times: WorkerTimes, link: Link) -> Curve:
    """Trains by asynchronous EASGD; the curve has an entry per local step, in order of completion."""
    workers = replicas(job)
    size, source = _examples(job, algorithm, method.name), open_data(job)
    step = assemble(_worker_job(job, workers, job.train.steps, size), _devices(job, workers))
    device_bytes = _parameter_bytes(step.layout)
    table = algorithm.local_steps(workers, job.train.steps, replace(times, travel=link.time(device_bytes)))
    rows: list[tuple[float, float, float]] = []
    state = virtual_clock.run_elastic(
        step, table, algorithm.alpha(workers), _shares(source, job.train.global_batch, size),
        lambda local, loss: rows.append((local.seconds, 2 * device_bytes * local.meets / workers, loss)),
        seed=job.train.seed,
    )  # fmt: skip
    seconds, traffic, losses = np.array(sorted(rows, key=lambda row: row[0])).T
    staleness = [local_step.staleness for local_step in table if local_step.meets]
    return Curve(
        method=method, samples=size * np.arange(1, len(rows) + 1), bytes=np.cumsum(traffic), seconds=seconds,
        loss=losses, eval_loss=evaluate(job, step, source, state), staleness=float(np.mean(staleness)),
    )  # fmt: skip


def _shares(source: Source, global_batch: int, size: int) -> virtual_clock.Examples:
    """Returns a function from a number to that share: `size` consecutive examples of the global batches."""
    shares = global_batch // size

    @lru_cache(maxsize=8)
    def batch(index: int) -> dict[str, np.ndarray]:
        return source.batch(index, global_batch)

    def examples(share: int) -> Mapping[str, Any]:
        index, place = divmod(share, shares)
        return select_rows(batch(index), np.arange(place * size, (place + 1) * size))

    return examples


def _devices(job: Job, workers: int) -> list[Any]:
    return jax.devices()[: device_count(job) // workers]


def _worker_job(job: Job, workers: int, updates: int, size: int) -> Job:
    """Returns the job of one worker, with its devices and examples and a schedule over all `updates`."""
    devices = device_count(job) // workers
    mesh = replace(job.mesh, target="", **{"simulate" if job.mesh.simulate else "devices": devices})
    warmup = job.optimizer.for_batch(job.train.global_batch).warmup * updates // job.train.steps
    optimizer = replace(job.optimizer.for_batch(size), warmup=warmup)
    return replace(
        job,
        mesh=mesh,
        parallel=replace(job.parallel, data=1, exchange=AllReduce()),
        optimizer=optimizer,
        train=replace(job.train, steps=updates, global_batch=size),
    )


def _parameter_bytes(layout: Layout) -> float:
    """Returns the parameter bytes per device, which a worker fetches and pushes."""
    return float(sum(part.size * jnp.dtype(part.dtype).itemsize for part in trained_shards(layout).values()))


def evaluate(job: Job, step: Step, source: Source, state: State) -> float:
    size = job.train.global_batch
    run = loop.Run(step=step, source=source, steps=0, global_batch=size, eval_batches=job.train.eval_batches)
    metrics = loop.evaluate(run, state, Feed(source, step.layout, size)) or {}
    return metrics.get("eval_loss", float("nan"))
