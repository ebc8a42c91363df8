"""The parts of a traced model that a pipeline runs at different times, each estimated as a program of its own.

    embedding ──► layer ──► ... ──► layer ──► head and loss      forward; the head's gradient at once
                    └── kept ──┐
    gradient  ◄── layer ◄── ... ◄── layer                        backward, from what the forward keeps

All layers are equal, so one is traced. A stage runs as many of them one after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr

from jaxpar.plan.model.liveness import Estimate, estimate
from jaxpar.plan.model.program import DEGREE
from jaxpar.plan.model.program_reader import ROWS, read_program

FEW, MANY = ROWS[0]  # rows of a microbatch at which parts are traced


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPrograms:
    """The programs of one layer under one remat policy, for any number of rows.

    Attributes:
      forward: From the layer's input to its output and the kept arrays.
      backward: From the kept arrays and the output's gradient to the gradients of parameters and input.
      kept: Bytes of the arrays that the backward reads. A polynomial in the rows, from the constant on.
    """

    forward: Estimate
    backward: Estimate
    kept: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTrace:
    """A traced model whose equal layers a pipeline can cut.

    Attributes:
      layers: Number of layers.
      layer_parameters: Parameters of one layer.
      end_parameters: All other parameters, which every stage holds while the table runs.
      arrays: Number of parameter arrays (in a layer, in the rest of the model).
      message: Bytes of the activations that a layer passes on. A polynomial in the rows of a microbatch, like `batch`.
      batch: Bytes of the batch.
      embedding: The program before the layers.
      embedding_gradient: The gradients of its parameters; it computes the embedding again.
      head: The program after the layers and the loss, with their gradients.
      programs: Maps each remat policy to the programs of a layer.
      shards: Maps sizes of (pipe, fsdp) to the number of parameters that a device stores between steps.
      other_state: Maps the same sizes to a device's bytes of state that is not a parameter.
      update_kernels: Kernels of the update of all parameters.
      copies: Whether the table reads copies of the parameters: in another dtype, or stacked from a list of layers.
    """

    layers: int
    layer_parameters: int
    end_parameters: int
    arrays: tuple[int, int]
    message: np.ndarray
    batch: np.ndarray
    embedding: Estimate
    embedding_gradient: Estimate
    head: Estimate
    programs: Mapping[str, LayerPrograms]
    shards: Mapping[tuple[int, int], int]
    other_state: Mapping[tuple[int, int], int]
    update_kernels: int
    copies: bool

    @property
    def pipe_sizes(self) -> tuple[int, ...]:
        """Sizes of `pipe` that cut the layers into equal stages, 1 included."""
        return tuple(sorted({pipe for pipe, _ in self.shards}))

    def parameters(self, pipe: Any) -> Any:
        """Returns the parameters that a device holds while the table runs, before `fsdp` shards them."""
        return self.layers / pipe * self.layer_parameters + self.end_parameters


def estimate_part(
    trace: Callable[[int], Jaxpr], rows: float, *, params: int, gradients: tuple[int, int] = (0, 0), name: str
) -> Estimate:
    """Estimates a part of a model; the bytes of its inputs are not among the live ones.

    Args:
      trace: Maps a number of examples to the jaxpr.
      rows: Rows of a device at which fusions are chosen.
      params: Number of the jaxpr's first inputs, which are the parameters.
      gradients: (start, stop) of the results that are gradients of parameters.
      name: Name of the model, for messages.

    Raises:
      JaxparError: If the ops depend on the number of rows.
    """
    program = read_program(trace, name=name)
    inputs = {program.inputs[place] for place in range(params)}
    others = sum(program.sizes[entry] for entry in program.inputs if entry not in inputs)
    result = estimate(program, rows, params=range(params), gradients=range(*gradients))
    live = {
        combined: curves | {"activations": curves["activations"] - others} for combined, curves in result.live.items()
    }
    return replace(result, live=live)


def bytes_by_rows(size: Callable[[int], float]) -> np.ndarray:
    """Returns bytes that are linear in the rows as a polynomial; `size` maps rows to bytes."""
    slope = (size(MANY) - size(FEW)) / (MANY - FEW)
    return np.array([size(FEW) - slope * FEW, slope, *[0.0] * (DEGREE - 1)])
