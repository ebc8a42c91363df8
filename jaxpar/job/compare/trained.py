"""A job trained by a method: its loss against samples, bytes and virtual seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data.spec import Source, some
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.base import Exchange
from jaxpar.exchange.clock import barriers
from jaxpar.exchange.clock.delays import Times
from jaxpar.exchange.clock.elastic import AsynchronousEasgd
from jaxpar.exchange.clock.events import Simulated, mean_staleness
from jaxpar.job.build import assemble
from jaxpar.job.check import check, device_count
from jaxpar.job.compare.methods import Method
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data
from jaxpar.job.parts.models import resolve_loss
from jaxpar.mesh.axes import infer_sizes
from jaxpar.mesh.links import Link
from jaxpar.parallel.layout import Layout
from jaxpar.step.keyed.loss import key_of
from jaxpar.step.state import State, init_state
from jaxpar.step.step import Step
from jaxpar.train import elastic_on_clock, loop, on_clock
from jaxpar.train.feed import Feed


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How a method trains. Arrays have an entry for each update.

    Attributes:
      method: Which.
      samples: Examples that have been used.
      bytes: That a device has sent to other replicas, or to a server and back.
      seconds: On the virtual clock; modelled.
      loss: Of the examples of the update.
      eval_loss: Of the held-out examples at the end; nan if there are none.
      staleness: Of the gradients, in the mean.
    """

    method: Method
    samples: np.ndarray
    bytes: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    eval_loss: float
    staleness: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        arrays = {name: getattr(self, name).tolist() for name in ("samples", "bytes", "seconds", "loss")}
        return {
            "method": self.method.name, "simulated": not self.method.runs, "eval_loss": self.eval_loss,
            "staleness": self.staleness, **arrays,
        }  # fmt: skip


def train(job: Job, method: Method, times: Times, link: Link) -> Curve:
    """Returns how a job trains by a method, to as many examples as the job says.

    Args:
      job: The job; its own exchange is not looked at.
      method: How replicas agree. Of a simulated one each replica over `data` is a worker.
      times: Of the replicas' gradients; `travel` is made of the link.
      link: Between replicas, and between a worker and its server.

    Raises:
      JaxparError: With what is wrong with the job by this method.
    """
    how = method.how
    if isinstance(how, Exchange):
        return _run(job, method, how, times, link)
    if isinstance(how, AsynchronousEasgd):
        return _elastic(job, method, how, times, link)
    return _simulate(job, method, how, times, link)


def check_all(job: Job, methods: Sequence[Method]) -> None:
    """Refuses methods that a job cannot be trained by, before the first of them is.

    Raises:
      JaxparError: With what is wrong with any.
    """
    if job.sweep.over:
        raise refuse("a job with [sweep]", rule="ways to agree are compared on one model", fix="a job without [sweep]")
    problems: list[Problem] = []
    if job.train.grow:
        fix = "train.grow=[] as an override"
        problems.append(Problem("train.grow in a comparison", "methods are compared at one batch size", fix))
    for method in methods:
        try:
            found = check(_by(job, method.how)) if isinstance(method.how, Exchange) else []
            if not isinstance(method.how, Exchange):
                _examples(job, method.how, method.name)
        except JaxparError as error:
            found = list(error.problems)
        problems += [problem for problem in found if problem not in problems]
    if problems:
        raise JaxparError(*problems)


def _by(job: Job, exchange: Exchange) -> Job:
    return replace(job, parallel=replace(job.parallel, exchange=exchange))


def _examples(job: Job, how: Simulated | AsynchronousEasgd, name: str) -> int:
    """Returns the examples of a gradient of a simulated method.

    Raises:
      JaxparError: If the job cannot be divided so.
    """
    shares = how.shares(replicas(job))
    size = job.train.global_batch // shares
    if size * shares != job.train.global_batch:
        raise refuse(
            f"train.global_batch = {job.train.global_batch} with {name}",
            rule=f"the {shares} workers that count have as many examples each",
            fix=f"train.global_batch = {-(-job.train.global_batch // shares) * shares}",
        )
    if key_of(resolve_loss(job)) is not None:
        raise refuse(
            f"{name} with a loss of (model, batch, key)",
            rule="on the virtual clock a loss draws no random numbers of its own",
            fix="a loss of (model, batch)",
        )
    return size


def replicas(job: Job) -> int:
    """Returns how many replicas a job has over `data`."""
    return infer_sizes(job.parallel.sizes, device_count(job))["data"]


def _run(job: Job, method: Method, exchange: Exchange, times: Times, link: Link) -> Curve:
    job = _by(job, exchange)
    step, source = assemble(job, jax.devices()[: device_count(job)]), open_data(job)
    state, losses = init_state(step.layout, step.optimizer, seed=job.train.seed), []
    feed = Feed(source, step.layout, job.train.global_batch)
    for index in range(job.train.steps):
        state, metrics = step(state, feed.batch(index))
        losses.append(metrics["loss"])
    number, sent = np.arange(1, job.train.steps + 1), step.layout.sends()
    return Curve(
        method=method,
        samples=number * job.train.global_batch,
        bytes=number * barriers.sent_bytes(sent),
        seconds=barriers.seconds(sent, step.layout.sizes["data"], len(number), times, link),
        loss=np.array(jax.device_get(losses), np.float64),
        eval_loss=evaluate(job, step, source, state),
    )


def _simulate(job: Job, method: Method, how: Simulated, times: Times, link: Link) -> Curve:
    workers = replicas(job)
    size, source = _examples(job, how, method.name), open_data(job)
    held = _held(assemble(_of_one(job, workers, job.train.steps, size), _devices(job, workers)).layout)
    updates = how.updates(workers, job.train.steps, replace(times, travel=link.time(held)))
    alone = _of_one(job, workers, sum(update.shard == 0 for update in updates), size)
    step = assemble(alone, _devices(job, workers))
    rows: list[tuple[float, float, float, float]] = []
    used = 0

    def told(update, loss: float) -> None:
        nonlocal used
        if update.shard == 0:
            used += len(update.pushes)
            rows.append((used * size, 2 * held * used / workers, update.seconds, loss))

    examples = _shares(source, job.train.global_batch, size)
    state = on_clock.run(step, updates, examples, told, seed=job.train.seed)
    samples, sent, seconds, losses = np.array(rows).T
    return Curve(
        method=method, samples=samples, bytes=sent, seconds=seconds, loss=losses,
        eval_loss=evaluate(job, step, source, state), staleness=mean_staleness(updates),
    )  # fmt: skip


def _elastic(job: Job, method: Method, how: AsynchronousEasgd, times: Times, link: Link) -> Curve:
    """Returns the curve of asynchronous EASGD, with an entry for each local step in the order of completion."""
    workers = replicas(job)
    size, source = _examples(job, how, method.name), open_data(job)
    step = assemble(_of_one(job, workers, job.train.steps, size), _devices(job, workers))
    held = _held(step.layout)
    table = how.local_steps(workers, job.train.steps, replace(times, travel=link.time(held)))
    rows: list[tuple[float, float, float]] = []
    state = elastic_on_clock.run(
        step, table, how.alpha(workers), _shares(source, job.train.global_batch, size),
        lambda local, loss: rows.append((local.seconds, 2 * held * local.meets / workers, loss)), seed=job.train.seed,
    )  # fmt: skip
    seconds, sent, losses = np.array(sorted(rows, key=lambda row: row[0])).T
    staleness = [each.staleness for each in table if each.meets]
    return Curve(
        method=method, samples=size * np.arange(1, len(rows) + 1), bytes=np.cumsum(sent), seconds=seconds, loss=losses,
        eval_loss=evaluate(job, step, source, state), staleness=float(np.mean(staleness)),
    )  # fmt: skip


def _shares(source: Source, global_batch: int, size: int) -> on_clock.Examples:
    """Returns a function from the number of a share to its `size` examples of a global batch."""
    shares = global_batch // size

    @lru_cache(maxsize=8)
    def batch(index: int) -> dict[str, np.ndarray]:
        return source.batch(index, global_batch)

    def examples(share: int) -> Mapping[str, Any]:
        index, place = divmod(share, shares)
        return some(batch(index), np.arange(place * size, (place + 1) * size))

    return examples


def _devices(job: Job, workers: int) -> list[Any]:
    return jax.devices()[: device_count(job) // workers]


def _of_one(job: Job, workers: int, updates: int, size: int) -> Job:
    """Returns the job of one worker: its devices, its examples, and a schedule over all updates."""
    devices = device_count(job) // workers
    mesh = replace(job.mesh, target="", **{"simulate" if job.mesh.simulate else "devices": devices})
    warmup = job.optimizer.at(job.train.global_batch).warmup * updates // job.train.steps
    optimizer = replace(job.optimizer.at(size), warmup=warmup)
    return replace(
        job,
        mesh=mesh,
        parallel=replace(job.parallel, data=1, exchange=AllReduce()),
        optimizer=optimizer,
        train=replace(job.train, steps=updates, global_batch=size),
    )


def _held(layout: Layout) -> float:
    """Returns the bytes of parameters that a device holds: what it fetches, and what it pushes."""
    return float(sum(part.size * jnp.dtype(part.dtype).itemsize for part in layout.parts.values()))


def evaluate(job: Job, step: Step, source: Source, state: State) -> float:
    size = job.train.global_batch
    run = loop.Run(step=step, source=source, steps=0, global_batch=size, eval_batches=job.train.eval_batches)
    found = loop.evaluate(run, state, Feed(source, step.layout, size)) or {}
    return found.get("eval_loss", float("nan"))
