"""The plan of any model: traced once on shapes, planned over data, fsdp, context, tensor, expert and pipe, and added
techniques.

    TracedShape      what the trace shows: parameters, matmuls, programs, splits, stages
    traced_memory    bytes of a step, by cause       traced_stages    both, in a pipeline
    traced_time      seconds of a step, by cause

The program is traced once per remat policy, split by the dims that were found for sizes of `context` and `tensor`, and
estimated as XLA compiles it; `--verify` compiles it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.mesh.collective import Collective
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate, Choices, schedule_traits
from jaxpar.plan.enumeration import all_layouts, select
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import divisors
from jaxpar.plan.techniques.table import TECHNIQUES, collectives, unused_axes
from jaxpar.plan.time import StepTime
from jaxpar.plan.traced_memory import traced_memory
from jaxpar.plan.traced_shape import TracedShape
from jaxpar.plan.traced_stages import supports
from jaxpar.plan.traced_time import traced_time

REMATS = "all_dots", "dots", "full"  # policies of models that mark blocks, from the least recomputation on


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A model that is planned only from its trace.

    Attributes:
      shape: Parameters, matmuls and programs.
      recipe: Bytes per parameter of the training state.
      sum_loss: Whether the loss is a (sum, count), which microbatches need.
      unsupported: Sizes of `fsdp` and of further axes that the model does not support, each with the reason.
    """

    shape: TracedShape
    recipe: Recipe
    sum_loss: bool
    unsupported: Mapping[tuple[int, ...], str]

    unit = "examples", 1
    has_published_runs = False  # all published runs are of decoders

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.shape.parameters

    @property
    def layers(self) -> int:
        """Number of equal layers that a pipeline can cut; 1 if there are none."""
        return self.shape.layers

    @property
    def named_axes(self) -> tuple[str, ...]:
        """Axes of `context` and `tensor` that split dims as the model names them."""
        return self.shape.named_axes

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of the matmuls and convolutions of the loss and its gradients, without recomputation."""
        return self.shape.step_flop(rows)

    def masked_flop(self, rows: int) -> float:
        """Returns 0: the trace does not show masks."""
        return 0.0

    def exclusions(self, choices: Choices) -> tuple[str, ...]:
        """Returns the axes, remat policies and sizes that the model does not support, with reasons."""
        remats = [policy for policy in REMATS if policy not in self.shape.trace.programs]
        return (
            *unused_axes(self.shape),
            *["microbatches: the loss is a mean; return (sum, count) to accumulate over them"] * (not self.sum_loss),
            *[f"remat {', '.join(remats)}: {self.shape.name} marks no blocks for it"] * bool(remats),
            *self.shape.no_splits,
            *_pipelines_left_out(self.shape, choices),
            *dict.fromkeys(self.unsupported.values()),
        )

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts of data, fsdp and further axes, with the model's remat policies.

        Raises:
          JaxparError: If the devices do not divide the examples.
        """
        shape = self.shape
        remats = tuple(name for name in choices.remats if name in shape.trace.programs)
        layouts = all_layouts(shape, devices=devices, rows=rows, choices=replace(choices, remats=remats))
        if layouts is None:
            replicas = " x ".join(axis for axis in batch_axes() if axis in TECHNIQUES)
            raise refuse(
                f"{devices:,} devices for {rows} examples",
                rule=f"{replicas}, the devices, divides the examples of the global batch",
                fix=f"{max(n for n in divisors(rows) if n <= devices)} devices, or a global batch of "
                f"{-(-rows // devices) * devices}",
            )
        supported = shape.shards.supports(layouts)
        if shape.stages:
            supported = np.where(layouts.pipe > 1, supports(shape.stages, layouts), supported)
        return select(layouts, supported & (self.sum_loss | (layouts.microbatches == 1)))

    def storable(self, candidate: Candidate) -> Any:
        """Whether jaxpar's program can store the parameters in equal shards; `legal` has left the others out."""
        return np.full(np.shape(candidate.pipe), True)

    def costs(self, software: SoftwareModel) -> "TracedCosts":
        """Returns the costs of layouts, with collectives in the dtype of the matmuls."""
        wire = (float(self.shape.itemsize),) * 2
        return TracedCosts(shape=self.shape, recipe=self.recipe, software=replace(software, wire=wire))


def _pipelines_left_out(shape: TracedShape, choices: Choices) -> Iterator[str]:
    if shape.stages is None:
        return
    if further_axes := shape.shards.axes[1:]:
        yield f"pipe with {' or '.join(further_axes)}: stages are priced with layers that pipe alone cuts"
    names = [name for name in LIBRARY if name not in choices.schedules or schedule_traits(name).split]
    whole = [name for name in names if not schedule_traits(name).split]
    if whole:
        yield f"schedules {', '.join(whole)}: --schedules all tries them too"
    if split := [name for name in names if name not in whole]:
        yield f"schedules {', '.join(split)}: they split backwards, which is priced for decoders"


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedCosts:
    """Bytes, seconds and collectives of layouts of a traced model.

    Attributes:
      shape: The model.
      recipe: Bytes per parameter of the training state.
      software: The program, with collectives in the dtype of the matmuls.
    """

    shape: TracedShape
    recipe: Recipe
    software: SoftwareModel

    @property
    def attention(self) -> str:
        """A note that attention is priced by its traced matmuls; "" if there are no batched matmuls."""
        batched = any(matmul.kind == "batched" for matmul in self.shape.trace.matmuls)
        return "as traced, without a GPU's fused kernel" if batched else ""

    @property
    def largest_layer(self) -> float:
        """Bytes of the largest array's training state, and of the activations of one block and one row."""
        trace = self.shape.trace
        activations = trace.programs["none"].peak(1, weights=0.0, gradients=0.0)["activations"]
        return self.recipe.total * self.shape.largest_array + activations / max(trace.blocks, 1)

    def memory(self, candidate: Candidate) -> Memory:
        """Returns the bytes of a device, by cause."""
        return traced_memory(self.shape, candidate, self.software, self.recipe)

    def time(self, candidate: Candidate, hardware: Hardware) -> StepTime:
        """Returns the seconds of a step, by cause."""
        return traced_time(self.shape, candidate, hardware, self.software, self.recipe)

    def collectives(self, candidate: Candidate) -> list[Collective]:
        """Returns the collectives of one step of one layout; see `jaxpar.plan.techniques.table`."""
        return collectives(self.shape, candidate, self.software)

    def host_bytes(self, candidate: Candidate) -> float:
        """Returns 0.0: a traced model offloads nothing."""
        return 0.0
