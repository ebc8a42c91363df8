"""Hogwild!: threads train one set of parameters in shared memory, without locks.

    thread 0   read ─ gradient ─ write ─ read ─ gradient ─ write         the parameters are arrays of numpy,
    thread 1      read ─ gradient ──── write ─ read ─ ...                 the same for all threads

It runs: the threads race. XLA computes gradients while other threads read and write. A thread may read parameters of
which another has written half, and of two threads that write an element at once one may undo what the other wrote. The
paper shows that SGD converges nevertheless where gradients are sparse, so that threads seldom write the same elements.
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
from jaxpar.step.state import State, fold_in_number, init_state
from jaxpar.step.step import Step

SPARSE = 0.25  # share of non-zero elements below which only they are written


@dataclass(frozen=True, kw_only=True)
class Race:
    """The result of threads that trained one model. Arrays have an entry per update, in the order of the writes.

    Attributes:
      state: With the parameters at the end, and the model state of the first thread.
      loss: Mean loss of the examples of each update.
      staleness: Updates of other threads that were written between reading and writing.
      worker: Which thread wrote it.
      write_share: Share of the elements of the parameters that it wrote.
      seconds: From the first reading to the last writing, by the clock, without compilation.
    """

    state: State
    loss: np.ndarray
    staleness: np.ndarray
    worker: np.ndarray
    write_share: np.ndarray
    seconds: float


def race(
    step: Step,
    examples: Callable[[int], Mapping[str, Any]],
    *,
    workers: int,
    updates: int,
    rate: float | Callable[[int], float],
    seed: int = 0,
) -> Race:
    """Trains by Hogwild! (Recht, Ré, Wright, Niu 2011, arXiv:1106.5730, algorithm 1) on this machine's processor.

    Each thread repeats: read all parameters x, compute the gradient g of its examples, and write x_v - rate g_v for
    each element v at which g is not zero. No thread waits for another. The paper's update is of one example; here it
    is of whatever batch `examples` returns. Two runs differ, as threads race otherwise.

    Args:
      step: On one device of the processor. It differentiates; its optimizer is not used, as elements are written one
        by one.
      examples: Number of an update to its batch. Threads call it at the same time.
      workers: Threads.
      updates: Of all threads together.
      rate: Learning rate, or number of an update to it.
      seed: Of the initial parameters.

    Raises:
      JaxparError: If the step's layout is not one processor device, or there is no worker or no update.
    """
    _check(step, workers, updates)
    state = init_state(step.layout, step.optimizer, seed=seed)
    initial, structure = flatten_by_path(state.params)
    shared = {path: np.array(leaf) for path, leaf in initial.items()}
    size = sum(array.size for array in shared.values())
    rate_at = rate if callable(rate) else lambda _: rate
    model_states = [
        fold_in_number(state.model_state, jnp.uint32(worker)) if workers > 1 else state.model_state
        for worker in range(workers)
    ]
    numbers = itertools.count()  # `next` and `append` are single operations of the interpreter: no lock of ours
    log: list[tuple[float, int, int, float]] = []
    ends = threading.Event()

    def read() -> Any:
        return structure.unflatten(
            [jax.device_put(array.copy(), initial[path].sharding) for path, array in shared.items()]
        )

    program = step.compile_gradients(read(), state.model_state, examples(0))

    def work(worker: int) -> None:
        while not ends.is_set() and (number := next(numbers)) < updates:
            before, params = len(log), read()
            tree, sums, model_states[worker] = program(params, model_states[worker], step.put(examples(number)))
            total, count = (float(x) for x in sums["loss"])
            gradients = {path: np.asarray(leaf) for path, leaf in flatten_by_path(tree)[0].items()}
            written = sum(_write(shared[path], leaf, rate_at(number)) for path, leaf in gradients.items())
            log.append((total / max(count, 1e-30), before, worker, written / size))

    begin = time.perf_counter()
    with ThreadPoolExecutor(workers, thread_name_prefix="hogwild") as pool:
        threads = [pool.submit(work, worker) for worker in range(workers)]
        try:
            wait(threads, return_when=FIRST_EXCEPTION)
        finally:
            ends.set()  # after an exception in one of them, or in whoever waits, the others end too
    seconds = time.perf_counter() - begin
    for thread in threads:
        thread.result()
    loss, before, worker, write_share = np.array(log).T
    return Race(
        state=replace(state, params=read(), model_state=model_states[0]),
        loss=loss,
        staleness=np.arange(len(log)) - before.astype(int),
        worker=worker.astype(int),
        write_share=write_share,
        seconds=seconds,
    )


def _write(shared: np.ndarray, gradient: np.ndarray, rate: float) -> int:
    """Subtracts a gradient in place, from the elements at which it is not zero; returns how many it wrote."""
    places = np.flatnonzero(gradient)
    if len(places) < SPARSE * gradient.size:
        shared.reshape(-1)[places] -= (rate * gradient.reshape(-1)[places]).astype(shared.dtype)
        return len(places)
    np.subtract(shared, (rate * gradient).astype(shared.dtype), out=shared)  # numpy lets other threads run meanwhile
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
