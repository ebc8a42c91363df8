"""The layers of a model one by one, as `jaxpar measure layers` measures them: a profile for `jaxpar partition`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxpar as jp
from jaxpar.measure.layer_times import measure
from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model import layer_time
from jaxpar.step.numerics import Numerics

from ...gpu.jobs.training import REAL, TINY, Training
from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage: the model."""

    job: Training


def run(work: Work) -> None:
    """Measures all layers at once, and says of each kind what it takes."""
    visible_devices()
    kinds = cache(lambda: _layers(work.sizes.job))
    for kind in ("Embedding", "Block 0", "Head and loss"):
        work.measure(kind, lambda kind=kind: kinds()[kind])


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields the planner's seconds of a block and of the head, forward and backward."""
    job = sizes.job
    forward, backward, _ = layer_time.block(job.shape, job.candidate, hardware, JAXPAR_FUSED)
    yield "Block 0", _times(forward, backward)
    yield "Head and loss", _times(*layer_time.head(job.shape, job.candidate, hardware, JAXPAR_FUSED))


def _times(forward: layer_time.Cost, backward: layer_time.Cost) -> Numbers:
    return {"planner_forward_seconds": float(forward.total), "planner_backward_seconds": float(backward.total)}


def _layers(job: Training) -> dict[str, dict[str, Any]]:
    batch = {name: jax.ShapeDtypeStruct((job.batch, job.seq), jnp.int32) for name in ("inputs", "targets")}
    profile = measure(partial(jp.Decoder, job.settings), jp.next_token_loss, batch, Numerics(precision=job.precision))
    return {
        node.layer: {
            "forward_seconds": node.forward / 1e3, "backward_seconds": node.backward / 1e3,
            "handed_on_bytes": node.activations, "parameter_bytes": node.parameters,
        }
        for node in profile.nodes[1:]
    }  # fmt: skip


STAGE = Stage(
    name="layers", seconds=30, limit=90,
    measures="forward and backward of an embedding, a block and the head",
    beside="the planner's formulas, which partition takes where nothing is measured",
    real=Sizes(REAL["350m"]), tiny=Sizes(TINY),
    run=run, predict=predict,
)  # fmt: skip
