"""The step of three models: its time beside the expert's and PyTorch's, what the host adds, and what compiling takes.

torch       by another process, before this one takes the GPU's memory
step        the host runs ahead, as in training
expert      both steps in turn, in random order: the ratio is the median of pairs
host        the longest waits of the GPU, one for each step, and all of them, as the profiler sees it
input       the same step, each with a batch of its own from the host
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.machine.hardware import Hardware

from ...gpu.jobs.beside import expert_step, torch_step
from ...gpu.jobs.running import Runs
from ...gpu.jobs.traced import gaps, trace
from ...gpu.jobs.training import REAL, TINY, Training, predict_memory, predict_time
from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      job: What is trained.
      steps: That are timed, one after another.
      pairs: Of a step of jaxpar and one of the expert.
    """

    job: Training
    steps: int
    pairs: int


def run(work: Work) -> None:
    """Measures."""
    job: Training = work.sizes.job
    work.measure("torch", lambda: torch_step(job, cuda=not work.rehearsal))
    runs = Runs(job, visible_devices()[0])
    work.measure("step", lambda: _step(runs, work.sizes))
    work.measure("host", lambda: _host(runs))
    work.measure("input", lambda: _input(runs, work.sizes))
    work.measure("expert", lambda: _expert(runs, work.sizes))


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields the seconds of a step, and the bytes of its peak."""
    yield "step", {**predict_time(sizes.job, hardware), **predict_memory(sizes.job, hardware)}


def _step(runs: Runs, sizes: Sizes) -> dict[str, Any]:
    job = sizes.job
    runs.steps(3)
    blocks = [runs.steps(sizes.steps) for _ in range(3)]
    seconds = statistics.median(blocks)
    stats = runs.batch["inputs"].device.memory_stats() or {}
    return {
        "seconds": seconds, "spread": max(blocks) / min(blocks) - 1, "flop_per_second": job.flop / seconds,
        "tokens_per_second": job.tokens / seconds, "first_step_seconds": runs.compiling,
        "compiled_before": runs.from_cache,
        "peak_bytes": stats.get("peak_bytes_in_use", 0), "static_bytes": runs.built.static,
        "parameters": job.shape.parameters,
    }  # fmt: skip


def _host(runs: Runs) -> dict[str, Any]:
    steps = 5
    kernels = trace(lambda: runs.steps(steps))
    if not kernels:
        return {"absent": "the profiler saw no kernel"}
    between = gaps(kernels)
    return {
        "gap_seconds": sum(between[: steps - 1]) / (steps - 1),  # the longest ones: where a step ends, if any is there
        "idle_seconds": sum(between) / steps,
        "profiled_seconds": (kernels[-1].end - kernels[0].start) / steps,
        "kernels": len(kernels) / steps,
    }


def _input(runs: Runs, sizes: Sizes) -> dict[str, Any]:
    host = runs.built.training.batches()
    with_input, without = ([] for _ in range(2))
    for _ in range(3):
        without.append(runs.steps(sizes.steps))
        with_input.append(runs.steps(sizes.steps, lambda: host))
    return {"wait_seconds": statistics.median(with_input) - statistics.median(without)}


def _expert(runs: Runs, sizes: Sizes) -> dict[str, Any]:
    device = runs.built.devices[0]
    step, state = expert_step(sizes.job, device)
    try:
        state = jax.block_until_ready(step(state))
    except jax.errors.JaxRuntimeError as error:  # both states at once may be too much
        return {"absent": str(error).splitlines()[0][:300]}
    ratios, expert, order = [], [], random.Random(0)
    for _ in range(sizes.pairs):
        seconds = {}
        for side in order.sample(("ours", "expert"), 2):
            begin = time.perf_counter()
            if side == "ours":
                runs.once()
            else:
                state = jax.block_until_ready(step(state))
            seconds[side] = time.perf_counter() - begin
        ratios.append(seconds["ours"] / seconds["expert"])
        expert.append(seconds["expert"])
    return {"ratio_to_expert": statistics.median(ratios), "expert_seconds": statistics.median(expert)}


def stage(name: str) -> Stage:
    """Returns the stage of one model."""
    return Stage(
        name=name, seconds=110, limit=200,
        measures="step, FLOP per second, host gap, input wait, time to compile",
        beside="expert twin, torch.compile, timeline, planner",
        real=Sizes(REAL[name], steps=10, pairs=60), tiny=Sizes(TINY, steps=1, pairs=1),
        run=run, predict=predict,
    )  # fmt: skip


STAGES = tuple(map(stage, REAL))
