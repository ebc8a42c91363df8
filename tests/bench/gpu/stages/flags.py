"""The same step, compiled in other ways: which of them pays on one GPU. Each program stands beside the plain one.

Flags of several GPUs (when collectives are combined, pipelined or hidden) are not here: one GPU sends nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpar.mesh.devices import visible_devices

from ...gpu.jobs.training import REAL, TINY, Training
from ...gpu.stage import Stage
from ...gpu.work import Work

WAYS: Mapping[str, Mapping[str, Any]] = {  # what XLA is told
    "plain": {},
    "O1": {"optimization_level": "O1"},  # also pipelines collectives, and takes more memory for it
    "no CUDA graphs": {"xla_gpu_enable_command_buffer": ""},  # each kernel is launched by the host
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "no Triton": {"xla_gpu_enable_triton_gemm": False},  # all matmuls by cuBLAS
}
CHANGED = {"unrolled": {"scan": False}}  # what the model is told
NOT_DONATED = "not donated"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      job: What is trained.
      steps: That are timed.
      ways: Names of `WAYS` and `CHANGED`.
    """

    job: Training
    steps: int
    ways: tuple[str, ...] = (*WAYS, *CHANGED, NOT_DONATED)


def run(work: Work) -> None:
    """Measures."""
    device, sizes = visible_devices()[0], work.sizes
    for name in sizes.ways:
        work.measure(name, lambda name=name: _step(sizes, name, device))


def _step(sizes: Sizes, name: str, device: Any) -> dict[str, Any]:
    job = replace(sizes.job, **CHANGED.get(name, {}))
    built = job.on([device])
    begin = time.perf_counter()
    try:
        lowered = built.step.lower(built.step.abstract(), built.batch)
        program = lowered.compile(compiler_options=dict(WAYS.get(name, {})))
        compiling = time.perf_counter() - begin
        stats = program.memory_analysis()
        state, batch = built.state(), built.step.put(job.batches())
        keep = name == NOT_DONATED
        state = _run(program, state, batch, keep=keep)
        begin = time.perf_counter()
        for _ in range(sizes.steps):
            state = _run(program, state, batch, keep=keep)
        jax.block_until_ready(state)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # an option that this version of XLA has not
        return {"absent": str(error).splitlines()[0][:300]}
    seconds = (time.perf_counter() - begin) / sizes.steps
    return {"seconds": seconds, "compiling_seconds": compiling, "temporary_bytes": stats.temp_size_in_bytes}


def _run(program: Any, state: Any, batch: Any, *, keep: bool) -> Any:
    """Returns the next state; where it is kept, of a copy, which is what a step that donates nothing must allocate."""
    given = jax.tree.map(lambda leaf: leaf.copy(), state) if keep else state
    return program(given, batch)[0]


STAGE = Stage(
    name="flags", seconds=100, limit=240,
    measures="the step compiled in other ways: O1, CUDA graphs, latency hiding, cuBLAS alone, unrolled, not donated",
    beside="each other",
    real=Sizes(REAL["124m"], steps=10), tiny=Sizes(TINY, steps=1, ways=("plain", NOT_DONATED)),
    run=run,
)  # fmt: skip
