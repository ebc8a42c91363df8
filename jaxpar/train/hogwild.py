"""Hogwild!: several threads update the same parameters in shared memory, without locks.

    thread 0   read ─ gradient ─ write ─ read ─ gradient ─ write         all threads share the parameters,
    thread 1      read ─ gradient ──── write ─ read ─ ...                 which are numpy arrays

This is a real run, not a simulation: XLA computes gradients while other threads read and write. A thread may read
parameters that another thread has written only in part, and one of two simultaneous writes to an element may be lost.
The paper shows that SGD still converges if gradients are sparse, because threads then rarely write the same elements.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.exchange.base import flatten_by_path
from jaxpar.step.init_state import init_state
from jaxpar.step.state import State, fold_in_number
from jaxpar.step.step import Step

SPARSE = 0.25  # below this fraction of non-zero elements, only those are written


@dataclass(frozen=True, kw_only=True)
class Race:
    """The result of a Hogwild! run. Arrays have shape [updates], in the order of the writes.

    Attributes:
      state: The state with the final parameters, and the model state of the first thread.
      loss: Mean loss of the examples of each update.
      staleness: Number of updates by other threads between the read and the write of an update.
      worker: Number of the thread that wrote the update.
      write_share: Fraction of all parameter elements that the update wrote.
      seconds: Wall-clock seconds from the first read to the last write, without compilation.
    """

    state: State
    loss: np.ndarray
    staleness: np.ndarray
    worker: np.ndarray
    write_share: np.ndarray
    seconds: float


def race(
    step: Step,
    examples: Callable[[int], Mapping[str, object]],
    *,
    workers: int,
    updates: int,
    rate: float | Callable[[int], float],
    seed: int = 0,
) -> Race:
    """Trains with Hogwild! (Recht, Ré, Wright, Niu 2011, arXiv:1106.5730, algorithm 1) on the CPU of this machine.

    Each thread repeats: read all parameters x, compute the gradient g of its batch, and write x_v - rate g_v for each
    element v with g_v != 0. No thread waits for another. An update in the paper uses one example; here it uses the
    batch that `examples` returns. Results differ from run to run, as the order of reads and writes does.

    Args:
      step: A step on one CPU device, which computes the gradients. Its optimizer is not used: plain SGD writes single
        elements.
      examples: Update number to its batch; several threads call it at the same time.
      workers: Number of threads.
      updates: Number of updates by all threads together.
      rate: Learning rate, or a function of the update number.
      seed: Seed of the initial parameters.

    Raises:
      JaxparError: If the step's layout is not a single CPU device, or `workers` or `updates` is less than 1.
    """
    _check(step, workers, updates)
    state = init_state(step.layout, step.optimizer, seed=seed)
    shared = _SharedParameters(state.params)
    rate_at = rate if callable(rate) else lambda _: rate
    model_states = [
        fold_in_number(state.model_state, jnp.uint32(worker)) if workers > 1 else state.model_state
        for worker in range(workers)
    ]
    numbers = itertools.count()  # `next` and `append` are atomic in CPython: no lock needed
    log: list[tuple[float, int, int, float]] = []
    program = step.compile_gradients(shared.read(), state.model_state, examples(0))

    def work(worker: int, ends: threading.Event) -> None:
        while not ends.is_set() and (number := next(numbers)) < updates:
            before, params = len(log), shared.read()
            gradients, sums, model_states[worker] = program(params, model_states[worker], step.put(examples(number)))
            total, count = (float(x) for x in sums["loss"])
            log.append((total / max(count, 1e-30), before, worker, shared.write(gradients, rate_at(number))))

    seconds = _run_threads(work, workers)
    loss, before, worker, write_share = np.array(log).T
    return Race(
        state=replace(state, params=shared.read(), model_state=model_states[0]),
        loss=loss,
        staleness=np.arange(len(log)) - before.astype(int),
        worker=worker.astype(int),
        write_share=write_share,
        seconds=seconds,
    )


class _SharedParameters:
    """The parameters as numpy arrays, which all threads read and write."""

    def __init__(self, params: object):
        leaves, self.structure = flatten_by_path(params)
        self.arrays = {path: np.array(leaf) for path, leaf in leaves.items()}
        self.shardings = {path: leaf.sharding for path, leaf in leaves.items()}
        self.size = sum(array.size for array in self.arrays.values())

    def read(self) -> Any:
        """Returns a copy on the device, in the structure of the parameters."""
        copies = [jax.device_put(array.copy(), self.shardings[path]) for path, array in self.arrays.items()]
        return self.structure.unflatten(copies)

    def write(self, gradients: object, rate: float) -> float:
        """Subtracts rate * gradients in place; returns the fraction of all elements that it wrote."""
        leaves = {path: np.asarray(leaf) for path, leaf in flatten_by_path(gradients)[0].items()}
        return sum(_write(self.arrays[path], leaf, rate) for path, leaf in leaves.items()) / self.size


def _run_threads(work: Callable[[int, threading.Event], None], workers: int) -> float:
    """Runs `work` in threads, which end when the event is set; returns the wall-clock seconds."""
    ends, begin = threading.Event(), time.perf_counter()
    with ThreadPoolExecutor(workers, thread_name_prefix="hogwild") as pool:
        threads = [pool.submit(work, worker, ends) for worker in range(workers)]
        try:
            wait(threads, return_when=FIRST_EXCEPTION)
        finally:
            ends.set()  # after an exception in a thread or in `wait`, the other threads end too
    seconds = time.perf_counter() - begin
    for thread in threads:
        thread.result()
    return seconds


def _write(shared: np.ndarray, gradient: np.ndarray, rate: float) -> int:
    """Subtracts rate * gradient in place where the gradient is not zero; returns the number of elements written."""
    places = np.flatnonzero(gradient)
    if len(places) < SPARSE * gradient.size:
        shared.reshape(-1)[places] -= (rate * gradient.reshape(-1)[places]).astype(shared.dtype)
        return len(places)
    np.subtract(shared, (rate * gradient).astype(shared.dtype), out=shared)  # numpy releases the GIL here
    return gradient.size


def _check(step: Step, workers: int, updates: int) -> None:
    devices = list(step.layout.device_mesh.devices.flat)
    if len(devices) > 1 or devices[0].platform != "cpu":
        raise refuse(
            f"Hogwild! on {len(devices)} x {devices[0].device_kind}",
            rule="its threads write into one memory, which they read through one device of the processor",
            fix="jp.compose(model, jp.Parallel(), jax.devices('cpu')[:1])",
        )
    for name, value in {"workers": workers, "updates": updates}.items():
        if not 1 <= value <= 2**31 - 1:
            raise refuse(f"{name} = {value}", rule=f"Hogwild! has one of the {name} or more", fix=f"{name} = 1")
