"""The optimizer's state in host memory: the time that it takes, and the memory of the device that it frees."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpar.errors import JaxparError
from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.machine.hardware import Hardware

from ...gpu.jobs.running import Runs
from ...gpu.jobs.training import REAL, TINY, Training
from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work

MOMENTS = 8  # bytes of AdamW's state per parameter
LINK = 50e9  # bytes per second between host and device, one way: assumed for PCIe 5.0 x16, whose line rate is 63


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      job: What is trained.
      steps: That are timed.
    """

    job: Training
    steps: int


def run(work: Work) -> None:
    """Measures."""
    device, sizes = visible_devices()[0], work.sizes
    for name in ("on the device", "in host memory"):
        job = replace(sizes.job, offload=name == "in host memory")
        work.measure(name, lambda job=job: _step(job, device, sizes.steps))
    found = {line["what"]: line for line in work.lines.own() if line["stage"] == work.stage}
    both = [found[name]["seconds"] for name in ("on the device", "in host memory") if "seconds" in found[name]]
    if len(both) == 2:
        work.measure("there and back", lambda: {"seconds": both[1] - both[0]})
    else:
        work.absent("there and back", "one of the two did not run")


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields the seconds of reading the state and of writing it, one after the other."""
    moved = 2 * MOMENTS * sizes.job.shape.parameters
    yield "there and back", {"formula_seconds": moved / LINK}


def _step(job: Training, device: Any, steps: int) -> dict[str, Any]:
    try:
        runs = Runs(job, device)
        seconds = runs.steps(steps)
    except (JaxparError, jax.errors.JaxRuntimeError) as error:
        return {"absent": str(error).splitlines()[0][:300]}
    return {"seconds": seconds, "device_bytes": (device.memory_stats() or {}).get("bytes_in_use")}


STAGE = Stage(
    name="offload", seconds=50, limit=120,
    measures="the step with the optimizer's state in host memory, and without",
    beside="a formula: its bytes over the link, there and back",
    real=Sizes(REAL["350m"], steps=5), tiny=Sizes(TINY, steps=1),
    run=run, predict=predict,
)  # fmt: skip
