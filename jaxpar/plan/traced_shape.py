"""The shape of a model that is planned only from its trace: parameters, matmuls, programs, and how axes split them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.model.splits import ModelSplit, Sizes
from jaxpar.plan.model.stages import StageTrace
from jaxpar.plan.model.tracing import ModelTrace
from jaxpar.plan.traced_stages import microbatch_bytes


@dataclass(frozen=True, kw_only=True)
class ShardAmounts:
    """Parameters on a device, or bytes of other state, by the sizes of `fsdp` and of further axes.

    Attributes:
      axes: These axes; `fsdp` is the first.
      by_sizes: Maps their sizes to the amount on a device.
    """

    axes: tuple[str, ...]
    by_sizes: Mapping[tuple[int, ...], int]

    @property
    def total(self) -> int:
        """The amount of the whole model."""
        return self.by_sizes[(1,) * len(self.axes)]

    def supports(self, candidate: Candidate) -> np.ndarray:
        """Whether the table has the sizes of each layout."""
        sizes, indices = _distinct([candidate.size(axis) for axis in self.axes])
        return np.array([size in self.by_sizes for size in sizes])[indices]

    def shard_amount(self, candidate: Candidate) -> Any:
        """Returns the amount on a device; an even share for sizes that the table does not have."""
        return self._amounts([candidate.size(axis) for axis in self.axes])

    def unsharded_amount(self, candidate: Candidate) -> Any:
        """Returns the amount on a device before fsdp shards it."""
        return self._amounts([np.ones_like(candidate.fsdp), *(candidate.size(axis) for axis in self.axes[1:])])

    def _amounts(self, columns: Sequence[np.ndarray]) -> Any:
        sizes, indices = _distinct(columns)
        return np.array([self.by_sizes.get(size, -(-self.total // math.prod(size))) for size in sizes])[indices]


def _distinct(columns: Sequence[np.ndarray]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Returns the distinct sizes of several axes, and the index of each layout's sizes."""
    arrays = np.broadcast_arrays(*columns)
    distinct, indices = np.unique(np.stack([array.ravel() for array in arrays]), axis=1, return_inverse=True)
    return [tuple(sizes) for sizes in distinct.T.tolist()], indices.reshape(arrays[0].shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedShape:
    """Parameters, matmuls and programs of a model, as its trace shows them.

    Attributes:
      name: The user's name of the model.
      shards: Parameters on a device.
      other_state: Bytes of state on a device that is not a parameter.
      largest_array: Parameters of the largest array that is gathered at once: a parameter, or a layer of a stack.
      trace: Matmuls, and estimates of the compiled program.
      itemsize: Bytes of the matmuls' dtype: 2 or 4.
      dims: Maps the name of parameter dims to a number that divides the size of all dims of that name.
      parameters_by_dim: Maps a dim name to the number of parameters in arrays that have such a dim.
      stacked: Share of the parameters that are stacks of layers, whose gradients a scan returns all at once.
      arrays: (number of layers, elements per layer) of each trained array; 1 layer if it is not a stack.
      splits: Maps sizes of (context, tensor) to the split of the model; `shards` then has these axes.
      no_splits: Sizes of these axes that are left out, each with the reason.
      named_axes: Those of these axes that split dims as the model names them: no specs are found for them, and they
        sum gradients together with `data`.
      stages: The parts of the model in a pipeline; None if it cannot be pipelined.
      no_pipeline: The reason why the model cannot be pipelined; "" if it can.
    """

    name: str
    shards: ShardAmounts
    other_state: ShardAmounts
    largest_array: int
    trace: ModelTrace
    itemsize: int
    dims: Mapping[str, int] = field(default_factory=dict)
    parameters_by_dim: Mapping[str, int] = field(default_factory=dict)
    stacked: float = 0.0
    arrays: tuple[tuple[int, int], ...] = ()
    splits: Mapping[Sizes, ModelSplit] = field(default_factory=dict)
    no_splits: tuple[str, ...] = ()
    named_axes: tuple[str, ...] = ()
    stages: StageTrace | None = None
    no_pipeline: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.shards.total

    @property
    def layers(self) -> int:
        """Number of equal layers that a pipeline can cut; 1 if there are none."""
        return self.stages.layers if self.stages else 1

    @property
    def pipe_sizes(self) -> tuple[int, ...]:
        """Numbers of stages that divide the layers, 1 included."""
        return (1, *self.stages.pipe_sizes) if self.stages else (1,)

    @property
    def stage_trace(self) -> StageTrace:
        """The parts of the model in a pipeline.

        Raises:
          JaxparError: If it cannot be pipelined.
        """
        if self.stages is None:
            raise refuse(
                f"a pipeline of {self.name}",
                rule=f"no pipeline cuts it: {self.no_pipeline}",
                fix="a layout with pipe 1",
            )
        return self.stages

    def message_bytes(self, candidate: Candidate) -> Any:
        """Returns the bytes that pass from a stage to the next one for a microbatch."""
        return microbatch_bytes(self.stage_trace.message, candidate)

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of the matmuls and convolutions of the loss and its gradients, without recomputation."""
        matmuls = (*self.trace.matmuls, *self.trace.backward)
        return float(rows) * sum(matmul.flop * matmul.times for matmul in matmuls)
