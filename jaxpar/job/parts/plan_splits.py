"""Finds how the tensor axis would split a model that is no decoder, for a plan."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.parallel.declaration import Parallel
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.model.splits import SplitTraffic, TensorSplit
from jaxpar.sharding.names import Blueprint
from jaxpar.specs.collectives import Sent
from jaxpar.specs.find import AXIS, choose_dims, costs_on
from jaxpar.specs.names import NamedSpecs, name_solution
from jaxpar.specs.optimize import Solution
from jaxpar.specs.shares import ArrayShares
from jaxpar.specs.trace import TracedLoss


def find_splits(
    blueprint: Blueprint,
    loss: Callable,
    batch: Mapping[str, Any],
    *,
    rows: int,
    devices: int,
    sizes: Iterable[int],
    precision: str,
    frozen: Collection[str],
) -> dict[int, tuple[TensorSplit, NamedSpecs, ArrayShares]]:
    """Returns, for each size of the tensor axis that splits parameters, the split, the names of its dims, and shares.

    Args:
      blueprint: The model.
      loss: A function of (model, batch), or of (model, batch, key).
      batch: Name to shape and dtype; the first dim is that of examples.
      rows: Examples of the global batch; the dims are chosen for those of a device without microbatches, as in a run.
      devices: Number of devices.
      sizes: Sizes of the axis to try.
      precision: Dtype of matmuls: "fp32" or "bf16".
      frozen: Patterns of the paths of frozen parameters.
    """
    found = {}
    for size in sizes:
        local = max(1, rows * size // devices)
        program = TracedLoss(blueprint, loss, batch, rows=local, precision=precision).program(frozen)
        try:
            cuts, solution, _ = choose_dims(
                program, (size,), costs_on(HARDWARE["h100"], Parallel(tensor=size), precision)
            )
        except JaxparError:  # no dims of the model can be cut so: the plan has no layout of this size
            continue
        if cuts.splits_parameters(solution):
            shares = ArrayShares(cuts, solution)
            found[size] = _split(solution, size, local), name_solution(cuts, solution, (AXIS,)), shares
    return found


def _split(solution: Solution, size: int, rows: int) -> TensorSplit:
    traffic = tuple(_traffic(sent, size, rows) for sent in solution.collectives)
    return TensorSplit(traffic=traffic)


def _traffic(sent: Sent, size: int, rows: int) -> SplitTraffic:
    payload = sent.bytes * size / (size - 1) / (2 if sent.kind == "all-reduce" else 1)
    constant = payload if sent.of_parameters else 0.0
    return SplitTraffic(kind=sent.kind, payload_per_row=(payload - constant) / rows, payload=constant, times=sent.times)
