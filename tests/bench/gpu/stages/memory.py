"""The peak of memory of six jobs: three sizes, with and without recomputation.

All jobs run in one process, the smallest peak first: the allocator's peak only grows, and is a job's own where it is
above all that came before it. Each is compiled before its state is made, so that the compiler's trials do not count.
"""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.memory import memory

from ...gpu.jobs.training import REAL, TINY, Training, predict_memory
from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work

Sizes = Mapping[str, Training]


def run(work: Work) -> None:
    """Measures."""
    device = visible_devices()[0]
    for name, job in sorted(work.sizes.items(), key=lambda item: _expected(item[1])):
        work.measure(name, lambda job=job: _peak(job, device))
        gc.collect()


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields the bytes that XLA assigns for the absent device, those of the planner, and those of shapes and specs."""
    for name, job in sizes.items():
        yield name, predict_memory(job, hardware)


def _expected(job: Training) -> float:
    return float(memory(job.shape, job.candidate, JAXPAR_FUSED).total)


def _peak(job: Training, device: Any) -> dict[str, Any]:
    before = _most(device)
    built = job.on([device])
    program = built.step.lower(built.step.abstract(), built.batch).compile()
    after_compiling = _most(device)
    stats = program.memory_analysis()
    said = {
        "compiled_here_bytes": stats.argument_size_in_bytes + stats.temp_size_in_bytes
        + stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "before_bytes": before, "after_compiling_bytes": after_compiling,
    }  # fmt: skip
    try:
        state, batch = built.state(), built.step.put(job.batches())
        static = sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves((state, batch)))
        for _ in range(2):
            state, _ = jax.block_until_ready(program(state, batch))
    except jax.errors.JaxRuntimeError as error:
        return said | {"absent": str(error).splitlines()[0][:300]}
    peak = _most(device)
    if device.platform == "gpu" and peak <= after_compiling:
        return said | {"static_bytes": static, "absent": "its peak is below one that was there before"}
    return said | {"static_bytes": static, "peak_bytes": peak or said["compiled_here_bytes"]}


def _most(device: Any) -> int:
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


def _each(jobs: Mapping[str, Training]) -> Sizes:
    return {f"{name} {remat}": replace(job, remat=remat) for name, job in jobs.items() for remat in ("none", "full")}


STAGE = Stage(
    name="memory", seconds=60, limit=180,
    measures="the peak of memory of six jobs, and the bytes of their state",
    beside="XLA's buffers for the absent device and here, the planner, shapes and specs",
    real=_each(REAL), tiny={"tiny": TINY, "tiny again": TINY},
    run=run, predict=predict,
)  # fmt: skip
