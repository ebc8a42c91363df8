"""One step kernel by kernel: what the profiler saw of each HLO instruction, and what the timeline says of it.

Commands that a CUDA graph launches have no names in a profile, so graphs are off here (`Stage.flags`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.hlo.text import parse
from jaxpar.inspector.timeline import price_kernels
from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.machine.hardware import Hardware

from ...gpu.jobs.traced import by_instruction, trace
from ...gpu.jobs.training import REAL, TINY, Training, attention_seconds, compiled
from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work

ATTENTION = "__cudnn$fmha"  # the timeline knows no time of it: it is the planner's
STEPS, SHOWN = 3, 80


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage: the jobs by name."""

    jobs: dict[str, Training]


def run(work: Work) -> None:
    """Measures."""
    device = visible_devices()[0]
    for name, job in work.sizes.jobs.items():
        work.measure(name, lambda job=job: _kernels(job, device, work.hardware))


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields the seconds of all kernels."""
    for name, job in sizes.jobs.items():
        report, _ = compiled(job, hardware.chip.key)
        if report.timeline:
            yield name, {"timeline_kernel_seconds": report.timeline.compute + sum(attention_seconds(job, hardware))}


def _kernels(job: Training, device: Any, hardware: Hardware) -> dict[str, Any]:
    built = job.on([device])
    program = built.step.lower(built.step.abstract(), built.batch).compile()
    state, batch = built.state(), built.step.put(job.batches())

    def steps() -> None:
        nonlocal state
        for _ in range(STEPS):
            state, metrics = program(state, batch)
        jax.block_until_ready(metrics)

    steps()
    measured = by_instruction(trace(steps), steps=STEPS)
    module = parse(program.as_text())
    sizes = {str(axis): size for axis, size in built.step.layout.device_mesh.shape.items()}
    modelled = price_kernels(module, sizes, hardware.chip, per_node=1)
    fused = {op.name for _, op in module.ops() if ATTENTION in op.attributes}
    core = sum(attention_seconds(job, hardware))
    seen = sum(measured.get(name, 0.0) for name in fused)
    others = [name for name in {*measured, *modelled} if name not in fused and name]
    errors = sum(abs(measured.get(name, 0.0) - modelled.get(name, 0.0)) for name in others) + abs(seen - core)
    total = sum(measured.values())
    micro = lambda found, name: round(1e6 * found.get(name, 0.0), 1)  # noqa: E731
    return {
        "kernel_seconds": total,
        "unnamed_seconds": measured.get("", 0.0),
        "attention_seconds": seen,
        "modelled_here_seconds": sum(modelled[name] for name in others if name in modelled) + core,
        "sum_of_errors": errors / total if total else None,
        "instructions": {
            name: [micro(measured, name), micro(modelled, name), _said(module, name)]
            for name in sorted(others, key=lambda name: -measured.get(name, 0.0))[:SHOWN]
        },
    }


def _said(module: Any, name: str) -> str:
    """Returns what an instruction is of, in the words of the model."""
    return next((op.label[-80:] for _, op in module.ops() if op.name == name), "")


STAGE = Stage(
    name="kernels", seconds=40, limit=120,
    measures="one step by HLO instruction, microseconds measured and modelled",
    beside="timeline, instruction by instruction",
    real=Sizes({"124m": REAL["124m"]}), tiny=Sizes({"tiny": TINY, "again": TINY}),
    run=run, predict=predict, flags="--xla_gpu_enable_command_buffer=",
)  # fmt: skip
