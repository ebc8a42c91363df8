"""PipeDream's partitioner: splits a profile into replicated stages for a topology, by a chosen objective.

    partition(linearise(load("vgg16.graph.txt")), ((16, 1.25e9),))      15-1

Source: Narayanan et al. (2019), "PipeDream: generalized pipeline parallelism for DNN training", section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite

from jaxpar.errors import JaxparError, refuse
from jaxpar.partition.chain import Chain
from jaxpar.partition.dynamic_program import CLOSE, Tables
from jaxpar.partition.objective import Bytes, Objective, Seconds
from jaxpar.partition.report import Partition
from jaxpar.partition.stages import PartitionStage, Segment, plan_name, price_stages
from jaxpar.partition.topology import Level, Topology, levels
from jaxpar.units import show_bytes, show_seconds

LARGEST = 20_000  # layers x parts of a level, at most: a search takes seconds and a few hundred MiB


def partition(chain: Chain, topology: Topology, objective: Objective | None = None) -> Partition:
    """Finds the plan with the fewest stages that is within the objective's margin of the fastest.

    Args:
      chain: The layers, from `linearise`.
      topology: (size, bandwidth in bytes per second, or Link) of each level, innermost first: ((8, 12e9), (4, 1.25e9)).
      objective: The objective to minimise.

    Raises:
      JaxparError: If the topology is not symmetric or has a link without bandwidth; if a plan on fewer parts of the
        outermost level is faster than on all; if no plan fits in memory (the message has the stage, its deficit, and a
        fix); if the search would be too large.
    """
    tree, objective = levels(topology), objective or Objective()
    for number, level in enumerate(tree, 1):
        if len(chain.names) * level.size > LARGEST:
            raise refuse(
                f"{len(chain.names)} layers on {level.size} parts of level {number}",
                rule=f"layers times parts of a level is at most {LARGEST}",
                fix=f"levels of at most {LARGEST // len(chain.names)} parts, or fewer layers, by merging neighbours",
            )
    unlimited = _search(chain, tree, replace(objective, memory=inf))
    search = unlimited if unlimited.suits(objective) else _search(chain, tree, objective)
    times, parts = search.least, search.useful(objective)
    if parts < len(times):
        raise refuse(
            f"{len(times)} parts of the outermost level: {show_seconds(times[-1])} a minibatch, "
            f"{parts} of them: {show_seconds(times[parts - 1])}",
            rule="adding parts to the outermost level must make a minibatch faster",
            fix=f"({parts}, ...) as the outermost level",
        )
    ruled_out = f"{plan_name(unlimited.parts)} does not fit: its {_most_memory(unlimited.stages, objective.memory)[1]}"
    return Partition(
        parts=search.parts,
        stages=search.stages,
        tree=tree,
        objective=objective,
        least_seconds=times[-1],
        seconds_by_stages=search.fewer,
        data_parallel=max(
            stage.seconds for stage in price_stages([_data_parallel(chain, tree)], chain, tree, objective)
        ),
        ruled_out=ruled_out if search.parts != unlimited.parts else "",
    )


@dataclass(frozen=True)
class _SearchResult:
    """The result of a search: the plan, and the shortest times on 1, 2, ... parts and with 1, 2, ... stages."""

    parts: tuple[Segment, ...]
    stages: tuple[PartitionStage, ...]
    least: list[float]
    fewer: tuple[float, ...]

    def useful(self, objective: Objective) -> int:
        """Returns the number of parts of the outermost level to use: all, unless fewer are faster by more than the
        margin.
        """
        slower = self.least[-1] > min(self.least) * (1 + objective.margin) * CLOSE
        return self.least.index(min(self.least)) + 1 if slower else len(self.least)

    def suits(self, objective: Objective) -> bool:
        """Whether this result, which was found without a memory limit, fits in the memory."""
        fits = max(stage.memory for stage in self.stages) <= objective.memory
        best = self.fewer[-1] <= self.least[-1] * CLOSE and self.useful(objective) == len(self.least)
        return not isfinite(objective.memory) or (fits and best)


def _search(chain: Chain, tree: Sequence[Level], objective: Objective) -> _SearchResult:
    tables = Tables(Seconds(chain, tree, objective), len(chain.names), tree)
    times = tables.least_costs
    if not isfinite(times[-1]):
        raise _too_little_memory(chain, tree, objective)
    parts, fewer = tables.fewest_stages(times[-1] * (1 + objective.margin))
    return _SearchResult(parts, price_stages(parts, chain, tree, objective), times, tuple(fewer))


def _data_parallel(chain: Chain, tree: Sequence[Level]) -> Segment:
    """Returns the plan of pure data parallelism, in which every device has all layers."""
    inner = (_data_parallel(chain, tree[:-1]),) if len(tree) > 1 else ()
    return Segment(0, len(chain.names), tree[-1].size, inner)


def _most_memory(stages: Sequence[PartitionStage], limit: float) -> tuple[PartitionStage, str]:
    """Returns the stage that needs the most memory, and a text with its deficit."""
    number = max(range(len(stages)), key=lambda index: stages[index].memory)
    stage = stages[number]
    deficit = f"{stage.memory - limit:,.0f} B ({show_bytes(stage.memory - limit)}) over {show_bytes(limit)}"
    need = f"{stage.versions} x (weights {show_bytes(stage.parameters)} + activations {show_bytes(stage.activations)})"
    return stage, f"stage {number} ({stage.layers[0]}..{stage.layers[-1]}) needs {need}, {deficit}"


def _too_little_memory(chain: Chain, tree: Sequence[Level], objective: Objective) -> JaxparError:
    """Returns the error for too little memory: the plan that needs the least, its deficit, and a fix."""
    tables = Tables(Bytes(chain, tree, objective), len(chain.names), tree)
    parts, _ = tables.fewest_stages(tables.least_costs[-1])
    stages, limit = price_stages(parts, chain, tree, objective), objective.memory
    stage, text = _most_memory(stages, limit)
    factors = [(limit / block.versions - block.parameters) / block.activations for block in stages if block.activations]
    remedy = f"; or {min(factors) * 0.99:.3g} of the minibatch" if min(factors, default=0) > 0 else ", or more devices"
    return refuse(
        f"no plan fits; in the plan that needs the least memory, {plan_name(parts)}, {text}",
        rule="weights and activations of every minibatch in flight fit into the memory of a device",
        fix=f"memory = {ceil(stage.memory)}, {show_bytes(stage.memory)} per device{remedy}",
    )
